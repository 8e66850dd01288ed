"""Sites on the CPU: the NumPy engine with its tiny model, or a real backend with the demo's model."""

import pytest

from dualtune.doctor.selftest.case import SIZES, Site
from dualtune.doctor.selftest.run import DEMO_TRAINING
from dualtune.engine.card import card_of


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
