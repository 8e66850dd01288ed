"""Adapters of experts: every engine and every other program compute the same, at the cost of the active experts."""

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import load_file

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, assert_equal, gradient
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.adapter import AdapterSpec, modules_of
from dualtune.model.experts import expert_of
from dualtune.model.formats.canonical import to_pairs
from dualtune.model.formats.directory import read_adapter
from dualtune.model.optimizer import OptimizerSpec
from dualtune.model.places import in_names_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")
load_adapters = pytest.importorskip("mlx_lm.tuner.utils").load_adapters

import tiny_families  # noqa: E402

SIZES, EXPERTS = tiny_families.SIZES, tiny_families.EXPERTS
# w1, w2 and w3; a dense layer first; a shared expert; gate and up by turns, in one stored tensor, with a bias.
FAMILIES = {
    "mixtral": SIZES | {"num_local_experts": 4},
    "qwen3_moe": SIZES | EXPERTS | {"num_experts": 4, "mlp_only_layers": [0]},
    "qwen2_moe": SIZES | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "gpt_oss": SIZES | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
ALSO = {
    "olmoe": SIZES | {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": tiny_families.FAMILIES["deepseek_v3"],
    "deepseek_v2": tiny_families.FAMILIES["deepseek_v3"] | {"topk_method": "greedy"},
    "glm4_moe": tiny_families.FAMILIES["glm4_moe"],
    "granitemoe": tiny_families.FAMILIES["granitemoe"],
}
SPEC = AdapterSpec(4, 6.0, 0.0, ("all-linear",), experts=True)
VOCAB, LENGTHS, BATCH = tiny_families.VOCAB, tiny_families.LENGTHS, tiny_families.BATCH
trained, at_tokens = tiny_families.trained, tiny_families.at_tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a family's model, written once."""
    return tiny_families.written_once(tmp_path_factory.mktemp("experts"), FAMILIES | ALSO)


@pytest.fixture
def load(load):
    return lambda name, model_dir, spec=SPEC, **options: load(name, model_dir, spec, **options)


# --- the function and its gradient ------------------------------------------------------------------------------------


class Mixture(torch.nn.Module):
    """The attributes of transformers' modules of experts, as `use_experts_implementation` sets them."""

    def __init__(self, E, inner, D, *, concatenated=True, transposed=False):
        super().__init__()
        self.has_gate, self.has_bias, self.has_post_expert_norm = True, False, False
        self.is_concatenated, self.is_transposed = concatenated, transposed
        up, down = torch.randn(E, 2 * inner, D), torch.randn(E, D, inner)
        self.gate_up_proj = torch.nn.Parameter(up.mT.contiguous() if transposed else up)
        self.down_proj = torch.nn.Parameter(down.mT.contiguous() if transposed else down)

    def _apply_gate(self, both):
        gate, up = both.chunk(2, -1) if self.is_concatenated else (both[..., ::2], both[..., 1::2])
        return torch.nn.functional.silu(gate) * up


def adapted_mixture(E, **form):
    from dualtune_torch.experts import AdaptedExperts, ExpertLoRA
    from dualtune_torch.methods import DropoutSeeds
    from dualtune_torch.mixture import Projection

    torch.manual_seed(0)
    base, seeds = Mixture(E, 6, 8, **form).requires_grad_(False), DropoutSeeds()
    adapters = {
        role: ExpertLoRA(Projection(base, role), f"layers.0.mlp.experts.*.{role}", SPEC, seeds)
        for role in ("gate_proj", "up_proj", "down_proj")
    }
    module = AdaptedExperts(base, adapters, seeds).double()
    for adapter in adapters.values():
        torch.nn.init.normal_(adapter.lora_A)
        torch.nn.init.normal_(adapter.lora_B)
    return module


def dense(module, x, chosen, weights):
    """Every expert on every token, with merged weights; what was not chosen has the weight 0."""
    total = torch.zeros_like(x)
    for e in range(module.base.down_proj.shape[0]):
        W = {
            role: adapter.projection.weight(e, x.dtype) + adapter.scale * adapter.lora_B[e] @ adapter.lora_A[e]
            for role, adapter in module.adapters.items()
        }
        inner = torch.nn.functional.silu(x @ W["gate_proj"].T) * (x @ W["up_proj"].T)
        total = total + (inner @ W["down_proj"].T) * (weights * (chosen == e)).sum(-1, keepdim=True)
    return total


@pytest.mark.parametrize("form", [{}, {"concatenated": False, "transposed": True}], ids=["halves", "turns_transposed"])
def test_the_function_and_its_gradient_are_those_of_all_experts_in_float64(form):
    module, T = adapted_mixture(5, **form), 7
    x = torch.randn(T, 8, dtype=torch.float64, requires_grad=True)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(T)])  # nobody chooses expert 4
    weights = torch.rand(T, 2, dtype=torch.float64, requires_grad=True)
    leaves = [x, weights, *(p for p in module.parameters() if p.requires_grad)]
    towards = torch.randn(T, 8, dtype=torch.float64)
    found, expected = module(x, chosen, weights), dense(module, x, chosen, weights)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad((y * towards).sum(), leaves) for y in (found, expected)), strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-11)
    # The gradient of one number by finite differences, which no autograd has part in.
    adapter, h = module.adapters["gate_proj"], 1e-6
    gradient_A = torch.autograd.grad((module(x, chosen, weights) * towards).sum(), adapter.lora_A)[0]
    e = int(chosen[0, 0])
    with torch.no_grad():
        losses = []
        for shift in (h, -2 * h):
            adapter.lora_A[e, 1, 3] += shift
            losses.append(float((module(x, chosen, weights) * towards).sum()))
        adapter.lora_A[e, 1, 3] += h
    assert (losses[0] - losses[1]) / (2 * h) == pytest.approx(float(gradient_A[e, 1, 3]), rel=1e-6)


