"""Models trained whole (adapter.method: full) on MLX: like torch, moved to it, resumed, and written."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance_case import assert_close, assert_equal, gradient, norm_of
from dualtune.engine.testing.conformance_losses import weighted
from dualtune.engine.testing.tiny_models import pack, random_batch, row_of, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.beside import is_constant
from dualtune.model.optimizer import Averaging, OptimizerSpec

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from mlx_lm.models import llama, qwen3_5  # noqa: E402

from dualtune_mlx import optimizer  # noqa: E402
from dualtune_mlx.kernels import cross_entropy  # noqa: E402

pytestmark = pytest.mark.covering(1)

FULL = AdapterSpec(rank=1, alpha=1.0, dropout=0.0, targets=(), method="full")
TIED = {"tie_word_embeddings": True}


@pytest.fixture
def engine_of(open_backend):
    def load(directory, backend="mlx", *, dtype="float32", kernels="auto", optimizer="adamw", checkpointing=KEEP_ALL):
        spec = OptimizerSpec(optimizer, {"weight_decay": 0.1})
        request = LoadRequest(
            directory, dtype, "auto", "pretrained", FULL, spec, 0, kernels=kernels, checkpointing=checkpointing
        )
        return open_backend(backend).load(request)

    return load


def train(engine, steps):
    for seed in steps:
        batch = random_batch([9, 16, 5, 12], 96, seed=seed)
        for row in range(4):
            engine.forward_backward(row_of(batch, row), divisor=batch.num_targets)
        engine.optim_step(lr=1e-3, max_grad_norm=1.0)
    return engine


@pytest.mark.parametrize(
    "spec",
    [
        OptimizerSpec("adamw", average=Averaging()),
        OptimizerSpec("lion", lr_factors={"embed_tokens.weight": 4.0}),
        OptimizerSpec("adafactor", average=Averaging(), lr_factors={"embed_tokens.weight": 4.0}),
        OptimizerSpec("adamw_8bit"),
    ],
    ids=["adamw", "lion", "adafactor", "adamw_8bit"],
)
def test_an_update_in_place_is_the_formula(monkeypatch, spec):
    """In several chunks, which end inside of a tensor; a step that is not good changes nothing."""
    monkeypatch.setattr(optimizer, "UPDATE_CHUNK", 512)
    shapes = {"layers.0.weight": (30, 40), "embed_tokens.weight": (20, 30), "norm.weight": (700,)}
    rng, layout = np.random.default_rng(0), optimizer.FlatLayout(shapes)
    w, g = ({name: rng.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()} for _ in "wg")
    ours = optimizer.flat_optimizer(spec, layout, in_place=True)
    params, grads, state = (*(layout.flat({n: mx.array(x) for n, x in of.items()}) for of in (w, g)), ours.zero_slots())
    rates = 1e-2 * ours.lr_factors
    numbers = {"lr": rates, "shrink": 1 - rates * spec.settings["weight_decay"]}
    numbers = {name: mx.array(np.asarray(value, np.float32)) for name, value in numbers.items()}
    slots = {name: {} for name in shapes}
    for slot, own in spec.slot_shapes(shapes).items():
        for name, shape in own.items():
            slots[name][slot] = np.zeros(shape, np.float32)
    for step, is_good in ((1, True), (2, False), (2, True)):
        flags = {"step": mx.array(float(step)), "is_good": mx.array(is_good)}
        params, state = ours.update(params, state, grads, **numbers, **flags)
        for name in shapes if is_good else ():
            lr = 1e-2 * spec.lr_factor(name)
            w[name], slots[name] = spec.update(w[name], g[name], slots[name], step=step, lr=lr)
        assert all(np.allclose(np.array(x), w[n], atol=2e-6) for n, x in layout.named(params).items())
    read = ours.read(state)
    for slot, own in spec.slot_shapes(shapes).items():
        expected = np.concatenate([slots[name][slot].flatten() for name in own])
        assert np.allclose(np.array(read[slot]), expected, atol=2e-6 if spec.name != "adamw_8bit" else 1e-2)


@pytest.mark.parametrize("changes", [{}, TIED], ids=["head", "tied"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
def test_ten_steps_are_torch_s(engine_of, tmp_path, changes, optimizer):
    """Of float32, by the norm of all weights; every tensor is trained, and a tied head is one with the embedding."""
    pytest.importorskip("torch")
    directory = write_tiny_llama(tmp_path / "model", **changes)
    start = engine_of(directory).adapter_state()
    batch = random_batch([9, 16], 96)
    assert_close(*(gradient(engine_of(directory, name), batch) for name in ("mlx", "torch")), tolerances.GRADIENT)
    ours, theirs = (
        train(engine_of(directory, name, optimizer=optimizer), range(10)).adapter_state() for name in ("mlx", "torch")
    )
    assert ours.keys() == theirs.keys() == load_file(directory / "model.safetensors").keys()
    assert not [name for name, w in start.items() if np.array_equal(w, ours[name])]
    assert_close(ours, theirs, 2e-5)


def long(*families):
    return [pytest.param(family, marks=pytest.mark.long) for family in families]


MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip
FEW = {"num_local_experts": 4, "num_experts_per_tok": 2}
# What the rows of tiny_families.FAMILIES, or its SIZES, have not.
SIZES = {
    "gpt_oss": FEW | {"layer_types": ["sliding_attention", "full_attention"]},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    "lfm2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
    },
    "jamba": {
        "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_offset": 1, "attn_layer_period": 2,
        "expert_layer_offset": 1, "expert_layer_period": 2, "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
    "phimoe": FEW,
    "nemotron_h": {"time_step_min": 0.69},  # the least step: some of this model's are shorter
    "olmo_hybrid": {
        "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "granitemoehybrid": MAMBA | FEW | {"shared_intermediate_size": 16, "layer_types": ["mamba", "attention"]},
    "qwen3_5_moe_text": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "linear_num_key_heads": 2,
        "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip


def write_family(family, path):
    import tiny_families  # by transformers, with torch

    sizes = tiny_families.FAMILIES.get(family, tiny_families.SIZES) | SIZES.get(family, {})
    return tiny_families.write_family(family, path, **sizes)


@pytest.mark.parametrize(
    "family",
    [
        "gpt2", "mixtral", "gpt_oss", "ernie4_5_moe", "nemotron_h", "qwen3_5_moe_text",
        *long("qwen3_moe", "lfm2_moe", "jamba", "phimoe", "granitemoehybrid", "deepseek_v3", "olmo_hybrid"),
    ],
)  # fmt: skip
def test_what_mlx_lm_turns_or_stacks_is_trained_as_the_files_hold_it(engine_of, tmp_path, family):
    """GPT-2's matrices, which are transposed, experts one by one, stacks of gate and up by turns, transposed too,
    filters of convolutions, norms that it adds 1 to, matrices cut by heads: torch's steps, and its files, which
    transformers reads. Corrections of the choice of experts stay as they are."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    directory = write_family(family, tmp_path / "model")
    whole_files = load_file(directory / "model.safetensors")
    stored = {name: tensor for name, tensor in whole_files.items() if not is_constant(name)}
    ours, theirs = (engine_of(directory, name) for name in ("mlx", "torch"))
    assert_equal(ours.neutral_state(), stored)
    assert_equal(theirs.neutral_state(), stored)
    named = {name: p.detach().numpy() * 2 for name, p in theirs.model.named_parameters()}  # as earlier versions wrote
    theirs.load_adapter_state({name: w for name, w in named.items() if not is_constant(name)})
    assert_equal(theirs.adapter_state(), {name: 2 * w for name, w in stored.items()})
    theirs.load_adapter_state(stored)
    batch = random_batch([9, 16, 5, 12], 96)
    whole = gradient(engine_of(directory), batch)
    # The steps of Adam and Muon show no factor of a whole tensor's gradient.
    assert_close(whole, gradient(engine_of(directory, "torch"), batch), tolerances.GRADIENT)
    assert_close(gradient(engine_of(directory), pack(batch, [[0, 2], [1, 3]])), whole, tolerances.GRADIENT)
    assert_equal(gradient(engine_of(directory, checkpointing=ActivationCheckpointing("all")), batch), whole)
    for name, engine in (("mlx", ours), ("torch", theirs)):
        train(engine, range(3)).save_merged(tmp_path / name)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("mlx", "torch")]
    assert files[0].keys() == files[1].keys() == whole_files.keys()
    same = {name for name, w in whole_files.items() if np.array_equal(w, files[0][name])}
    assert same == whole_files.keys() - stored.keys()
    assert_close(*files, 2e-5)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mlx", dtype=torch.float32).eval()
    row = row_of(batch, 0)
    with torch.no_grad():
        logprobs = model(torch.from_numpy(row.tokens_BT).long()).logits.log_softmax(-1).numpy()
    assert np.abs(ours.logprobs(row) - logprobs).max() <= 1e-4
    again = engine_of(directory)
    again.load_adapter_state(ours.adapter_state())
    again.load_optimizer_state(ours.optimizer_state())
    assert_equal(train(again, range(3, 5)).adapter_state(), train(ours, range(3, 5)).adapter_state())
    if family == "gpt2":  # experts in 16 bits have no code on a CPU
        half = gradient(engine_of(directory, dtype="bfloat16"), batch)
        assert norm_of({n: g - whole[n] for n, g in half.items()}) <= 0.05 * norm_of(whole)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("family", "optimizer"),
    [
        ("llama", "adamw"), ("mixtral", "muon"), ("gpt_oss", "adafactor"), ("nemotron_h", "adamw"),
        *(
            pytest.param(family, optimizer, marks=LONG)
            for family, optimizer in [
                ("llama", "muon"), ("gpt2", "adamw"), ("mixtral", "adafactor"), ("qwen3_moe", "lion_8bit"),
                ("gpt_oss", "muon"), ("granitemoe", "adafactor"), ("qwen3_5_moe_text", "adamw"),
                ("ernie4_5_moe", "muon"), ("lfm2_moe", "adamw"), ("jamba", "adafactor"), ("phimoe", "adamw"),
                ("granitemoehybrid", "muon"), ("nemotron_h", "muon"), ("deepseek_v3", "adamw"),
            ]
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backends", [("mlx", "torch"), pytest.param(("torch", "mlx"), marks=LONG)], ids="-".join)
def test_a_run_moves_in_the_middle(engine_of, tmp_path, family, optimizer, backends):
    """Also of mixtures, whose experts torch has in stacks of gate and up, and MLX in one of each projection."""
    pytest.importorskip("torch")
    here, other = backends
    directory = write_family(family, tmp_path / "model") if family != "llama" else write_tiny_llama(tmp_path / "model")
    straight, moving = (train(engine_of(directory, here, optimizer=optimizer), range(3)) for _ in range(2))
    there = engine_of(directory, other, optimizer=optimizer)
    again = engine_of(directory, here, optimizer=optimizer)
    for engine in (there, again):
        engine.load_adapter_state(moving.adapter_state())
        engine.load_optimizer_state(moving.optimizer_state())
        assert_equal(engine.adapter_state(), moving.adapter_state())
    for engine in (straight, there, again):
        train(engine, range(3, 6))
    assert_equal(again.adapter_state(), straight.adapter_state())
    assert_close(there.adapter_state(), straight.adapter_state(), 1e-6 if optimizer == "adamw" else 2e-5)


def test_the_gradient_of_a_head_in_chunks_with_loss_weights(engine_of, tmp_path, monkeypatch):
    monkeypatch.setitem(cross_entropy.LOSS_LOGITS, "cpu", 7 * 96)
    directory = write_tiny_llama(tmp_path / "model", **TIED)
    batch = weighted(random_batch([9, 16, 5, 12], 96), 0.25, 0.0, -1.5, 3.0)
    fused, plain = (engine_of(directory, kernels=kernels) for kernels in ("auto", "reference"))
    assert fused.description.kernels.startswith("fused: loss")
    assert_close(gradient(fused, batch), gradient(plain, batch), tolerances.GRADIENT)


def test_packing_changes_nothing_and_recomputation_no_bit(engine_of, tmp_path):
    directory, batch = write_tiny_llama(tmp_path / "model"), random_batch([9, 16, 5, 12], 96)
    whole = gradient(engine_of(directory), batch)
    assert_close(gradient(engine_of(directory), pack(batch, [[0, 2], [1, 3]])), whole, tolerances.GRADIENT)
    recomputed = engine_of(directory, checkpointing=ActivationCheckpointing("all"))
    assert_equal(gradient(recomputed, batch), whole)


def test_16_bits_compute_with_a_copy_of_float32_masters(engine_of, tmp_path):
    """Updates below the precision of bfloat16 add up in the masters, and the gradient is near that of float32."""
    directory, batch = write_tiny_llama(tmp_path / "model"), random_batch([9, 16], 96)
    exact, engine = gradient(engine_of(directory), batch), engine_of(directory, dtype="bfloat16")
    before = engine.adapter_state()
    assert_equal(before, engine_of(directory).adapter_state())
    gap = norm_of({n: g - exact[n] for n, g in gradient(engine, batch).items()})
    assert gap <= 0.05 * norm_of(exact)
    engine.forward_backward(batch, divisor=batch.num_targets)
    engine.optim_step(lr=1e-7, max_grad_norm=None)
    moved = {n: np.abs(w - before[n]).max() for n, w in engine.adapter_state().items()}
    assert all(0 < step <= 1e-6 for step in moved.values()), moved
    assert engine.model.model.norm.weight.dtype == mx.bfloat16
    assert_equal(engine.neutral_state(), before)


@pytest.mark.parametrize("changes", [{}, TIED], ids=["head", "tied"])
def test_what_is_written_is_a_model_of_transformers(engine_of, tmp_path, changes):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    directory = write_tiny_llama(tmp_path / "model", **changes)
    engine = train(engine_of(directory), range(2))
    engine.save_merged(tmp_path / "written")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "written", dtype=torch.float32)
    assert_equal({n: p.detach().numpy() for n, p in model.named_parameters()}, engine.adapter_state())


def test_what_cannot_be_trained_is_refused_by_name(engine_of, tmp_path):
    quantized = write_tiny_llama(tmp_path / "q", quantization={"group_size": 64, "bits": 4})
    with pytest.raises(ConfigError, match=r"adapter.method: got full, but the base is stored quantized \(affine4\)"):
        engine_of(quantized)


def curved(weights, norms):
    return weights | {norms[0]: mx.exp(weights[norms[0]])}


def added(weights, norms):
    """The tensors have the numbers 3 and 11, say, so that their sum could be twice the tensor of number 7."""
    order = [*weights]
    pairs = [(a, b) for a in norms for b in norms if a != b and (order.index(a) - order.index(b)) % 2 == 0]
    return weights | {pairs[0][0]: weights[pairs[0][0]] + weights[pairs[0][1]]}


@pytest.mark.parametrize("made", [curved, added])
def test_what_is_made_of_the_files_in_another_way_is_refused(engine_of, tmp_path, monkeypatch, made):
    def sanitize(self, weights):
        return made(weights, sorted(name for name in weights if "norm" in name))

    directory = write_tiny_llama(tmp_path / "model", num_hidden_layers=4)
    monkeypatch.setattr(llama.Model, "sanitize", sanitize)
    with pytest.raises(ConfigError, match=r"mlx-lm computes 1 of the parameters .*\(for example model.*Train it on"):
        engine_of(directory)


def test_only_passes_with_a_derivative_are_training(engine_of, tmp_path, monkeypatch):
    """A kernel of Metal has none. No machine without Metal shows the error, so the mode is looked at."""
    asked, plain = [], qwen3_5.gated_delta_update

    def noted(*args, **options):
        asked.append(options["use_kernel"])
        return plain(*args, **options)

    monkeypatch.setattr(qwen3_5, "gated_delta_update", noted)
    engine = engine_of(write_family("qwen3_5_moe_text", tmp_path), kernels="reference")
    batch = random_batch((9,), 60)
    asked.clear()
    engine.forward_backward(batch, divisor=1.0)
    assert {*asked} == {False}
    asked.clear()
    engine.evaluate(batch)
    assert {*asked} == {True}
