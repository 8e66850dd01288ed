"""The cost of starting: CPU seconds of check-config, preview, check-data, and of a run up to its first step.

    python benchmarks/startup.py --against REVISION [--pairs 5] [--shared ../shared]

Both sides run in turns, each from its own source, on stories260k and 1,000 rows of GSM8K, in a separate process. The
model is on the disk and its data are in the cache of tokenized data; each side has its own cache. The script counts the
CPU time of the process and its children, user and system, by wait4.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import record

ROOT = Path(__file__).parents[1]
ROWS = 1000
COMMAND = "from dualtune.cli.main import main; main()"
FIRST_STEP = """
import os, shutil, sys
import dualtune
from dualtune.config import load_config
from dualtune.train.hooks import Hook
class Stop(Hook):
    def on_step(self, record):
        os._exit(0)
config = load_config(sys.argv[1])
shutil.rmtree(config.run.dir, ignore_errors=True)
dualtune.train(config, "cpu", [Stop()])
"""
CASES = {
    "check-config": (COMMAND, "check-config", "--platform", "cpu"),
    "preview": (COMMAND, "preview"),
    "check-data": (COMMAND, "check-data"),
    "first step": (FIRST_STEP,),
}
GOALS_S = {"check-config": 2, "preview": 2, "check-data": 2, "first step": 5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", required=True, help="a git revision")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, checked_out(args.against, Path(folder) / "code") as before:
        sides = {"before": before, "now": ROOT}
        configs = {side: write_config(Path(folder) / side, args.shared) for side in sides}
        for side, code in sides.items():  # fill the caches of data, bytecode and disk
            for case in CASES:
                cpu_s(code, configs[side], case)
        found: dict[str, dict[str, list[float]]] = {case: {side: [] for side in sides} for case in CASES}
        for number in range(args.pairs):
            for case in CASES:
                for side in [*sides][:: 1 if number % 2 else -1]:
                    found[case][side].append(round(cpu_s(sides[side], configs[side], case), 3))
                    print(f"{case}, {side}: {found[case][side][-1]:.2f} s", flush=True)
    figures = {
        case: {side: {"cpu_s": times, "median": statistics.median(times)} for side, times in both.items()}
        | {"ratio": round(statistics.median(both["now"]) / statistics.median(both["before"]), 3), "goal": GOALS_S[case]}
        for case, both in found.items()
    }
    what = {"unit": "processor seconds", "against": args.against, "rows": ROWS, "threads": 1, "pairs": args.pairs}
    print(record.write("startup", {**what, "cases": figures}))


@contextmanager
def checked_out(revision: str, path: Path) -> Iterator[Path]:
    """The source of a revision."""
    subprocess.run(["git", "worktree", "add", "--detach", str(path), revision], cwd=ROOT, check=True)
    try:
        yield path
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(path)], cwd=ROOT, check=True)


def write_config(folder: Path, shared: Path) -> Path:
    folder.mkdir()
    data = folder / "train.jsonl"
    with (shared / "data/gsm8k/train.jsonl").open(encoding="utf-8") as rows:
        data.write_text("".join(islice(rows, ROWS)), encoding="utf-8")
    config = {
        "model": {"name": str((shared / "models/stories260k").resolve())},
        "adapter": {"targets": "all-linear"},
        "data": {"train": str(data), "columns": {"prompt": "question", "completion": "answer"}, "max_length": 256,
                 "eval": 0},
        "train": {"steps": 10, "documents_per_step": 4, "warmup": 0},
        "run": {"dir": str(folder / "run")},
    }  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    return folder / "config.yaml"


def cpu_s(code: Path, config: Path, case: str) -> float:
    program, *arguments = CASES[case]
    if arguments:
        command = [sys.executable, "-c", program, arguments[0], str(config), *arguments[1:]]
    else:
        command = [sys.executable, "-c", program, str(config)]
    return child_cpu_s(
        command, code, PYTHONPATH=os.pathsep.join(map(str, (code, code / "backends"))),
        DUALTUNE_CACHE=str(config.parent / "cache"),
    )  # fmt: skip


def child_cpu_s(command: Sequence[str], folder: Path, **environment: str) -> float:
    """Return the processor seconds of a command that is given no input. Its errors end the script."""
    settings = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment
    process = subprocess.Popen(
        command, env=settings, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    error = process.stderr.read() if process.stderr else b""
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        sys.exit(f"{' '.join(command)} failed:\n{error.decode()[-3000:]}")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
