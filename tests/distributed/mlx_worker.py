"""One process of a ring: `python mlx_worker.py MODEL TALKER OUT`.

It steps on its share, writes down what it then has, and runs GRPO with the others on a model that has a tokenizer.
"""

import json
import sys
from pathlib import Path

import numpy as np

from dualtune.config import parse_config
from dualtune.data.batches import SequenceLayout, micro_batches
from dualtune.data.documents import in_memory
from dualtune.engine.backend import Backend, LoadRequest, get_backend
from dualtune.engine.testing.conformance_case import random_adapter
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.run import run
from dualtune.train.team import Team

LENGTHS = (9, 30, 5, 14, 22, 7, 17)
SPEC = AdapterSpec(rank=4, alpha=6.0, dropout=0.1, targets=("all-linear",))


def main(model: Path, talker: Path, out: Path) -> None:
    backend = get_backend("mlx", "cpu")
    team = Team(backend.world())
    request = LoadRequest(model, "float32", "auto", "pretrained", SPEC, OptimizerSpec("sgd"), seed=1)
    engine = backend.load(request)
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    rng = np.random.default_rng(0)
    documents = in_memory([(rng.integers(3, 96, n, np.int32), np.arange(n) > 1) for n in LENGTHS])
    results = {}
    for name, row_length in (("packed", 32), ("padded", None)):
        layout = SequenceLayout(64, row_length)
        share = micro_batches(documents, range(len(LENGTHS)), layout, seed=1, step=0, rank=team.rank, size=team.size)
        (num_targets,) = team.total(sum(batch.num_targets for batch in share))
        before = engine.adapter_state()
        for batch in share:
            engine.forward_backward(batch, divisor=int(num_targets))
        output = engine.optim_step(lr=1.0, max_grad_norm=None)  # w ← w − g
        results[f"{name} loss"], results[f"{name} norm"] = float(output.loss), float(output.grad_norm)
        results |= {f"{name} {n}": before[n] - w for n, w in engine.adapter_state().items()}
        engine.load_adapter_state(before)
        results[f"{name} share"] = len([batch for batch in share if batch.num_targets])
    long = bytes(range(256)) * 4000
    assert team.broadcast(long if team.is_first else b"") == long
    grpo(backend, talker, out / f"run-{team.size}", out / "asked.jsonl")
    np.savez(out / f"{team.size}-{team.rank}.npz", **results)


def grpo(backend: Backend, model: Path, run_dir: Path, data: Path) -> None:
    """By SGD, which keeps what rounding changes of a gradient as small as it is: AdamW makes a whole step of it."""
    settings = {
        "model.name": model, "model.dtype": "float32", "adapter.rank": 2, "adapter.dropout": 0, "data.train": data,
        "train.objective": "grpo", "train.steps": 2, "train.documents_per_step": 3, "train.optimizer": "sgd",
        "train.learning_rate": 1.0, "train.weight_decay": 0, "rollouts.rewards": ["brief:4"], "rollouts.samples": 2,
        "rollouts.max_tokens": 5, "rollouts.kl": 0.1, "run.dir": run_dir, "run.report": False, "data.eval": 0,
    }  # fmt: skip
    chosen = [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()]
    run(parse_config("model: {}", overrides=chosen), backend)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
