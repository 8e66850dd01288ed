"""Experts that transformers computes by code of a family's own: dualtune computes what that code and PEFT compute."""

import dataclasses

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, assert_equal, gradient
from dualtune.model.adapter import AdapterSpec, modules_of, tensor_name
from dualtune.model.experts import DOWN, GATE, UP, expert_of
from dualtune.model.formats.canonical import to_pairs
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.model.optimizer import OptimizerSpec
from dualtune.model.places import in_names_of, naming_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import tiny_families  # noqa: E402

SIZES, EXPERTS, LATENT, IMAGES = (getattr(tiny_families, name) for name in ("SIZES", "EXPERTS", "LATENT", "IMAGES"))
VOCAB, LENGTHS, BATCH = tiny_families.VOCAB, tiny_families.LENGTHS, tiny_families.BATCH
trained, at_tokens = tiny_families.trained, tiny_families.at_tokens
LLAMA4 = SIZES | {
    "num_local_experts": 4, "intermediate_size": 16, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2,
    "num_hidden_layers": 4,
    "attention_chunk_size": 64,
}  # fmt: skip
FAMILIES = {
    # Weighed before they enter, stacks [in, out]; mlx-lm has one expert a token only.
    "llama4_text": LLAMA4 | {"num_experts_per_tok": 1},
    "llama4_text twice": LLAMA4 | {"num_experts_per_tok": 2},
    # Two experts without weights.
    "longcat_flash": SIZES | LATENT | {
        "num_layers": 1, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "n_routed_experts": 4,
        "zero_expert_num": 2, "moe_topk": 2,
    },
    # Experts for images after those for text in one list.
    "ernie4_5_vl_moe": {
        "text_config": SIZES | {
            "moe_intermediate_size": [16, 24], "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse"], "rope_parameters": tiny_families._turned(),
        },
        "vision_config": IMAGES | {"depth": 1, "num_heads": 2},
    },
}  # fmt: skip
OTHERS = {
    "granitemoe": tiny_families.FAMILIES["granitemoe"],
    "gpt_oss": SIZES | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
REFUSED = {
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "vocab_size": 96,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "jetmoe": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8},
}  # fmt: skip
ON_MLX = ("llama4_text", "longcat_flash")
SPEC = AdapterSpec(4, 6.0, 0.0, ("all-linear",), experts=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("experts")
    written = {}

    def model(name):
        if name not in written:
            family = name.partition(" ")[0]
            written[name] = tiny_families.write_family(
                family, directory / name.replace(" ", "-"), **(FAMILIES | OTHERS | REFUSED)[name]
            )
        return written[name]

    return model


@pytest.fixture
def load(backends):
    def load_(name, model, spec=SPEC, quantization="none"):
        return backends[name].load(
            LoadRequest(model, "float32", quantization, "pretrained", spec, OptimizerSpec(), seed=5)
        )

    return load_


def of_transformers(model_dir, dtype=None):
    config = transformers.AutoConfig.from_pretrained(model_dir)
    wrapped = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind = transformers.AutoModelForImageTextToText if wrapped else transformers.AutoModelForCausalLM
    return kind.from_pretrained(
        model_dir, dtype=dtype or torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def rows_of(model):
    """The logarithms of the probabilities of a model of transformers, row by row: of real tokens, [N, V]."""
    rows = (torch.from_numpy(BATCH.tokens_BT[i : i + 1, :n]).long() for i, n in enumerate(LENGTHS))
    return torch.cat([model(input_ids=row).logits.log_softmax(-1)[0] for row in rows])


def matrices(model, module):
    """The matrix [out, in] of an adapted expert as a view of transformers' parameter, and that of its gradient."""
    expert = expert_of(module)
    container, number = (
        expert.container.replace(".mlp.", ".mlp.text_moe.") if is_ernie(model) else expert.container,
        int(expert.number),
    )
    if is_ernie(model):
        container = container.replace("model.layers", "model.language_model.layers")
    experts = model.get_submodule(container)
    parameter = experts.down_proj if expert.name == DOWN else experts.gate_up_proj
    for whole in (parameter, parameter.grad):
        if whole is None:
            yield None
            continue
        matrix = whole[number].T if "Llama4" in type(experts).__name__ else whole[number]
        half = len(matrix) // 2
        yield {DOWN: matrix, GATE: matrix[:half], UP: matrix[half:]}[expert.name]


def is_ernie(model):
    return "Ernie" in type(model).__name__


@pytest.mark.parametrize("name", FAMILIES)
def test_function_and_gradient_are_those_of_transformers_own_code_in_float64(load, models, name):
    """Its own code with the merged weights; dA = s · Bᵀ dW and dB = s · dW Aᵀ, from the slope at the weights."""
    engine = trained(load("torch", models(name), dataclasses.replace(SPEC, targets=(GATE, UP, DOWN))))
    state = engine.adapter_state()
    experts = [module for module in modules_of(state) if expert_of(module)]
    assert len(experts) == 4 * 3 * (2 if "llama4" in name else 1)
    oracle = of_transformers(models(name), torch.float64)
    pairs = {m: (pair.A_rI.astype(np.float64), pair.B_Or.astype(np.float64)) for m, pair in to_pairs(state, "").items()}
    linear = {m.removeprefix("model."): pair for m, pair in pairs.items() if m not in experts}
    with torch.no_grad():
        for module in experts:
            A_rI, B_Or = pairs[module]
            next(matrices(oracle, module)).add_(torch.from_numpy(SPEC.scale * B_Or @ A_rI))
        for path, layer in oracle.named_modules():
            if own := next((pair for m, pair in linear.items() if path.endswith(m)), None):
                layer.weight.add_(torch.from_numpy(SPEC.scale * own[1] @ own[0]))
    logprobs_NV = rows_of(oracle)
    assert np.abs(logprobs_NV.detach().numpy() - at_tokens(engine.logprobs(BATCH))).max() <= tolerances.LOGPROBS
    labels_N = torch.from_numpy(np.concatenate([BATCH.labels_BT[i, :n] for i, n in enumerate(LENGTHS)])).long()
    torch.nn.functional.nll_loss(logprobs_NV, labels_N, ignore_index=-100).backward()
    expected = {}
    for module in experts:
        (A_rI, B_Or), dW_OI = pairs[module], [*matrices(oracle, module)][1].numpy()
        expected[tensor_name(module, "A")] = SPEC.scale * B_Or.T @ dW_OI
        expected[tensor_name(module, "B")] = SPEC.scale * dW_OI @ A_rI.T
    found = gradient(engine, BATCH)
    assert_close({n: found[n] for n in expected}, expected, tolerances.GRADIENT)
    assert any(g.any() for g in expected.values())


def test_a_token_that_has_no_expert_takes_nothing_from_the_memory_of_products(monkeypatch):
    """Rows of no expert stay as they were allocated: here they are NaN, in both directions."""
    from transformers.models.longcat_flash.configuration_longcat_flash import LongcatFlashConfig
    from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMoE

    from dualtune_torch.expert_forms import with_common_forms

    torch.manual_seed(0)
    config = LongcatFlashConfig(**FAMILIES["longcat_flash"])
    experts = LongcatFlashMoE(config).experts.double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    chosen = torch.stack([torch.randperm(6)[:2] for _ in range(9)])
    weights, towards = torch.rand(9, 2, dtype=torch.float64), torch.randn(9, 32, dtype=torch.float64)
    x = torch.randn(9, 32, dtype=torch.float64, requires_grad=True)
    leaves, results = [x, *experts.parameters()], []
    for form in (experts, with_common_forms(experts)):
        y = form(x, chosen, weights)
        results.append([y, *torch.autograd.grad((y * towards).sum(), leaves)])
        monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: self.new_full(shape, float("nan")))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_peft_and_merges_compute_the_same_and_give_it_back(load, models, tmp_path, name):
    model = models(name)
    engine = trained(load("torch", model))
    state, expected = engine.adapter_state(), at_tokens(engine.logprobs(BATCH))
    tiny_families.write_in_all_layouts(tmp_path, SPEC, state, model)
    loaded = peft.PeftModel.from_pretrained(of_transformers(model), str(tmp_path / "peft")).eval()
    with torch.no_grad():
        assert np.abs(rows_of(loaded).numpy() - expected).max() <= tolerances.LOGPROBS
    loaded.save_pretrained(tmp_path / "saved")
    back = in_names_of(read_adapter(tmp_path / "saved"), model)
    assert_close(updates(back.tensors, back.spec.scale), updates(state, SPEC.scale), 1e-6)
    again = load("torch", model, dataclasses.replace(back.spec, dropout=0.0))
    again.load_adapter_state(back.tensors)
    assert np.abs(at_tokens(again.logprobs(BATCH)) - expected).max() <= tolerances.LOGPROBS
    engine.save_merged(tmp_path / "merged")
    with torch.no_grad():
        assert np.abs(rows_of(of_transformers(tmp_path / "merged")).numpy() - expected).max() <= tolerances.MERGE


def updates(tensors, scale):
    return {m: scale * (pair.B_Or.astype(np.float64) @ pair.A_rI) for m, pair in to_pairs(tensors, "").items()}


@pytest.mark.parametrize("name", ON_MLX)
def test_both_backends_start_alike_and_have_one_gradient(load, models, name):
    spec = dataclasses.replace(SPEC, dropout=0.2)
    engines = [load(backend, models(name), spec) for backend in ("torch", "mlx")]
    assert_equal(*(engine.adapter_state() for engine in engines))
    assert_close(*(gradient(trained(engine), BATCH) for engine in engines), tolerances.GRADIENT)
    a, b = (at_tokens(engine.logprobs(BATCH)) for engine in engines)
    assert np.abs(a - b).max() <= tolerances.LOGPROBS


@pytest.mark.parametrize("name", FAMILIES)
def test_the_plan_counts_what_trains_and_what_is_active(load, models, name):
    from dualtune.engine.memory.counted import shape_from
    from dualtune.engine.memory.estimate import selected
    from dualtune.model.config_file import read_config

    engine = load("torch", models(name))
    shape = shape_from(read_config(models(name)), "torch")
    planned = selected(shape, ("all-linear",), "all", experts=True)
    assert sum(SPEC.rank * (out + in_) for out, in_ in planned.values()) == engine.description.trainable_parameters
    sent = {linear.sent for layer in shape.by_layer for linear in layer.linears if linear.number > 1}
    assert sent == {1 if name == "llama4_text" else 2}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("llama4_text", "hold the experts of a layer in one tensor"),
        ("longcat_flash", "experts without weights"),
        ("ernie4_5_vl_moe", "models with other parts"),
        ("granitemoe", "Granite's files"),
        ("gpt_oss", None),
    ],
)
def test_vllm_is_refused_where_its_loader_finds_no_experts(load, models, tmp_path, name, why):
    state = trained(load("torch", models(name))).adapter_state()
    adapter = Adapter(SPEC, state, str(models(name)), naming=naming_of(models(name), modules_of(state)))
    if why is None:
        write_adapter(tmp_path / "vllm", adapter, layout="vllm")
        return
    with pytest.raises(ConfigError, match=f"layout: got vllm, but .*{why}.*; allowed: peft, or merge it for vLLM"):
        write_adapter(tmp_path / "vllm", adapter, layout="vllm")
    assert not (tmp_path / "vllm").exists()
    attention = without_experts(adapter)
    if name == "llama4_text":
        with pytest.raises(ConfigError, match="reorders the rows of Llama 4's q_proj and k_proj"):
            write_adapter(tmp_path / "attention", attention, layout="vllm")
        rotated = {"q_proj", "k_proj"}
        others = {name: x for name, x in attention.tensors.items() if rotated.isdisjoint(name.split("."))}
        attention = dataclasses.replace(attention, tensors=others)
    write_adapter(tmp_path / "attention", attention, layout="vllm")


