"""The whole of fine-tuning with dualtune's engine, in time order. `dualtune train` is this with more around it.

    python examples/minimal_loop.py                        # the demo's model, on what this machine has
    python examples/minimal_loop.py --platform mlx --steps 40

What it leaves out, and `dualtune train` has: checkpoints and resume, schedules, guards against NaN, metrics, several
processes, and the check that the model keeps packed documents apart.
"""

import argparse
from pathlib import Path

import dualtune
from dualtune.base.files import free_name
from dualtune.data.batches import SequenceLayout, micro_batches
from dualtune.data.documents import Data
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import LoadRequest
from dualtune.engine.choose import choose, open_backend
from dualtune.model.adapter import AdapterSpec
from dualtune.model.formats.directory import Adapter, write_adapter
from dualtune.model.optimizer import OptimizerSpec

DEMO = Path(dualtune.__file__).parent / "demo"
SEED, DOCUMENTS_PER_STEP = 42, 16


def evaluate(engine, documents, layout):
    """The mean loss (nats) over all target tokens. Reading `loss_sum` synchronizes the device, so it is read last."""
    batches = micro_batches(documents, range(len(documents)), layout, seed=SEED, step=0)
    results = [engine.evaluate(batch) for batch in batches]
    return sum(result.loss_sum for result in results) / sum(result.num_targets for result in results)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="auto", help="auto, mlx, cuda, cpu or the name of another backend")
    parser.add_argument("--model", type=Path, default=DEMO / "model", help="a model directory")
    parser.add_argument("--data", type=Path, default=DEMO / "data" / "train.jsonl")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/minimal_loop"))
    args = parser.parse_args()

    # The data: rows become conversations, conversations become tokens with a loss mask, some documents are held out.
    config = dualtune.load_config({
        "model": {"name": str(args.model)},
        "data": {"train": str(args.data), "eval": 0.1, "max_length": 256},
        "run": {"seed": SEED},
    })  # fmt: skip
    train, held_out = Data(config).train_and_eval(Tokenizer(args.model))
    layout = SequenceLayout(max_tokens=2048, row_length=256)  # packed rows of 256 tokens, up to 2048 tokens at once

    # The engine: the frozen base model and a fresh adapter, on a device.
    backend = open_backend(choose(args.platform))
    spec = AdapterSpec(rank=8, alpha=16, dropout=0.0, targets=("all-linear",))
    engine = backend.load(
        LoadRequest(
            args.model,
            dtype="auto",
            quantization="auto",
            init="pretrained",
            adapter=spec,
            optimizer=OptimizerSpec(),
            seed=SEED,
        )
    )
    print(f"{backend.name}: {engine.description.trainable_parameters:,} trainable parameters")
    print(f"held-out loss before: {evaluate(engine, held_out, layout):.4f}")

    # The loop: each micro-batch adds its share of the gradient of the whole step's mean loss, then one update.
    for step in range(args.steps):
        ids = [(step * DOCUMENTS_PER_STEP + i) % len(train) for i in range(DOCUMENTS_PER_STEP)]
        batches = micro_batches(train, ids, layout, seed=SEED, step=step)
        num_targets = sum(batch.num_targets for batch in batches)
        for batch in batches:
            engine.forward_backward(batch, divisor=num_targets)
        output = engine.optim_step(lr=3e-3, max_grad_norm=1.0)
        if step % 5 == 4:
            print(f"step {step + 1:3}  loss {float(output.loss):.4f}  gradient norm {float(output.grad_norm):.3f}")

    print(f"held-out loss after:  {evaluate(engine, held_out, layout):.4f}")

    # The adapter: one directory that PEFT, mlx-lm and dualtune load.
    names = tuple(sorted({name.split(".")[-3] for name in engine.adapter_state()}))
    path = free_name(args.out)
    write_adapter(path, Adapter(AdapterSpec(8, 16, 0.0, names), engine.adapter_state(), base_model=str(args.model)))
    print(f"adapter: {path}")


if __name__ == "__main__":
    main()
