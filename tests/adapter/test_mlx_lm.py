"""Adapters that mlx-lm trained, read here; adapters written here, loaded by mlx-lm. The oracle is mlx-lm's own layers.

ΔW is what an adapted layer of zero base weights makes of the identity matrix.
"""

import importlib
import json

import numpy as np
import pytest
import safetensors.numpy

from dualtune.base.errors import FormatError
from dualtune.model.adapter import AdapterSpec, tensor_name
from dualtune.model.formats.canonical import to_pairs
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.model.places import naming_of

pytest.importorskip("mlx_lm")
import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

DIM, HIDDEN, LAYERS, VOCAB = 16, 24, 3, 32  # q_proj is square: no shape can give a missing transpose away
SHAPES = {"self_attn.q_proj": (DIM, DIM), "self_attn.k_proj": (DIM // 2, DIM), "mlp.down_proj": (DIM, HIDDEN)}


def tiny_llama():
    mx.random.seed(0)
    return llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=DIM,
            intermediate_size=HIDDEN,
            num_hidden_layers=LAYERS,
            vocab_size=VOCAB,
            num_attention_heads=2,
            num_key_value_heads=1,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
        )
    )


def deltas_of(model):
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            module.linear.weight = mx.zeros_like(module.linear.weight)
            module.eval()
            found[name] = np.array(module(mx.eye(module.linear.weight.shape[1]))).T
    return found


def saved_by_mlx_lm(path, *, num_layers=-1, dtype=mx.float32, config=None, **parameters):
    """A directory as `mlx_lm.lora` leaves it, with B drawn at random; and ΔW of each module."""
    parameters = {"rank": 4, "scale": 20.0, "dropout": 0.0, **parameters}
    model = tiny_llama()
    model.freeze()
    linear_to_lora_layers(model, num_layers, parameters)
    for _, module in model.named_modules():
        if isinstance(module, LoRALinear):
            module.lora_a = module.lora_a.astype(dtype)
            module.lora_b = mx.random.normal(module.lora_b.shape).astype(dtype)
    path.mkdir(parents=True)
    mx.save_safetensors(str(path / "adapters.safetensors"), dict(tree_flatten(model.trainable_parameters())))
    whole = {"fine_tune_type": "lora", "num_layers": num_layers, "lora_parameters": parameters, "model": "org/base"}
    (path / "adapter_config.json").write_text(json.dumps({**whole, **(config or {})}))
    return deltas_of(model)


@pytest.fixture
def random_adapter(make_adapter):
    def make(modules, alpha, targets):
        shapes = {m: SHAPES[m.split(".", 3)[3]] if ".layers." in m else (VOCAB, DIM) for m in modules}
        return make_adapter(shapes, rank=5, alpha=alpha, targets=targets)

    return make


def stack(*names, layers=range(LAYERS)):
    return [f"model.layers.{layer}.{name}" for layer in layers for name in names]


def keys_in(path):
    return json.loads((path / "adapter_config.json").read_text())["lora_parameters"]["keys"]


READABLE = {
    "every linear layer": {},
    "keys": {"keys": ["self_attn.q_proj", "mlp.down_proj"]},
    "last layers": {"num_layers": 2, "keys": ["self_attn.q_proj"]},
    "paths": {"keys": ["model.layers.0.self_attn.q_proj", "lm_head"]},
    "scale that gives no integer alpha": {"scale": 2.5, "rank": 3, "keys": ["self_attn.q_proj"]},
    "dropout": {"dropout": 0.25, "keys": ["mlp.down_proj"]},
}


@pytest.mark.parametrize("config", READABLE.values(), ids=READABLE)
def test_reads_the_function_that_mlx_lm_trained(tmp_path, config, deltas, assert_same_function):
    expected = saved_by_mlx_lm(tmp_path / "mlx", **config)
    adapter = read_adapter(tmp_path / "mlx")
    assert adapter.layout == "mlx" and adapter.base_model == "org/base"
    assert adapter.spec.dropout == config.get("dropout", 0.0)
    assert_same_function(deltas(adapter), expected)
    for layout in ("dual", "mlx"):
        write_adapter(tmp_path / layout / "out", adapter, layout=layout)
        model = load_adapters(tiny_llama(), tmp_path / layout / "out")
        assert_same_function(deltas_of(model), expected)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
def test_reads_half_precision_exactly(tmp_path, dtype):
    saved_by_mlx_lm(tmp_path / "mlx", dtype=dtype, keys=["self_attn.q_proj"])
    stored = mx.load(str(tmp_path / "mlx" / "adapters.safetensors"))
    pairs = to_pairs(read_adapter(tmp_path / "mlx").tensors, "test")
    assert len(stored) == 2 * len(pairs) == 2 * LAYERS
    for module, pair in pairs.items():
        np.testing.assert_array_equal(pair.A_rI, np.array(stored[f"{module}.lora_a"].astype(mx.float32)).T)
        np.testing.assert_array_equal(pair.B_Or, np.array(stored[f"{module}.lora_b"].astype(mx.float32)).T)