def test_the_cost_is_that_of_the_active_experts():
    """Multiplications forwards and backwards: twice as many for two experts of a token, whatever the number of all."""
    from torch.utils.flop_counter import FlopCounterMode

    counted = {}
    for E, each in ((4, 1), (4, 2), (16, 1), (16, 2)):
        module, x = adapted_mixture(E), torch.randn(32, 8, dtype=torch.float64, requires_grad=True)
        chosen = torch.stack([torch.randperm(E)[:each] for _ in range(32)])
        with FlopCounterMode(display=False) as counter:
            module(x, chosen, torch.ones(32, each, dtype=torch.float64)).sum().backward()
        counted[E, each] = counter.get_total_flops()
    assert counted[4, 1] == counted[16, 1] > 0
    assert counted[4, 2] == counted[16, 2] == 2 * counted[4, 1]


def test_the_cost_on_mlx_is_that_of_the_active_experts(load, models, monkeypatch):
    from dualtune_mlx import experts

    engine, product, rows = load("mlx", models("qwen3_moe")), mx.gather_mm, []

    def counting(x, factors, **options):
        out = product(x, factors, **options)
        rows.append(out.size // out.shape[-1])
        return out

    monkeypatch.setattr(experts.mx, "gather_mm", counting)
    engine.logprobs(BATCH)
    assert {*rows} == {BATCH.tokens_BT.size * EXPERTS["num_experts_per_tok"]}


# --- two engines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.long) for name in ALSO)])
def test_both_backends_start_alike_and_have_one_gradient(load, models, family):
    spec = dataclasses.replace(SPEC, dropout=0.2)
    engines = [load(name, models(family), spec) for name in ("torch", "mlx")]
    starts = [engine.adapter_state() for engine in engines]
    assert_equal(*starts)
    assert any(expert_of(module) for module in modules_of(starts[0]))
    gradients = [gradient(trained(engine), BATCH) for engine in engines]
    assert_close(*gradients, tolerances.GRADIENT)
    a, b = (at_tokens(engine.logprobs(BATCH)) for engine in engines)
    assert np.abs(a - b).max() <= tolerances.LOGPROBS


def losses_of(engine, steps):
    losses = []
    for step in steps:
        batch = random_batch(LENGTHS, VOCAB, seed=step % 3)
        engine.forward_backward(batch, divisor=batch.num_targets)
        losses.append(float(engine.optim_step(lr=3e-3, max_grad_norm=0.3).loss))
    return losses


def test_a_run_takes_the_same_steps_on_both_resumes_to_the_bit_and_moves(load, models):
    model, spec = models("qwen3_moe"), dataclasses.replace(SPEC, dropout=0.1)
    whole = {}
    for name, other in (("torch", "mlx"), ("mlx", "torch")):
        engine = load(name, model, spec)
        first = losses_of(engine, range(5))
        states = engine.adapter_state(), engine.optimizer_state()
        whole[name] = first + losses_of(engine, range(5, 10))
        for to in (name, other):
            again = load(to, model, spec)
            again.load_adapter_state(states[0])
            again.load_optimizer_state(states[1])
            rest = losses_of(again, range(5, 10))
            if to == name:
                assert rest == whole[name][5:]
                assert_equal(again.adapter_state(), engine.adapter_state())
            else:
                assert np.abs(np.array(rest) - whole[name][5:]).max() <= 2e-5
    assert np.abs(np.array(whole["torch"]) - whole["mlx"]).max() <= 2e-5
    assert whole["torch"][9] < whole["torch"][0] - 0.02, "nothing was learned, so nothing is shown"


@pytest.mark.parametrize(("name", "quantization", "four_bit"), [("torch", "nf4", 32), ("mlx", "affine4", 32)])
def test_experts_are_adapted_on_packed_bases(backends, tmp_path, name, quantization, four_bit):
    """Two layers of four experts with 64 features."""
    sizes = SIZES | EXPERTS | {"num_experts": 4, "hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    model = tiny_families.write_family("qwen3_moe", tmp_path / "model", **sizes)
    engine = backends[name].load(
        LoadRequest(model, "float32", quantization, "pretrained", SPEC, OptimizerSpec(), seed=5)
    )
    assert engine.description.adapted_weights["four_bit"] == four_bit
    stored = load_file(model / "model.safetensors").values()
    assert engine.description.num_parameters == sum(tensor.size for tensor in stored)
    losses = losses_of(engine, range(6))
    assert losses[3] < losses[0] and losses[4] < losses[1] and losses[5] < losses[2]


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_the_plan_counts_what_the_engine_trains(load, models, name):
    from dualtune.engine.memory.counted import shape_from
    from dualtune.engine.memory.estimate import selected
    from dualtune.model.config_file import read_config

    engine = load(name, models("qwen3_moe"))
    shape = shape_from(read_config(models("qwen3_moe")), name)
    planned = selected(shape, ("all-linear",), "all", experts=True)
    assert {*map(stack_of, planned)} == {*map(stack_of, modules_of(engine.adapter_state()))}
    assert sum(SPEC.rank * (out + in_) for out, in_ in planned.values()) == engine.description.trainable_parameters
    sent = {linear.sent for layer in shape.by_layer for linear in layer.linears if linear.number > 1}
    assert sent == {EXPERTS["num_experts_per_tok"]}


def stack_of(module):
    expert = expert_of(module)
    return expert.stack if expert else module


def test_a_kept_start_of_every_expert_stays(load, models):
    """The state has it beside what is trained, whose gradient is that of LoRA of twice the rank, on both engines."""
    spec = dataclasses.replace(SPEC, init="olora")
    for name in ("torch", "mlx"):
        engine, plain = (load(name, models("qwen3_moe"), each) for each in (spec, spec.plain))
        state = engine.adapter_state()
        plain.load_adapter_state(state)
        expected, _ = spec.split(gradient(plain, BATCH))
        assert_close(gradient(engine, BATCH), expected, tolerances.GRADIENT)
        engine.forward_backward(BATCH, divisor=BATCH.num_targets)
        engine.optim_step(lr=1e-2, max_grad_norm=1.0)
        (moved, same), (before, start) = spec.split(engine.adapter_state()), spec.split(state)
        assert_equal(same, start)
        assert all((moved[n] != w).any() for n, w in before.items() if expected[n].any())


# --- other programs ---------------------------------------------------------------------------------------------------


def updates(tensors, scale):
    """The changes of weights, by which adapters of different ranks are compared."""
    return {m: scale * (pair.B_Or.astype(np.float64) @ pair.A_rI) for m, pair in to_pairs(tensors, "test").items()}


def logprobs_of_mlx(model):
    logits = model(mx.array(BATCH.tokens_BT))
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def rows_of(model):
    """The log-probabilities of a model of transformers, row by row."""
    with torch.no_grad():
        rows = (torch.from_numpy(BATCH.tokens_BT[i : i + 1, :n]).long() for i, n in enumerate(LENGTHS))
        return np.concatenate([model(row).logits.log_softmax(-1)[0].numpy() for row in rows])


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.long) for name in ALSO)])
def test_peft_and_mlx_lm_and_merges_compute_the_same_and_give_it_back(load, models, tmp_path, monkeypatch, family):
    model = models(family)
    engine = trained(load("torch", model))
    state, expected = engine.adapter_state(), at_tokens(engine.logprobs(BATCH))
    tiny_families.write_in_all_layouts(tmp_path, SPEC, state, model)
    # PEFT
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "peft")).eval()
    assert np.abs(rows_of(loaded) - expected).max() <= tolerances.LOGPROBS
    loaded.save_pretrained(tmp_path / "saved")
    back = in_names_of(read_adapter(tmp_path / "saved"), model)
    assert_equal(updates(back.tensors, back.spec.scale), updates(state, SPEC.scale))
    # mlx-lm
    plain = load("mlx", model, dataclasses.replace(SPEC, targets=(), experts=False)).model
    monkeypatch.setattr(type(plain), "load_weights", nn.Module.load_weights)  # without the check of whole models
    by_mlx = at_tokens(logprobs_of_mlx(load_adapters(plain, str(tmp_path / "mlx"))))
    assert np.abs(by_mlx - expected).max() <= tolerances.LOGPROBS
    (tmp_path / "mlx" / "dualtune.json").unlink()
    assert_equal(in_names_of(read_adapter(tmp_path / "mlx"), model).tensors, state)
    # merged, from either engine
    for name in ("torch", "mlx"):
        trained(load(name, model)).save_merged(tmp_path / f"merged-{name}")
    weights = [load_file(tmp_path / f"merged-{name}" / "model.safetensors") for name in ("torch", "mlx")]
    assert all(np.abs(w - weights[1][key]).max() <= 1e-6 for key, w in weights[0].items())
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged-mlx", dtype=torch.float32)
    assert np.abs(rows_of(merged) - expected).max() <= 2 * tolerances.LOGPROBS


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_what_cannot_be_is_refused_by_name(load, models, tiny, name):
    model = models("qwen3_moe")
    for changes, message in (
        ({"method": "dora"}, "adapter.method: got dora, but model.layers.1.mlp.experts"),
        ({"targets": ("experts.0.up_proj",)}, r"all 4 experts of model.layers.1.mlp.experts.up_proj are adapted"),
        ({"targets": ("q_proj",)}, "adapter.experts: got true, but the targets select no layer of an expert"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(name, model, dataclasses.replace(SPEC, **changes))
    with pytest.raises(ConfigError, match=r"adapter\.experts: got true"):
        load(name, tiny.model_dir)


def test_experts_are_left_alone_unless_they_are_asked_for(load, models):
    engine = load("torch", models("qwen2_moe"), dataclasses.replace(SPEC, experts=False))
    assert not any(expert_of(module) for module in modules_of(engine.adapter_state()))
