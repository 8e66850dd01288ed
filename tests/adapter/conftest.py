"""Adapters for the tests of this folder. Session-wide, so that hypothesis may use them."""

import numpy as np
import pytest

from dualtune.model.adapter import AdapterSpec, init_adapter
from dualtune.model.formats.canonical import to_pairs
from dualtune.model.formats.directory import Adapter, write_adapter

Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="session")
def make_adapter():
    """A function that draws an adapter whose B is not zero; by default LoRA of two square projections."""

    def make(shapes=None, rank=3, alpha=6.0, targets=("q_proj",), method="lora", **fields):
        shapes = shapes or {Q0: (8, 8), Q1: (8, 8)}
        rng = np.random.default_rng(0)
        weights = {module: np.random.default_rng(i).normal(size=shapes[module]) for i, module in enumerate(shapes)}
        tensors = init_adapter(shapes, rank, seed=0, method=method, weight=weights.__getitem__)
        tensors = {n: x if x.any() else rng.normal(size=x.shape).astype(np.float32) for n, x in tensors.items()}
        return Adapter(AdapterSpec(rank, alpha, 0.1, tuple(targets), method=method), tensors, **fields)

    return make


@pytest.fixture(scope="session")
def deltas():
    """A function from an adapter to scale · B A of each module, in float64."""

    def compute(adapter):
        return {
            module: adapter.spec.scale_of(module) * (pair.B_Or.astype(np.float64) @ pair.A_rI.astype(np.float64))
            for module, pair in to_pairs(adapter.tensors, "test").items()
        }

    return compute


@pytest.fixture(scope="session")
def assert_same_function():
    """A function that compares ΔW by module, to float32 rounding of the largest entry."""

    def check(ours, theirs, rtol=1e-6):
        assert ours.keys() == theirs.keys()
        for module, expected in theirs.items():
            size = np.abs(expected).max()
            assert size > 0
            np.testing.assert_allclose(ours[module], expected, rtol=0, atol=rtol * size, err_msg=module)

    return check


@pytest.fixture
def dual(tmp_path, make_adapter):
    write_adapter(tmp_path / "a", make_adapter(base_model="org/base"))
    return tmp_path / "a"
