"""Engine: one model, its cache and its scheduler, run step by step. The loop of the serving engine is `step`."""

from __future__ import annotations

import math
import os
import select
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.cache.tiers import STOP_SECONDS
from octavo.config import EngineConfig
from octavo.engine.load import Report, load
from octavo.engine.messages import Abort, Add, LoadAdapter, Progress, Reply, Stats, StepOutput, UnloadAdapter
from octavo.engine.phases import Phase, StepClock
from octavo.explain import Explanation
from octavo.pooled import Pool
from octavo.request import FinishReason, ParameterError, Request
from octavo.sched.beam import BeamSearch
from octavo.sched.constraint import Constraint
from octavo.sched.live import Update
from octavo.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from octavo.grammar.compiler import Compiler


STATS_SECONDS = 0.02
"""Stats go with a step where a request has come or ended since, or so long after the last: a step of one stream takes a
quarter of it, and counting costs as much as scheduling."""


class Engine:
    """Not thread-safe, but for `wake`. `add` and `abort` may be called between steps."""

    def __init__(self, config: EngineConfig, report: Report | None = None, epoch: int = 1) -> None:
        """Load the model. report is told how far it is, where that takes long. epoch: names this life in what is sent.

        Raises CheckpointError, GraphError or ConfigError with one line for the user.
        """
        self.config = config
        self.loaded = load(config, report)
        self.bounds = self.loaded.bounds
        self._epoch = epoch
        self._program = self.loaded.program
        self._batches = self.loaded.batches
        self._scheduler: Scheduler = self.loaded.scheduler
        self._ended: list[Progress] = []  # of requests that ended outside of a step
        self._received = 0
        self._steps = 0
        self._checked = 0  # steps at the last check
        self._step_seconds = 0.0
        self._told = 0, 0.0  # requests received, and the time, when Stats were told last
        self.clock = StepClock()
        self._compiler: Compiler | None = None  # made for the first grammar
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable after `wake`, until the next step
        self._tier = self.loaded.tier
        if self._tier is not None:
            prefill_seconds = self._scheduler.cost.prefill_seconds
            self._tier.start(os.dup(self.wakeup), partial(prefill_seconds, chunk=self.loaded.limits.max_tokens))
        if self.loaded.packed is not None:
            self.loaded.packed.start()

    def close(self, keep_seconds: float = STOP_SECONDS) -> None:
        """Keep on disk what is to be kept there, within `keep_seconds`. The engine is of no use afterwards."""
        if self._compiler is not None:
            self._compiler.close()
        if self._tier is not None:
            self._tier.stop(keep_seconds)
        if self.loaded.packed is not None:
            self.loaded.packed.stop()

    def __del__(self) -> None:
        if hasattr(self, "wakeup"):
            if self.loaded.packed is not None:
                self.loaded.packed.stop()
            if self._tier is not None:
                self._tier.stop(0.0)
            if self._compiler is not None:
                self._compiler.close()
            os.close(self.wakeup)

    def add(self, add: Add) -> None:
        """Queue the choices of a request. Raises ParameterError where it can never be served."""
        self._received += add.params.n
        self.bounds.check(add)
        if self._scheduler.is_live(add.id):
            raise ParameterError("id", f"a request with the id {add.id} is being served")
        if add.adapter and add.adapter not in self.loaded.adapters.slots:
            raise ParameterError("model", f"there is no adapter {add.adapter} here")
        now = time.monotonic()
        params = add.params
        for choice in range(1 if params.use_beam_search else params.n):
            request = Request(
                add.id,
                choice,
                add.prompt_ids,
                params,
                add.seed,
                self.bounds.eos_ids,
                add.terms,
                arrival=now,
                adapter=add.adapter,
            )
            search = BeamSearch(request, self.bounds.max_model_len) if params.use_beam_search else None
            if add.pooling is not None:
                request.pool = Pool(add.pooling, len(add.prompt_ids))
                request.num_first = add.num_first if self.bounds.abilities.token_types > 1 else None
            self._constrain(request)
            try:
                self._scheduler.add(search.first if search else request, search)
            except ValueError as e:
                raise ParameterError("max_tokens", str(e)) from None
            params = msgspec.structs.replace(add.params, prompt_logprobs=None)  # the prompt is scored once

    def _constrain(self, request: Request) -> None:
        """A request with a grammar waits until it is compiled."""
        params = request.params
        if params.structured is not None:
            if self._compiler is None:
                self._compiler = _compiler(self)
            compilation = self._compiler.compile(params.structured)
            request.gates.append(compilation)
            request.constraint = Constraint(request, compilation.start)
        elif params.reasoning is not None and params.reasoning.budget is not None:
            request.constraint = Constraint(request, None)

    def abort(self, abort: Abort) -> None:
        """End a request or one choice of it; its blocks are free at once. Unknown ids have ended already."""
        for request in self._scheduler.abort(abort.id, abort.choice):
            self._ended.append(_progress(Update(request, [], [])))

    def fail(self, add: Add, error: ParameterError) -> None:
        """Tell the client that `add` was refused."""
        for choice in range(add.params.n):
            self._ended.append(
                Progress(
                    add.id,
                    choice,
                    0,
                    [],
                    [],
                    0,
                    finish_reason=FinishReason.ERROR,
                    error=f"{error.param}: {error}",
                    param=error.param,
                )
            )

    def explain(self, id: str) -> list[Explanation]:
        """Of the choices of the request `id`, or of `id`-0, `id`-1 and so on: live ones, and the last that have ended."""
        return self._scheduler.explain(id)

    def flush(self) -> int:
        """Forget the cached blocks that no live request uses, how many these were, and those on disk."""
        if self._tier is not None:
            self._tier.flush()
        return self.loaded.cache.flush()

    def load_adapter(self, command: LoadAdapter) -> None:
        """Read it beside the loop; `replies` has the answer."""
        self.loaded.adapters.begin(command, self.wake)

    def unload_adapter(self, command: UnloadAdapter) -> None:
        """Forget an adapter as soon as no live request uses it."""
        self.loaded.adapters.unload(command.adapter)

    def replies(self) -> list[Reply]:
        """Answers to commands that took longer than their call."""
        return self.loaded.adapters.replies()

    def wake(self) -> None:
        """A gate has opened. From any thread."""
        os.eventfd_write(self.wakeup, 1)

    def wait(self, seconds: float) -> None:
        """Until `wake`, or for so long: after a step that was None though requests are live."""
        select.select([self.wakeup], [], [], min(seconds, self.idle_seconds))

    @property
    def idle_seconds(self) -> float:
        """How long `step` has nothing to do, if nothing comes: until the next limit of time; at most."""
        deadline = self._scheduler.next_deadline()
        return math.inf if deadline is None else max(0.0, deadline - time.monotonic())

    def check(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Raise AssertionError where requests, blocks and index disagree, if a step ran since the last whole look.

        Looks at everything, which takes a second for a large cache: for when nobody waits. It ends early where `stop`,
        asked every few milliseconds, says that somebody does."""
        if self._checked != self._steps:
            for _ in self._scheduler.check_in_parts():
                if stop():
                    return
            self._checked = self._steps

    @property
    def has_work(self) -> bool:
        """Requests are live or have ended unheard. Where all of them wait for gates, `step` gives None."""
        return bool(self._ended) or self._scheduler.has_work

    def step(self) -> StepOutput | None:
        """Compute one step. None when there was nothing to do or to tell."""
        started, clock = time.perf_counter(), self.clock
        clock.begin()
        if not self._scheduler.runs_all:
            self._sleep_again()
        if self._tier is not None:
            self._tier.work()
        step = self._scheduler.schedule()
        ended, self._ended = self._ended, []
        ended += map(_progress, self._scheduler.dropped())
        if step is None:
            return StepOutput(self._epoch, ended, self.stats()) if ended else None
        clock.end(Phase.SCHEDULE)
        batch = self._batches.build(step)
        clock.end(Phase.BATCH)
        result = self._program.run(batch).result()
        clock.end(Phase.RUN)
        if self._tier is not None:
            for request in step.prompts_done():
                self._tier.offer(request, request.num_cached)
        states = {name: self._program.output(name) for name in step.outputs}
        updates = self._scheduler.commit(step, result, states)
        self._steps += 1
        seconds = time.perf_counter() - started
        if self._tier is not None:
            self._tier.stepped(seconds)
        self._step_seconds += seconds
        self._scheduler.took(step, seconds)
        clock.end(Phase.COMMIT)
        progress = ended + [_progress(u) for u in updates]
        output = StepOutput(self._epoch, progress, self.stats() if self._tells_stats(progress) else None)
        clock.end(Phase.EMIT)
        return output

    def _tells_stats(self, progress: list[Progress]) -> bool:
        received, told = self._told
        now = time.monotonic()
        if now < told + STATS_SECONDS and received == self._received and not any(p.finish_reason for p in progress):
            return False
        self._told = self._received, now
        return True

    def _sleep_again(self) -> None:
        """Before gates are looked at, so that none opens unseen. Where there are none, nobody sleeps after the step."""
        try:
            os.eventfd_read(self.wakeup)
        except BlockingIOError:
            pass

    def stats(self) -> Stats:
        others: dict[str, Any] = {}
        tiles = self.loaded.program.kv_tiles
        uses = self._scheduler.adapters() if self.loaded.adapters.slots else {}
        for part in (self._tier, self._compiler):
            if part is not None:
                others |= part.stats()
        return Stats(
            received=self._received,
            steps=self._steps,
            step_seconds=self._step_seconds,
            kv_tiles_read=tiles.read,
            kv_tiles_saved=tiles.saved,
            adapters={digest: uses[digest] for digest in self.loaded.adapters.slots},
            **self._scheduler.stats(),
            **others,
        )


def _compiler(engine: Engine) -> Compiler:
    """Loaded on use: most models are served without grammars, and start faster so."""
    from octavo.grammar.compiler import Compiler

    wake = weakref.WeakMethod(engine.wake)
    bounds = engine.bounds
    return Compiler(engine.config.model, bounds.vocab_size, bounds.eos_ids, lambda: (wake() or _nothing)())


def _nothing() -> None:
    """The engine has gone."""


def _progress(update: Update) -> Progress:
    request, live = update.request, update.live
    index = len(request.output_ids) - len(update.token_ids)
    first = index == 0 and (bool(update.token_ids) or request.finish_reason is not None)
    return Progress(
        request.id,
        request.choice,
        index,
        update.token_ids,
        update.logprobs,
        update.num_cached,
        request.finish_reason,
        request.prompt_logprobs if first else [],
        update.error,
        update.param,
        update.logprob,
        min(request.num_computed, len(request.prompt_ids)),
        live.num_disk if first and live else 0,
        sum(live.waits.values()) if first and live else 0.0,
        request.pool.vector().tobytes() if request.pool and request.finish_reason is FinishReason.LENGTH else b"",
    )
