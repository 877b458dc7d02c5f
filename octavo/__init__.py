"""Octavo: an LLM serving engine. The public names; everything else is internal."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.request import ParameterError, SamplingParams, Structured

if TYPE_CHECKING:
    from octavo.llm import LLM, CompletionOutput, Logprob, RequestOutput

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "Logprob", "ParameterError", "RequestOutput", "SamplingParams", "Structured"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # loaded on use: the engine's process needs no tokenizer and starts faster without
        return getattr(import_module("octavo.llm"), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
