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
from dualtune.model.optimizer import OPTIMIZERS, Optimizer, OptimizerSpec
from dualtune.train.objective import optimizer_spec
from dualtune.train.state import checkpoint
from dualtune.train.state.checkpoint import restore

DECAY = {"weight_decay": 0.1}
SPEC = AdapterSpec(rank=4, alpha=6.0, dropout=0.0, targets=("all-linear",))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_formula_is_torch_s_in_float64(name):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    w, spec, lr = rng.normal(size=(3, 5)), OptimizerSpec(name, DECAY), 0.03
    parameter = torch.nn.Parameter(torch.from_numpy(w.copy()))
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    theirs = kind([parameter], lr=lr, **DECAY)
    slots = {slot: np.zeros_like(w) for slot in spec.entry.slots}
    for step in range(1, 6):
        g = rng.normal(size=w.shape)
        parameter.grad = torch.from_numpy(g)
        theirs.step()
        w, slots = spec.entry.update(w, g, slots, step=step, lr=lr, settings=spec.settings)
        assert {*slots} == {*spec.entry.slots}
        np.testing.assert_allclose(w, parameter.detach().numpy(), rtol=1e-13)


def test_the_constants_of_adamw_are_torch_s():
    torch = pytest.importorskip("torch")
    ours, theirs = OPTIMIZERS["adamw"].defaults, torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]).defaults
    assert (ours["beta1"], ours["beta2"], ours["eps"]) == (*theirs["betas"], theirs["eps"])
    assert ours["weight_decay"] == theirs["weight_decay"]


def test_a_spec_knows_its_names():
    assert OptimizerSpec("adamw", DECAY).settings == {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    with pytest.raises(ConfigError, match="optimizer: got 'adam', allowed: adamw, adamw_8bit, sgd"):
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
        np.testing.assert_allclose(ours[n], parameter.detach().numpy(), rtol=1e-12)
    for off in (None, 1.0):
        assert optimizer_spec(make_config("no.jsonl", {"train.lora_plus_ratio": off}), 10).lr_factors == {}
    with pytest.raises(ConfigError, match=r"train.lora_plus_ratio: got 16, but adapter.method: full has no B"):
        make_config("no.jsonl", {"train.lora_plus_ratio": 16.0, "adapter.method": "full"})


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


def lion(w, g, slots, *, step, lr, settings):
    """Chen et al., arXiv 2302.06675, algorithm 2."""
    beta1, beta2 = settings["beta1"], settings["beta2"]
    c = beta1 * slots["m"] + (1 - beta1) * g
    m = beta2 * slots["m"] + (1 - beta2) * g
    return w * (1 - lr * settings["weight_decay"]) - lr * np.sign(c), {"m": m}


@pytest.fixture
def with_lion(monkeypatch):
    entry = Optimizer(lion, ("m",), {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0})
    table = MappingProxyType({**OPTIMIZERS, "lion": entry})
    for module in ("train.state.checkpoint", "model.optimizer"):
        monkeypatch.setattr(f"dualtune.{module}.OPTIMIZERS", table)


def test_a_third_optimizer_is_an_entry_of_the_table(with_lion, open_backend, tiny_softmax, tmp_path):
    """It trains on the NumPy engine, is saved with the slot that it has, and continues bitwise."""
    assert optimizer.OPTIMIZERS["lion"].bytes_per_parameter == 4
    assert checkpoint.bytes_per_weight(OptimizerSpec("lion")) == 8
    request = LoadRequest(tiny_softmax, "auto", "auto", "pretrained", SPEC, OptimizerSpec("lion", DECAY), seed=1)
    straight, other = (open_backend("numpy").load(request) for _ in range(2))
    train(straight, range(2))
    state = {"config": {"train": {"optimizer": "lion"}}, "place": {}, "schedule": {}, "guards": {}}
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
    with pytest.raises(ValueError, match="optimizer lion: got the slots none, it has m"):
        other.load_optimizer_state(OptimizerState(0, {}))


def test_a_checkpoint_of_an_optimizer_that_is_not_in_the_table_is_a_newer_one(
    with_lion, open_backend, tiny_softmax, tmp_path, monkeypatch
):
    test_a_third_optimizer_is_an_entry_of_the_table(with_lion, open_backend, tiny_softmax, tmp_path)
    monkeypatch.setattr(checkpoint, "OPTIMIZERS", OPTIMIZERS)
    with pytest.raises(
        checkpoint.NewerCheckpoint, match="its optimizer is 'lion', this one has adamw, adamw_8bit, sgd"
    ):
        checkpoint.newest(tmp_path)
    manifest = json.loads((tmp_path / "step-00000002" / "MANIFEST.json").read_text())
    assert manifest["schema_version"] == 3


def train(engine, seeds):
    for seed in seeds:
        batch = random_batch([9, 16, 5], 31, seed=seed)
        engine.forward_backward(batch, divisor=batch.num_targets)
        engine.optim_step(lr=0.01, max_grad_norm=1.0)
