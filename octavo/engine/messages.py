"""Small typed messages between the API process and the engine process, msgpack over ZeroMQ.

Strings stay in the API process; token ids cross. `epoch` names the life of an engine process and `index` the
position of the first token in the output, so nothing is delivered twice.
"""

from __future__ import annotations

import msgspec

from octavo.config import EngineConfig
from octavo.explain import Explanation
from octavo.pooling import Pooling
from octavo.request import PLAIN, FinishReason, SamplingParams, Terms, TokenLogprobs


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process is started with, on its standard input."""

    config: EngineConfig
    commands: str  # address of the socket it receives Command from
    events: str  # and the one it sends Event to
    parent_pid: int
    launched: float  # wall clock, seconds
    epoch: int


class Add(msgspec.Struct, tag="add", frozen=True):
    """One client request: `params.n` choices of one prompt."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    terms: Terms = Terms()
    pooling: Pooling | None = None  # the pooled states of the prompt are wanted; params.max_tokens is 0
    num_first: int | None = None  # of two texts in one: tokens of the first, its separator included; others have type 1
    adapter: str = ""  # digest of the LoRA adapter that it is for; "": none


def pooled(
    id: str,
    prompt_ids: list[int],
    pooling: Pooling,
    terms: Terms = PLAIN,
    num_first: int | None = None,
    adapter: str = "",
) -> Add:
    """A request for the pooled states of a prompt."""
    return Add(id, prompt_ids, _NOTHING, 0, terms, pooling, num_first, adapter)


_NOTHING = SamplingParams(max_tokens=0, temperature=0.0)


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Stop a request; choice -1: all of its choices."""

    id: str
    choice: int = -1


class Explain(msgspec.Struct, tag="explain", frozen=True):
    """Ask for the Explanations of the request `id`, or of `id`-0, `id`-1 and so on: live ones, and the last that ended."""

    ticket: int
    id: str


class Flush(msgspec.Struct, tag="flush", frozen=True):
    """Forget every cached block that no live request uses."""

    ticket: int


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True):
    """Read the LoRA adapter at a path of this machine; the Reply has its digest, or the error."""

    ticket: int
    path: str


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", frozen=True):
    """No new request uses this adapter: forget it when those that do have ended."""

    ticket: int
    adapter: str


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """End, at once for open requests."""

    keep_seconds: float  # to write to the disk cache what is to be kept there


Command = Add | Abort | Explain | Flush | LoadAdapter | UnloadAdapter | Shutdown


class Progress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one choice gained in one step."""

    id: str
    choice: int
    index: int  # output index of token_ids[0]
    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # beside token_ids where asked for, else empty
    num_cached: int  # prompt tokens that came from the cache
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprobs] = []  # for prompt tokens 1.., sent once, with the first token
    error: str | None = None  # why, when finish_reason is ERROR
    param: str | None = None  # the field at fault, where the error is the client's
    logprob: float | None = None  # of all tokens together, with the whole answer of a beam search
    num_computed: int = 0  # prompt tokens in the cache by now, cached ones included
    num_disk: int = 0  # of num_cached, those from disk; this and the next are sent with the first token
    queue_seconds: float = 0.0  # until it was admitted, and while it was preempted
    pooled: bytes = b""  # with the end of a pooled prompt: float64 [hidden size], not normalised


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's own numbers; sent with steps (`StepOutput`) and every second when idle. Counters only go up."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_by_reason: dict[str, int] = {}  # "slots", "blocks", "budget", or what the gate of a request says
    waiting_tokens: int = 0  # known and not computed: of those who wait, and of prompts that run
    waiting_seconds: float = 0.0  # until they are computed and all who wait now have been served, as predicted
    received: int = 0  # choices that were sent here, those that were refused included; counter
    predicted_seconds: float = 0.0  # beside step_seconds, as the cost model had it before each step
    prediction_error: float = 0.0  # median relative error of late
    kv_blocks_total: int = 0
    kv_blocks_held: int = 0  # distinct blocks that live requests refer to
    kv_blocks_cached: int = 0  # blocks that only the prefix index keeps
    kv_score_bytes: int = 0  # prompt scores kept with blocks
    kv_slots_filled: int = 0  # token slots written in held blocks
    steps: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0  # computed, counter
    cached_tokens: int = 0  # prompt tokens taken from the cache, counter
    output_tokens: int = 0
    kv_tiles_read: int = 0  # by attention, as in backends.base.KvTiles, counter
    kv_tiles_saved: int = 0  # that it need not read again for sequences with a common prefix, counter
    preemptions: int = 0
    recomputed_tokens: int = 0
    disk_open: int = 0  # 1: the disk cache is in use
    disk_bytes: int = 0  # of its files, those of other models too
    disk_blocks_written: int = 0
    disk_blocks_loaded: int = 0
    disk_blocks_refused: int = 0  # damaged or foreign files, removed
    disk_blocks_removed: int = 0  # to keep the bound
    forced_tokens: int = 0  # output tokens that a grammar left no choice about, appended without a draw
    adapters: dict[str, int] = {}  # digests of the LoRA adapters that are loaded: live choices that use each
    grammars_compiled: int = 0
    grammars_reused: int = 0  # requests whose grammar another had asked for
    grammars_refused: int = 0
    disk_blocks_skipped: int = 0  # worth keeping, but evicted before they were copied


class StepOutput(msgspec.Struct, tag="step", frozen=True):
    epoch: int
    progress: list[Progress]
    stats: Stats | None = None  # where they are not those of the step before


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a model can do."""

    generates: bool = True  # False: an encoder, which reads whole texts, each in one step
    heads: dict[Pooling, int] = {}  # its own, and how many numbers they give
    pooling: Pooling = "last"  # what it was trained for
    token_types: int = 0  # that it tells apart; none: a second text is known by its separator alone

    def names(self) -> list[str]:
        """As Ollama names them."""
        return [
            *(["completion"] if self.generates else []),
            "embedding",
            *(["rerank"] if "scores" in self.heads else []),
        ]


class Loading(msgspec.Struct, tag="loading", frozen=True):
    """How far a phase of the start is that takes long, before Ready."""

    what: str  # is being done, as in "packing the weights"
    done: int  # bytes
    total: int


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The model is loaded."""

    epoch: int
    vocab_size: int
    max_model_len: int
    num_kv_blocks: int
    kv_bytes: int
    phases: dict[str, float]  # seconds of start-up by name
    threads: int
    isa: str
    eos_ids: list[int]  # end tokens that the model can draw
    abilities: Abilities = Abilities()
    adapters: dict[str, str] = {}  # digests of those that the config names, by name
    notices: list[str] = []  # lines for the user, e.g. a context longer than the model was made for


class Reply(msgspec.Struct, tag="reply", frozen=True):
    """To the command with this ticket."""

    ticket: int
    explanations: list[Explanation] = []
    num_blocks: int = 0  # flushed
    adapter: str = ""  # digest of the one that was loaded
    error: str | None = None  # why it was not


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine could not start, or its loop ended by an exception. The process exits non-zero after it."""

    message: str


Event = Loading | Ready | StepOutput | Reply | Failed
