"""The optimizers as data: their formulas against torch's, and a third one that is an entry of the table and no more."""

import json
from types import MappingProxyType

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest, OptimizerState
from dualtune.engine.testing.conformance_case import assert_equal, norm_of, random_adapter
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model import optimizer
from dualtune.model.adapter import AdapterSpec
from dualtune.model.beside import BesideAdapter
from dualtune.model.formats.directory import Adapter
from dualtune.model.optimizer import OPTIMIZERS, Optimizer, OptimizerSpec
from dualtune.train.objective import optimizer_spec
from dualtune.train.prepare import spec_of_section, with_adapter_of
from dualtune.train.state import checkpoint
from dualtune.train.state.checkpoint import restore

DECAY = {"weight_decay": 0.1}
SPEC = AdapterSpec(rank=4, alpha=6.0, dropout=0.0, targets=("all-linear",))


def of_torch(name, parameter, lr):
    """An implementation that is installed, with our constants."""
    torch = pytest.importorskip("torch")
    match name:
        case "adamw":
            return torch.optim.AdamW([parameter], lr=lr, **DECAY)
        case "sgd":
            return torch.optim.SGD([parameter], lr=lr, **DECAY)
        case "muon":
            return torch.optim.Muon([parameter], lr=lr, adjust_lr_fn="match_rms_adamw", **DECAY)
        case "adafactor":
            kind = pytest.importorskip("transformers").optimization.Adafactor
            return kind([parameter], lr=lr, relative_step=False, scale_parameter=False, **DECAY)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("adamw", (3, 5)), ("sgd", (3, 5)), ("adafactor", (3, 5)), ("adafactor", (7,)), ("adafactor", (2, 3, 5)),
     ("muon", (3, 5)), ("muon", (6, 2)), ("muon", (4, 4))],
    ids=str,
)  # fmt: skip
def test_a_formula_is_that_of_torch_or_transformers_in_float64(name, shape, monkeypatch):
    """Muon's iteration, which torch has in bfloat16, is in float64 here."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    rng = np.random.default_rng(0)
    w, spec, lr = rng.normal(size=shape), OptimizerSpec(name, DECAY), 0.03
    parameter = torch.nn.Parameter(torch.from_numpy(w.copy()))
    theirs, slots = of_torch(name, parameter, lr), zero_slots(spec, "w", shape)
    for step in range(1, 6):
        g = rng.normal(size=shape)
        parameter.grad = torch.from_numpy(g.copy())
        theirs.step()
        w, after = spec.update(w, g, slots, step=step, lr=lr)
        assert {n: x.shape for n, x in after.items()} == {n: x.shape for n, x in slots.items()}
        slots = after
        np.testing.assert_allclose(w, parameter.detach().numpy(), rtol=1e-6 if name == "muon" else 1e-12)


def test_lion_is_mlx_s():
    mx, optimizers = pytest.importorskip("mlx.core"), pytest.importorskip("mlx.optimizers")
    rng = np.random.default_rng(0)
    w, spec, lr = rng.normal(size=(3, 5)).astype(np.float32), OptimizerSpec("lion", DECAY), 0.03
    theirs, slots = optimizers.Lion(lr, weight_decay=0.1), zero_slots(spec, "w", (3, 5))
    parameters = {"w": mx.array(w)}
    for step in range(1, 6):
        g = rng.normal(size=(3, 5)).astype(np.float32)
        parameters = theirs.apply_gradients({"w": mx.array(g)}, parameters)
        w, slots = spec.update(w, g, slots, step=step, lr=lr)
        np.testing.assert_allclose(w, np.array(parameters["w"]), rtol=1e-6)


def zero_slots(spec, name, shape):
    return {slot: np.zeros(own) for slot, own in spec.entry.slots_of(name, shape).items()}


def test_which_tensors_muon_takes_as_matrices():
    taken = {
        "model.layers.0.mlp.up_proj.weight": (8, 4), "transformer.h.1.attn.c_attn.weight": (4, 12),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (2, 4),
        "base_model.model.lm_head.lora_B.weight": (96, 2), "model.layers.0.mlp.experts.down_proj": (3, 4, 8),
    }  # fmt: skip
    others = {
        "model.embed_tokens.weight": (96, 4), "lm_head.weight": (96, 4), "transformer.wpe.weight": (16, 4),
        "model.norm.weight": (4,), "model.layers.0.linear_attn.conv1d.weight": (4, 1, 3),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": (4,),
    }  # fmt: skip
    muon = OPTIMIZERS["muon"]
    assert {(name, *muon.slots_of(name, shape)) for name, shape in taken.items()} == {(name, "m") for name in taken}
    assert {(n, *muon.slots_of(n, shape)) for n, shape in others.items()} == {(n, "m", "v") for n in others}


def test_the_updates_of_muon_are_as_long_as_those_of_adamw():
    """And about as long along each direction, however unequal the gradient is: singular values of 0.5 to 1.3."""
    rng, spec = np.random.default_rng(0), OptimizerSpec("muon", {"weight_decay": 0.0})
    for shape in ((16, 64), (64, 16), (32, 32)):
        g = rng.normal(size=shape) @ np.diag(np.logspace(0, -1, shape[1]))
        w, _ = spec.update(np.zeros(shape), g, zero_slots(spec, "layers.0.w", shape), step=1, lr=1.0)
        unit = w / (0.2 * np.sqrt(max(shape)))
        sizes = np.linalg.svd(unit, compute_uv=False)
        assert sizes.min() > 0.3 and sizes.max() < 1.3
        assert np.sqrt((w**2).mean()) == pytest.approx(0.2, rel=0.2)


def test_the_state_of_adafactor_is_a_row_and_a_column():
    entry = OPTIMIZERS["adafactor"]
    assert entry.slots_of("w", (30, 50)) == {"v_row": (30,), "v_col": (50,)}
    assert (entry.bytes_of("w", (30, 50)), entry.bytes_of("b", (30,))) == (4 * 80, 4 * 30)


def test_the_constants_of_adamw_are_torch_s():
    torch = pytest.importorskip("torch")
    ours, theirs = OPTIMIZERS["adamw"].defaults, torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]).defaults
    assert (ours["beta1"], ours["beta2"], ours["eps"]) == (*theirs["betas"], theirs["eps"])
    assert ours["weight_decay"] == theirs["weight_decay"]


def test_a_spec_knows_its_names():
    assert OptimizerSpec("adamw", DECAY).settings == {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    with pytest.raises(ConfigError, match="optimizer: got 'adam', allowed: adamw, adamw_8bit, sgd, lion"):
        OptimizerSpec("adam")
    with pytest.raises(ConfigError, match="optimizer sgd: got beta1, it has: weight_decay"):
        OptimizerSpec("sgd", {"beta1": 0.5})


def test_lora_plus_is_peft_s(make_config):
    """Ten steps of AdamW with decay, from a config; full fine-tuning has no B."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from peft.optimizers import create_loraplus_optimizer

    config = make_config("no.jsonl", {"train.lora_plus_ratio": 16.0, "train.weight_decay": 0.1})
    spec, lr = optimizer_spec(config, 10), 0.03
    model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(5, 3)), peft.LoraConfig(r=2, target_modules=["0"]))
    kind = torch.optim.AdamW
    theirs = create_loraplus_optimizer(model, kind, lr=lr, loraplus_lr_ratio=16.0, loraplus_weight_decay=0.1)
    rng = np.random.default_rng(0)
    pairs = {n.replace(".default", ""): p for n, p in model.double().named_parameters() if p.requires_grad}
    ours = {n: rng.normal(size=p.shape) for n, p in pairs.items()}
    assert [spec.lr_factor(n) for n in sorted(ours)] == [1.0, 16.0]
    slots = {n: {slot: np.zeros_like(w) for slot in spec.slots} for n, w in ours.items()}
    for n, parameter in pairs.items():
        parameter.data = torch.from_numpy(ours[n].copy())
    for step in range(1, 11):
        for n, parameter in pairs.items():
            g = rng.normal(size=parameter.shape)
            parameter.grad = torch.from_numpy(g)
            ours[n], slots[n] = spec.update(ours[n], g, slots[n], step=step, lr=lr * spec.lr_factor(n))
        theirs.step()
    for n, parameter in pairs.items():
        np.testing.assert_allclose(ours[n], parameter.detach().numpy(), rtol=1e-11, atol=1e-14)
    for off in (None, 1.0):
        assert optimizer_spec(make_config("no.jsonl", {"train.lora_plus_ratio": off}), 10).lr_factors == {}
    with pytest.raises(ConfigError, match=r"train.lora_plus_ratio: got 16, but adapter.method: full has no B"):
        make_config("no.jsonl", {"train.lora_plus_ratio": 16.0, "adapter.method": "full"})