def test_alpha_is_scale_times_rank(tmp_path):
    saved_by_mlx_lm(tmp_path / "mlx", scale=1.1, rank=10, keys=["self_attn.q_proj"])
    spec = read_adapter(tmp_path / "mlx").spec
    assert (spec.rank, spec.alpha, spec.targets) == (10, 11.0, ("q_proj",))


def test_the_last_layers_become_paths(tmp_path):
    saved_by_mlx_lm(tmp_path / "mlx", num_layers=2, keys=["self_attn.q_proj"])
    assert read_adapter(tmp_path / "mlx").spec.targets == tuple(stack("self_attn.q_proj", layers=[1, 2]))


WRITTEN = {
    "whole stack": (stack(*SHAPES), ("q_proj", "k_proj", "down_proj"), list(SHAPES)),
    "with the head": ([*stack("mlp.down_proj"), "lm_head"], ("down_proj", "lm_head"), ["mlp.down_proj", "lm_head"]),
    "not layer 0": (stack("self_attn.q_proj", layers=[1, 2]), ("q_proj",), None),
    "a hole": (stack("self_attn.q_proj", layers=[0, 2]), ("q_proj",), None),
    "the first layers": (stack("self_attn.q_proj", layers=[0, 1]), stack("self_attn.q_proj", layers=[0, 1]), None),
    "different layers": (
        [*stack("mlp.down_proj"), *stack("self_attn.q_proj", layers=[2])],
        ("down_proj", "q_proj"),
        None,
    ),
}


