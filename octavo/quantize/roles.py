"""What each matrix of a model is for, as its graph says: which of them may be quantised, and how finely."""

from __future__ import annotations

import enum

from octavo.graph import ops
from octavo.graph.ir import Graph, Kind


class Role(enum.Enum):
    LINEAR = "linear"  # of a layer
    EXPERT = "expert"
    HEAD = "head"  # makes the logits, or what else comes behind the layers
    EMBEDDING = "embedding"  # rows are looked up; of tied models it is the head, too
    KEPT = "kept"  # scores of experts, and what latent attention multiplies head by head: little work, large errors


_RANK = (Role.LINEAR, Role.EXPERT, Role.HEAD, Role.EMBEDDING, Role.KEPT)
"""A matrix of two uses has the later role."""


def roles(graph: Graph) -> dict[str, Role]:
    """By the names of weight parts (addresses, `weights.address`), in the order of the graph. Vectors are left out."""
    scores = {v.root for node in graph.nodes if isinstance(node.attrs, ops.Route) for v in node.ins}
    found: dict[str, Role] = {}
    for node in graph.nodes:
        match node.attrs:
            case ops.Embed():
                role = Role.EMBEDDING
            case ops.Linear():
                role = Role.KEPT if node.outs[0] in scores else Role.LINEAR if node.layer >= 0 else Role.HEAD
            case ops.ExpertLinear():
                role = Role.EXPERT
            case _:
                role = Role.KEPT
        for value in node.ins:
            if value.kind is Kind.WEIGHT and not value.vector:
                for part in value.parts:
                    found[part.name] = max(found.get(part.name, role), role, key=_RANK.index)
    return found
