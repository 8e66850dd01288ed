"""The gradient of many families with the base split and with it whole: `main(CHOICE, OUT)` writes both down.

CHOICE is tests/torch/test_torch_choice.py, which knows the families.
"""

import json
import runpy
from pathlib import Path

import torch
import transformers

from dualtune.engine.backend import LoadRequest, get_backend
from dualtune.engine.testing.conformance_case import random_adapter
from dualtune.model.optimizer import OptimizerSpec


def main(choice: str, out: str) -> None:
    known, home = runpy.run_path(choice), Path(out)
    backend = get_backend("torch", "cpu")
    world = backend.world()
    found = {}
    for family, (changes, _) in known["FAMILIES"].items():
        if world.rank == 0:
            torch.manual_seed(0)
            config = getattr(transformers, f"{family}Config")(**known["SHAPE"] | changes)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(home / family)
        world.gather(b"written")
        batches = [known["DOCUMENTS"]] if family == "GptOss" else [known["DOCUMENTS"], known["PACKED"]]
        found[family] = [
            gradients(backend, home / family, known["SPEC"], batches, sharding) for sharding in ("none", "full")
        ]
    (home / f"{world.rank}.json").write_text(json.dumps(found), encoding="utf-8")


def gradients(backend, model, spec, batches, sharding):
    """Of this process alone: nothing is summed."""
    engine = backend.load(
        LoadRequest(model, "float32", "auto", "pretrained", spec, OptimizerSpec(), seed=4, sharding=sharding)
    )
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    for batch in batches:
        engine.forward_backward(batch, divisor=batch.num_targets)
    return {"kernels": engine.description.kernels, "gradient": engine._adapter.flat.grad.tolist()}