def test_of_gpt_oss_vllm_needs_gate_or_up_and_down(load, models, tmp_path):
    """They are one parameter there: vLLM 0.32 loads it with zeros for the other one."""
    model = models("gpt_oss")
    for targets, missing in (((GATE, DOWN), None), ((GATE, UP), DOWN)):
        spec = dataclasses.replace(SPEC, targets=targets)
        state = trained(load("torch", model, spec)).adapter_state()
        adapter = Adapter(spec, state, str(model), naming=naming_of(model, modules_of(state)))
        if missing is None:
            write_adapter(tmp_path / "vllm", adapter, layout="vllm")
            back = read_adapter(tmp_path / "vllm")
            found = updates(back.tensors, back.spec.scale)
            expected = updates(state, SPEC.scale)
            assert_close({module: found[module] for module in expected}, expected, 1e-6)
            assert not any(change.any() for module, change in found.items() if module not in expected)
            continue
        with pytest.raises(ConfigError, match=rf"experts\.{missing} has no adapter"):
            write_adapter(tmp_path / "other", adapter, layout="vllm")


def without_experts(adapter):
    tensors = {name: x for name, x in adapter.tensors.items() if ".experts." not in name}
    return dataclasses.replace(adapter, tensors=tensors, spec=dataclasses.replace(adapter.spec, experts=False))


@pytest.mark.parametrize(("name", "why"), [("dbrx", "as the rows of one"), ("jetmoe", "dualtune has no names")])
def test_others_are_refused_with_the_reason_and_without_experts_they_train(load, models, name, why):
    with pytest.raises(ConfigError, match=rf"adapter\.experts: got true, but .*{why}.*Set adapter\.experts: false"):
        load("torch", models(name))
    engine = load("torch", models(name), dataclasses.replace(SPEC, experts=False))
    assert any(g.any() for g in gradient(engine, BATCH).values())


def test_peft_cannot_adapt_the_experts_of_dbrx(models):
    """Why they are refused: transformers reads all parameters of a module of which PEFT's wrapper shows one."""
    config = peft.LoraConfig(target_modules=[], target_parameters=["mlp.w1"], r=4)
    adapted = peft.get_peft_model(of_transformers(models("dbrx")), config)
    with pytest.raises(AttributeError, match="'ParamWrapper' object has no attribute 'v1'"):
        rows_of(adapted)
