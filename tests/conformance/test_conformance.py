"""The conformance suite over every installed backend.

A backend named in DUALTUNE_TEST_BACKENDS (comma separated) must be installed: one that is missing fails instead of
being skipped. A device other than the default is named as `torch:cuda`.
"""

import os

import pytest

from dualtune.backend import get_backend
from dualtune.errors import EnvironmentFault
from dualtune.testing.conformance import CHECKS, Case, llama_case, softmax_case

REQUIRED = [name for name in os.environ.get("DUALTUNE_TEST_BACKENDS", "").split(",") if name]
BACKENDS = REQUIRED or ["numpy", "torch", "mlx"]


@pytest.fixture(params=BACKENDS)
def case(request, tmp_path) -> Case:
    name, _, device = request.param.partition(":")
    try:
        backend = get_backend(name, device or "auto")
    except EnvironmentFault as error:
        if REQUIRED:
            raise
        pytest.skip(str(error))
    return (softmax_case if name == "numpy" else llama_case)(backend, tmp_path)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_engine(check, case):
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_engine_on_cuda(check, tmp_path):
    try:
        backend = get_backend("torch", "cuda")
    except EnvironmentFault as error:
        pytest.skip(str(error))
    check(llama_case(backend, tmp_path))
