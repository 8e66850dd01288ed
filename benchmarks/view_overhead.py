"""The cost of the live view and the log: runs with and without them in turn, and the processor time inside their hooks.

    python benchmarks/view_overhead.py [--pairs 6] [--steps 40]

The demo's model on torch's CPU with one thread; a step of 1 document, and one of 16. With the view, a terminal (a
pseudo-terminal that a thread reads) shows the state of the run, and log.txt is written; a line each 10 steps; no
samples. The ratio is of the processor time of the whole process in all steps but the first 5, with the threads that
draw: the median over pairs, and its spread, because other work on a machine disturbs even processor time. The time in
the hooks is counted apart, and is the finer number; so is that of the thread that draws, beside an idle process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads

import record

import dualtune
from dualtune.cli.progress import progress_hook
from dualtune.cli.screen import phases
from dualtune.config import Config, load_config
from dualtune.engine.backend import Backend, get_backend
from dualtune.show.run import run
from dualtune.show.view.lines import RunLog
from dualtune.train.hooks import Hook

DEMO = Path(dualtune.__file__).parent / "demo"
CASES = {"1 document": 1, "16 documents": 16}
WARM = 5  # steps that are not counted
EVENTS = ("on_step", "on_phase_change", "after_step")


class StepClock(Hook):
    """The processor time of the process between the end of the warm steps and the last one."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step(self, record: Any) -> None:
        if record.step >= WARM:
            self.marks.append(time.process_time())

    @property
    def step_s(self) -> float:
        return (self.marks[-1] - self.marks[0]) / (len(self.marks) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    backend = get_backend("torch", "cpu")
    cases = {name: measured(backend, documents, args.pairs, args.steps) for name, documents in CASES.items()}
    figures = {"pairs": args.pairs, "steps": args.steps, "drawing_share_of_a_core": drawing(), "cases": cases}
    path = record.write("view_overhead", figures)
    print(json.dumps(figures, indent=2), path, sep="\n")


def drawing(seconds: float = 10.0) -> float:
    """Return the share of a processor core that the drawing thread takes, while nothing else happens."""
    with on_a_terminal(), phases() as shown:
        shown.begin("training")
        shown.panel = ("curve       " + "▁▂▃▄▅▆▇█" * 5, *[f"{name:<11} {'text ' * 12}" for name in ("state", "sample")])
        began, processor = time.monotonic(), time.process_time()
        time.sleep(seconds)
        return (time.process_time() - processor) / (time.monotonic() - began)


def measured(backend: Backend, documents: int, pairs: int, steps: int) -> dict[str, Any]:
    """Return the figures of one case; the order within a pair alternates."""
    ratios, off_s, hooks_s = list[float](), list[float](), list[float]()
    train_once(backend, documents, steps, shows=True)  # imports, and caches of the model
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        found = {shows: train_once(backend, documents, steps, shows=shows) for shows in order}
        ratios.append(found[True][0] / found[False][0])
        off_s.append(found[False][0])
        hooks_s.append(found[True][1])
    step_s, in_hooks = statistics.median(off_s), statistics.median(hooks_s)
    return {
        "step_ms_without": 1e3 * step_s,
        "ratio": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
        "hooks_us_per_step": 1e6 * in_hooks,
        "hooks_share_of_step": in_hooks / step_s,
    }


def train_once(backend: Backend, documents: int, steps: int, *, shows: bool) -> tuple[float, float]:
    """Train, and return the processor seconds of a step and of the view's hooks in it."""
    clock, spent = StepClock(), [0.0]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        config = config_of(Path(folder) / "run", documents, steps)
        if not shows:
            stack.enter_context(patch("dualtune.show.run.RunLog", lambda *_: Hook()))
            run(config, backend, [clock])
            return clock.step_s, 0.0
        stack.enter_context(on_a_terminal())
        hook = stack.enter_context(progress_hook(config, backend))
        for kind in (RunLog, type(hook)):
            for event in EVENTS:
                stack.enter_context(timed(kind, event, spent))
        hook.begin_loading(config.run)
        run(config, backend, [hook, clock])
    return clock.step_s, spent[0] / steps


@contextlib.contextmanager
def timed(kind: type[Hook], event: str, spent: list[float]) -> Generator[None]:
    """Count the processor time of a hook's method, in its own thread."""
    method = getattr(kind, event)

    def counted(self: Hook, *args: Any) -> None:
        began = time.thread_time()
        method(self, *args)
        spent[0] += time.thread_time() - began

    with patch.object(kind, event, counted):
        yield


@contextlib.contextmanager
def on_a_terminal() -> Iterator[None]:
    """Let standard output be a pseudo-terminal, whose text is thrown away."""
    leader, follower = os.openpty()
    reader = threading.Thread(target=drained, args=(leader,), daemon=True)
    reader.start()
    with os.fdopen(follower, "w") as stream, patch.object(sys, "stdout", stream), patch.dict(os.environ, TERM="xterm"):
        yield
    reader.join()


def drained(leader: int) -> None:
    with contextlib.suppress(OSError):  # the other side is closed
        while os.read(leader, 1 << 16):
            pass
    os.close(leader)


def config_of(run_dir: Path, documents: int, steps: int) -> Config:
    """Return the config of a run without evaluations and saves between its steps."""
    return load_config({
        "model": {"name": str(DEMO / "model")},
        "data": {"train": str(DEMO / "data" / "train.jsonl"), "eval": 0},
        "train": {"steps": steps, "documents_per_step": documents},
        "run": {"dir": str(run_dir), "save_every": steps, "report": False},
    })  # fmt: skip


if __name__ == "__main__":
    main()
