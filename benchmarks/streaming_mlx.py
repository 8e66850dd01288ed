"""Layer streaming on MLX: peak memory, bytes read and processor time of a step, by the number of resident layers.

    python benchmarks/streaming_mlx.py [--rounds 2] [--tokens 16]       # streamed steps beside resident ones
    python benchmarks/streaming_mlx.py --limited                        # `dualtune train` of a base 3 times its limit

The weights are random, in float32, in a temporary file that the system has in its cache: GB/s are those of copies in
memory and of MLX's arrays, not of a disk. `resident` is `memory.checkpointing: full` with all layers in memory, which
computes the same gradient to the bit. Peaks are MLX's, above what was there before the model was loaded. Seconds are
those of the process; the variants take turns, and the ratio is the median over the rounds. With `--limited`, bytes are
also those of the whole process (RssAnon, sampled). Writes results/streaming_mlx.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import record
from checkpointing_mlx import batch_of

from dualtune.config.schema import AdapterConfig
from dualtune.engine.backend import LoadRequest, get_backend
from dualtune.engine.card import ActivationCheckpointing
from dualtune.engine.testing.tiny_models import write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune_mlx.engine import MlxEngine

SHAPE: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 2048,
}  # fmt: skip
# 1.7 GB: three times the limit, of which 400 MiB are room for Python and MLX.
LARGE: dict[str, Any] = SHAPE | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 29}
LIMIT = "560MB"
RESIDENT: tuple[int | None, ...] = (None, 1, 2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--limited", action="store_true")
    args = parser.parse_args()
    origin = record.origin()  # now, because the code may change while this runs
    with tempfile.TemporaryDirectory() as folder:
        figures = limited(Path(folder)) if args.limited else streamed(Path(folder), args)
    cases = record.runs("streaming_mlx", "cases")
    cases["limited" if args.limited else "streamed"] = origin | figures
    print(json.dumps(figures, indent=2), record.write("streaming_mlx", {"cases": cases}), sep="\n")


def layer_bytes(model: Path, shape: dict[str, Any]) -> int:
    tables = 2 * shape["vocab_size"] * shape["hidden_size"] * 4
    return ((model / "model.safetensors").stat().st_size - tables) // shape["num_hidden_layers"]


# --- streamed beside resident -----------------------------------------------------------------------------------------


def streamed(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    model, batch = write_tiny_llama(folder / "model", **SHAPE), batch_of(args.tokens, SHAPE["vocab_size"])
    found: dict[int | None, list[dict[str, Any]]] = {layers: [] for layers in RESIDENT}
    gradients: dict[int | None, np.ndarray] = {}
    for _ in range(args.rounds):
        for layers in RESIDENT:
            step, gradients[layers] = measure(model, layers, batch)
            found[layers].append(step)
            print(layers, step, flush=True)
    variants = {
        "resident" if layers is None else str(layers): {
            "peak_bytes": max(step["peak_bytes"] for step in steps),
            "bytes_read": steps[0]["bytes_read"],
            "gb_per_processor_second": statistics.median(s["bytes_read"] / s["processor_seconds"] / 1e9 for s in steps),
            "processor_seconds": [step["processor_seconds"] for step in steps],
            "time_ratio": statistics.median(
                own["processor_seconds"] / base["processor_seconds"]
                for own, base in zip(steps, found[None], strict=True)
            ),
            "gradient_is_bitwise_equal": bool(np.array_equal(gradients[layers], gradients[None])),
        }
        for layers, steps in found.items()
    }
    return {
        "shape": SHAPE, "tokens": args.tokens, "layer_bytes": layer_bytes(model, SHAPE), "reading": reading(model),
        "variants": variants,
    }  # fmt: skip


def measure(model: Path, layers: int | None, batch: Any) -> tuple[dict[str, Any], np.ndarray]:
    """Of a load and two micro-batches; time and bytes read are those of the second."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()  # a buffer from before serves a smaller array too, and counts as what it is
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    defaults = AdapterConfig()
    spec = AdapterSpec(defaults.rank, defaults.alpha, 0.05, tuple(defaults.targets))
    request = LoadRequest(
        model, "float32", "none", "pretrained", spec, OptimizerSpec(), seed=1,
        checkpointing=ActivationCheckpointing("all"), resident_layers=layers,
    )  # fmt: skip
    engine = get_backend("mlx", "cpu").load(request)
    assert isinstance(engine, MlxEngine)
    take_step(engine, batch)
    read, began = bytes_read(engine), time.process_time()
    take_step(engine, batch)
    seconds = time.process_time() - began
    return {
        "peak_bytes": mx.get_peak_memory() - before,
        "bytes_read": bytes_read(engine) - read,
        "processor_seconds": seconds,
    }, np.array(engine._grads)


def take_step(engine: Any, batch: Any) -> None:
    engine.forward_backward(batch, divisor=batch.num_targets)
    mx.eval(engine._grads, engine._loss)
    mx.synchronize()


def bytes_read(engine: Any) -> int:
    return engine._recomputation.residency.bytes_read if engine._request.resident_layers else 0


def reading(model: Path) -> dict[str, float]:
    """Only reading, as a streamed layer is read."""
    arrays: Any = mx.load(str(model / "model.safetensors"))
    size, began, cpu = sum(array.nbytes for array in arrays.values()), time.perf_counter(), time.process_time()
    mx.eval(arrays)
    return {"gb_per_second": size / (time.perf_counter() - began) / 1e9,
            "gb_per_processor_second": size / (time.process_time() - cpu) / 1e9}  # fmt: skip


# --- a base larger than its memory ------------------------------------------------------------------------------------


def limited(folder: Path) -> dict[str, Any]:
    model = write_tiny_llama(folder / "model", **LARGE, tie_word_embeddings=False)
    write_tokenizer(model)
    (folder / "train.jsonl").write_text('{"text": "a b a b"}\n' * 8)
    refused, _ = train(folder, model, "all")
    done, peak = train(folder, model, "1")
    assert refused.returncode == 2 and done.returncode == 0, refused.stderr + done.stderr
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    return {
        "shape": LARGE, "base_bytes": (model / "model.safetensors").stat().st_size, "limit": LIMIT,
        "layer_bytes": layer_bytes(model, LARGE), "refused_with_all_layers": refused.stderr.strip().splitlines()[0],
        "process_peak_bytes": peak, "losses": losses,
    }  # fmt: skip


def write_tokenizer(model: Path) -> None:
    """Words, because the content does not matter here."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<s>": 1, "</s>": 2, "<unk>": 0, "a": 3, "b": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))


def train(folder: Path, model: Path, layers: str) -> tuple[subprocess.CompletedProcess[str], int]:
    """Two steps; (how it ended, the peak of the process's own memory)."""
    settings = {
        "model.name": model, "data.train": folder / "train.jsonl", "data.eval": 0, "data.max_length": 16,
        "adapter.rank": 1, "adapter.alpha": 2,
        "train.micro_batch_tokens": 16, "train.steps": 2, "train.documents_per_step": 1, "data.packing": "false",
        "memory.limit": LIMIT,
        "memory.resident_layers": layers, "run.dir": folder / "run",
    }  # fmt: skip
    (folder / "config.yaml").write_text("model: {}\n")
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "dualtune", "train", str(folder / "config.yaml"), "--platform", "mlx", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, own_bytes(process.pid))
        time.sleep(0.01)
    errors = process.stderr.read() if process.stderr else ""
    return subprocess.CompletedProcess(command, process.returncode, stderr=errors), peak


def own_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


if __name__ == "__main__":
    main()
