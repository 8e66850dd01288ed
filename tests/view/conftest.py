"""A tiny run on the NumPy engine."""

import pytest

from dualtune.show.run import run


@pytest.fixture
def trained(open_backend, make_config, write_rows, qa_rows, tmp_path, tiny_softmax):
    """Train with overrides in the directory `run`; return the result."""
    data = write_rows(qa_rows)

    def train(backend, settings, hooks=()):
        config = make_config(data, {"run.dir": tmp_path / "run", "data.eval": 0.25} | settings, tiny_softmax)
        return run(config, open_backend(backend), hooks)

    return train
