"""One frozen config: every option is documented here and nowhere else.

Command-line flags, the TOML/YAML file and the keyword options of `LLM` are all made from these fields
(`max_model_len` is `--max-model-len`), so they cannot drift apart.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal, get_args

Backend = Literal["cpu", "reference"]
Activations = Literal["auto", "bf16", "f32"]
KvDtype = Literal["auto", "int8"]
Quantize = Literal["none", "int8", "int4"]
Isa = Literal["auto", "generic", "avx2", "avx512", "amx"]
RequestLog = Literal["off", "counts", "text"]
MetricNames = Literal["octavo", "vllm", "both"]
ToolFormat = Literal[
    "auto", "hermes", "llama3", "pythonic", "mistral", "mistral-named", "granite", "deepseek", "deepseek-v3.1", "glm",
    "qwen-xml", "harmony", "generic",
]  # fmt: skip
ReasoningFormat = Literal["auto", "none", "think", "mistral", "gemma", "thought", "seed", "granite"]
GenerationConfig = Literal["none", "auto"]


MAX_ITL = 3600.0
"""Seconds between two tokens that no step reaches."""


class ConfigError(ValueError):
    """An option has a bad value; the message names the option and what it takes."""


def option(default: Any, help: str, **metadata: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What `LLM`, `serve`, `generate` and `bench` have in common."""

    model: str = option("demo", "A directory in Hugging Face layout, a .gguf file, a Hub id, or 'demo'.")
    backend: Backend = option("cpu", "cpu: native kernels. reference: the slow numpy oracle.")
    isa: Isa = option("auto", "Force a lower kernel level, for tests; auto takes the best this machine supports.")
    num_threads: int = option(0, "Worker threads. 0: affinity, cgroup quota and physical cores decide.")
    activations: Activations = option(
        "auto", "How inputs of matrix products are rounded. auto: as the weight format asks. bf16, f32: strict modes."
    )
    quantize: Quantize = option(
        "none",
        "Round the weights of an F32, F16 or BF16 model at load. int8, int4: the layers' matrices in groups of 32, "
        "embeddings and head to int8 (docs/QUANTIZE.md).",
    )
    kv_dtype: KvDtype = option(
        "auto",
        "Type of the KV cache. auto: bf16, float32 with activations f32. int8: half of bf16's memory, a small loss.",
    )
    max_model_len: int | None = option(
        None, "Longest prompt plus output in tokens. Default: what the model was made for."
    )
    kv_cache_memory: int | None = option(
        None,
        "Bytes of KV cache, or a string as '2GiB'. Default: most of the memory that is free after loading.",
        size=True,
    )
    max_num_seqs: int = option(64, "Most sequences computed in one step.")
    max_num_batched_tokens: int = option(512, "Most tokens computed in one step: the size of a prefill chunk.")
    target_itl: float | None = option(
        None,
        "Seconds from a token of a stream to its next that 99 of 100 should not exceed while prompts are computed beside "
        "it. Default: 2.5 times what the step takes without them, twice what it will take when all prompts that could run are "
        "streams, and at least 0.055; offline none, for nobody waits for single tokens.",
    )
    prefix_caching: bool = option(True, "Reuse the KV blocks of equal prefixes.")
    disk_cache: str | None = option(
        None,
        "Directory that keeps KV blocks of long and of reused prompts, for use after a restart; processes may share it. "
        "It holds the prompts' tokens, readable by its owner only. Default: none.",
    )
    disk_cache_size: int = option(
        10 * 2**30, "Most bytes in the directory of disk_cache, or a string as '10GiB'.", size=True
    )
    weights_cache: str = option(
        "auto",
        "Directory that keeps packed weights, so that the next start reads them instead of packing; processes may share "
        "it. auto: octavo/weights in $XDG_CACHE_HOME or in ~/.cache. off: none.",
    )
    weights_cache_size: int = option(
        32 * 2**30,
        "Most bytes in the directory of weights_cache, or a string as '32GiB'. A model that would not fit is not kept.",
        size=True,
    )
    lora: tuple[str, ...] = option(
        (), "A LoRA adapter as NAME=PATH, in PEFT's layout: requests choose it by NAME as their model. May be repeated."
    )
    max_loras: int = option(
        0, "Most LoRA adapters at once, those loaded while serving included. 0: those named by lora alone."
    )
    max_lora_rank: int = option(64, "The largest rank of a LoRA adapter.")
    seed: int | None = option(None, "Seed for requests that bring none. Default: drawn at random.")
    fuse: bool = option(True, "Run fused operations. Off changes no bit, only speed.")
    reuse: bool = option(True, "Let temporary values share memory. Off changes no bit, only memory.")
    share: bool = option(
        True, "Let attention read a common prefix once for all sequences. Off changes no bit, only speed."
    )
    poison: bool = option(False, "Fill freed memory with NaN before each step, to find reads of stale data.")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            if f.metadata.get("size") and isinstance(getattr(self, f.name), str):
                object.__setattr__(self, f.name, parse_size(f.name, getattr(self, f.name)))
        for name, choices in (
            ("backend", Backend),
            ("activations", Activations),
            ("quantize", Quantize),
            ("kv_dtype", KvDtype),
            ("isa", Isa),
        ):
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(choices))}; got {getattr(self, name)!r}")
        for name, low in (
            ("num_threads", 0),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 16),
            ("max_model_len", 1),
            ("disk_cache_size", 1),
            ("weights_cache_size", 1),
            ("max_loras", 0),
            ("max_lora_rank", 1),
        ):
            value = getattr(self, name)
            if value is None and name == "max_model_len":
                continue
            if not isinstance(value, int) or value < low:
                raise ConfigError(f"{name} must be a whole number of at least {low}; got {value!r}")
        if self.target_itl is not None and not 0 < self.target_itl <= MAX_ITL:
            raise ConfigError(f"target_itl must be above 0 and at most {MAX_ITL:g}; got {self.target_itl:g}")
        if self.seed is not None and not (isinstance(self.seed, int) and -(2**63) <= self.seed < 2**64):
            raise ConfigError(f"seed must be a whole number between {-(2**63)} and {2**64 - 1}; got {self.seed!r}")
        object.__setattr__(self, "lora", tuple(self.lora))
        names = [name for name, _ in self.adapters]
        if len(set(names)) < len(names):
            raise ConfigError(f"lora names an adapter twice: {', '.join(names)}")
        if 0 < self.max_loras < len(names):
            raise ConfigError(f"max_loras is {self.max_loras}, but lora names {len(names)} adapters")
        if self.max_lora_rank > 1024:
            raise ConfigError(f"max_lora_rank must be at most 1024; got {self.max_lora_rank}")
        if self.disk_cache is not None and not (self.prefix_caching and self.backend == "cpu"):
            raise ConfigError("disk_cache needs prefix_caching and the cpu backend: it holds blocks of equal prefixes")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): a step gives every running sequence a token"
            )

    @property
    def adapters(self) -> list[tuple[str, str]]:
        """(name, path) of the adapters that `lora` names."""
        found = []
        for each in self.lora:
            name, _, path = each.partition("=")
            if not name or not path:
                raise ConfigError(f"lora must be NAME=PATH; got {each!r:.100}")
            found.append((name, path))
        return found

    @property
    def num_adapters(self) -> int:
        """Slots for adapters."""
        return self.max_loras or len(self.lora)


