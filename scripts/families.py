"""Build every family of transformers and mlx-lm tiny, put it to all that is promised, and write
benchmarks/results/families.md.

    .venv/bin/python scripts/families.py [--again] [--only check,train,base] [--build DIR] [--page FILE] [FAMILY …]
    .venv/bin/python scripts/families.py --page-only     # from the results that are there

Without names it takes all families, and goes on where it was stopped: what has a result is not run again unless --again
says so. Each family runs in a process of its own with a time limit; each stage is a line of JSON in
build/families/results.jsonl, with the commit that it ran on. What has no result stays on the page as it is. Needs both
backends, PEFT, and no network. Families with a tower of timm (gemma3n, fast_vlm, perception_lm) are made where timm,
pillow and the torchvision of the same index as torch are installed (`pip install timm pillow torchvision`). It ends
with 1 if a family has a fault: a traceback, a wrong number or a lost tensor.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

from family.case import BACKENDS, Case
from family.make import transformers_names
from family.mlx_only import mlx_only_names
from family.page import FAULTS, Line, lines_of, page_of
from family.stages import STAGES, make_model, outcome

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "families.md"
TIME_LIMIT_S = 240  # of a family
ONCE = {"parity"}  # stages that are about both backends


def main() -> int:
    given = _arguments()
    results = given.build / "results.jsonl"
    if not given.page_only:
        given.build.mkdir(parents=True, exist_ok=True)
        os.environ["DUALTUNE_CACHE"] = str(given.build / "cache")
        _preload()
        _run_all(given.families or [*transformers_names(), *mlx_only_names()], given.only, results, again=given.again)
    lines = read(results)
    before = lines_of(given.page.read_text(encoding="utf-8")) if given.page.exists() else []
    given.page.write_text(page_of([*before, *lines]), encoding="utf-8")
    return int(any(line["outcome"] in FAULTS for line in lines))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="model types; none: all")
    parser.add_argument("--only", type=lambda text: tuple(text.split(",")), default=tuple(STAGES), metavar="STAGES")
    parser.add_argument("--again", action="store_true", help="run what already has a result")
    parser.add_argument(
        "--build", type=Path, default=ROOT / "build" / "families", metavar="DIR", help="for the results"
    )
    parser.add_argument("--page", type=Path, default=RECORD, metavar="FILE", help="to write")
    parser.add_argument("--page-only", action="store_true", help="run nothing")
    return parser.parse_args()


def _preload() -> None:
    """Import once what every family needs: its process is a copy of this one. MLX has threads, so each imports it."""
    for name in ("peft", "dualtune.doctor.check_config", "dualtune_torch.engine"):
        importlib.import_module(name)
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    gc.freeze()  # no process has to look for garbage among what all have imported


def _run_all(families: Iterable[str], only: tuple[str, ...], results: Path, *, again: bool) -> None:
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    lines = [] if again else read(results)
    done = {(line["family"], line["stage"], line["backend"]) for line in lines}
    left_out = {line["family"] for line in lines if line["outcome"] == "not made"}
    for family in families:
        todo = list(steps(only))  # all of them: a later stage needs what an earlier one has written
        if family not in left_out and any((family, *each) not in done for each in todo):
            _run(family, todo, results, commit)


def steps(only: Iterable[str] = tuple(STAGES)) -> Iterator[tuple[str, str]]:
    """Yield each stage with each backend that it is about, in order."""
    for stage in STAGES:
        if stage in only:
            yield from ((stage, name) for name in (("both",) if stage in ONCE else BACKENDS))


def _run(family: str, todo: list[tuple[str, str]], results: Path, commit: str) -> None:
    """Run stages of a family in processes of their own: one, and another for what is left if it dies or hangs."""
    directory = results.parent / family
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    deadline = time.monotonic() + TIME_LIMIT_S
    context = multiprocessing.get_context("fork")
    position = context.Value("i", -1)  # of the stage that runs; -1: the model is made
    start = -1
    while start < len(todo):
        process = context.Process(target=_stages, args=(family, directory, todo, start, position, results, commit))
        process.start()
        process.join(max(1.0, deadline - time.monotonic()))
        is_hung = process.is_alive()
        if is_hung:
            process.kill()
            process.join()
        if process.exitcode == 0:
            break
        at = position.value
        why = f"no end within {TIME_LIMIT_S} s" if is_hung else f"the process died with {process.exitcode}"
        stage, name = todo[at] if at >= 0 else ("make", "both")
        _write(results, family, stage, name, commit, {"outcome": "CRASH", "why": why})
        start = at + 1
        if at < 0 or is_hung:
            break
    shutil.rmtree(directory, ignore_errors=True)


def _stages(family, directory, todo, start, position, results, commit) -> None:  # type: ignore[no-untyped-def]
    """Run the stages from `start` on and write a line for each."""
    log = (directory / "log.txt").open("a", encoding="utf-8")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    case = Case(family, directory)
    if start < 0:
        position.value = -1
        _write(results, family, "make", "both", commit, found := outcome(make_model, case, "both"))
        if found["outcome"] != "ok":
            return
    for number in range(max(start, 0), len(todo)):
        position.value = number
        stage, name = todo[number]
        began = time.monotonic()
        found = outcome(STAGES[stage], case, name)
        _write(results, family, stage, name, commit, found | {"seconds": round(time.monotonic() - began, 2)})


def _write(results: Path, family: str, stage: str, backend: str, commit: str, found: dict[str, object]) -> None:
    line = {"family": family, "stage": stage, "backend": backend, "commit": commit} | found
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read(results: Path) -> list[Line]:
    """Return the last line of each stage of each family."""
    if not results.exists():
        return []
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return list({(line["family"], line["stage"], line["backend"]): line for line in lines}.values())


if __name__ == "__main__":
    sys.exit(main())
