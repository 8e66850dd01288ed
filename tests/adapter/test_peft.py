"""Adapters that PEFT saved, read here; adapters written here, loaded by PEFT. The oracle is PEFT's get_delta_weight."""

import dataclasses
import json
import warnings

import numpy as np
import pytest
import safetensors.numpy

from dualtune.base.errors import FormatError
from dualtune.model.adapter import AdapterSpec, tensor_name
from dualtune.model.formats.directory import read_adapter, write_adapter
from dualtune.model.formats.peft import HANDLED, REFUSED

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# The dual directory has keys of mlx-lm, of which PEFT warns that it ignores them.
pytestmark = pytest.mark.filterwarnings("ignore:Unexpected keyword arguments", "ignore::FutureWarning:transformers")

DIM, HIDDEN, LAYERS, VOCAB = 16, 24, 3, 32  # q_proj is square: no shape can give a missing transpose away
SHAPES = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(LAYERS)
    for name, shape in {
        "self_attn.q_proj": (DIM, DIM),
        "self_attn.k_proj": (DIM // 2, DIM),
        "mlp.down_proj": (DIM, HIDDEN),
    }.items()
}


def tiny_llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=DIM, intermediate_size=HIDDEN, num_hidden_layers=LAYERS, vocab_size=VOCAB,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def saved_by_peft(path, dtype=None, **config):
    """A directory that PEFT wrote, with B drawn at random; and ΔW of each module by PEFT's own account."""
    defaults = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(**{**defaults, **config}))
    for name, parameter in model.named_parameters():
        if "lora_" in name and "lora_A" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
    if dtype:
        model.to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path)
    return deltas_of(model)


def deltas_of(model):
    prefix = "base_model.model."
    return {
        name.removeprefix(prefix): module.get_delta_weight("default").detach().float().numpy()
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.Linear)
    }


def edit_config(path, **changes):
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def random_adapter(make_adapter):
    targets = ("q_proj", "k_proj", "down_proj")
    return lambda shapes=SHAPES, alpha=10.0: make_adapter(shapes, rank=5, alpha=alpha, targets=targets)


READABLE = {
    "plain": {},
    "rslora with a rank that is no square": {"use_rslora": True},
    "rank pattern": {"rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 5}},
    "alternatives in a pattern": {"rank_pattern": {"k_proj|q_proj": 3}},
    "alpha pattern": {"alpha_pattern": {r"model\.layers\.[02]\.self_attn\.q_proj": 7}},
    "both patterns": {
        "rank_pattern": {"^model.layers.0.self_attn.q_proj": 12},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 3, "q_proj": 5},
    },
    "patterns under rslora": {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 9}},
    "some layers": {"layers_to_transform": [0, 2]},
    "one layer by pattern": {"layers_to_transform": 1, "layers_pattern": "layers"},
    "expression": {"target_modules": r".*\.(0|1)\.self_attn\.[qv]_proj"},
    "exceptions": {"exclude_modules": ["layers.1.self_attn.q_proj"]},
    "all linear layers": {"target_modules": "all-linear"},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "DoRA": {"use_dora": True},
    "DoRA with both patterns": {"use_dora": True, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"down_proj": 5}},
}


@pytest.mark.parametrize("config", READABLE.values(), ids=READABLE)
def test_reads_the_function_that_peft_saved(tmp_path, config, deltas, assert_same_function):
    expected = saved_by_peft(tmp_path / "peft", **config)
    if config.get("init_lora_weights") == "mica":  # starts with A = 0, which is what it trains
        expected = trained_a(tmp_path / "peft")
    adapter = read_adapter(tmp_path / "peft")
    assert adapter.layout == "peft"
    assert_same_function(deltas(adapter), expected)
    write_adapter(tmp_path / "dual", adapter)
    assert_same_function(deltas(read_adapter(tmp_path / "dual")), expected)
    model = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path / "dual")
    assert_same_function(deltas_of(model), expected)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_starts_of_the_weight_are_peft_s(init):
    """PEFT takes scale · B A out of the base, where we keep it beside the adapter: the same matrices."""
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=init)
    expected = deltas_of(peft.get_peft_model(tiny_llama(), config))
    weights = {name.removesuffix(".weight"): x.detach().numpy() for name, x in tiny_llama().named_parameters()}
    spec = AdapterSpec(4, 6.0, 0.0, ("q_proj", "down_proj"), init=init)
    start = spec.initial({module: weights[module].shape for module in expected}, 0, weights.__getitem__)
    for module, delta in expected.items():
        A, B = (start[tensor_name(module, part)] for part in "AB")
        np.testing.assert_allclose(1.5 * B[:, :4] @ A[:4], delta, atol=1e-5 * np.abs(delta).max())
        assert np.array_equal(A[:4], A[4:]) and np.array_equal(B[:, :4], -B[:, 4:])


