"""A training step of a hybrid of the shape of Qwen3.5 on MLX, against mlx-lm's own training loop: time and memory.

    python benchmarks/qwen3_5_mlx.py [--tokens 2048] [--pairs 3] [--layers 4]

Both sides train the same LoRA (rank 8, all attention and MLP projections) on the same model with random weights, one
row of so many tokens, nothing recomputed, each in a process of its own, one side after the other: the first step is
left out, the fastest of the others counts. Memory is MLX's peak. Writes results/qwen3_5_mlx.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import record

STEPS, VOCAB, RANK = 3, 1024, 8
TARGETS = (
    "linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj", "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--side", choices=("dualtune", "mlx-lm"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps((_dualtune if args.side == "dualtune" else _mlx_lm)(args.model, args.tokens)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.layers)
        pairs = [
            {side: measured(side, Path(folder), args.tokens) for side in ("dualtune", "mlx-lm")}
            for _ in range(args.pairs)
        ]
    ratios = {
        f"{what}_ratio": statistics.median(pair["mlx-lm"][what] / pair["dualtune"][what] for pair in pairs)
        for what in ("seconds", "peak_bytes")
    }
    figures = {"tokens": args.tokens, "layers": args.layers, "pairs": pairs, **ratios}
    print(json.dumps(figures, indent=2), record.write("qwen3_5_mlx", figures), sep="\n")


def measured(side: str, model: Path, tokens: int) -> dict[str, Any]:
    """Return what one side prints of itself, in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--model", model, "--tokens", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def write_model(directory: Path, layers: int) -> None:
    """Write a text model of Qwen3.5: three layers of four with the gated delta rule, and the ratios of its sizes."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import qwen3_5

    text = {
        "model_type": "qwen3_5_text", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": layers,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCAB,
        "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "tie_word_embeddings": True,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                            "mrope_section": [3, 3, 2], "mrope_interleaved": True},
    }  # fmt: skip
    config = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True}
    mx.random.seed(0)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    parameters: list[tuple[str, mx.array]] = list(tree_flatten(model.parameters()))
    weights = {name: mx.random.normal(w.shape) * 0.02 if name.endswith("proj.weight") else w for name, w in parameters}
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _row(tokens: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, tokens + 1, dtype=np.int32)


def _dualtune(model: Path, tokens: int) -> dict[str, Any]:
    import mlx.core as mx

    from dualtune.engine.backend import Batch, LoadRequest
    from dualtune.model.adapter import AdapterSpec
    from dualtune.model.optimizer import OptimizerSpec
    from dualtune_mlx.backend import MlxBackend

    spec = AdapterSpec(rank=RANK, alpha=20.0 * RANK, dropout=0.0, targets=TARGETS)
    engine = MlxBackend().load(LoadRequest(model, "float32", "auto", "pretrained", spec, OptimizerSpec(), seed=0))
    row, ones = _row(tokens), np.ones((1, tokens), np.int32)
    batch = Batch(row[None, :-1], row[None, 1:], ones, np.arange(tokens, dtype=np.int32)[None], ones.astype(np.uint32))

    def step() -> float:
        engine.forward_backward(batch, divisor=tokens)
        return float(engine.optim_step(lr=1e-4, max_grad_norm=None).loss)

    return _timed(step, mx.get_peak_memory, mx.reset_peak_memory)


def _mlx_lm(model_dir: Path, tokens: int) -> dict[str, Any]:
    """mlx-lm's trainer as it is, with its `mx.compile`; each of its reports is of one step."""
    import mlx.core as mx
    import mlx.optimizers as optim
    from mlx_lm.tuner.trainer import TrainingArgs, train
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    model, _ = load_model(model_dir)
    model.freeze()
    settings = {"rank": RANK, "scale": 20.0, "dropout": 0.0, "keys": list(TARGETS)}
    linear_to_lora_layers(model, len(model.layers), settings)
    reports: list[dict[str, float]] = []

    class Reports:
        def on_train_loss_report(self, report: dict[str, float]) -> None:
            if not reports:  # the first step, with the compiling
                mx.reset_peak_memory()
            reports.append(report)

    file = str(model_dir / "adapters.safetensors")
    settings = TrainingArgs(1, STEPS, steps_per_report=1, max_seq_length=tokens + 1, adapter_file=file)
    train(
        model, optim.AdamW(1e-4), [(_row(tokens).tolist(), 0)], args=settings, training_callback=Reports(),
    )  # fmt: skip
    seconds = [1 / report["iterations_per_second"] for report in reports]
    return {
        "seconds": round(min(seconds[1:]), 3),
        "first_seconds": round(seconds[0], 3),
        "peak_bytes": mx.get_peak_memory(),
        "losses": [report["train_loss"] for report in reports],
    }


def _timed(step: Any, peak: Any, reset: Any) -> dict[str, Any]:
    losses, seconds = [step()], []
    reset()
    for _ in range(STEPS - 1):
        begin = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - begin)
    return {"seconds": round(min(seconds), 3), "peak_bytes": peak(), "losses": losses}


if __name__ == "__main__":
    main()
