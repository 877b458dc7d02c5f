"""What the API tells of an answer that asked to be explained: members of its usage, and an object of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.explain import Explanation

Explanations = Mapping[tuple[int, int], Explanation]
"""By prompt and candidate, as the engine numbers choices."""


def written(explanation: Explanation) -> dict[str, Any]:
    """Cached tokens by tier; everything else by its own name."""
    fields: dict[str, Any] = msgspec.to_builtins(explanation)
    for name in ("id", "choice"):
        del fields[name]
    disk = fields.pop("cached_tokens_disk")
    return {**fields, "cached_tokens": {"memory": fields["cached_tokens"] - disk, "disk": disk}}


def by_prompt(explanations: Sequence[Explanation]) -> Explanations:
    """Those of the requests named `id`-prompt."""
    return {(int(e.id.rpartition("-")[2]), e.choice): e for e in explanations}


def prompt_details(explanations: Explanations, num_prompts: int) -> dict[str, Any]:
    """Members of usage.prompt_tokens_details: of the first choice of each prompt, which has computed it."""
    firsts = [explanations[p, 0] for p in range(num_prompts) if (p, 0) in explanations]
    disk = sum(first.cached_tokens_disk for first in firsts)
    return {
        "cached_tokens_by_tier": {"memory": sum(first.cached_tokens for first in firsts) - disk, "disk": disk},
        "match_ends": [msgspec.to_builtins(first.match_end) for first in firsts],
    }
