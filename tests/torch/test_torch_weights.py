"""The torch backend's cross-entropy with weights, and the log-probabilities of targets, each against the plain code."""

import pytest

torch = pytest.importorskip("torch")

from dualtune_torch.kernels import attention, compiled, cross_entropy  # noqa: E402
from dualtune_torch.kernels.cross_entropy import Scaling  # noqa: E402

pytestmark = pytest.mark.covering(2)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CLOSE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}  # relative, by norm
COMPILE = {"plain": lambda function: function, "compiled": compiled.compile_function}


CODE = pytest.mark.parametrize(
    ("dtype", "how"),
    [
        ("float32", "plain"), ("bfloat16", "plain"), ("float16", "plain"), ("bfloat16", "compiled"),
        *(pytest.param(dtype, "compiled", marks=pytest.mark.long) for dtype in ("float32", "float16")),
    ],
)  # fmt: skip


def randn(*shape, seed=0, dtype="float32"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def leaf(x):
    return x.clone().requires_grad_()


def gap(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@CODE
def test_the_loss_in_chunks_takes_weights(dtype, how, monkeypatch):
    """Fractions, 0, negative ones, and ones so small that float16 holds them only with its loss scale."""
    monkeypatch.setitem(cross_entropy.LOSS_ROWS, "cpu", 13)
    rows, cap = 40, 3.0
    hidden, head = randn(rows, 24, dtype=dtype), randn(97, 24, seed=1, dtype=dtype)
    labels = torch.arange(rows) * 31 % 97
    for weights in (torch.tensor([0.3, 0.0, -1.5, 2.0]).repeat(rows // 4), torch.full((rows,), 1e-8)):
        a, b = leaf(hidden), leaf(hidden.float())
        loss = cross_entropy.LinearCrossEntropy.apply(a, head, None, labels, Scaling(cap), COMPILE[how], weights)
        plain = cross_entropy.reference(b, head.float(), None, labels, Scaling(cap), weights)
        with torch.no_grad():
            alone = cross_entropy.LinearCrossEntropy.apply(
                hidden, head, None, labels, Scaling(cap), COMPILE[how], weights
            )
        assert gap(loss, plain) <= CLOSE[dtype] and gap(alone, plain) <= CLOSE[dtype]
        (loss * 1024.0).backward()
        (plain * 1024.0).backward()
        assert a.grad.dtype == DTYPES[dtype] and gap(a.grad, b.grad) <= CLOSE[dtype]
        assert not a.grad[weights == 0].any()


@CODE
def test_the_logprobs_of_targets_come_in_chunks(dtype, how, monkeypatch):
    monkeypatch.setitem(cross_entropy.LOSS_ROWS, "cpu", 13)
    hidden, head, labels = randn(40, 24, dtype=dtype), randn(97, 24, seed=1, dtype=dtype), torch.arange(40) * 31 % 97
    found = cross_entropy.target_logprobs(hidden, head, None, labels, Scaling(3.0), COMPILE[how])
    logits = attention.capped(hidden.float() @ head.float().T, 3.0)
    assert found.dtype == torch.float32
    assert gap(found, logits.log_softmax(-1)[torch.arange(40), labels]) <= CLOSE[dtype]
