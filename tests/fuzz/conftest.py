"""The long form of fuzzing runs when it is asked for: `pytest -m fuzz`."""

import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "fuzz: a hundred thousand hostile inputs, ten minutes")


def pytest_collection_modifyitems(config, items):
    if "fuzz" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("fuzz"):
                item.add_marker(pytest.mark.skip(reason="runs when asked for: pytest -m fuzz"))
