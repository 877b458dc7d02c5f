"""How models mark their reasoning, found in the chat template."""

from __future__ import annotations

from typing import NamedTuple


class ReasoningFormat(NamedTuple):
    """`starts` and `ends` are texts or special tokens; `wrappers` are tags around the answer that follows."""

    name: str
    starts: tuple[str, ...]
    ends: tuple[str, ...]
    wrappers: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return self.starts + self.ends + self.wrappers


FORMATS = (
    ReasoningFormat("think", ("<think>",), ("</think>",)),
    ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",)),
    ReasoningFormat("gemma", ("<|channel>thought\n",), ("<channel|>",)),
    ReasoningFormat("thought", ("<thought>",), ("</thought>",)),
    ReasoningFormat("seed", ("<seed:think>",), ("</seed:think>",)),
    ReasoningFormat(
        "granite",
        ("Here is my thought process:", "Here's my thought process:", "<think>"),
        ("Here is my response:", "Here's my response:", "</think>"),
        ("<response>", "</response>"),
    ),
)
"""gpt-oss has channels for its reasoning, which `tools.harmony` reads."""


def detect_reasoning(template: str) -> ReasoningFormat | None:
    """The format whose marks a chat template knows; None for a model that does not reason, or has channels for it."""
    if "Here is my thought process:" in template:
        return next(form for form in FORMATS if form.name == "granite")
    return next((form for form in FORMATS if form.ends[0] in template or form.starts[0].strip() in template), None)
