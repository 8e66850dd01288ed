"""Adapters of routers, and routers that are trained whole: only if they are named, and alike everywhere."""

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import load_file

from dualtune.base.errors import ConfigError
from dualtune.engine.card import ActivationCheckpointing
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, assert_equal, gradient, random_adapter
from dualtune.model.adapter import AdapterSpec, modules_of, tensor_name
from dualtune.model.beside import BesideAdapter
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.model.places import in_names_of, naming_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")
load_adapters = pytest.importorskip("mlx_lm.tuner.utils").load_adapters

import tiny_families  # noqa: E402

SIZES, EXPERTS = tiny_families.SIZES, tiny_families.EXPERTS
# A linear layer in mlx-lm and another name in transformers; a dense layer first; a bias; a class of its own in mlx-lm.
FAMILIES = {
    "mixtral": (SIZES | {"num_local_experts": 4}, "gate"),
    "qwen3_moe": (SIZES | EXPERTS | {"num_experts": 4, "mlp_only_layers": [0]}, "gate"),
    "gpt_oss": (SIZES | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"],
    }, "router"),
    "deepseek_v3": (tiny_families.FAMILIES["deepseek_v3"], "gate"),
}  # fmt: skip
ALSO = {
    "qwen2_moe": (tiny_families.FAMILIES["qwen2_moe"], "gate"),
    "qwen3_next": (tiny_families.FAMILIES["qwen3_next"], "gate"),
    "olmoe": (SIZES | {"num_experts": 4, "num_experts_per_tok": 2}, "gate"),
    "deepseek_v2": (tiny_families.FAMILIES["deepseek_v3"] | {"topk_method": "greedy"}, "gate"),
    "glm4_moe": (tiny_families.FAMILIES["glm4_moe"], "gate"),
    "nemotron_h": (tiny_families.FAMILIES["nemotron_h"], "gate"),
}
OWN_CLASS = {"deepseek_v2", "deepseek_v3", "glm4_moe", "nemotron_h"}  # in mlx-lm
ALL = [*FAMILIES, *(pytest.param(name, marks=pytest.mark.long) for name in ALSO)]
VOCAB, LENGTHS, BATCH = tiny_families.VOCAB, tiny_families.LENGTHS, tiny_families.BATCH
trained, at_tokens = tiny_families.trained, tiny_families.at_tokens


def spec_of(family, *others, **changes):
    return dataclasses.replace(AdapterSpec(4, 6.0, 0.0, ((FAMILIES | ALSO)[family][1], *others)), **changes)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a family's model, written once."""
    return tiny_families.written_once(
        tmp_path_factory.mktemp("routers"), {family: keys for family, (keys, _) in (FAMILIES | ALSO).items()}
    )


# --- the function and its gradient ------------------------------------------------------------------------------------


