"""Where the trials happen: a tiny model, its data, a config for each run, and uninterrupted runs to compare with."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import statistics
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path
from types import ModuleType

import judge
import victim
from plan import Plan, read_trace

NUM_STEPS = 24
SAVE_EVERY = 2
NUM_CONTROLS = 4


def settle(backends: list[str]) -> None:
    """Import the product. Nothing is computed: threads would not survive a fork."""
    if not victim.FORKS:
        return
    import dualtune

    packages = [dualtune, *(importlib.import_module(f"dualtune_{name}") for name in backends)]
    for package in packages:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                with suppress(ModuleNotFoundError):  # a tracker that is not installed, which no run here uses
                    importlib.import_module(module.name)
    _check_threads()


def _check_threads() -> None:
    num_threads = len(os.listdir("/proc/self/task")) if Path("/proc/self/task").is_dir() else 1  # noqa: PTH208
    if num_threads > 1:
        raise RuntimeError(f"{num_threads} threads after the imports: a fork would lose them")


@dataclass(frozen=True, slots=True)
class Lab:
    """A directory with everything in it."""

    path: Path

    def furnish(self) -> None:
        """Write the model and the data, in a process of its own: tokenizers start threads."""
        if (pid := os.fork()) == 0:
            code = 1
            try:
                shared = _shared_helpers()
                shared.write_tiny_llama(self.path / "model", vocab_size=shared.VOCAB, hidden_size=32,
                                        intermediate_size=64, head_dim=8, max_position_embeddings=512)  # fmt: skip
                shared.write_tokenizer(self.path / "model")
                rows = [{"prompt": f"{i} plus {i}?", "completion": f"{2 * i}{'!' * (i % 5)}"} for i in range(40)]
                text = "".join(json.dumps(row) + "\n" for row in rows)
                (self.path / "train.jsonl").write_text(text, encoding="utf-8")
                code = 0
            finally:
                os._exit(code)
        if os.waitpid(pid, 0)[1]:
            raise RuntimeError("the model cannot be written")

    def run_dir(self, name: str) -> Path:
        return self.path / name

    def log(self, name: str) -> Path:
        return self.path / f"{name}.log"

    def control(self, backend: str) -> str:
        """The name of the run that the others are compared with."""
        return f"{backend}-control-0"

    def write_config(self, name: str) -> Path:
        """Three epochs with dropout; several micro-batches a step; evaluations that lie on a save, and beside one."""
        path = self.path / f"{name}.yaml"
        settings = {
            "model": {"name": str(self.path / "model")},
            "adapter": {"rank": 2, "alpha": 4, "dropout": 0.1, "targets": "all-linear"},
            "data": {"train": str(self.path / "train.jsonl"), "eval": 0.2, "max_length": 64},
            "train": {"steps": NUM_STEPS, "documents_per_step": 4, "micro_batch_tokens": 64, "learning_rate": 1e-2},
            "run": {"dir": str(self.run_dir(name)), "seed": 1, "save_every": SAVE_EVERY, "eval_every": 5, "keep": 2,
                    "log_every": 5},
        }  # fmt: skip
        path.write_text(json.dumps(settings, indent=2), encoding="utf-8")  # JSON is YAML
        return path

    def scout(self, backend: str) -> Path:
        """A traced run; then import what it imported, so that no other run spends its time on that."""
        name = f"{backend}-scout"
        trace = self.path / f"{backend}.trace"
        self._check(name, victim.run(backend, self.write_config(name), self.log(name), trace=trace), control=name)
        for module in victim.modules_of(trace).read_text(encoding="utf-8").splitlines():
            if victim.FORKS and module not in sys.modules:
                with contextlib.suppress(Exception):  # it can be loaded later, or was made in another way
                    importlib.import_module(module)
        _check_threads()
        return trace

    def rehearse(self, backend: str, trace: Path, pool: Pool) -> Plan:
        """Uninterrupted runs, as many at once as in the trials: they must agree, and the plan comes from them."""
        names = [f"{backend}-control-{n}" for n in range(NUM_CONTROLS)]
        jobs = [(backend, self.write_config(name), self.log(name)) for name in names]
        ends = pool.starmap(victim.run, jobs, chunksize=1)
        for name, end in zip(names, ends, strict=True):
            self._check(name, end, control=self.control(backend))
        setup_seconds = statistics.median(end.setup_seconds for end in ends)
        seconds = statistics.median(end.seconds for end in ends)
        return Plan(NUM_STEPS, setup_seconds, seconds, *read_trace(trace))

    def _check(self, name: str, end: victim.End, control: str) -> None:
        """A run that nobody kills must succeed, and give what another one gives."""
        if end.code != 0:
            raise RuntimeError(f"{name}: exit code {end.code}: {self.log(name).read_text(encoding='utf-8')}")
        run_dir, other = self.run_dir(name), self.run_dir(control)
        if problems := judge.corruptions(run_dir, other) + judge.differences(run_dir, other):
            raise RuntimeError(f"{name}, which nobody killed: {problems[0]}")


def _shared_helpers() -> ModuleType:
    """tests/conftest.py, which writes the tokenizer."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    return importlib.import_module("conftest")
