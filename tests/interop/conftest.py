"""llama.cpp for the tests of this folder: an environment of its own, its converters, and its logits.

`scripts/interop_llama.sh DIR` makes the environment, and DUALTUNE_INTEROP names it (.venv-interop by default). These
tests take a minute and run when they are asked for: `pytest -m interop`.
"""

import json
import os
from pathlib import Path

import pytest

from dualtune.config import Config
from dualtune.show.run import run
from dualtune.use.export.llama_environment import LlamaCpp, environment_of

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


class Converted:
    """llama.cpp by `dualtune export`'s own code, with the files that it writes in a directory of the tests."""

    def __init__(self, tools: LlamaCpp, directory: Path) -> None:
        self.tools, self._directory = tools, directory

    def convert_model(self, model: Path) -> Path:
        out = self._directory / f"{model.parent.name}-{model.name}.gguf"
        self.tools.convert(model, out, "f32")
        return out

    def convert_adapter(self, adapter: Path, base: Path) -> Path:
        out = self._directory / f"{adapter.parent.name}-{adapter.name}.gguf"
        script = self.tools._converters / "convert_lora_to_gguf.py"
        self.tools._run(script, adapter, "--base", base, "--outtype", "f32", "--outfile", out)
        return out

    def greedy(self, model: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """The most probable continuation of each prompt, token by token."""
        job = {"model": str(model), "prompts": prompts, "num_tokens": num_tokens}
        return json.loads(self.tools._run(Path(__file__).with_name("greedy.py"), json.dumps(job)))


@pytest.fixture(scope="session")
def environment():
    """The directory that scripts/interop_llama.sh has made."""
    return ENVIRONMENT


@pytest.fixture(scope="session")
def llama_cpp(tmp_path_factory):
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.fail(f"{ENVIRONMENT}: no such environment. Run: scripts/interop_llama.sh {ENVIRONMENT}")
    return Converted(environment_of(ENVIRONMENT), tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="session")
def stories(shared, open_backend, train_on_sums, tmp_path_factory):
    """A model, the adapter of a short run on it, and 50 prompts that the run has not seen."""
    place, model = tmp_path_factory.mktemp("stories"), shared("models/stories260k")
    adapter = train_on_sums(open_backend("torch"), model, place)
    names, deeds = ("Lily", "Tom", "The cat", "A dog", "Mia"), ("went to", "saw", "liked", "had", "found")
    prompts = [f"{name} {deed} {what}" for name in names for deed in deeds for what in ("the", "a big")]
    return model, adapter, prompts


@pytest.fixture(scope="session")
def train_on_sums():
    """Train an adapter for a short while, and return its directory."""
    return _train_on_sums


def _train_on_sums(backend, model, place):
    rows = [{"prompt": f"{i} + {i} =", "completion": f" {2 * i}. The dog was happy."} for i in range(40)]
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"name": str(model), "dtype": "float32"},
        "adapter": {"rank": 8, "alpha": 16.0, "targets": "all-linear"},
        "data": {"train": str(place / "train.jsonl"), "eval": 0, "max_length": 64},
        "train": {"steps": 30, "documents_per_step": 8, "learning_rate": 3e-3, "warmup": 0},
        "run": {"dir": str(place / "run"), "save_every": None, "eval_every": None},
    }
    return run(Config.model_validate(config), backend).adapter_dir
