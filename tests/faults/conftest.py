"""A run in a box: real processes with a fault inside, the run that continues it, and what it left behind.

A test says what it is about with @pytest.mark.fault(row=…, fault=…, injection=…, expected=…), from which
scripts/reliability_table.py makes the table in benchmarks/results/faults.md.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

DUALTUNE = [sys.executable, "-m", "dualtune.cli.main"]
INJECTION = Path(__file__).with_name("injection.py")
FORWARD = {
    "numpy": "dualtune.engine.testing.numpy_engine.NumpyEngine.forward_backward",
    "cpu": "dualtune_torch.engine.TorchEngine.forward_backward",
    "mlx": "dualtune_mlx.engine.MlxEngine.forward_backward",
}


def pytest_configure(config):
    config.addinivalue_line("markers", "fault(row, fault, injection, expected): a line of benchmarks/results/faults.md")


@dataclass
class Box:
    """A small run. Change `settings` before a process is started; None stands for null."""

    home: Path
    platform: str
    main: Any  # the command line in this process: quick, for what is only to be continued
    forked: Any
    python: Any
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def forward(self) -> str:
        """What begins a micro-batch, for `enter`."""
        return FORWARD[self.platform]

    @property
    def dir(self) -> Path:
        return Path(self.settings["run.dir"])

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.dir.glob("checkpoints/step-*"))

    @property
    def leftovers(self) -> list[Path]:
        return sorted(path for path in self.dir.rglob(".*") if ".tmp-" in path.name)

    @property
    def adapter(self) -> bytes:
        return (self.dir / "adapter" / "adapter_model.safetensors").read_bytes()

    def forget_tokens(self) -> None:
        """Let the next process tokenize the data again."""
        shutil.rmtree(os.environ["DUALTUNE_CACHE"], ignore_errors=True)

    def rows(self) -> list[dict[str, Any]]:
        lines = (self.dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [row for row in self.rows() if row.get("event") in kinds]

    def losses(self) -> list[tuple[int, float]]:
        return [(row["step"], row["loss"]) for row in self.rows() if "lr" in row]

    def command(self) -> list[str]:
        """The arguments behind `dualtune`; writes the config file."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in self.settings.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = str(value) if isinstance(value, Path) else value
        lines = [f"{section}: {json.dumps(fields, ensure_ascii=False)}\n" for section, fields in sections.items()]
        path = self.home / "config.yaml"
        path.write_text("".join(lines), encoding="utf-8")
        return ["train", str(path), "--platform", self.platform]

    def environment(self, inject: str = "", fault: str = "") -> dict[str, str]:
        """The variables that put a fault into a process: lines of Python (see injection.py), or a fault point."""
        place = self.home / "injected"
        place.mkdir(exist_ok=True)
        shutil.copy(INJECTION, place)
        (place / "sitecustomize.py").write_text(f"from injection import *\n{inject}\n", encoding="utf-8")
        return {"PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]), "DUALTUNE_FAULT": fault}

    def train(self, code: int, *args: str, inject="", fault="", env=None, is_forked=True, **options):
        """`dualtune train` as a process that has to end with this code (negative: killed by that signal).

        Forked where what is injected need not be there before the imports.
        """
        env = self.environment(inject, fault) | (env or {})
        start = [self.forked, "dualtune"] if is_forked else [self.python, "-m", "dualtune.cli.main"]
        result = start[0](*start[1:], *self.command(), *args, env=env, **options)
        assert "Error in sitecustomize" not in result.stderr
        assert result.returncode == code, result.stdout + result.stderr
        return result

    @contextlib.contextmanager
    def start(self, inject: str = "", **options) -> Generator[subprocess.Popen]:
        """The same, to be watched while it runs; it is killed in the end, also where a test fails."""
        options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} | options
        env = os.environ | self.environment(inject)
        with subprocess.Popen([*DUALTUNE, *self.command()], env=env, **options) as process:
            try:
                yield process
            finally:
                process.kill()

    def resume(self, code: int = 0, *args: str):
        """The same command in this process: for what is continued, and for what no process has to end for."""
        result = self.main(*self.command(), *args)
        assert result.returncode == code, result.stdout + result.stderr
        return result

    def stop(self, step: int) -> None:
        """Begin the run in this process, and end it behind the update of a step, without a word to anybody."""

        def die():
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DUALTUNE_FAULT", f"step:{step}")
            patch.setattr("dualtune.base.faults._passed", Counter())
            patch.setattr("dualtune.base.faults.die", die)
            self.resume(130)

    def straight(self) -> bytes:
        """The adapter of a run like this one that nothing disturbs."""
        twin = replace(self, settings=self.settings | {"run.dir": self.home / "ref"})
        twin.resume()
        return twin.adapter


@pytest.fixture
def box(request, tmp_path, forked, python, dualtune_main, write_rows, qa_rows, open_backend) -> Box:
    """On the NumPy engine, unless a test asks for "cpu" (torch)."""
    platform = getattr(request, "param", "numpy")
    open_backend({"cpu": "torch"}.get(platform, platform))
    model = request.getfixturevalue("tiny_softmax" if platform == "numpy" else "tiny_llama")
    settings = {
        "model.name": model, "adapter.rank": 2, "adapter.alpha": 4, "adapter.dropout": 0.3,
        "adapter.targets": "all-linear", "data.train": write_rows(qa_rows), "data.eval": 0.25, "data.max_length": 64,
        "train.steps": 9, "train.documents_per_step": 4, "train.micro_batch_tokens": 64, "train.learning_rate": 1e-2,
        "run.dir": tmp_path / "run", "run.seed": 1, "run.log_every": 1, "run.save_every": 2, "run.eval_every": 3,
    }  # fmt: skip
    return Box(tmp_path, platform, dualtune_main, forked, python, settings)


@pytest.fixture
def small_disk():
    """An empty file system of one MiB. Only root may mount one."""
    place = Path(tempfile.mkdtemp())
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        place.rmdir()
        pytest.skip("needs the right to mount a tmpfs")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)
    place.rmdir()