def oracle(model_dir, state, scale):
    """The loss of transformers' model in float64 with merged routers, and the gradient of their adapters."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    routers = {path: m for path, m in model.named_modules() if path.rpartition(".")[2] in ("gate", "router")}
    factors, weights = {}, {}
    for path in modules_of(state):
        end = path.replace("block_sparse_moe", "mlp").partition("layers.")[2]
        own = next(name for name in routers if name.endswith(end))
        A, B = (torch.from_numpy(state[tensor_name(path, part)]).double().requires_grad_() for part in "AB")
        weights[f"{own}.weight"] = routers[own].weight.detach() + scale * B @ A
        factors |= {tensor_name(path, "A"): A, tensor_name(path, "B"): B}
    loss = torch.zeros((), dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        tokens, labels = (torch.from_numpy(x[row, :length]).long() for x in (BATCH.tokens_BT, BATCH.labels_BT))
        logits = torch.func.functional_call(model, weights, (tokens[None],)).logits[0]
        loss = loss + torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    gradients = torch.autograd.grad(loss / BATCH.num_targets, [*factors.values()])
    return {name: g.numpy() for name, g in zip(factors, gradients, strict=True)}


@pytest.mark.parametrize("family", ALL)
def test_both_backends_have_the_gradient_through_the_weights_of_the_chosen(load, models, family):
    spec = spec_of(family)
    engines = [load(name, models(family), spec) for name in ("torch", "mlx")]
    states = [engine.adapter_state() for engine in engines]
    assert_equal(*states)
    expected = oracle(models(family), random_adapter(states[0]), spec.scale)
    for engine in engines:
        assert_close(gradient(trained(engine), BATCH), expected, tolerances.GRADIENT)
    assert max(np.abs(g).max() for g in expected.values()) > 1e-5, "nothing reaches the router, so nothing is shown"
    a, b = (at_tokens(engine.logprobs(BATCH)) for engine in engines)
    assert np.abs(a - b).max() <= tolerances.LOGPROBS


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_a_router_is_recomputed_with_its_layer(load, models, name):
    """Recomputed, and without kernels: one gradient."""
    model, spec = models("deepseek_v3"), AdapterSpec(4, 6.0, 0.0, ("all-linear", "gate"), experts=True)
    expected = gradient(trained(load(name, model, spec)), BATCH)
    for options in (
        {"checkpointing": ActivationCheckpointing(layers=2)},
        {"kernels": "reference"},
    ):
        assert_close(gradient(trained(load(name, model, spec, **options)), BATCH), expected, tolerances.GRADIENT)


# --- other programs, and whole routers --------------------------------------------------------------------------------

FAST = ("mixtral", "deepseek_v3")
EXCHANGED = [pytest.param(name, marks=() if name in FAST else pytest.mark.long) for name in FAMILIES | ALSO][:-1]


@pytest.mark.parametrize("family", EXCHANGED)  # PEFT does not find layers of the last one by their whole paths
def test_peft_and_mlx_lm_and_merges_compute_the_same_and_give_it_back(load, models, tmp_path, monkeypatch, family):
    model, spec = models(family), spec_of(family, "o_proj")
    engine = trained(load("torch", model, spec))
    state, expected = engine.adapter_state(), at_tokens(engine.logprobs(BATCH))
    adapter = Adapter(spec, state, str(model), naming=naming_of(model, modules_of(state)))
    write_adapter(tmp_path / "peft", adapter, layout="peft")
    assert_equal(read_adapter(tmp_path / "peft").tensors, state)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "peft")).eval()
    assert np.abs(rows_of(loaded) - expected).max() <= tolerances.LOGPROBS
    loaded.save_pretrained(tmp_path / "saved")
    assert_equal(in_names_of(read_adapter(tmp_path / "saved"), model).tensors, state)
    if family in OWN_CLASS:
        with pytest.raises(ConfigError, match="layout: got mlx, but mlx-lm's trainer has no adapter for routers"):
            write_adapter(tmp_path / "mlx", adapter, layout="mlx")
        write_adapter(tmp_path / "dual", adapter)
        assert read_adapter(tmp_path / "dual").layout == "peft"
    else:
        write_adapter(tmp_path / "mlx", adapter, layout="mlx")
        plain = load("mlx", model, dataclasses.replace(spec, targets=())).model
        monkeypatch.setattr(type(plain), "load_weights", nn.Module.load_weights)  # without the check of whole models
        by_mlx = at_tokens(logprobs_of_mlx(load_adapters(plain, str(tmp_path / "mlx"))))
        assert np.abs(by_mlx - expected).max() <= tolerances.LOGPROBS
        assert_equal(read_adapter(tmp_path / "mlx").tensors, state)
    for name in ("torch", "mlx"):
        trained(load(name, model, spec)).save_merged(tmp_path / f"merged-{name}")
    weights = [load_file(tmp_path / f"merged-{name}" / "model.safetensors") for name in ("torch", "mlx")]
    assert all(np.abs(w - weights[1][key]).max() <= 1e-6 for key, w in weights[0].items())
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged-mlx", dtype=torch.float32)
    assert np.abs(rows_of(merged) - expected).max() <= 2 * tolerances.LOGPROBS


def logprobs_of_mlx(model):
    logits = model(mx.array(BATCH.tokens_BT))
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def rows_of(model):
    """The log-probabilities of a model of transformers, row by row."""
    with torch.no_grad():
        rows = (torch.from_numpy(BATCH.tokens_BT[i : i + 1, :n]).long() for i, n in enumerate(LENGTHS))
        return np.concatenate([model(row).logits.log_softmax(-1)[0].numpy() for row in rows])


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_a_router_is_trained_whole_beside_an_adapter(load, models, tmp_path, family):
    name = FAMILIES[family][1]
    spec = AdapterSpec(4, 6.0, 0.0, ("o_proj",), beside=BesideAdapter((name,)))
    engines = [load(backend, models(family), spec) for backend in ("torch", "mlx")]
    states = [engine.adapter_state() for engine in engines]
    assert_equal(*states)
    whole = {key.rpartition(".")[2] for key in states[0] if f".{name}." in key}
    assert whole == ({"weight", "bias"} if family == "gpt_oss" else {"weight"})
    gradients = [gradient(engine, BATCH) for engine in engines]
    assert_close(*gradients, tolerances.GRADIENT)
    assert any(np.abs(g).max() > 1e-5 for key, g in gradients[0].items() if f".{name}." in key)
    state = {key: x + 0.05 * random_adapter(states[0])[key] for key, x in states[0].items()}
    for engine in engines:
        engine.load_adapter_state(state)
    a, b = (at_tokens(engine.logprobs(BATCH)) for engine in engines)
    assert np.abs(a - b).max() <= tolerances.LOGPROBS
    model = models(family)
    write_adapter(tmp_path / "peft", Adapter(spec, state, str(model), naming=naming_of(model, modules_of(state))))
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "peft")).eval()
    assert np.abs(rows_of(loaded) - a).max() <= tolerances.LOGPROBS


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_a_router_that_peft_could_not_load_is_not_trained_whole(load, models, name):
    spec = AdapterSpec(4, 6.0, 0.0, ("o_proj",), beside=BesideAdapter(("gate",)))
    for family, why in (
        ("mixtral", "transformers calls model.layers.0.block_sparse_moe.gate model.layers.0.mlp.gate"),
        ("deepseek_v3", "model.layers.1.mlp.gate also holds a correction of its choice"),
    ):
        with pytest.raises(ConfigError, match=f"train_modules: got 'gate', but {why}"):
            load(name, models(family), spec)


def test_ranks_of_routers_are_read_by_peft(load, models, tmp_path):
    """PEFT's patterns match an adapted parameter by its whole name, `gate.weight`."""
    model, pattern = models("mixtral"), (("layers.1.block_sparse_moe.gate", 2), ("o_proj", 6))
    spec = spec_of("mixtral", "o_proj", rank_pattern=pattern, alpha_pattern=(("gate", 3.0),))
    engine = trained(load("torch", model, spec))
    state, expected = engine.adapter_state(), at_tokens(engine.logprobs(BATCH))
    write_adapter(tmp_path / "a", Adapter(spec, state, str(model), naming=naming_of(model, modules_of(state))))
    back = read_adapter(tmp_path / "a")
    assert_equal(back.tensors, state)
    for module in modules_of(state):
        assert (back.spec.rank_of(module), back.spec.scale_of(module)) == (spec.rank_of(module), spec.scale_of(module))
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "a")).eval()
    assert np.abs(rows_of(loaded) - expected).max() <= tolerances.LOGPROBS


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_what_cannot_be_is_refused_by_name(load, models, name):
    """On MLX only where the router has a class of its own: a linear layer there has every method."""
    for changes, message in (
        ({"method": "dora"}, r"adapter.method: got dora, but model.layers.1.mlp.gate is a router"),
        ({"dropout": 0.1}, r"adapter.dropout: got 0.1, but model.layers.1.mlp.gate is a router"),
        ({"merge_for": "affine4"}, r"adapter.merge_for: got affine4, but model.layers.1.mlp.gate is a router"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(name, models("deepseek_v3"), spec_of("deepseek_v3", **changes))


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_routers_are_left_alone_unless_they_are_named(load, models, name):
    engine = load(name, models("qwen3_moe"), AdapterSpec(4, 6.0, 0.0, ("all-linear",), experts=True))
    assert not any(module.endswith(".gate") for module in modules_of(engine.adapter_state()))


@pytest.mark.parametrize("name", [pytest.param("torch", marks=pytest.mark.long), "mlx"])
def test_the_plan_counts_what_the_engine_trains(load, models, name):
    from dualtune.engine.memory.counted import shape_from
    from dualtune.engine.memory.estimate import selected
    from dualtune.model.config_file import read_config

    engine = load(name, models("deepseek_v3"), spec_of("deepseek_v3"))
    planned = selected(shape_from(read_config(models("deepseek_v3")), name), ("gate",), "all")
    assert sorted(planned) == modules_of(engine.adapter_state())
    assert 4 * sum(out + in_ for out, in_ in planned.values()) == engine.description.trainable_parameters