def trained_a(path):
    file = path / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    rng = np.random.default_rng(0)
    tensors = {n: rng.normal(size=x.shape).astype(np.float32) if "lora_A" in n else x for n, x in tensors.items()}
    safetensors.numpy.save_file(tensors, file)
    return deltas_of(peft.PeftModel.from_pretrained(tiny_llama(), path))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_reads_half_precision_exactly(tmp_path, dtype):
    saved_by_peft(tmp_path, dtype=getattr(torch, dtype))
    from safetensors.torch import load_file

    expected = load_file(tmp_path / "adapter_model.safetensors")
    tensors = read_adapter(tmp_path).tensors
    assert tensors.keys() == expected.keys()
    for name, x in expected.items():
        assert x.dtype == getattr(torch, dtype) and tensors[name].dtype == np.float32
        np.testing.assert_array_equal(tensors[name], x.float().numpy())


def test_rslora_stays_rslora(tmp_path):
    """alpha / √rank is no alpha / rank with an integer alpha: kept as it is, nothing has to be folded into B."""
    saved_by_peft(tmp_path / "rs", use_rslora=True)
    adapter = read_adapter(tmp_path / "rs")
    assert (adapter.spec.scaling, adapter.spec.alpha, adapter.notes) == ("rank_stabilized", 16, ())
    for layout in ("dual", "peft", "mlx"):
        write_adapter(tmp_path / layout, adapter, layout=layout)
        again = read_adapter(tmp_path / layout)
        assert (again.spec.scaling, again.spec.alpha, again.spec.scale) == ("rank_stabilized", 16, 16 / 8**0.5)
        for name, tensor in adapter.tensors.items():
            np.testing.assert_array_equal(again.tensors[name], tensor)
        assert json.loads((tmp_path / layout / "dualtune.json").read_text())["adapter"]["scaling"] == "rank_stabilized"
    config = json.loads((tmp_path / "dual" / "adapter_config.json").read_text())
    assert config["lora_alpha"] == 16 and config["use_rslora"] is True
    assert config["lora_parameters"]["scale"] == 16 / 8**0.5


def test_patterns_are_kept(tmp_path, deltas, assert_same_function):
    """In PEFT's file as they were, to the bit; mlx-lm's has one rank and one scale, which padding and folding keep."""
    patterns = {"rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 5}, "alpha_pattern": {"q_proj": 7}}
    expected = saved_by_peft(tmp_path / "peft", use_rslora=True, **patterns)
    adapter = read_adapter(tmp_path / "peft")
    assert (adapter.spec.rank, adapter.spec.alpha, adapter.notes) == (8, 16, ())
    assert {key: dict(getattr(adapter.spec, key)) for key in patterns} == patterns
    write_adapter(tmp_path / "dual", adapter)
    again, config = read_adapter(tmp_path / "dual"), json.loads((tmp_path / "dual/adapter_config.json").read_text())
    assert {key: config[key] for key in patterns} == patterns and again.spec == adapter.spec
    assert config["lora_parameters"]["rank"] == 8 and config["use_rslora"] is True
    for name, tensor in adapter.tensors.items():
        np.testing.assert_array_equal(again.tensors[name], tensor)
    notes = json.loads((tmp_path / "dual/dualtune.json").read_text())["notes"]
    assert "mlx-lm's file: rank pattern: ranks 3, 5, 8 zero-padded to 8" in notes
    write_adapter(tmp_path / "mlx", again, layout="mlx")
    assert_same_function(deltas(read_adapter(tmp_path / "mlx")), expected)


def test_expressions_in_patterns_become_names(tmp_path):
    saved_by_peft(tmp_path / "a", rank_pattern={"q_proj|k_proj": 3}, alpha_pattern={r".*\.[02]\..*q_proj": 7})
    spec = read_adapter(tmp_path / "a").spec
    assert (spec.rank_pattern, spec.rank) == ((("q_proj", 3),), 8)
    layers = "model.layers.{}.self_attn.q_proj".format
    assert (spec.alpha_pattern, spec.alpha) == (((layers(0), 7.0), (layers(2), 7.0)), 16)


def test_patterns_are_rescaled_exactly(tmp_path, dualtune_main, deltas, assert_same_function):
    """alpha / √rank of two ranks is alpha / rank with two alphas."""
    expected = saved_by_peft(tmp_path / "a", use_rslora=True, rank_pattern={"q_proj": 4})
    command = ("adapter", "convert", tmp_path / "a", tmp_path / "b", "--to", "peft", "--scaling", "standard")
    assert dualtune_main(*command).returncode == 0
    adapter = read_adapter(tmp_path / "b")
    assert (adapter.spec.scaling, dict(adapter.spec.alpha_pattern)) == ("standard", {"q_proj": 32.0})
    assert_same_function(deltas(adapter), expected)
    assert (
        dualtune_main("adapter", "convert", tmp_path / "b", tmp_path / "c", "--to", "peft", "--uniform").returncode == 0
    )
    uniform = read_adapter(tmp_path / "c")
    assert (uniform.spec.rank, uniform.spec.rank_pattern, uniform.spec.alpha_pattern) == (8, (), ())
    assert_same_function(deltas(uniform), expected)


def test_targets_become_paths_where_the_names_would_select_more(tmp_path):
    saved_by_peft(tmp_path / "plain")
    assert set(read_adapter(tmp_path / "plain").spec.targets) == {"q_proj", "down_proj"}
    saved_by_peft(tmp_path / "layers", layers_to_transform=[0], target_modules=["q_proj"])
    assert read_adapter(tmp_path / "layers").spec.targets == ("model.layers.0.self_attn.q_proj",)


@pytest.mark.parametrize("layout", ["dual", "peft", "mlx"])
def test_magnitudes_of_dora_go_there_and_back(tmp_path, layout):
    """PEFT's file has them without `.weight`; the logits of a model that loads what was written are PEFT's own."""
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], use_dora=True)
    model = peft.get_peft_model(tiny_llama(), config).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "magnitude" in name:  # lengths other than those of any weight
            torch.nn.init.uniform_(parameter, 0.1, 0.5)
    model.save_pretrained(tmp_path / "peft")
    stored = safetensors.numpy.load_file(tmp_path / "peft" / "adapter_model.safetensors")
    adapter = read_adapter(tmp_path / "peft")
    assert (adapter.spec.method, adapter.notes) == ("dora", ())
    assert adapter.tensors.keys() == stored.keys() >= {f"{Q}.lora_magnitude_vector"}
    write_adapter(tmp_path / layout / "out", adapter, layout=layout)
    again = read_adapter(tmp_path / layout / "out")
    assert (again.spec.method, again.spec.scale, len(again.tensors)) == ("dora", 1.5, len(stored))
    for name, x in stored.items():
        np.testing.assert_array_equal(again.tensors[name], x)
    if layout == "mlx":
        return
    tokens = torch.arange(8)[None]
    loaded = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path / layout / "out")
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert (loaded(tokens).logits - tiny_llama()(tokens).logits).abs().max() > 0.01


