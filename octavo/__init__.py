"""Octavo: an LLM serving engine. The public names; everything else is internal."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.request import ParameterError, Retention, SamplingParams, Structured, Terms

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.outputs import CompletionOutput, Logprob, PoolingRequestOutput, RequestOutput

__version__ = "0.1.0"
__all__ = [
    "LLM", "CompletionOutput", "Logprob", "ParameterError", "PoolingRequestOutput", "RequestOutput", "Retention",
    "SamplingParams", "Structured", "Terms",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:  # loaded on use: the engine's process needs no tokenizer and starts faster without
        return getattr(import_module("octavo.llm" if name == "LLM" else "octavo.outputs"), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