def offline(config: EngineConfig) -> EngineConfig:
    """For whole answers: prompts are computed as fast as they can be, unless target_itl is named."""
    return config if config.target_itl is not None else dataclasses.replace(config, target_itl=MAX_ITL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig(EngineConfig):
    """Options of `octavo serve`, on top of the engine's."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on. 0 takes a free one.")
    served_model_name: str | None = option(None, "Name in /v1/models and in answers. Default: from the model path.")
    max_queued_requests: int | None = option(
        1024, "A request that would have to wait is refused with 429 where so many choices wait already."
    )
    max_queued_tokens: int | None = option(
        None,
        "A request is refused with 429 where so many tokens of the prompts of others are still to be computed, which come "
        "before its first token. Default: no bound.",
    )
    timeout_seconds: float | None = option(
        None, "From a request to the end of its answer; then it is ended with 504. Default: no limit."
    )
    ttft_timeout_seconds: float | None = option(
        None,
        "From a request to its first token; then, or as soon as it is hopeless, it is ended with 504. Default: no limit.",
    )
    drain_seconds: float = option(30.0, "On SIGTERM, wait this long for open requests to finish.")
    sse_ping_seconds: float = option(30.0, "A stream that is silent for so long gets a comment. 0: never.")
    resume_seconds: float = option(
        60.0, "A resumable stream whose reader has left goes on for so long, and may be taken up again."
    )
    generation_config: GenerationConfig = option(
        "none",
        "auto: temperature, top_k, top_p, min_p, typical_p and repetition_penalty that a request leaves out are those of "
        "the model's generation_config.json. none: those of the API.",
    )
    strict: bool = option(False, "Refuse a request that has unknown fields. Otherwise a header names them.")
    chat_template: str | None = option(
        None, "Chat template, as a file or as its text, in place of the model's own. Default: the model's."
    )
    tool_format: ToolFormat = option("auto", "How the model writes tool calls. auto: as its chat template shows.")
    reasoning_format: ReasoningFormat = option(
        "auto", "How the model marks its reasoning. auto: as its chat template shows. none: it is content."
    )
    files_dir: str | None = option(
        None, "Directory for uploaded files and batches, which then outlive the server. Default: a temporary one."
    )
    api_key: str | None = option(None, "Key that every request but liveness must carry. Default: none is needed.")
    api_key_file: str | None = option(
        None, "TOML file of [[key]] tables: name, key or sha256, and optionally tenant, salt and quotas."
    )
    cors_origins: str | None = option(
        None, "Origins whose web pages may use this server, with commas between; '*': any. Default: none."
    )
    tls_cert: str | None = option(None, "PEM file of the certificate chain: serve HTTPS.")
    tls_key: str | None = option(None, "PEM file of the certificate's private key, where tls_cert does not hold it.")
    tls_client_ca: str | None = option(
        None, "PEM file of authorities: only clients with a certificate of theirs may connect."
    )
    request_log: RequestLog = option(
        "counts", "One JSON line per request on standard error. counts: no text. text: prompts and answers too."
    )
    metric_names: MetricNames = option(
        "octavo", "Names of the series at /metrics; vllm and both for existing dashboards."
    )
    otlp_endpoint: str | None = option(
        None, "Address of an OTLP/HTTP collector for traces, e.g. http://localhost:4318. Needs octavo[otel]."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (
            ("request_log", RequestLog),
            ("metric_names", MetricNames),
            ("tool_format", ToolFormat),
            ("reasoning_format", ReasoningFormat),
            ("generation_config", GenerationConfig),
        ):
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(choices))}; got {getattr(self, name)!r}")
        for name in ("max_queued_requests", "max_queued_tokens"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name} must be at least 0; got {getattr(self, name)}")
        for name in ("timeout_seconds", "ttft_timeout_seconds"):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit <= 86400:
                raise ConfigError(f"{name} must be above 0 and at most 86400; got {limit:g}")
        for origin in self.origins:
            if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+|null", origin):
                raise ConfigError(f"cors_origins must be origins, as https://a.example, or '*'; got {origin!r}")
        for name in ("api_key", "served_model_name"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} must not be empty")
        if self.otlp_endpoint is not None and not re.fullmatch(r"https?://[^/\s]\S*", self.otlp_endpoint):
            raise ConfigError(f"otlp_endpoint must be an address as http://localhost:4318; got {self.otlp_endpoint!r}")
        for name in ("tls_key", "tls_client_ca"):
            if getattr(self, name) is not None and self.tls_cert is None:
                raise ConfigError(f"{name} needs tls_cert: without it nothing is encrypted")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535; got {self.port}")
        for name in ("drain_seconds", "sse_ping_seconds", "resume_seconds"):
            if not 0 <= getattr(self, name) <= 86400:
                raise ConfigError(f"{name} must be between 0 and 86400; got {getattr(self, name):g}")

    @property
    def origins(self) -> list[str]:
        """Those of cors_origins."""
        return [] if self.cors_origins is None else [origin.strip() for origin in self.cors_origins.split(",")]


_UNITS = {
    "": 1,
    "B": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def parse_size(name: str, text: str) -> int:
    """Bytes of a size such as '2GiB', '512MB' or '1000000'."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?)?B?\s*", text)
    if not match:
        raise ConfigError(f"{name} must be bytes or a size such as 2GiB or 500MB; got {text!r}")
    return int(float(match[1]) * _UNITS[match[2] or ""])
