"""What the GPT-2 examples share: the sizes, a run that trains all parameters, and its memory beside the plan.

The weights are random and the data those of the demo, so the loss says only that training works; the memory and the
time are those of the real size. It runs alone too, with the plan of every size: python examples/gpt2_whole.py
"""

import argparse
import json
import math
import shutil
from pathlib import Path

import dualtune
from dualtune.base.text import in_bytes
from dualtune.config import parse_config
from dualtune.engine.choose import choose, open_backend
from dualtune.engine.memory.estimate import Ask, estimate
from dualtune.engine.memory.shapes import decoder_of
from dualtune.show.run import run
from dualtune.train.hooks import Hook

DEMO = Path(dualtune.__file__).parent / "demo"
# Layers, width and heads: OpenAI's four, and one of 1.02B between the last two. Radford et al., Language models are
# unsupervised multitask learners, table 2.
SIZES = {
    "124M": (12, 768, 12), "355M": (24, 1024, 16), "774M": (36, 1280, 20), "1.02B": (40, 1408, 22),
    "1.56B": (48, 1600, 25),
}  # fmt: skip
TINY = (2, 64, 2)  # with --smoke
SHORT = {"data.max_length": 128, "data.eval": 0.02, "train.tokens_per_step": 512}
SHORTER = 8  # times fewer tokens in a micro-batch
FIXED = {
    "adapter.method": "full", "model.init": "random", "data.train": DEMO / "data" / "train.jsonl",
    "data.eval": DEMO / "data" / "heldout.jsonl", "data.max_length": 512, "train.tokens_per_step": 4096,
    "train.warmup": 1, "train.max_grad_norm": 1.0, "run.save_every": None, "run.seed": 1,
}  # fmt: skip


def model_config(layers, width, heads, vocab=50257):
    fixed = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "layer_norm_epsilon": 1e-5}
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": 1024, "n_ctx": 1024}
    return fixed | sizes | {"vocab_size": vocab, "bos_token_id": 1, "eos_token_id": 2}


def write_model(directory, config):
    """Write a model directory without weights, with the tokenizer of the demo."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for file in (DEMO / "model").glob("tokenizer*"):
        shutil.copy(file, directory)


class Log(Hook):
    """Prints every tenth step, and keeps all."""

    def __init__(self):
        self.steps = []

    def on_step(self, record):
        self.steps.append(record)
        if record.step % 10 == 1:
            perplexity = math.exp(min(record.loss, 50))
            print(
                f"step {record.step:5}  loss {record.loss:7.4f}  perplexity {perplexity:10.1f}  "
                f"grad norm {record.grad_norm:8.4f}  {1000 * record.step_s:8.0f} ms  peak {in_bytes(record.peak_bytes)}"
            )

    @property
    def peak_bytes(self):
        return max(record.peak_bytes for record in self.steps)


def main(description, size, settings, *, steps=1000, smoke=None, techniques=None):
    """Train a size with these keys of a config, by the options of the command line.

    `smoke`: keys that --smoke sets besides. `techniques`: other settings by name, for --technique.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="auto", help="cuda, cpu or the name of another backend")
    parser.add_argument("--smoke", action="store_true", help="a tiny GPT-2 and 4 steps, in seconds on a CPU")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--size", choices=SIZES, default=size, help="another size, such as a smaller one that fits")
    parser.add_argument("--out", type=Path)
    if techniques:
        parser.add_argument("--technique", choices=[*techniques, "all"], default="all")
    args = parser.parse_args()

    out = args.out or Path("runs") / f"gpt2_{args.size}"
    write_model(out / "shape", model_config(*TINY, vocab=868) if args.smoke else model_config(*SIZES[args.size]))
    if techniques and args.technique != "all":
        settings = techniques[args.technique]
    keys = FIXED | settings
    if args.smoke:
        keys |= SHORT | {"train.micro_batch_tokens": settings["train.micro_batch_tokens"] // SHORTER} | (smoke or {})
    keys |= {"model.name": out / "shape", "run.dir": out / "run"}
    keys |= {"train.steps": args.steps or (4 if args.smoke else steps)}
    config = parse_config("model: {}", overrides=[f"{key}={json.dumps(keys[key], default=str)}" for key in keys])
    backend = open_backend(choose(args.platform))
    log = Log()
    result = run(config, backend, [log], announce=lambda prepared: tell_plan(prepared.memory.plan))
    tell_measured(log, backend.devices()[0].kind, result)


def tell_plan(plan):
    print(f"plan of {plan.decoder.num_parameters:,} parameters, {plan.ask.dtype}, {plan.ask.optimizer}, recomputed: "
          f"{plan.recomputed or 'none'}")  # fmt: skip
    for part in plan.estimate.parts:
        print(f"  {in_bytes(part.bytes):>10}  {part.name:<12} {part.formula}")
    print(f"  {in_bytes(plan.estimate.total_bytes):>10}  in all")


def tell_measured(log, kind, result):
    what = "the allocator, without the reserve of the plan" if kind == "cuda" else "the process"
    seconds = sorted(record.step_s for record in log.steps)[len(log.steps) // 2]
    print(f"measured peak {in_bytes(log.peak_bytes)} ({what}), {1000 * seconds:.0f} ms for a step (median)")
    print(f"held-out loss {result.eval_loss_before:.4f} before, {result.eval_loss:.4f} after; {result.adapter_dir}")


def tell_sizes():
    """Print the states of each size, and the whole plan of a step of 8 rows of 512 tokens, all kept, in float32."""
    print(f"{'size':>6}  {'parameters':>13}  {'weights':>10}  {'gradient, AdamW':>15}  {'step of 8 x 512':>15}")
    for name, shape in SIZES.items():
        decoder = decoder_of(model_config(*shape))
        found = estimate(decoder, Ask("torch", "cuda", "none", "float32", 1, (), 4096, 512, method="full"))
        states = f"{in_bytes(found['weights']):>10}  {in_bytes(found['optimizer']):>15}"
        print(f"{name:>6}  {decoder.num_parameters:13,}  {states}  {in_bytes(found.total_bytes):>15}")


if __name__ == "__main__":
    tell_sizes()