@pytest.mark.parametrize(("modules", "targets", "keys"), WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize("layout", ["dual", "mlx"])
def test_mlx_lm_loads_the_same_function(
    tmp_path, layout, modules, targets, keys, deltas, assert_same_function, random_adapter
):
    adapter = random_adapter(modules, alpha=7.3, targets=targets)
    write_adapter(tmp_path / "a", adapter, layout=layout)
    assert set(keys_in(tmp_path / "a")) == set(modules if keys is None else keys)
    assert_same_function(deltas_of(load_adapters(tiny_llama(), tmp_path / "a")), deltas(adapter))


def test_mlx_layout_keeps_scale_and_numbers(tmp_path, random_adapter):
    """No integer alpha is needed there, so nothing is folded."""
    adapter = random_adapter(stack("self_attn.q_proj"), alpha=7.3, targets=("q_proj",))
    write_adapter(tmp_path / "a", adapter, layout="mlx")
    again = read_adapter(tmp_path / "a")
    assert again.spec == adapter.spec
    for name, x in adapter.tensors.items():
        np.testing.assert_array_equal(again.tensors[name], x)


@pytest.mark.parametrize("layout", ["dual", "peft", "mlx"])
def test_magnitudes_of_dora_go_there_and_back(tmp_path, layout):
    """A directory as `mlx_lm.lora --fine-tune-type dora` leaves it; a model that loads what was written is the same."""
    parameters = {"rank": 4, "scale": 1.5, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.down_proj"]}
    model = tiny_llama()
    model.freeze()
    linear_to_lora_layers(model, LAYERS, parameters, use_dora=True)
    model.update(tree_map(lambda x: x + 0.1 * mx.random.normal(x.shape), model.trainable_parameters()))
    path = tmp_path / "mlx-lm"
    path.mkdir()
    stored = dict(tree_flatten(model.trainable_parameters()))
    mx.save_safetensors(str(path / "adapters.safetensors"), stored)
    whole = {"fine_tune_type": "dora", "num_layers": LAYERS, "lora_parameters": parameters}
    (path / "adapter_config.json").write_text(json.dumps(whole))
    write_adapter(tmp_path / layout, read_adapter(path), layout=layout)
    again = read_adapter(tmp_path / layout)
    assert (again.spec.method, again.spec.scale, len(again.tensors)) == ("dora", 1.5, len(stored))
    for module in stack("self_attn.q_proj", "mlp.down_proj"):
        for part, end in (("A", "lora_a"), ("B", "lora_b"), ("m", "m")):
            tensor = again.tensors[tensor_name(module, part, "dora")]
            np.testing.assert_array_equal(tensor, np.array(stored[f"{module}.{end}"]).T)
    if layout != "peft":
        loaded = load_adapters(tiny_llama(), tmp_path / layout)
        assert mx.array_equal(loaded(mx.arange(8)[None]), model(mx.arange(8)[None])).item()


REFUSED = {
    "q_proj.*is missing; DoRA needs it": {"config": {"fine_tune_type": "dora"}},
    "fine_tune_type: got 'full'": {"config": {"fine_tune_type": "full"}},
    "lora_parameters: rank: missing": {"config": {"lora_parameters": None}},
    "scale: missing, and mlx-lm ignores 'alpha' .16": {"config": {"lora_parameters": {"rank": 4, "alpha": 16}}},
    "dropout: missing": {"config": {"lora_parameters": {"scale": 2.0, "rank": 4}}},
    r"must be \[5, in\]": {"config": {"lora_parameters": {"scale": 2.0, "rank": 5, "dropout": 0.0}}},
    "not selected by lora_parameters.keys": {
        "config": {"lora_parameters": {"scale": 2.0, "rank": 4, "dropout": 0.0, "keys": ["q_proj"]}}
    },
    "scale: got '0.0'": {"scale": 0.0},
}


@pytest.mark.parametrize(("message", "config"), REFUSED.items(), ids=REFUSED)
def test_wrong_values_are_named(tmp_path, message, config):
    saved_by_mlx_lm(tmp_path / "mlx", **{"keys": ["self_attn.q_proj"], **config})
    with pytest.raises(FormatError, match=message):
        read_adapter(tmp_path / "mlx")


def test_embeddings_doras_and_experts_are_refused_by_name(tmp_path):
    saved_by_mlx_lm(tmp_path / "mlx", keys=["self_attn.q_proj"])
    file = tmp_path / "mlx" / "adapters.safetensors"
    tensors = safetensors.numpy.load_file(file)
    q, a, b = "model.layers.0.self_attn.q_proj", np.ones((VOCAB, 4), np.float32), np.ones((4, DIM), np.float32)
    for extra, message in (
        ({"model.embed_tokens.lora_a": a, "model.embed_tokens.lora_b": b}, "LoRA of an embedding"),
        ({f"{q}.m": np.ones(DIM, np.float32)}, "DoRA's magnitude"),
        ({f"{q}.lora_a": a[None], f"{q}.lora_b": b[None]}, "of a projection of experts"),
        ({"model.norm.weight": np.ones(DIM, np.float32)}, "not part of a LoRA adapter"),
    ):
        safetensors.numpy.save_file({**tensors, **extra}, file)
        with pytest.raises(FormatError, match=message):
            read_adapter(tmp_path / "mlx")


def test_single_experts_are_not_written_for_mlx_lm(tmp_path, deltas, assert_same_function, make_adapter):
    adapter = make_adapter({"model.layers.0.mlp.experts.3.w1": (6, 4)}, targets=("w1",))
    with pytest.raises(FormatError, match="stacks the experts"):
        write_adapter(tmp_path / "a", adapter)
    assert not (tmp_path / "a").exists()
    write_adapter(tmp_path / "a", adapter, layout="peft")
    assert_same_function(deltas(read_adapter(tmp_path / "a")), deltas(adapter))


OTHER_NAMES = {  # family -> its arguments, and layers by the names of its files
    "gptj": (
        {
            "model_type": "gptj", "n_embd": DIM, "n_head": 2, "n_layer": 2, "n_positions": 32, "rotary_dim": 4,
            "vocab_size": VOCAB,
        },
        ("transformer.h.0.attn.q_proj", "transformer.h.1.attn.q_proj"),
    ),
    "lfm2_moe": (
        {
            "model_type": "lfm2_moe", "vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": DIM,
            "moe_intermediate_size": DIM, "num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 1,
            "norm_topk_prob": True, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32,
            "use_expert_bias": False, "num_dense_layers": 1, "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3,
            "full_attn_idxs": [0], "layer_types": ["full_attention"],
        },
        ("model.layers.0.self_attn.q_proj", *(f"model.layers.0.feed_forward.{name}" for name in ("w1", "w2", "w3"))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", OTHER_NAMES)
def test_mlx_lm_loads_layers_that_it_names_otherwise_than_the_files(tmp_path, family):
    config, modules = OTHER_NAMES[family]
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    shape = np.zeros((DIM, DIM), np.float32)
    safetensors.numpy.save_file({f"{module}.weight": shape for module in modules}, base / "model.safetensors")
    tensors = {
        tensor_name(module, part): np.full(shape, number, np.float32)
        for number, module in enumerate(modules, start=1)
        for part, shape in (("A", (2, DIM)), ("B", (DIM, 2)))
    }
    spec = AdapterSpec(rank=2, alpha=4.0, dropout=0.0, targets=modules)
    write_adapter(tmp_path / "a", Adapter(spec, tensors, str(base), naming=naming_of(base, modules)), layout="mlx")
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = load_adapters(module.Model(module.ModelArgs.from_dict(config)), str(tmp_path / "a"))
    loaded = [float(a.max()) for name, a in tree_flatten(model.parameters()) if name.endswith("lora_a")]
    assert sorted(loaded) == [*range(1, 1 + len(modules))]
    assert read_adapter(tmp_path / "a").tensors.keys() == tensors.keys()
