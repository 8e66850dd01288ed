"""llama.cpp for the tests of this folder: an environment of its own, its converters, and its logits.

`scripts/interop_llama.sh DIR` makes the environment, and DUALTUNE_INTEROP names it (.venv-interop by default). These
tests take a minute and run when they are asked for: `pytest -m interop`.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("DUALTUNE_INTEROP", ROOT / ".venv-interop")).absolute()
ROWS = pytest.StashKey[list[tuple[str, str, str]]]()


def pytest_configure(config):
    config.stash[ROWS] = []


def pytest_terminal_summary(terminalreporter, config):
    """The table of docs/adapters.md."""
    if rows := config.stash[ROWS]:
        terminalreporter.section("largest difference of log-probabilities")
        for row in (("what", "loaded by", "from float64"), ("---",) * 3, *rows):
            terminalreporter.write_line(f"| {' | '.join(row)} |")


@pytest.fixture(scope="session")
def report(request):
    """Add a row to the table that is printed at the end."""
    rows = request.config.stash[ROWS]
    return lambda what, program, number: rows.append((what, program, f"{number:.1e}"))


class LlamaCpp:
    """llama.cpp's own converters to GGUF, and its model, each in a process of the other environment."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def convert_model(self, model: Path) -> Path:
        return self._convert("convert_hf_to_gguf.py", model)

    def convert_adapter(self, adapter: Path, base: Path) -> Path:
        return self._convert("convert_lora_to_gguf.py", adapter, "--base", base)

    def logits(self, model: Path, prompts: list[list[int]], adapter: Path | None = None) -> list[np.ndarray]:
        """float32 [T, V] of each prompt."""
        out = self._directory / "logits.npz"
        job = {"model": str(model), "adapter": adapter and str(adapter), "prompts": prompts, "out": str(out)}
        self._run(Path(__file__).with_name("llama_logits.py"), json.dumps(job))
        with np.load(out, allow_pickle=False) as arrays:
            return [arrays[str(i)] for i in range(len(prompts))]

    def _convert(self, script: str, source: Path, *options: object) -> Path:
        out = self._directory / f"{source.parent.name}-{source.name}.gguf"
        program = ENVIRONMENT / "source" / "vendor" / "llama.cpp" / script
        self._run(program, source, "--outtype", "f32", "--outfile", out, *options)
        return out

    def _run(self, *args: object) -> None:
        command = [str(ENVIRONMENT / "bin" / "python"), *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="session")
def llama_cpp(tmp_path_factory):
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.fail(f"{ENVIRONMENT}: no such environment. Run: scripts/interop_llama.sh {ENVIRONMENT}")
    return LlamaCpp(tmp_path_factory.mktemp("gguf"))