def test_embedding_and_head_have_a_learning_rate_of_their_own(make_config):
    """Wherever they are trained, whole or by rows; not the adapter of a head. It is refused where they are not."""
    rates = {"train.learning_rate": 1e-3, "train.embedding_learning_rate": 1e-4}
    beside = {"adapter.train_modules": ["embed_tokens", "lm_head"], **rates}
    factor = optimizer_spec(make_config("no.jsonl", beside), 10).lr_factor
    for name in ("model.embed_tokens.weight", "lm_head.weight", "transformer.wte.weight"):
        assert factor(name) == pytest.approx(0.1)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.norm.weight", "base_model.model.lm_head.lora_A.weight"):
        assert factor(name) == 1
    for more in ({}, {"adapter.train_modules": ["norm", "input_layernorm"]}):
        with pytest.raises(ConfigError, match=r"train.embedding_learning_rate: got 0.0001, but neither embedding nor"):
            make_config("no.jsonl", {"train.embedding_learning_rate": 1e-4, **more})


@pytest.mark.parametrize(("modules", "is_table"), [(("model.embed_tokens",), True), (("model.norm",), False)])
def test_a_start_says_whether_a_table_has_a_learning_rate(make_config, modules, is_table):
    config = make_config("no.jsonl", {"train.embedding_learning_rate": 1e-4, "adapter.init_from": "old"})
    tensors = {f"base_model.model.{module}.weight": np.ones((3, 2), np.float32) for module in modules}
    start = Adapter(spec_of_section(config.adapter, tuple(config.adapter.targets), BesideAdapter(modules)), tensors)
    if is_table:
        assert with_adapter_of(config, start).train.embedding_learning_rate == 1e-4
        return
    with pytest.raises(ConfigError, match=r"the adapter in adapter.init_from trains neither embedding nor output head"):
        with_adapter_of(config, start)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_backends_update_alike(name, open_backend, tiny_llama):
    """Four steps, two of them clipped and one skipped, in which a weight was NaN; B has another rate than A."""
    states, spec = [], OptimizerSpec(name, DECAY, lr_factors={"lora_B.weight": 3.0})
    for backend in ("torch", "mlx"):
        request = LoadRequest(tiny_llama, "float32", "auto", "pretrained", SPEC, spec, seed=1)
        engine = open_backend(backend).load(request)
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        before = engine.adapter_state()
        for step in range(4):
            batch = random_batch([9, 16, 5], 31, seed=step)
            good = engine.adapter_state()
            if step == 2:
                engine.load_adapter_state({n: w * np.float32("nan") for n, w in good.items()})
            engine.forward_backward(batch, divisor=batch.num_targets)
            engine.load_adapter_state(good)
            engine.optim_step(lr=0.05, max_grad_norm=0.1 if step % 2 else None)
        states.append(engine)
    (a, b), moved = (engine.adapter_state() for engine in states), norm_of(before)
    assert all(engine.optimizer_state().step == 3 for engine in states)
    change = norm_of({n: a[n] - before[n] for n in a})
    assert change > 1e-3 * moved, "nothing was learned, so nothing is shown"
    assert norm_of({n: a[n] - b[n] for n in a}) <= 1e-3 * change


