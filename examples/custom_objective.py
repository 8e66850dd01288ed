"""An objective of your own, as a NumPy function: focal loss, which pays less attention to tokens that are easy.

    python examples/custom_objective.py

The engine computes the log-probabilities of the targets; the function returns its value and, for each target, the
weight −∂value/∂log p. That is all: docs/objectives.md explains why.
"""

import argparse
from pathlib import Path

import numpy as np

import dualtune
from dualtune.data.batches import SequenceLayout, micro_batches
from dualtune.data.documents import Data
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import IGNORE_INDEX, LoadRequest
from dualtune.engine.choose import choose, open_backend
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.objective import add_gradient

DEMO = Path(dualtune.__file__).parent / "demo"
SEED, DOCUMENTS_PER_STEP, GAMMA = 42, 16, 2.0


def focal(logprobs_BT, batch):
    """Focal loss (Lin et al., arXiv 1708.02002, equation 4): Σ −(1 − p)^γ · log p over the targets."""
    logp = logprobs_BT.astype(np.float64)
    p = np.exp(logp)
    is_target = batch.labels_BT != IGNORE_INDEX
    value = -((1 - p) ** GAMMA * logp)[is_target].sum()
    weights = (1 - p) ** GAMMA - GAMMA * p * (1 - p) ** (GAMMA - 1) * logp
    return float(value), np.where(is_target, weights, 0.0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="auto", help="auto, mlx, cuda, cpu or the name of another backend")
    parser.add_argument("--model", type=Path, default=DEMO / "model", help="a model directory")
    parser.add_argument("--data", type=Path, default=DEMO / "data" / "train.jsonl")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    config = dualtune.load_config({
        "model": {"name": str(args.model)}, "data": {"train": str(args.data), "eval": 0.1, "max_length": 256},
    })  # fmt: skip
    train, held_out = Data(config).train_and_eval(Tokenizer(args.model))
    layout = SequenceLayout(max_tokens=2048, row_length=256)
    spec = AdapterSpec(rank=8, alpha=16, dropout=0.0, targets=("all-linear",))
    engine = open_backend(choose(args.platform)).load(
        LoadRequest(args.model, "auto", "auto", "pretrained", spec, OptimizerSpec(), SEED)
    )

    def focal_loss_of(documents):
        batches = micro_batches(documents, range(len(documents)), layout, seed=SEED, step=0)
        total = sum(focal(engine.target_logprobs(batch), batch)[0] for batch in batches)
        return total / sum(batch.num_targets for batch in batches)

    print(f"held-out focal loss before: {focal_loss_of(held_out):.4f}")
    for step in range(args.steps):
        ids = [(step * DOCUMENTS_PER_STEP + i) % len(train) for i in range(DOCUMENTS_PER_STEP)]
        batches = micro_batches(train, ids, layout, seed=SEED, step=step)
        num_targets = sum(batch.num_targets for batch in batches)
        loss = sum(add_gradient(engine, batch, focal, divisor=num_targets) for batch in batches) / num_targets
        engine.optim_step(lr=3e-3, max_grad_norm=1.0)
        if step % 5 == 4:
            print(f"step {step + 1:3}  focal loss {loss:.4f}")
    print(f"held-out focal loss after:  {focal_loss_of(held_out):.4f}")


if __name__ == "__main__":
    main()
