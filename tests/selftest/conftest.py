"""Sites on the CPU: the NumPy engine with its tiny model, or a real backend with the demo's model."""

import pytest

from dualtune.card import card_of
from dualtune.selftest.checks.finding import Site
from dualtune.selftest.checks.sizes import SIZES
from dualtune.selftest.process import DEMO_TRAINING


@pytest.fixture
def site_of(open_backend, tmp_path, tiny_softmax, write_rows, qa_rows):
    """The site of a backend on the CPU."""

    def make(name: str) -> Site:
        backend, device = open_backend(name), card_of(name).device("cpu")
        training = DEMO_TRAINING
        if name == "numpy":
            files = {"model.name": str(tiny_softmax), "data.train": str(write_rows(qa_rows))}
            training = files | {"adapter.targets": "all-linear"}
        (place := tmp_path / "site").mkdir()
        return Site(backend, device, SIZES["cpu"], place, training)

    return make
