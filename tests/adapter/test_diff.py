"""The comparison of two adapters. The oracle is NumPy in float64 on updates that are formed whole."""

import json

import numpy as np
import pytest

from dualtune.cli.adapter import difference_text
from dualtune.model.adapter import AdapterSpec, tensor_name
from dualtune.model.formats.canonical import to_pairs
from dualtune.model.formats.directory import write_adapter
from dualtune.model.inspection import diff_adapters

Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
SHAPES = {Q0: (24, 40), Q1: (24, 40)}


@pytest.fixture
def write(tmp_path):
    def write(name, adapter, **options):
        write_adapter(tmp_path / name, adapter, **options)
        return tmp_path / name

    return write


def changed(adapter, change, only=""):
    """The adapter with some tensors changed."""
    tensors = {name: change(x).astype(np.float32) if only in name else x for name, x in adapter.tensors.items()}
    return type(adapter)(adapter.spec, tensors, adapter.base_model)


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 1e-6])
def test_norms_cosine_and_difference_are_those_of_the_dense_updates(size, write, make_adapter, deltas):
    ours = make_adapter(SHAPES, rank=3, alpha=6.0)
    noise = np.random.default_rng(1)
    theirs = changed(ours, lambda x: x + size * noise.normal(size=x.shape))
    found = {m.module: m for m in diff_adapters(write("a", ours), write("b", theirs)).modules}
    assert found.keys() == SHAPES.keys()
    for module, dense in deltas(ours).items():
        other = deltas(theirs)[module]
        norms = np.linalg.norm(dense), np.linalg.norm(other)
        assert (found[module].norm_a, found[module].norm_b) == pytest.approx(norms, rel=1e-9)
        assert found[module].cosine == pytest.approx((dense * other).sum() / np.prod(norms), abs=1e-9)
        difference = np.linalg.norm(dense - other) / max(norms)
        assert found[module].relative_difference == pytest.approx(difference, rel=1e-3, abs=3e-8)


def test_another_rank_scale_and_layout_can_be_the_same_function(write, make_adapter):
    ours = make_adapter(SHAPES, rank=3, alpha=6.0, targets=("q_proj",))
    wider = {m: (np.pad(p.A_rI, ((0, 2), (0, 0))), np.pad(p.B_Or, ((0, 0), (0, 2)))) for m, p in
             to_pairs(ours.tensors, "").items()}  # fmt: skip
    tensors = {tensor_name(m, part): x for m, (A, B) in wider.items() for part, x in (("A", A), ("B", 4 * B))}
    theirs = type(ours)(AdapterSpec(5, 2.5, 0.1, ("q_proj",)), tensors)  # scale 1/2 in place of 2
    found = diff_adapters(write("a", ours), write("b", theirs, layout="mlx"))
    assert found.is_same_function
    assert found.settings == {"rank": (3, 5), "alpha": (6.0, 2.5), "scale": (2.0, 0.5)}
    assert difference_text(found).splitlines()[-1].startswith("same function")


@pytest.mark.parametrize(("size", "same"), [(3e-6, True), (3e-5, False)])
def test_the_border_of_the_same_function_is_1e_5(size, same, write, make_adapter):
    ours = make_adapter(SHAPES)
    theirs = changed(ours, lambda x: x * (1 + size), only="layers.1.self_attn.q_proj.lora_B")
    assert diff_adapters(write("a", ours), write("b", theirs)).is_same_function is same


def test_the_command_says_what_differs_and_exits_with_1(write, make_adapter, dualtune_main):
    ours = make_adapter({Q0: (24, 40), Q1: (24, 40), "lm_head": (48, 24)}, targets=("q_proj", "lm_head"))
    theirs = make_adapter({Q0: (24, 40), Q1: (40, 24)})
    theirs = changed(theirs, np.negative, only="lora_B")
    a, b = write("a", ours), write("b", theirs)
    result = dualtune_main("adapter", "diff", a, b)
    assert result.returncode == 1 and "only in A: lm_head" in result.stdout
    assert f"different shape: {Q1}" in result.stdout and "targets: ('lm_head', 'q_proj') in A" in result.stdout
    table = json.loads(dualtune_main("adapter", "diff", a, b, "--json").stdout)
    assert table["same_function"] is False and table["only_in_b"] == []
    assert [(m["module"], round(m["cosine"], 6)) for m in table["modules"]] == [(Q0, -1.0)]
    assert table["modules"][0]["relative_difference"] == pytest.approx(2.0)
    same = dualtune_main("adapter", "diff", a, a)
    assert same.returncode == 0 and same.stdout.startswith("same function")


def test_a_zero_update_has_no_cosine(write, make_adapter):
    ours = make_adapter(SHAPES)
    theirs = changed(ours, np.zeros_like, only="layers.0.self_attn.q_proj.lora_B")
    found = diff_adapters(write("a", ours), write("b", theirs))
    assert [(m.module, m.norm_b, m.cosine, m.relative_difference) for m in found.modules[:1]] == [(Q0, 0.0, None, 1.0)]


def test_a_module_more_or_of_another_shape_is_another_function(write, make_adapter):
    one, two = make_adapter({Q0: (24, 40)}), make_adapter({Q0: (24, 40), Q1: (24, 40)})
    a, b = write("a", one), write("b", two)
    for found, apart in ((diff_adapters(a, b), ((), (Q1,))), (diff_adapters(b, a), ((Q1,), ()))):
        assert (found.only_in_a, found.only_in_b) == apart and not found.is_same_function
        assert found.modules[0].relative_difference == 0.0
    reshaped = diff_adapters(b, write("c", make_adapter({Q0: (24, 40), Q1: (40, 24)})))
    assert reshaped.of_other_shape == (Q1,) and not reshaped.is_same_function
