"""Addresses: parts of tensors by name, in every format, against numpy on the whole tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.weights.address import Addressed
from octavo.weights.formats import dequantise
from octavo.weights.spec import CheckpointError, base_name
from tests.random_model import InMemory

RNG = np.random.default_rng(0)
TENSORS = {
    "experts": RNG.standard_normal((3, 8, 6)).astype(np.float32),
    "matrix.weight": RNG.standard_normal((12, 5)).astype(np.float32),
    "bias": RNG.standard_normal((3, 8)).astype(np.float32),
    "vector": RNG.standard_normal(7).astype(np.float32),
}


def turned(x: Any, rows: int) -> Any:
    return x.reshape(-1, rows, x.shape[1]).swapaxes(1, 2).reshape(-1, rows)


PARTS: dict[str, Any] = {
    "experts[2]": lambda t: t["experts"][2],
    "experts[1][0::2]": lambda t: t["experts"][1][0::2],
    "experts[1][1::2]": lambda t: t["experts"][1][1::2],
    "experts[0].T": lambda t: t["experts"][0].T,
    "experts[2].T[1::2]": lambda t: t["experts"][2].T[1::2],
    "experts[1][2:6]": lambda t: t["experts"][1][2:6],
    "experts[:]": lambda t: t["experts"].reshape(24, 6),
    "experts[7:9]": lambda t: t["experts"].reshape(24, 6)[7:9],
    "experts.T(8)": lambda t: turned(t["experts"].reshape(24, 6), 8),
    "matrix.weight[3:]": lambda t: t["matrix.weight"][3:],
    "matrix.weight[1:3%6]": lambda t: t["matrix.weight"][[1, 2, 7, 8]],
    "matrix.weight[4:%6]": lambda t: t["matrix.weight"][[4, 5, 10, 11]],
    "matrix.weight.T": lambda t: t["matrix.weight"].T,
    "matrix.weight.T(4)": lambda t: turned(t["matrix.weight"], 4),
    "matrix.weight[0:4%6].T(4)": lambda t: turned(t["matrix.weight"][[0, 1, 2, 3, 6, 7, 8, 9]], 4),
    "bias[1]": lambda t: t["bias"][1],
    "bias[2][1::2]": lambda t: t["bias"][2][1::2],
    "vector[1:3]": lambda t: t["vector"][1:3],
    "vector[0:6][1:2%3]": lambda t: t["vector"][[1, 4]],
    "matrix.weight": lambda t: t["matrix.weight"],
}


def values(checkpoint: Addressed, name: str, start: int = 0, stop: int | None = None) -> Any:
    info, data = checkpoint.read(name, start, stop)[:2]
    found = dequantise(info.source, np.ascontiguousarray(data), info.shape[-1])
    return found[0] if len(info.shape) == 1 else found


@pytest.mark.parametrize("address", PARTS)
@pytest.mark.parametrize("stored", ["F32", "BF16"])
def test_parts_are_numpys(address: str, stored: str) -> None:
    checkpoint = Addressed(InMemory({}, TENSORS, stored))
    whole = {name: values(checkpoint, name) for name in TENSORS}
    want = PARTS[address]({name: x.reshape(TENSORS[name].shape) for name, x in whole.items()})
    assert checkpoint.info(address).shape == want.shape
    assert address in checkpoint
    np.testing.assert_array_equal(values(checkpoint, address), want)
    if want.ndim == 2:
        np.testing.assert_array_equal(values(checkpoint, address, 1, 3), want[1:3])


def test_base_names() -> None:
    assert {base_name(a) for a in PARTS} == set(TENSORS)
    assert base_name("model.layers.0.self_attn.T_proj.weight") == "model.layers.0.self_attn.T_proj.weight"


@pytest.mark.parametrize(
    "address",
    ["experts[3]", "matrix.weight[0][2]", "vector[0]", "vector.T", "matrix.weight.T(5)", "matrix.weight[1:].T(11).T",
     "matrix.weight[0:3%5]", "matrix.weight[0:7%6]", "matrix.weight[9:8]", "matrix.weight[0:13]",
     "bias[3]", "matrix.weight[::0]", "bias[x]", "bias[1", "bias[1]."],
)  # fmt: skip
def test_what_is_not_there_is_refused(address: str) -> None:
    checkpoint = Addressed(InMemory({}, TENSORS))
    with pytest.raises(CheckpointError, match=r"has shape .*: there is no"):
        checkpoint.info(address)


def test_a_part_of_nothing_is_missing() -> None:
    with pytest.raises(CheckpointError, match="'other' is missing"):
        Addressed(InMemory({}, TENSORS)).info("other[0]")