REFUSED_SAVES = {
    "lora_bias": {"lora_bias": True},
    "init_lora_weights.*pissa": {"init_lora_weights": "pissa"},
    "init_lora_weights.*olora": {"init_lora_weights": "olora"},
    "LoRA of an embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "a copy of a base weight": {"target_modules": ["lm_head", "q_proj"]},
    "kasa_config": {"kasa_config": peft.tuners.lora.config.KasaConfig()},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", REFUSED_SAVES.values(), ids=REFUSED_SAVES)
def test_refuses_by_name_what_peft_saved_but_plain_lora_cannot_express(tmp_path, config, request):
    saved_by_peft(tmp_path, **config)
    name = next(name for name, value in REFUSED_SAVES.items() if value is config)
    with pytest.raises(FormatError, match=name):
        read_adapter(tmp_path)


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_each_refused_key_is_named(tmp_path, key, random_adapter):
    write_adapter(tmp_path / "a", random_adapter(), layout="peft")
    (tmp_path / "a" / "dualtune.json").unlink()
    edit_config(tmp_path / "a", **{key: False})
    read_adapter(tmp_path / "a")
    edit_config(tmp_path / "a", **{key: {"x": 1}})
    with pytest.raises(FormatError, match=rf"adapter_config\.json: {key}: got .* must be unset"):
        read_adapter(tmp_path / "a")


def test_every_field_of_lora_config_is_accounted_for():
    """A newer PEFT with a new field fails here, before a user's adapter is converted wrongly."""
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} == {*REFUSED, *HANDLED}


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "OLoRA", "new"])
def test_initializations_that_change_the_base_are_refused(tmp_path, init, random_adapter):
    write_adapter(tmp_path / "a", random_adapter(), layout="peft")
    (tmp_path / "a" / "dualtune.json").unlink()
    edit_config(tmp_path / "a", init_lora_weights=init)
    with pytest.raises(FormatError, match=rf"init_lora_weights: got '{init}'"):
        read_adapter(tmp_path / "a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type: got 'LOHA'"),
        ({"r": 4}, r"must be \[4, in\]"),
        ({"r": True}, "r: got 'True', must be an integer"),
        ({"lora_alpha": 0}, "lora_alpha: got '0', must be a number from"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"lora_dropout": 1.0}, "lora_dropout"),
        ({"bias": "some"}, "bias: got 'some', must be one of none, all, lora_only"),
        ({"target_modules": ["k_proj"]}, "q_proj: not selected by target_modules|down_proj: not selected"),
        ({"target_modules": "(unclosed"}, "not a regular expression"),
        ({"target_modules": [1]}, "target_modules: got .* must be a list of strings"),
        ({"target_modules": {}}, "target_modules"),
        ({"layers_to_transform": [0, 1]}, r"layers\.2.* not selected"),
        ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern: q_proj: got '8'"),
        ({"rank_pattern": [8]}, "rank_pattern: got .* must be an object"),
        ({"use_turbo_lora": True}, "use_turbo_lora"),
        ({"turbo_config": {"x": 1}}, "turbo_config"),
        ({"base_model_name_or_path": "a\x1b[2J"}, "base_model_name_or_path"),
    ],
)
def test_wrong_values_are_named(tmp_path, changes, message, random_adapter):
    write_adapter(tmp_path / "a", random_adapter(), layout="peft")
    (tmp_path / "a" / "dualtune.json").unlink()
    edit_config(tmp_path / "a", **changes)
    with pytest.raises(FormatError, match=message):
        read_adapter(tmp_path / "a")


