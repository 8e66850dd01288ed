"""What adapter.merge_for is worth on a real model: the loss of the merge after it was rounded, trained for that or not.

    python benchmarks/merge_for.py [--shared ../shared] [--formats q4_0] [--seeds 1 2] [--threads 1]
    python benchmarks/merge_for.py --table    # writes the table of docs/adapters.md from the recorded result

SmolLM2-135M-Instruct learns WikiSQL as in quality.py, once as LoRA and once for each format. Each adapter is merged,
the merged weights of the adapted layers are rounded by the format, and `dualtune eval` measures the model on the same
held-out rows. Embedding and head stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import page_tables
import psutil
import quality
import record

from dualtune.model.adapter import tensor_name
from dualtune.model.copies import copy_without_weights
from dualtune.model.formats.directory import read_adapter
from dualtune.model.merge_rounding import ROUNDINGS

PAGE = Path(__file__).parents[1] / "docs" / "adapters.md"
PLAIN = "lora"


def rounded_merge(model: Path, adapter: Path, out: Path, form: str | None) -> Path:
    """Write the model with the merged adapter; the weights of its layers as the format gives them back."""
    from safetensors.numpy import load_file, save_file  # pyright: ignore[reportUnknownVariableType]

    loaded, weights = read_adapter(adapter), load_file(model / "model.safetensors")
    for name in [name for name in weights if tensor_name(name.removesuffix(".weight"), "A") in loaded.tensors]:
        module = name.removesuffix(".weight")
        A, B = (loaded.tensors[tensor_name(module, part)] for part in "AB")
        merged = weights[name].astype(np.float32) + loaded.spec.scale_of(module) * (B @ A)
        weights[name] = merged if form is None else ROUNDINGS[form](merged, np)
    out.mkdir()
    copy_without_weights(model, out)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


def measure(bench: quality.Bench, arm: str, seed: int, forms: list[str]) -> dict[str, Any]:
    """Train an arm and return what its merge measures, as it is and rounded."""
    plain = bench.run(arm, seed)
    figures: dict[str, Any] = {"none": {"loss": plain["loss"], "right": plain["right"]}}
    for form in forms:
        model = rounded_merge(
            bench.model, bench.folder / f"{arm}-{seed}" / "adapter", bench.folder / f"{arm}-{seed}-{form}", form
        )
        settings = bench.config(PLAIN, seed)
        settings["model"] |= {"name": str(model)}
        config = bench.folder / "rounded.json"
        config.write_text(json.dumps(settings))
        figures[form] = bench.measured(config, "--base")
        print(arm, seed, form, figures, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=quality.ROOT.parent / "shared")
    parser.add_argument("--formats", default="q4_0")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False))
    parser.add_argument("--table", action="store_true", help="write the table of the recorded result")
    args = parser.parse_args()
    if args.table:
        return print(page_tables.write(PAGE, {"merge_for": table(record.runs("merge_for"))}))
    args.shared, args.envs, args.again = args.shared.resolve(), Path(), False
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    forms = args.formats.split(",")
    for form in forms:
        quality.ARMS[form] = {"adapter": {"merge_for": form}}
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as name:
            bench = quality.Bench(args, "wikisql", Path(name))
            for arm in (PLAIN, *forms):
                figures = measure(bench, arm, seed, forms if arm == PLAIN else [arm])
                record.add_run("merge_for", f"{arm}/{seed}", figures, steps=quality.STEPS)
    return None


def table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the losses of each seed: of the plain merge, and of the rounded merges of both adapters."""
    header = ["format", "seed", "LoRA, not rounded", "LoRA, rounded", "`merge_for`, rounded", "exactly right, rounded"]
    rows: list[list[str]] = []
    for key, run in runs.items():
        form, seed = key.split("/")
        if form != PLAIN:
            plain = runs[f"{PLAIN}/{seed}"]
            losses = [f"{each['loss']:.4f}" for each in (plain["none"], plain[form], run[form])]
            rows.append([f"`{form}`", seed, *losses, f"{plain[form]['right']:.1%} → {run[form]['right']:.1%}"])
    return page_tables.table(header, rows)


if __name__ == "__main__":
    main()
