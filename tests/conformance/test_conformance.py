"""The conformance suite over every installed backend.

A backend named in DUALTUNE_TEST_BACKENDS (comma separated) must be installed: one that is missing fails instead of
being skipped. A device other than the default is named as `torch:cuda`.
"""

import math
import os
from dataclasses import replace

import pytest

from dualtune.base.errors import EnvironmentFault
from dualtune.engine.backend import SharedBase, get_backend
from dualtune.engine.decoding import CannotBatch
from dualtune.engine.testing.conformance import CHECKS, PACKING_CHECKS, Case, llama_case, softmax_case
from dualtune.engine.testing.conformance_decoding import check_rows_together_compute_what_each_computes_alone
from dualtune.engine.testing.conformance_state import (
    assert_same_state,
    forward_backward_with_bad_weight,
    state_of,
    train,
)

REQUIRED = [name for name in os.environ.get("DUALTUNE_TEST_BACKENDS", "").split(",") if name]
BACKENDS = REQUIRED or ["numpy", "torch", "mlx"]


# What transformers and mlx-lm call a Llama with an attention window in some of its layers.
WINDOWED = {"torch": "ministral", "mlx": "mistral"}


@pytest.fixture(params=BACKENDS)
def backend(request):
    name, _, device = request.param.partition(":")
    try:
        return get_backend(name, device or "auto")
    except EnvironmentFault as error:
        if REQUIRED:
            raise
        pytest.skip(str(error))


@pytest.fixture
def case(backend, tmp_path) -> Case:
    case = (softmax_case if backend.name == "numpy" else llama_case)(backend, tmp_path)
    return replace(case, shared_base=SharedBase())  # half of the time of some checks was that of loading it


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_engine(check, case):
    check(case)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_the_plain_code_of_an_engine(check, case):
    if "reference" not in case.backend.capabilities().get("model.kernels", ()):
        pytest.skip("has one kind of code")
    check(replace(case, kernels="reference"))


def test_rows_together_keep_to_the_window_of_attention(backend, tmp_path):
    """Torch keeps all keys and masks those outside of the window; mlx-lm's caches of such layers forget, and say so."""
    if backend.name not in WINDOWED:
        pytest.skip("has no models with a window")
    changes = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    case = llama_case(backend, tmp_path, model_type=WINDOWED[backend.name], **changes)
    if backend.name == "mlx":
        with pytest.raises(CannotBatch, match="RotatingKVCache"):
            case.engine().decoding()
    else:
        check_rows_together_compute_what_each_computes_alone(case)


@pytest.mark.parametrize("check", PACKING_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_packing_keeps_to_the_window_of_attention(check, backend, tmp_path):
    if backend.name not in WINDOWED:
        pytest.skip("has no models with a window")
    changes = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    check(llama_case(backend, tmp_path, model_type=WINDOWED[backend.name], **changes))


@pytest.mark.parametrize("spoiled", ["loss", "gradient"])
def test_either_number_alone_stops_the_step(spoiled, case):
    """The verbs cannot make every engine's loss bad and its gradient not, or the reverse; its accumulator can."""
    engine, batch = case.engine(), case.batch()
    train(engine, batch)
    before = state_of(engine)
    engine.forward_backward(batch, divisor=batch.num_targets)
    loss = engine._loss + 0  # a copy: torch adds in place
    if spoiled == "loss":
        engine._loss = loss + math.inf
    else:
        forward_backward_with_bad_weight(engine, batch, math.nan, num_targets=batch.num_targets)
        engine._loss = loss
    output = engine.optim_step(lr=1e-2, max_grad_norm=1.0)
    finite = [math.isfinite(float(number)) for number in (output.loss, output.grad_norm)]
    assert finite == [spoiled == "gradient", spoiled == "loss"]
    assert_same_state(engine, *before)


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_engine_on_cuda(check, tmp_path):
    try:
        backend = get_backend("torch", "cuda")
    except EnvironmentFault as error:
        pytest.skip(str(error))
    check(llama_case(backend, tmp_path))