def test_unknown_keys_without_a_switchs_name_are_noted(tmp_path, random_adapter):
    write_adapter(tmp_path / "a", random_adapter(), layout="peft")
    (tmp_path / "a" / "dualtune.json").unlink()
    edit_config(tmp_path / "a", trained_by="somebody", use_new_thing=False)
    assert read_adapter(tmp_path / "a").notes == ("unknown to peft 0.21, ignored: 'trained_by'",)


@pytest.mark.parametrize("shapes", [SHAPES, {m: s for m, s in SHAPES.items() if ".1." not in m}], ids=["all", "some"])
@pytest.mark.parametrize("alpha", [10.0, 7.3])
def test_peft_loads_the_dual_directory_as_the_same_function(
    tmp_path, shapes, alpha, deltas, assert_same_function, random_adapter
):
    adapter = random_adapter(shapes, alpha=alpha)
    write_adapter(tmp_path / "a", adapter)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path / "a")
    assert not [w for w in caught if "missing adapter keys" in str(w.message)]
    assert_same_function(deltas_of(model), deltas(adapter))


Q = "base_model.model.model.layers.0.self_attn.q_proj"
MAGNITUDE = {
    "is missing; DoRA needs it": lambda t: t.pop(f"{Q}.lora_magnitude_vector"),
    r"got shape \[3\], must be \[16\]": lambda t: t.update({f"{Q}.lora_magnitude_vector": np.ones(3, np.float32)}),
    "belongs to use_dora: true, named": lambda t: t.update({f"{Q}.lora_magnitude_vector.x": np.ones(3, np.float32)}),
}
DAMAGE = {
    "lora_B is there, but lora_A is missing": lambda t: t.pop(f"{Q}.lora_A.weight"),
    "lora_A is there, but lora_B is missing": lambda t: t.pop(f"{Q}.lora_B.weight"),
    "They look transposed": lambda t: t.update({n: np.ascontiguousarray(x.T) for n, x in t.items()}),
    "Only layers of experts are read as stacks": lambda t: t.update({n: x[None] for n, x in t.items() if Q in n}),
    "cannot be converted: DoRA's magnitude": lambda t: t.update({f"{Q}.lora_magnitude_vector": np.ones(DIM)}),
    "cannot be converted: not part of": lambda t: t.update({"model.norm.weight": np.ones(DIM)}),
    "holds no LoRA tensors": lambda t: t.clear(),
    "is not a module path": lambda t: t.update({n.replace("0", "0\x1b[2J"): x for n, x in t.items()}),
}


def test_peft_warns_of_mlx_lms_keys_and_of_nothing_else(tmp_path, random_adapter):
    """mlx-lm reads them from the top of the same file (docs/adapters.md), so that one directory serves both."""
    write_adapter(tmp_path / "dual", random_adapter())
    with pytest.warns(UserWarning, match=r"\['fine_tune_type', 'lora_parameters', 'num_layers'\]"):
        peft.PeftConfig.from_pretrained(tmp_path / "dual")
    write_adapter(tmp_path / "peft", random_adapter(), layout="peft")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peft.PeftConfig.from_pretrained(tmp_path / "peft")


@pytest.mark.parametrize("message", [*DAMAGE, *MAGNITUDE])
def test_wrong_tensors_are_named(tmp_path, message, make_adapter):
    method = "dora" if message in MAGNITUDE else "lora"
    adapter = make_adapter(SHAPES, rank=5, targets=("q_proj", "k_proj", "down_proj"), method=method)
    write_adapter(tmp_path / "a", adapter, layout="peft")
    (tmp_path / "a" / "dualtune.json").unlink()
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    (DAMAGE | MAGNITUDE)[message](tensors)
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(FormatError, match=message):
        read_adapter(tmp_path / "a")
