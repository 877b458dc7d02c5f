"""Shape: how a family writes its calls, for grammars that let a model write nothing else."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Shape(NamedTuple):
    """open, call (between, call)*, close; a call is before, arguments, after. NAME stands for the tool's name."""

    trigger: str  # what begins with it is a call; empty: a call is the whole answer
    before: str
    after: str = ""
    open: str = ""
    between: str = ""
    close: str = ""
    arguments: Literal["json", "glm", "qwen_xml", "python"] = "json"
    one: bool = False  # an answer holds one call at most
    thought: tuple[str, str] | None = (
        None  # what a thought before the calls stands between, where it is part of the answer
    )
    answer: str = ""  # what an answer without calls begins with
