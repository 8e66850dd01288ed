"""Products by oneDNN: where they are taken, and that they are MKL's but for rounding, in training as in generation."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from dualtune.model.adapter import AdapterSpec  # noqa: E402
from dualtune_torch.adapter import adapter_buffer  # noqa: E402
from dualtune_torch.kernels import products  # noqa: E402
from dualtune_torch.kernels.cross_entropy import LinearCrossEntropy, Scaling, reference, target_logprobs  # noqa: E402
from dualtune_torch.kernels.lora import add_groups  # noqa: E402
from dualtune_torch.lora import LoRALinear  # noqa: E402
from dualtune_torch.methods import DropoutSeeds  # noqa: E402

ROWS, IN, OUT = 128, 256, 512  # of one product: as many multiplications as LEAST
CLOSE = 1e-5  # of the largest number

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this torch has no oneDNN",
)


@pytest.fixture(params=[True, False], ids=["onednn", "mkl"])
def is_faster(request, monkeypatch) -> bool:
    monkeypatch.setattr(products, "is_faster", lambda: request.param)
    return request.param


@pytest.fixture
def on_amd(monkeypatch):
    monkeypatch.setattr(products, "is_faster", lambda: True)


def randn(*shape, seed=0, **how):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(**how)


class Counted(TorchDispatchMode):
    """How many products oneDNN computes."""

    def __init__(self):
        super().__init__()
        self.times = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.times += function is torch.ops.mkldnn._linear_pointwise.default
        return function(*args, **(kwargs or {}))


def count(work) -> int:
    with Counted() as counted:
        work()
    return counted.times


def gap(found, expected) -> float:
    return float(((found - expected).abs().max() / expected.abs().max()).detach())


# --- the products -----------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_both_products_are_those_of_double_precision(is_faster, with_bias):
    x, g, weight = randn(ROWS, IN, seed=1), randn(ROWS, OUT, seed=2), randn(OUT, IN, seed=3)
    bias = randn(OUT, seed=4) if with_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert gap(products.linear(x, weight, bias), expected) < 1e-6
    assert gap(products.linear(x.view(2, -1, IN), weight, bias).view(ROWS, OUT), expected) < 1e-6
    assert gap(products.linear(x, weight.T.contiguous().T, bias), expected) < 1e-6  # as Conv1D keeps it
    assert gap(products.times(g, weight), g.double() @ weight.double()) < 1e-6
    assert count(lambda: (products.linear(x, weight, bias), products.times(g, weight))) == 2 * is_faster


@torch.no_grad()
def test_nothing_of_a_weight_is_kept(on_amd):
    """The next call sees a weight that was changed in place, and the same numbers give the same bits."""
    x, g, weight = randn(ROWS, IN, seed=1), randn(ROWS, OUT, seed=2), randn(OUT, IN, seed=3)
    first = products.linear(x, weight), products.times(g, weight)
    weight.mul_(2)  # rounds nothing
    second = products.linear(x, weight), products.times(g, weight)
    assert all(torch.equal(after, 2 * before) for after, before in zip(second, first, strict=True))
    assert all(torch.equal(products.linear(x.clone(), weight.clone()), second[0]) for _ in range(3))


@pytest.mark.parametrize(
    ("why", "x", "weight"),
    [
        ("small", randn(ROWS - 1, IN), randn(OUT, IN)),
        ("16 bits", randn(ROWS, IN, dtype=torch.bfloat16), randn(OUT, IN, dtype=torch.bfloat16)),
        ("64 bits", randn(ROWS, IN, dtype=torch.float64), randn(OUT, IN, dtype=torch.float64)),
        ("rows apart", randn(ROWS, 2 * IN)[:, :IN], randn(OUT, IN)),
        ("weight apart", randn(ROWS, IN), randn(OUT, 2 * IN)[:, :IN]),
    ],
)  # fmt: skip
def test_what_onednn_does_not_serve_stays_as_it_is(on_amd, why, x, weight):
    with torch.no_grad():
        assert count(lambda: products.linear(x, weight)) == 0
        assert torch.equal(products.linear(x, weight), torch.nn.functional.linear(x, weight))
        g = randn(len(x), OUT, dtype=x.dtype)
        if why not in ("rows apart", "small"):
            assert torch.equal(products.times(g, weight), g @ weight) and count(lambda: products.times(g, weight)) == 0


def test_what_autograd_records_stays_as_it_is(on_amd):
    weight = randn(OUT, IN).requires_grad_()
    x = randn(ROWS, IN)
    assert count(lambda: products.linear(x, weight).sum().backward()) == 0
    assert gap(weight.grad, x.sum(0).expand(OUT, IN)) < CLOSE


def test_only_amd_s_processors_take_it(monkeypatch):
    found = {}
    for is_amd in (True, False):
        products.is_faster.cache_clear()
        monkeypatch.setattr(products, "is_amd", lambda is_amd=is_amd: is_amd)
        found[is_amd] = products.is_faster()
    products.is_faster.cache_clear()
    assert found == {True: torch.backends.mkl.is_available(), False: False}


def test_where_it_is_not_faster_generation_computes_as_training(is_faster):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    assert products.ProductsOfFewRows(model).layers == ([model[0]] if is_faster else [])


# --- training ---------------------------------------------------------------------------------------------------------


def lora_layer(out: int, inputs: int):
    """One layer in a group of its own, with its buffer."""
    path = "model.layers.0.mlp.up_proj"
    base = torch.nn.Linear(inputs, out).requires_grad_(False)
    base.weight.copy_(randn(out, inputs, seed=1))
    base.bias.copy_(randn(out, seed=2))
    layer = LoRALinear(base, path, AdapterSpec(4, 8.0, 0.0, ()), DropoutSeeds())
    buffer = adapter_buffer({path: layer}, torch.device("cpu"), torch.float32)
    layer.lora_A.data.copy_(randn(4, inputs, seed=3))
    layer.lora_B.data.copy_(randn(out, 4, seed=4))
    buffer.refresh()
    return path, layer, buffer


def test_a_layer_with_an_adapter_takes_both_products(is_faster):
    path, layer, buffer = lora_layer(OUT, IN)
    x, slopes = randn(1, ROWS, IN, seed=5), randn(1, ROWS, OUT, seed=6)
    plain = x.clone().requires_grad_()
    expected = layer(plain)
    (expected * slopes).sum().backward()
    dA = layer.lora_A.grad.clone()
    layer.lora_A.grad.zero_()
    add_groups({path: layer}, buffer, lambda function: function)
    own, kept = x.clone().requires_grad_(), []
    assert count(lambda: kept.append(layer(own))) == is_faster
    assert count(lambda: (kept[0] * slopes).sum().backward()) == is_faster
    assert gap(kept[0], expected) < CLOSE and gap(own.grad, plain.grad) < CLOSE
    assert gap(layer.lora_A.grad, dA) < CLOSE


def test_a_forward_of_its_own_is_used(on_amd):
    """Generation gives few rows one; other code may, too."""
    path, layer, buffer = lora_layer(OUT, IN)
    add_groups({path: layer}, buffer, lambda function: function)
    x = randn(1, ROWS, IN, seed=5)
    with torch.no_grad():
        before = layer(x)
        layer.base.forward = lambda x: torch.zeros(len(x), OUT)
        update = layer(x.clone())
        assert gap(before - update, torch.nn.functional.linear(x, layer.base.weight, layer.base.bias)) < CLOSE


@pytest.mark.parametrize("K", [0, 3], ids=["one label", "three"])
def test_the_loss_takes_three_products_of_the_head(is_faster, K):
    """Logits and their gradient's, and for log-probabilities the logits alone."""
    hidden, head = randn(ROWS, IN, seed=1).requires_grad_(), randn(OUT, IN, seed=2) / 16
    tokens = np.random.default_rng(0).permuted(np.tile(np.arange(OUT), (ROWS, 1)), axis=1)
    labels = torch.from_numpy(tokens[:, :K] if K else tokens[:, 0])
    arguments = (head, None, labels, Scaling())
    kept = []
    assert count(lambda: kept.append(LinearCrossEntropy.apply(hidden, *arguments, lambda f: f))) == 2 * is_faster
    kept[0].backward()
    with torch.no_grad():
        assert count(lambda: kept.append(target_logprobs(hidden, *arguments, lambda f: f))) == is_faster
    plain = hidden.detach().clone().requires_grad_()
    columns = labels.T if K else [labels]
    expected = sum(reference(plain, head, None, column, Scaling()) for column in columns)
    expected.backward()
    assert gap(kept[0], expected) < CLOSE and gap(hidden.grad, plain.grad) < CLOSE
    assert gap(-kept[1].sum(), expected) < CLOSE
