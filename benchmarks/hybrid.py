"""`dualtune hybrid bench` on stories260k with two corpora, at the tuned rate and at a quarter of it, and a real model.

    python benchmarks/hybrid.py [--shared ../shared] [--seeds 3] [--cases gsm8k-tuned,wikisql-slow]
    python benchmarks/hybrid.py --table    # writes those of results/hybrid.md, from the recorded result

LoRA of rank 8; torch on the CPU in float32 with one thread. The real model is that of `train --demo smollm2`, which
learns the demo's SQL with LoRA of rank 16. The arms, their controls and the intervals are those of the command. Each
case is recorded when it is done, beside those that were recorded before.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads

import page_tables
import record
from origins import read
from stories_gsm8k import base_config

from dualtune.cli.hybrid import table
from dualtune.doctor.bench.hybrid import ARMS, Comparison, compare, plot
from dualtune.engine.choose import choose, open_backend
from dualtune.model.package import fetch_model

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "dualtune" / "demo" / "smollm2"
ENGINES = ("baseline", "predict", "fast_forward")
AVERAGES = ("schedule_free", "average")
# A rate that is right for cosine, and a quarter of it with large batches: where predictions could pay.
TUNED = {"train": {"steps": 160, "documents_per_step": 8, "learning_rate": 8e-3}, "hybrid": {"warmup_steps": 30}}
SLOW = {
    "train": {"steps": 60, "documents_per_step": 64, "learning_rate": 2e-3},
    "hybrid": {"warmup_steps": 8, "full_steps": 8},
}
# The rate of the demo, half of its documents a step.
REAL = {
    "train": {"steps": 48, "documents_per_step": 4, "learning_rate": 1e-3},
    "hybrid": {"warmup_steps": 12, "full_steps": 8},
}
REAL_CASE = "sql-real"
TO_TUNE = "wikisql-tuned"  # that of GSM8K was found before; the slow cases have a quarter of GSM8K's
CASES: dict[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "gsm8k-tuned": (TUNED, (*ENGINES, *AVERAGES)),
    "gsm8k-slow": (SLOW, ENGINES),
    "wikisql-tuned": (TUNED, tuple(ARMS)),
    "wikisql-slow": (SLOW, ENGINES),
    REAL_CASE: (REAL, ENGINES),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--table", action="store_true", help="write the tables of the recorded result")
    args = parser.parse_args()
    if args.table:
        return print(page_tables.write(page_tables.RESULTS / "hybrid.md", recorded_tables()))
    backend, cases = open_backend(choose("cpu")), args.cases.split(",")
    real = fetch_model() if REAL_CASE in cases else None  # before each case gets a cache of its own
    for case in cases:
        settings, arms = CASES[case]
        origin = record.origin()  # now, because the code may change while this runs
        with tempfile.TemporaryDirectory() as name:
            os.environ["DUALTUNE_CACHE"] = str(Path(name) / "cache")
            if case == REAL_CASE and real is not None:
                base = of_demo(real)
            else:
                base = corpora(Path(name), args.shared.resolve())[case.partition("-")[0]]
            config = {**base, **settings, "run": {"dir": str(Path(name) / "run"), "seed": 1}}
            found = compare(
                config, (), backend, arms=arms, seeds=args.seeds, tune=case == TO_TUNE,
                tell=lambda what: print(what, file=sys.stderr, flush=True),
            )  # fmt: skip
        result = {**origin, "settings": settings, "table": as_table(found), **found.as_json()}
        print(record.write("hybrid", {"cases": record.runs("hybrid", "cases") | {case: result}}))
        (record.RESULTS / f"hybrid_{case}.svg").write_text(plot(found), encoding="utf-8")
    return None


def corpora(folder: Path, shared: Path) -> dict[str, dict[str, Any]]:
    """Return the config of stories260k with each corpus."""
    gsm8k = base_config(folder, shared)
    wikisql = shared / "data/wikisql"
    data = {"train": str(wikisql / "train.jsonl"), "eval": str(wikisql / "valid.jsonl"), "max_length": 256}
    return {"gsm8k": gsm8k, "wikisql": {**gsm8k, "data": data}}


def of_demo(model: Path) -> dict[str, Any]:
    """Return the config of the real model with the demo's SQL."""
    return {
        "model": {"name": str(model), "dtype": "float32"},
        "adapter": {"rank": 16, "alpha": 32.0, "dropout": 0.0},
        "data": {"train": str(DEMO / "train.jsonl"), "eval": str(DEMO / "heldout.jsonl"), "max_length": 256},
    }


def recorded_tables() -> dict[str, str]:
    """Return the tables of the page, of each case that is recorded, with that of hybrid_calibration.py."""
    from hybrid_calibration import table

    cases = {case.replace("-", "_"): result["table"] for case, result in record.runs("hybrid", "cases").items()}
    return cases | {"calibration": table(read("hybrid_calibration"))}


def as_table(found: Comparison) -> str:
    """Return the command's table in Markdown."""
    head, *rows = table(found)
    return page_tables.table(head, rows)


if __name__ == "__main__":
    main()