# --- a third one ------------------------------------------------------------------------------------------------------


def signs(w, g, slots, *, step, lr, settings, xp):
    """Signs of a mean of the gradients."""
    m = settings["beta"] * slots["m"] + (1 - settings["beta"]) * g
    return w * (1 - lr * settings["weight_decay"]) - lr * xp.sign(m), {"m": m}


@pytest.fixture
def with_signs(monkeypatch):
    entry = Optimizer(signs, ("m",), {"beta": 0.9, "weight_decay": 0.0})
    table = MappingProxyType({**OPTIMIZERS, "signs": entry})
    for module in ("train.state.checkpoint", "model.optimizer"):
        monkeypatch.setattr(f"dualtune.{module}.OPTIMIZERS", table)


def test_a_third_optimizer_is_an_entry_of_the_table(with_signs, open_backend, tiny_softmax, tmp_path):
    """It trains on the NumPy engine, is saved with the slot that it has, and continues bitwise."""
    assert optimizer.OPTIMIZERS["signs"].bytes_of("w", (3, 5)) == 60
    assert checkpoint.bytes_per_weight(OptimizerSpec("signs")) == 8
    request = LoadRequest(tiny_softmax, "auto", "auto", "pretrained", SPEC, OptimizerSpec("signs", DECAY), seed=1)
    straight, other = (open_backend("numpy").load(request) for _ in range(2))
    train(straight, range(2))
    state = {"config": {"train": {"optimizer": "signs"}}, "place": {}, "schedule": {}, "guards": {}}
    state["fingerprints"] = dict.fromkeys(checkpoint.FINGERPRINTS, "x")
    path = checkpoint.save(tmp_path, 2, straight, state)
    assert {file.name for file in path.iterdir()} == {
        "adapter.safetensors", "optimizer_m.safetensors", "state.json", "MANIFEST.json"
    }  # fmt: skip
    restore(other, checkpoint.read(path))
    for engine in (straight, other):
        train(engine, range(2, 4))
    assert_equal(other.adapter_state(), straight.adapter_state())
    assert_equal(other.optimizer_state().slots["m"], straight.optimizer_state().slots["m"])
    with pytest.raises(ValueError, match="optimizer signs: got the slots none, it has m"):
        other.load_optimizer_state(OptimizerState(0, {}))


def test_a_checkpoint_of_an_optimizer_that_is_not_in_the_table_is_a_newer_one(
    with_signs, open_backend, tiny_softmax, tmp_path, monkeypatch
):
    test_a_third_optimizer_is_an_entry_of_the_table(with_signs, open_backend, tiny_softmax, tmp_path)
    monkeypatch.setattr(checkpoint, "OPTIMIZERS", OPTIMIZERS)
    with pytest.raises(
        checkpoint.NewerCheckpoint, match="its optimizer is 'signs', this one has adamw, adamw_8bit, sgd"
    ):
        checkpoint.newest(tmp_path)
    manifest = json.loads((tmp_path / "step-00000002" / "MANIFEST.json").read_text())
    assert manifest["schema_version"] == 3


def train(engine, seeds):
    for seed in seeds:
        batch = random_batch([9, 16, 5], 31, seed=seed)
        engine.forward_backward(batch, divisor=batch.num_targets)
        engine.optim_step(lr=0.01, max_grad_norm=1.0)
