"""What the tests that measure memory share."""

import gc

import pytest


@pytest.fixture(scope="module")
def fewer_objects_to_collect():
    """What was imported is no garbage: without it, a collection before a measurement is fifty times faster."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
