"""`python tests/chaos`: kill training runs at random, let them resume, and count what was lost.

A table at the end, a file with what was counted, and exit code 1 if anything was lost, corrupted, or not bitwise what
an uninterrupted run gives. `make chaos` runs it in full.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Before the first import: threads of BLAS or of the tokenizers would not survive the forks.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

import lab
import trial
import victim
from lab import Lab
from plan import Plan
from trial import Result

COLUMNS = ("trials", "resumed", "lost", "corrupted", "not bitwise")


def main() -> int:
    args = _arguments()
    counts = {backend: getattr(args, backend) for backend in victim.PLATFORMS if getattr(args, backend)}
    print(f"seed {args.seed}", flush=True)
    lab.settle(list(counts))
    place = Lab(Path(tempfile.mkdtemp(prefix="chaos-")))
    place.furnish()
    rows: dict[str, dict[str, Any]] = {}
    failed: list[Result] = []
    for backend, count in counts.items():
        began = time.monotonic()
        trace = place.scout(backend)
        with multiprocessing.get_context("fork").Pool(_workers(backend)) as pool:
            plan = place.rehearse(backend, trace, pool)
            times = f"{plan.seconds:.2f} s, {plan.setup_seconds:.2f} s of it before the first step"
            print(f"{backend}: an uninterrupted run takes {times}", flush=True)
            results: list[Result] = []
            waiting = [pool.apply_async(trial.carry_out, (place, plan, backend, args.seed, n)) for n in range(count)]
            for job in waiting:
                results.append(job.get())
                _tell(results, count)
            pool.close()  # the end of the block alone would kill its workers, one of which may hold a lock of the pool
            pool.join()
        failed += [result for result in results if result.failed]
        rows[backend] = _count(results, plan, time.monotonic() - began)
    print(_table(rows))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(_report(args.seed, rows, failed), indent=2) + "\n", encoding="utf-8")
    if failed:
        print(f"\nThe directories of {len(failed)} failed trials are kept in {place.path}", file=sys.stderr)
        return 1
    shutil.rmtree(place.path)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--torch", type=int, default=0, help="how many trials on torch")
    parser.add_argument("--mlx", type=int, default=0, help="how many trials on MLX")
    parser.add_argument("--output", type=Path, help="where to write the counts, as JSON")
    return parser.parse_args()


def _workers(backend: str) -> int:
    """How many runs at once. MLX has threads of its own; torch is told to use one."""
    num_cores = os.cpu_count() or 1
    return max(1, num_cores // 2 if backend == "mlx" else num_cores)


def _tell(results: list[Result], count: int) -> None:
    newest = results[-1]
    if newest.failed:
        for column in ("lost", "corrupted", "not_bitwise"):
            for text in dict.fromkeys(getattr(newest, column)):
                print(f"{newest.backend} trial {newest.number}: {column.replace('_', ' ')}: {text}", flush=True)
    if len(results) % 25 == 0 or len(results) == count:
        num_failed = sum(result.failed for result in results)
        print(f"{newest.backend}: {len(results)} of {count} trials, {num_failed} failed", flush=True)


def _count(results: list[Result], plan: Plan, seconds: float) -> dict[str, Any]:
    kills: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for point, phase in (kill for result in results for kill in result.kills):
        kills[f"at the fault point {point}" if point != "time" else "at a random time"][phase] += 1
    return {
        "trials": len(results),
        "resumed": sum(result.resumed for result in results),
        "lost": sum(bool(result.lost) for result in results),
        "corrupted": sum(bool(result.corrupted) for result in results),
        "not bitwise": sum(bool(result.not_bitwise) for result in results),
        "kills": sum(len(result.kills) for result in results),
        "kills_that_came_too_late": sum(result.num_missed for result in results),
        "checkpoints_damaged_on_purpose": sum(result.num_damaged for result in results),
        "kills_by_phase": {how: {phase: kills[how][phase] for phase in victim.PHASES if kills[how][phase]}
                           for how in sorted(kills)},
        "seconds_of_an_uninterrupted_run": round(plan.seconds, 3),
        "seconds_before_its_first_step": round(plan.setup_seconds, 3),
        "seconds": round(seconds, 1),
    }  # fmt: skip


def _table(rows: dict[str, dict[str, Any]]) -> str:
    lines = ["", "| backend | " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * len(COLUMNS)]
    for backend, row in rows.items():
        lines.append(f"| {backend} | " + " | ".join(str(row[column]) for column in COLUMNS) + " |")
    for backend, row in rows.items():
        late, damaged = row["kills_that_came_too_late"], row["checkpoints_damaged_on_purpose"]
        lines += ["", f"{backend}: {row['kills']} kills and {late} that came too late; {damaged} checkpoints damaged"]
        for how, phases in row["kills_by_phase"].items():
            lines.append(f"  {how}: " + ", ".join(f"{count} {phase}" for phase, count in phases.items()))
    return "\n".join(lines)


def _report(seed: int, rows: dict[str, dict[str, Any]], failed: list[Result]) -> dict[str, Any]:
    """What benchmarks/results keeps. No names of hosts, no paths."""
    from dualtune.base.versions import versions_of
    from dualtune.train.state.records import recorded_packages

    return {
        "what": "training runs killed (SIGKILL) one to three times each, resumed, and compared with uninterrupted ones",
        "seed": seed,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": versions_of(recorded_packages()),
        "run": {"model": "Llama, 2 layers of 32, random", "steps": lab.NUM_STEPS, "save_every": lab.SAVE_EVERY},
        "backends": rows,
        "failed_trials": [{"backend": result.backend, "trial": result.number} for result in failed],
    }


if __name__ == "__main__":
    sys.exit(main())
