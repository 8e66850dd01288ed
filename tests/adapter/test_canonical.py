"""Names in stacks of layers, and the arithmetic that must keep scale · B A. The oracle is NumPy in float64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualtune.base.errors import FormatError
from dualtune.model.adapter import (
    exact_targets,
    is_module_path,
    short_targets,
    uniform_names,
)
from dualtune.model.formats.canonical import Pair, check_rank, delta_distance, delta_norm, fold, integral_alpha, unify
from dualtune.model.targets import LayerPosition, position_of


def stack(*names, layers=range(3)):
    return [f"model.layers.{layer}.{name}" for layer in layers for name in names]


def random_pair(rank, in_dim, out_dim, seed=0):
    rng = np.random.default_rng(seed)
    return Pair(rng.normal(size=(rank, in_dim)).astype(np.float32), rng.normal(size=(out_dim, rank)).astype(np.float32))


def delta(pair, scale):
    return scale * (pair.B_Or.astype(np.float64) @ pair.A_rI.astype(np.float64))


@given(st.floats(1e-3, 1e3), st.integers(1, 300))
def test_integral_alpha_keeps_the_scale(scale, rank):
    alpha, factor = integral_alpha(scale, rank)
    assert type(alpha) is int and alpha >= 1
    assert alpha / rank * factor == pytest.approx(scale, rel=1e-12)


@given(st.integers(1, 10_000), st.integers(1, 300))
def test_integral_alpha_leaves_an_integer_alone(alpha, rank):
    assert integral_alpha(alpha / rank, rank) == (alpha, 1.0)


def test_integral_alpha_of_a_fractional_scale():
    assert integral_alpha(2.5, 3) == (8, 7.5 / 8)
    assert integral_alpha(0.01, 8) == (1, 0.08)


def test_fold_rounds_once():
    x = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    factor = 1 / 3
    np.testing.assert_array_equal(fold(x, factor), (x.astype(np.float64) * factor).astype(np.float32))
    assert fold(x, 1.0) is x


@given(st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0.5, 2.0, 1 / 3])), min_size=1, max_size=5))
def test_unify_keeps_every_update(modules):
    pairs = {f"m{i}": random_pair(rank, 5 + i, 4, seed=i) for i, (rank, _) in enumerate(modules)}
    scales = {f"m{i}": scale for i, (_, scale) in enumerate(modules)}
    unified, scale, _ = unify(pairs, scales)
    assert {pair.A_rI.shape[0] for pair in unified.values()} == {max(rank for rank, _ in modules)}
    for name, pair in pairs.items():
        np.testing.assert_allclose(delta(unified[name], scale), delta(pair, scales[name]), rtol=0, atol=1e-6)


def test_unify_keeps_the_numbers_of_the_majority():
    pairs = {name: random_pair(4, 6, 5) for name in "abc"}
    unified, scale, notes = unify(pairs, {"a": 1.0, "b": 2.0, "c": 2.0})
    assert scale == 2.0
    assert unified["b"].B_Or is pairs["b"].B_Or
    assert notes == ["scale pattern: lora_B of 1 modules multiplied, so that scale 2 holds for all"]


@given(st.integers(1, 5), st.integers(1, 20), st.integers(1, 20), st.floats(0.1, 20))
def test_delta_norm_is_the_frobenius_norm(rank, in_dim, out_dim, scale):
    pair = random_pair(rank, in_dim, out_dim)
    assert delta_norm(pair, scale) == pytest.approx(np.linalg.norm(delta(pair, scale)), rel=1e-9)


def test_delta_norm_of_nan_is_nan():
    pair = random_pair(2, 3, 4)
    pair.A_rI[0, 0] = np.nan
    assert np.isnan(delta_norm(pair, 1.0))


def test_delta_distance_compares_functions_and_not_factors():
    pair = random_pair(3, 8, 9)
    mixed = Pair(pair.A_rI[::-1] * 2, pair.B_Or[:, ::-1])  # the same product, twice over
    assert delta_distance(pair, 1.0, mixed, 0.5) < 1e-7
    assert delta_distance(pair, 1.0, pair, 1.01) == pytest.approx(0.01 / 1.01, rel=1e-6)


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "hint"),
    [((6, 4), (4, 7), "transposed"), ((3, 6), (7, 3), r"must be \[4, in\]"), ((4, 6), (7, 3), "lora_B")],
)
def test_check_rank_names_the_mistake(a_shape, b_shape, hint):
    with pytest.raises(FormatError, match=hint):
        check_rank("m", Pair(np.zeros(a_shape), np.zeros(b_shape)), 4, "file")


def test_place_is_the_first_number_and_not_the_expert():
    assert position_of("model.layers.3.self_attn.q_proj") == LayerPosition("model.layers", 3, "self_attn.q_proj")
    assert position_of("model.layers.1.mlp.experts.7.w1") == LayerPosition("model.layers", 1, "mlp.experts.7.w1")
    assert position_of("lm_head") is None


def test_uniform_names_need_every_layer_from_zero():
    assert uniform_names(stack("a.q", "a.v")) == {"a.q", "a.v"}
    assert uniform_names([*stack("a.q"), *stack("a.v", layers=[0, 2])]) == {"a.q"}
    assert uniform_names(stack("a.q", layers=[1, 2])) == set()
    assert uniform_names([*stack("a.q"), "encoder.layers.0.a.q"]) == set()


def test_exact_targets_keep_what_selects_no_more_than_is_there():
    q, v = stack("attn.q"), stack("attn.v")
    assert exact_targets([*q, "lm_head"], ["q", "lm_head"]) == ("q", "lm_head")
    assert exact_targets(q, q) == tuple(q)
    assert exact_targets(q, ["all-linear"]) == ("q",)
    assert exact_targets(q[1:], ["q"]) == tuple(q[1:])  # "q" would select layer 0 as well
    assert exact_targets(q, ["q", "v"]) == tuple(q)  # "v" may select what is not adapted
    assert exact_targets([*q, *v], ["q"]) == tuple(sorted([*q, *v]))  # "q" misses v


def test_short_targets_are_short_only_where_whole_layers_are_adapted():
    assert short_targets([*stack("attn.q", "mlp.up"), "lm_head"]) == ("lm_head", "q", "up")
    assert short_targets(stack("attn.q", "mlp.q")) == ("attn.q", "mlp.q")  # one short name cannot mean both
    assert short_targets(stack("attn.q", layers=[1, 2])) == tuple(stack("attn.q", layers=[1, 2]))


@pytest.mark.parametrize("text", ["", ".a", "a.", "a..b", "a b", "a\x1b[31m", "a/b", "é"])
def test_what_is_no_module_path(text):
    assert not is_module_path(text)
