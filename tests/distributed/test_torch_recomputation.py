"""Activation checkpointing with the base split among two processes: the same bits, and no weight stays gathered."""

import json
from pathlib import Path

import pytest

from dualtune.engine.backend import LoadRequest, get_backend
from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing
from dualtune.engine.testing.conformance_case import random_adapter
from dualtune.engine.testing.tiny_models import random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")

PLANS = {
    "full": ActivationCheckpointing("all"),
    "2 at a time": ActivationCheckpointing("all", every=2),
    "first layer, remade": ActivationCheckpointing(1, adapter_inputs=True),
}


def main(model: str, out: str) -> None:
    """What each of the two processes runs."""
    backend = get_backend("torch", "cpu")
    rank = backend.world().rank
    found = {}
    for dtype, kernels in (("float32", "auto"), ("bfloat16", "reference")):
        spec = AdapterSpec(rank=4, alpha=6.0, dropout=0.1, targets=("all-linear",))
        request = LoadRequest(
            Path(model), dtype, "none", "pretrained", spec, OptimizerSpec(), seed=4, kernels=kernels, sharding="full"
        )
        engine = backend.load(request)
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        batch = random_batch([9, 16], 96, seed=rank)
        expected, held = gradient(engine, batch), held_bytes(engine)
        for name, plan in PLANS.items():
            if kernels == "auto" or not plan.adapter_inputs:
                engine.set_checkpointing(plan)
                same = torch.equal(gradient(engine, batch), expected)
                found[f"{dtype} {kernels} {name}"] = [same, float(expected.norm()), held_bytes(engine) / held]
        engine.set_checkpointing(KEEP_ALL)
        assert torch.equal(gradient(engine, batch), expected)
    (Path(out) / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def gradient(engine, batch):
    engine._adapter.flat.grad.zero_()
    engine.forward_backward(batch, divisor=batch.num_targets)
    return engine._adapter.flat.grad.clone()


def held_bytes(engine):
    parameters = (p for n, p in engine.model.named_parameters() if "lora_" not in n)
    return sum((p.to_local() if hasattr(p, "to_local") else p).untyped_storage().nbytes() for p in parameters)


def test_two_processes_recompute_the_same_bits(start, tmp_path):
    model = write_tiny_llama(tmp_path / "model", num_hidden_layers=4)
    for process in start(2, model, tmp_path, file=__file__).wait():
        assert process.code == 0, process.output
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert len(found) == 5
        for name, (same, norm, held) in found.items():
            assert same and norm > 0.1, name
            assert held == 1, name
