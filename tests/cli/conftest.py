"""The command line in a process of its own, and config files."""

import json
from functools import cache
from pathlib import Path

import pytest

from dualtune.doctor.bench import measure

SPEEDS = {}  # of this machine, by backend and dtype
copied_bytes_per_s = cache(measure._copied_bytes_per_s)


@pytest.fixture(scope="module", autouse=True)
def _measured_once():
    """A plan and a benchmark measure this machine for some seconds; all tests of a process have the same."""
    peak_flops = measure.peak_flops

    def once(backend, dtype):
        key = backend.name, dtype
        if key not in SPEEDS:
            SPEEDS[key] = peak_flops(backend, dtype)
        return SPEEDS[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "peak_flops", once)
        patch.setattr(measure, "_copied_bytes_per_s", copied_bytes_per_s)
        yield


@pytest.fixture(scope="session")
def dualtune(python):
    """`dualtune …` as a real process."""
    return lambda *args, **options: python("-m", "dualtune.cli.main", *args, **options)


@pytest.fixture
def config_file(tmp_path, write_rows, qa_rows, tiny_softmax):
    """Write a small config, with changes such as {"train.steps": 2}; None removes a key. The run lands in runs/a."""
    data = write_rows(qa_rows)

    def write(changes=None, name="config.yaml") -> Path:
        settings = {
            "model.name": str(tiny_softmax), "adapter.rank": 2, "adapter.alpha": 4, "adapter.dropout": 0,
            "adapter.targets": "all-linear", "data.train": str(data), "data.eval": 0.25, "data.max_length": 64,
            "train.steps": 4, "train.documents_per_step": 4, "train.learning_rate": 0.01,
            "run.dir": str(tmp_path / "runs" / "a"),
        } | (changes or {})  # fmt: skip
        sections: dict = {}
        for key, value in settings.items():
            section, _, field = key.partition(".")
            sections.setdefault(section, {})[field] = str(value) if isinstance(value, Path) else value
        path = tmp_path / name
        path.write_text("".join(f"{section}: {json.dumps(fields)}\n" for section, fields in sections.items()))
        return path

    return write
