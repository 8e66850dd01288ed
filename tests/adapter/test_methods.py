"""What every method of the table keeps, whichever it is: a new one is held to it by its line there."""

import zlib
from itertools import chain
from typing import get_args

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.config.schema import AdapterConfig
from dualtune.model.adapter import AdapterSpec, init_adapter, parse_name, tensor_name
from dualtune.model.formats.peft import REFUSED
from dualtune.model.methods import FULL, KEPT_INITS, METHODS, NAMES
from dualtune.model.methods import lora as lora_method

WEIGHT, RANK = (6, 10), 4
MODULE = "model.layers.0.mlp.up_proj"


def frozen():
    return np.random.default_rng(3).normal(size=WEIGHT).astype(np.float32)


STARTS = [(method, init) for method in METHODS.values() for init in method.inits]


def fresh(method, init, shape=WEIGHT):
    tensors = init_adapter(
        {MODULE: shape},
        RANK,
        1,
        method=method.name,
        init=init,
        scale=lambda module: 1.5,
        weight=lambda module: frozen(),
    )
    return {parse_name(name)[1]: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(("method", "init"), STARTS, ids=lambda each: getattr(each, "name", each))
def test_a_fresh_adapter_has_the_shapes_it_says_and_changes_nothing(method, init):
    values = fresh(method, init)
    rank = 2 * RANK if init in KEPT_INITS else RANK
    assert {part: x.shape for part, x in values.items()} == method.shapes(WEIGHT, rank)
    assert values.keys() == method.parts and all(x.dtype == np.float32 for x in values.values())
    assert sum(x.size for x in values.values()) == method.count(WEIGHT, rank)
    np.testing.assert_allclose(method.delta(values, 1.5, frozen), 0, atol=1e-6)


def test_the_starts_of_lora_are_the_documented_distributions():
    """Kaiming with a = √5: uniform with the bound √(6 / ((1 + a²) · in)) = 1 / √in, whose bits every run before had."""
    shape = (6, 40_000)
    uniform, normal, gaussian = (fresh(METHODS["lora"], init, shape)["A"] for init in ("kaiming", "normal", "gaussian"))
    rng = np.random.default_rng([1, zlib.crc32(MODULE.encode())])
    assert np.array_equal(uniform, rng.uniform(-(40_000**-0.5), 40_000**-0.5, (RANK, 40_000)).astype(np.float32))
    assert uniform.std() == pytest.approx(40_000**-0.5 / 3**0.5, rel=0.01)
    assert normal.std() == pytest.approx(0.02, rel=0.01) and abs(normal.mean()) < 0.02 * 4 / normal.size**0.5
    assert gaussian.std() == pytest.approx(1 / RANK, rel=0.01)
    assert (np.abs(normal) < 0.02).mean() == pytest.approx(0.6827, abs=0.005)  # within one deviation


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_trained_part_moves_the_update(method):
    """From values that are nobody's start, so that no part is multiplied by zero."""
    rng = np.random.default_rng(5)
    values = {part: rng.normal(size=shape) for part, shape in method.shapes(WEIGHT, RANK).items()}
    update = method.delta(values, 1.5, frozen)
    assert update.shape == WEIGHT
    for part, x in values.items():
        changed = method.delta({**values, part: 1.1 * x}, 1.5, frozen)
        assert np.abs(changed - update).max() > 1e-3, part


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_names_go_there_and_back(method):
    for parameter in method.parameters:
        name = tensor_name(MODULE, parameter.part, method.name)
        assert name == f"base_model.model.{MODULE}.{parameter.peft}" and parse_name(name) == (MODULE, parameter.part)


def test_no_two_methods_call_different_parts_alike():
    for name in ("peft", "mlx"):
        found = {(getattr(p, name), p.part) for method in METHODS.values() for p in method.parameters}
        assert len({key for key, _ in found}) == len(found) == len({part for _, part in found})


def test_config_and_readers_know_the_table():
    assert get_args(AdapterConfig.model_fields["method"].annotation) == NAMES == (*METHODS, FULL)
    read = set(chain.from_iterable(method.peft_keys for method in METHODS.values()))
    assert not read & REFUSED.keys()


@pytest.mark.parametrize(("scaling", "scale"), [("standard", 1.5), ("rank_stabilized", 3.0)])
def test_the_scale_is_alpha_over_the_rank_or_over_its_root(scaling, scale):
    assert AdapterSpec(4, 6.0, 0.0, (), scaling).scale == scale


def test_a_large_matrix_is_searched_and_a_small_one_decomposed():
    """A decaying spectrum, as of trained weights; the same numbers each time, whatever sign a library gives."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(size, 530)))[0] for size in (600, 540))
    weight = (left * np.geomspace(10, 1e-6, 530) @ right.T).astype(np.float32)
    U, S, V = lora_method.largest_singular(weight, RANK, np.random.default_rng(1))
    assert (U.shape, S.shape, V.shape) == ((600, RANK), (RANK,), (RANK, 540))
    np.testing.assert_allclose(S, np.geomspace(10, 1e-6, 530)[:RANK], rtol=2e-3)
    exact = lora_method.largest_singular(weight[:500], RANK, np.random.default_rng(1))
    np.testing.assert_allclose(exact[1], np.linalg.svd(weight[:500], compute_uv=False)[:RANK], rtol=1e-5)
    for values in (U, exact[0]):
        assert (values[np.abs(values).argmax(0), np.arange(RANK)] > 0).all()
        np.testing.assert_allclose(values.T @ values, np.eye(RANK), atol=1e-5)
    again = lora_method.largest_singular(weight, RANK, np.random.default_rng(1))
    assert all(np.array_equal(a, b) for a, b in zip((U, S, V), again, strict=True))


def test_a_rank_that_the_weight_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"got pissa, which takes 7 directions .*rank_pattern .* at most 6"):
        init_adapter({MODULE: WEIGHT}, 7, 1, init="pissa", weight=lambda module: frozen())


@pytest.mark.parametrize("scaling", ["standard", "rank_stabilized"])
def test_a_kept_start_is_plain_lora_of_twice_the_rank(scaling):
    spec = AdapterSpec(
        4, 6.0, 0.1, ("q_proj", "v_proj"), scaling, init="olora", rank_pattern=(("q_proj", 3),),
        alpha_pattern=(("q_proj", 5.0),),
    )  # fmt: skip
    plain = spec.plain
    assert plain.plain is plain and not plain.keeps_start and plain.rank == 8
    for module in ("a.q_proj", "a.v_proj"):
        assert plain.rank_of(module) == spec.width_of(module) == 2 * spec.rank_of(module)
        assert plain.scale_of(module) == pytest.approx(spec.scale_of(module), rel=1e-15)
    A, B = np.arange(54.0).reshape(6, 9), np.arange(42.0).reshape(7, 6)
    state = {tensor_name("a.q_proj", "A"): A, tensor_name("a.q_proj", "B"): B, "base_model.model.norm.weight": A[0]}
    trained, start = spec.split(state)
    assert [w.tolist() for w in trained.values()] == [A[:3].tolist(), B[:, :3].tolist(), A[0].tolist()]
    assert [w.tolist() for w in start.values()] == [A[3:].tolist(), B[:, 3:].tolist()]
    shapes = {name: w.shape for name, w in state.items()}
    assert spec.state_shapes({name: w.shape for name, w in trained.items()}) == shapes
    assert all(np.array_equal(spec.joined(trained, start)[name], w) for name, w in state.items())
    assert plain.split(state) == (state, {}) and plain.state_shapes(shapes) == shapes
