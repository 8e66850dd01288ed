"""What the tests of `dualtune verify` share: a tiny base, adapters that short runs wrote, and copies of them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dualtune.config import Config
from dualtune.engine.testing.tiny_models import write_tiny_llama
from dualtune.model.formats.directory import read_adapter, write_adapter
from dualtune.show.run import run
from dualtune.use.verify.verify import verify

VOCAB = 262  # of the byte tokenizer


@pytest.fixture(scope="package")
def write_model(tiny_llama):
    """Write a Llama wider than `tiny_llama`, so that MLX quantizes all of it, with the same tokenizer and template."""

    def write(path, seed=0, **changes) -> Path:
        shutil.copytree(tiny_llama, path)
        settings = {"vocab_size": VOCAB, "max_position_embeddings": 512} | changes
        return write_tiny_llama(path, seed, **settings)

    return write


@pytest.fixture(scope="package")
def model(write_model, tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="package")
def train(model, tmp_path_factory, open_backend):
    """Train a few steps on a backend; the adapter directory."""
    directory = tmp_path_factory.mktemp("runs")
    rows = [{"prompt": f"{i} plus {i}?", "completion": f"{2 * i}"} for i in range(16)]
    data = directory / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def run_it(backend, *, name=None, **sections) -> Path:
        values = {
            "model": {"name": str(model), "dtype": "float32"}, "adapter": {"rank": 4, "alpha": 8.0, "dropout": 0.0},
            "data": {"train": str(data), "eval": 0, "max_length": 64},
            "train": {"steps": 6, "documents_per_step": 4, "learning_rate": 1e-2, "warmup": 0},
            "run": {"dir": str(directory / (name or backend)), "save_every": None, "eval_every": None},
        }  # fmt: skip
        config = Config.model_validate({key: value | sections.get(key, {}) for key, value in values.items()})
        return run(config, open_backend(backend)).adapter_dir

    return run_it


@pytest.fixture(scope="package")
def trained(train):
    """The adapter directory of a short float32 run on each backend."""
    found: dict[str, Path] = {}
    return lambda backend: found.setdefault(backend, found.get(backend) or train(backend))


@pytest.fixture
def check(open_backend, model):
    def verify_on(directory, backend="torch", base=None, **options):
        return verify(directory, str(base or model), lambda: open_backend(backend), **options)

    return verify_on


@pytest.fixture
def rewritten(tmp_path):
    """A copy of an adapter directory by a tool that changes it and passes dualtune.json's records on."""

    def rewrite(directory, change=lambda name, tensor: tensor, **spec) -> Path:
        adapter = read_adapter(directory)
        tensors = {name: changed for name, w in adapter.tensors.items() if (changed := change(name, w)) is not None}
        write_adapter(tmp_path / "rewritten", replace(adapter, spec=replace(adapter.spec, **spec), tensors=tensors))
        return tmp_path / "rewritten"

    return rewrite


@pytest.fixture
def with_record(tmp_path):
    """A copy of an adapter directory whose dualtune.json was edited."""

    def edit(directory, change) -> Path:
        path = tmp_path / "edited"
        shutil.copytree(directory, path)
        record = json.loads((path / "dualtune.json").read_text())
        change(record)
        (path / "dualtune.json").write_text(json.dumps(record))
        return path

    return edit
