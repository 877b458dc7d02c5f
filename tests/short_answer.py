"""An engine whose answers were short so far: it lets in more than it can hold, and takes it back from some."""

from __future__ import annotations

from octavo.engine.core import Engine
from octavo.engine.messages import Add
from octavo.request import SamplingParams


def after_a_short_answer(engine: Engine) -> Engine:
    engine.add(Add("short", [5], SamplingParams(max_tokens=1), seed=0))
    while engine.step() is not None:
        pass
    engine.flush()
    return engine
