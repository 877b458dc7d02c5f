"""LLM: the offline class, the same engine in this process. Names follow vLLM's offline API."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, repeat
from operator import index
from types import FrameType
from typing import Any, Self, TypeVar, get_args

import msgspec
import numpy as np

from octavo.bars import LoadingBar, request_bar
from octavo.config import EngineConfig, ReasoningFormat, ToolFormat, offline
from octavo.engine.core import Engine
from octavo.engine.messages import Abort, Add, Progress, pooled
from octavo.outputs import PoolingRequestOutput, RequestOutput, Result
from octavo.pooled import embedding, logistic, similarities
from octavo.pooling import Pooling
from octavo.request import PLAIN, FinishReason, ParameterError, SamplingParams, Terms
from octavo.text.chat import ChatFormat, ChatOptions, ChatPrompt
from octavo.text.literal import GUARD
from octavo.text.template import read_template
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.text.tools.offer import read_offer
from octavo.text.words import resolve
from octavo.weights.locate import locate

Prompt = str | Mapping[str, Any]
"""Text, {"prompt": text} or {"prompt_token_ids": [...]}."""

Message = Mapping[str, Any]

T = TypeVar("T")

INTERRUPT_SECONDS = 0.1
"""Within which Ctrl-C is noticed while all requests wait for something else."""


class LLM:
    """A model in this process.

    ``LLM("demo").generate(["Hello"], SamplingParams(max_tokens=32))``. The keyword options are the fields of
    `config.EngineConfig`. Not thread-safe.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        """Raises CheckpointError, ConfigError or GraphError with one line naming the cause."""
        path = locate(model)
        self.config = offline(EngineConfig(model=str(path), **options))
        self._tokenizer = load_tokenizer(path)
        with LoadingBar() as bar:
            self.engine = Engine(self.config, bar.show)
        self.adapters = dict(self.engine.loaded.named_adapters)  # name: digest of the content
        notices = (self.engine.loaded.notices, self._tokenizer.notices, ChatFormat(self._tokenizer).notices)
        for notice in chain.from_iterable(notices):
            print(f"octavo: {notice}", file=sys.stderr)
        self._random = random.Random(self.config.seed)
        self._count = 0
        self._pieces: dict[int, str] = {}

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        terms: Terms | Sequence[Terms] | None = None,
        adapter: str | Sequence[str] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt; the results are in the order of the prompts. use_tqdm: a progress bar on a terminal.

        terms: priority, limits on time, cache salt and retention; one for all prompts, or one each.
        adapter: the name of a LoRA adapter, "" for none; one for all prompts, or one each.
        Raises ParameterError before anything is computed where one of the requests cannot be served.
        """
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        texts, ids = zip(*map(self._encode, prompts), strict=True) if prompts else ((), ())
        return self._run(list(texts), list(ids), sampling_params, terms, adapter, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        tool_format: ToolFormat = "auto",
        reasoning_format: ReasoningFormat = "auto",
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        reasoning_effort: str | None = None,
        thinking_token_budget: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        terms: Terms | Sequence[Terms] | None = None,
        adapter: str | Sequence[str] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of conversations, through the model's chat template.

        The parameters are those of the chat API, in OpenAI's form. `outputs[i].message` tells content, reasoning and
        tool calls apart. chat_template: a template, or the path of one, in place of the model's; tool_format and
        reasoning_format as the server's options. terms, adapter: as in `generate`.
        Raises ParameterError or ChatTemplateError before anything is computed.
        """
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        for name, given, formats in (
            ("tool_format", tool_format, ToolFormat),
            ("reasoning_format", reasoning_format, ReasoningFormat),
        ):
            if given not in get_args(formats):
                raise ParameterError(name, f"{name} must be one of {', '.join(get_args(formats))}; got {given!r:.80}")
        form = ChatFormat(
            self._tokenizer,
            None if chat_template is None else read_template(chat_template),
            tool_format=tool_format,
            reasoning_format=reasoning_format,
        )
        options = ChatOptions(
            offer=read_offer(tools, tool_choice, parallel_tool_calls),
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            reasoning_effort=reasoning_effort,
            thinking_budget=thinking_token_budget,
            variables=chat_template_kwargs or {},
        )
        chats = [form.prompt(list(c), options) for c in conversations]
        each = _each("sampling_params", sampling_params, SamplingParams(), len(chats))
        params = [chat.params(p) for chat, p in zip(chats, each, strict=True)]
        ids = [form.encode(chat.text) for chat in chats]
        return self._run([chat.text.replace(GUARD, "") for chat in chats], ids, params, terms, adapter, use_tqdm, chats)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: Pooling | None = None, normalize: bool = True,
        adapter: str = "", use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:  # fmt: skip
        """A vector of each prompt: of the states after the final norm, that of the last token, the mean of all, or that
        of the first ("cls"), or what the model's own head makes of that ("pooler"; "scores" of a classifier); of length 1
        unless `normalize` is false. Without `pooling`, what the model was trained for, where its files say it.

        Raises ParameterError before anything is computed, RuntimeError where the model gives no finite number.
        """
        outputs = self._pooled([prompts] if isinstance(prompts, str | Mapping) else prompts, pooling, adapter, use_tqdm)
        return [replace(out, embedding=embedding(out.embedding, normalize)) for out in outputs]

    def score(
        self, text_1: Prompt | Sequence[Prompt], text_2: Prompt | Sequence[Prompt], *, pooling: Pooling | None = None,
        adapter: str = "", use_tqdm: bool = True,
    ) -> list[float]:  # fmt: skip
        """How near each of `text_2` is to `text_1`, or to that of its place. A classifier of one score reads the two
        together: its score by the logistic function, 0 to 1. Of other models, or with `pooling`: the cosine of their
        embeddings, -1 to 1.

        Raises as `embed`.
        """
        first, second = ([t] if isinstance(t, str | Mapping) else list(t) for t in (text_1, text_2))
        if len(first) not in (1, len(second)):
            raise ParameterError(
                "text_1", f"{len(first)} texts and {len(second)} to compare: give one, or one for each"
            )
        if pooling is None and "scores" in self.engine.bounds.abilities.heads:
            return self._pair_scores(first * (len(second) if len(first) == 1 else 1), second, adapter, use_tqdm)
        vectors = [out.embedding for out in self._pooled([*first, *second], pooling, adapter, use_tqdm)]
        return similarities(vectors[: len(first)], vectors[len(first) :])

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter in PEFT's layout, beside those of the option `lora`, while `max_loras` allows.

        Raises AdapterError with one line naming the cause, ParameterError where the name is taken.
        """
        if not name or name in self.adapters:
            raise ParameterError("name", f"an adapter cannot have the name {name!r:.100}: it must be new")
        self.adapters[name] = self.engine.loaded.adapters.load(path)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Raises ParameterError where there is none of this name."""
        digest = self._digest(name)
        if self.adapters.pop(name, None) and digest not in self.adapters.values():
            self.engine.loaded.adapters.unload(digest)

    def reset_prefix_cache(self) -> int:
        """Forget the cached KV blocks; how many these were."""
        return self.engine.flush()

    def close(self) -> None:
        """Release threads and memory. The object is of no use afterwards."""
        self.engine.close()
        del self.engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt)
        if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt_token_ids"), Sequence):
            try:
                return prompt.get("prompt"), [index(i) for i in prompt["prompt_token_ids"]]
            except TypeError as e:
                raise ParameterError("prompt", f"prompt_token_ids must be whole numbers: {e}") from None
        if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
            return prompt["prompt"], self._tokenizer.encode(prompt["prompt"])
        raise ParameterError("prompt", f'a prompt is text or {{"prompt_token_ids": [...]}}, got {prompt!r:.80}')

    def _run(
        self,
        texts: list[str | None],
        ids: list[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        terms: Terms | Sequence[Terms] | None,
        adapter: str | Sequence[str] | None,
        show: bool,
        chats: Sequence[ChatPrompt] | None = None,
    ) -> list[RequestOutput]:
        """chats: the prompts as conversations; None where the text goes on where they end."""
        params = _each("sampling_params", sampling_params, SamplingParams(), len(ids))
        each_terms = _each("terms", terms, PLAIN, len(ids))
        digests = map(self._digest, _each("adapter", adapter, "", len(ids)))
        adds = [
            self._add(i, resolve(p, self._tokenizer), t, digest)
            for i, p, t, digest in zip(ids, params, each_terms, digests, strict=True)
        ]
        for add in adds:
            self.engine.bounds.check(add)
        each_chat: Iterable[ChatPrompt | None] = chats or repeat(None, len(adds))
        results = {
            add.id: Result(self._tokenizer, add, p, text, self._piece, chat)
            for add, p, text, chat in zip(adds, params, texts, each_chat, strict=True)
        }

        def take(progress: Progress) -> bool:
            result = results.get(progress.id)
            if result is None or not result.open:
                return False
            if result.push(progress):
                self.engine.abort(Abort(progress.id, progress.choice))
            if result.open:
                return False
            result.output.explanations = self.engine.explain(progress.id)
            return True

        self._compute(adds, take, show)
        return [r.finish() for r in results.values()]

    def _compute(self, adds: Sequence[Add], take: Callable[[Progress], bool], show: bool) -> None:
        """Run requests to their ends. take: True where a request has ended with this."""
        num_open = len(adds)
        try:
            with request_bar(num_open, show) as advance, _interrupts_held() as interrupt:
                for add in adds:
                    self.engine.add(add)
                while num_open:
                    interrupt()
                    output = self.engine.step()
                    if output is None:  # all wait for gates
                        self.engine.wait(INTERRUPT_SECONDS)
                        continue
                    for progress in output.progress:
                        if take(progress):
                            num_open -= 1
                            advance()
        except BaseException:
            for add in adds:
                self.engine.abort(Abort(add.id))
            raise

    def _pair_scores(self, first: Sequence[Prompt], second: Sequence[Prompt], adapter: str, show: bool) -> list[float]:
        pairs = list(zip(first, second, strict=True))
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise ParameterError("text_1", "a classifier of pairs reads texts, not token ids")
        if (count := self.engine.bounds.abilities.heads["scores"]) != 1:
            raise ParameterError("model", f"this classifier gives {count} numbers for a pair, a score is one")
        joined = self._tokenizer.encode_pairs(pairs)  # type: ignore[arg-type]
        digest = self._digest(adapter)
        adds = [pooled(self._next_id(), p.ids, "scores", PLAIN, p.num_first, digest) for p in joined]
        outputs = self._run_pooled(adds, show)
        return [logistic(float(out.embedding[0])) for out in outputs]

    def _pooled(
        self, prompts: Sequence[Prompt], pooling: Pooling | None, adapter: str, show: bool
    ) -> list[PoolingRequestOutput]:
        """Vectors that are not normalised."""
        pooling = self.engine.bounds.abilities.pooling if pooling is None else pooling
        if pooling not in get_args(Pooling):
            raise ParameterError("pooling", f"pooling must be {', '.join(get_args(Pooling))}, got {pooling!r:.80}")
        digest = self._digest(adapter)
        adds = [pooled(self._next_id(), self._encode(p)[1], pooling, adapter=digest) for p in prompts]
        return self._run_pooled(adds, show)

    def _next_id(self) -> str:
        self._count += 1
        return str(self._count)

    def _run_pooled(self, adds: Sequence[Add], show: bool) -> list[PoolingRequestOutput]:
        for add in adds:
            self.engine.bounds.check(add)
        ended: dict[str, Progress] = {}

        def take(progress: Progress) -> bool:
            if progress.finish_reason is not None:
                ended[progress.id] = progress
            return progress.finish_reason is not None

        self._compute(adds, take, show)
        outputs = []
        for add in adds:
            progress = ended[add.id]
            if progress.finish_reason is not FinishReason.LENGTH:
                raise RuntimeError(progress.error or f"the request ended by {progress.finish_reason}")
            vector = np.frombuffer(progress.pooled, np.float64)
            outputs.append(PoolingRequestOutput(add.id, vector, add.prompt_ids, progress.num_cached))
        return outputs

    def _digest(self, adapter: str) -> str:
        if adapter and adapter not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            raise ParameterError("adapter", f"there is no adapter {adapter!r:.100}; loaded: {known}")
        return self.adapters.get(adapter, "")

    def _add(self, ids: list[int], params: SamplingParams, terms: Terms, adapter: str) -> Add:
        try:
            terms = msgspec.convert(msgspec.to_builtins(terms), Terms)
        except (msgspec.ValidationError, TypeError) as e:
            raise ParameterError("terms", f"terms: {e}") from None
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        return Add(self._next_id(), ids, params.candidates(), seed, terms, adapter=adapter)

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return self._pieces[token]


def _each(name: str, given: T | Sequence[T] | None, default: T, count: int) -> list[T]:
    """One for each prompt. Raises ParameterError naming the parameter."""
    if given is None:
        return [default] * count
    if isinstance(given, type(default)):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(item, type(default)) for item in given):
        raise ParameterError(name, f"{name} must be of {type(default).__name__}, or a list of it, got {given!r:.80}")
    if len(given) != count:
        raise ParameterError(name, f"{count} prompts and {len(given)} {name}: give one, or one each")
    return list(given)


@contextmanager
def _interrupts_held() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back until the function is called, or the end: an engine interrupted within a step is of no use."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():  # nothing is raised here
        yield lambda: None
        return
    held: list[tuple[int, FrameType | None]] = []

    def deliver() -> None:
        while held:
            handler(*held.pop())

    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, handler)
        deliver()
