"""Octavo: an LLM serving engine. The public names; everything else is internal."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.outputs import CompletionOutput, Logprob, PoolingRequestOutput, RequestOutput
    from octavo.request import ParameterError, Retention, SamplingParams, Structured, Terms

__version__ = "0.1.0"
__all__ = [
    "LLM", "CompletionOutput", "Logprob", "ParameterError", "PoolingRequestOutput", "RequestOutput", "Retention",
    "SamplingParams", "Structured", "Terms",
]  # fmt: skip


_MODULES = {"LLM": "llm"} | dict.fromkeys(
    ("CompletionOutput", "Logprob", "PoolingRequestOutput", "RequestOutput"), "outputs"
)


def __getattr__(name: str) -> Any:
    """Loaded on use: the engine's process needs no tokenizer, and processes start faster with less."""
    if name in __all__:
        return getattr(import_module(f"octavo.{_MODULES.get(name, 'request')}"), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
