"""Products on a CPU: where oneDNN's are taken, that they are MKL's but for rounding, in training as in generation, and
that 16 bits which the CPU does not multiply are widened."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from dualtune.engine.backend import LoadRequest, get_backend  # noqa: E402
from dualtune.engine.testing.tiny_models import random_batch, write_tiny_llama  # noqa: E402
from dualtune.model.adapter import AdapterSpec  # noqa: E402
from dualtune.model.optimizer import OptimizerSpec  # noqa: E402
from dualtune_torch.adapter import adapter_buffer  # noqa: E402
from dualtune_torch.kernels import products  # noqa: E402
from dualtune_torch.kernels.cross_entropy import LinearCrossEntropy, Scaling, reference, target_logprobs  # noqa: E402
from dualtune_torch.kernels.lora import add_groups  # noqa: E402
from dualtune_torch.lora import LoRALinear  # noqa: E402
from dualtune_torch.methods import DropoutSeeds  # noqa: E402

ROWS, IN, OUT = 128, 256, 512  # of one product: as many multiplications as LEAST
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CLOSE = 1e-5  # of the largest number

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this torch has no oneDNN",
)


@pytest.fixture(params=[True, False], ids=["onednn", "mkl"])
def is_faster(request, monkeypatch) -> bool:
    monkeypatch.setattr(products, "is_faster", lambda: request.param)
    monkeypatch.setattr(products, "has_avx512", lambda: True)
    return request.param


@pytest.fixture
def on_amd(monkeypatch):
    monkeypatch.setattr(products, "is_faster", lambda: True)
    monkeypatch.setattr(products, "has_avx512", lambda: True)
    monkeypatch.setattr(products, "is_native", lambda dtype: True)


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def widened(request, monkeypatch):
    """A dtype that this CPU does not multiply, and blocks of a few rows."""
    monkeypatch.setattr(products, "is_native", lambda dtype: False)
    monkeypatch.setattr(products, "WIDENED_AT_ONCE", 7 * IN)
    return request.param


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


def test_without_avx_512_it_takes_the_output_head_s_product_alone(on_amd, monkeypatch):
    monkeypatch.setattr(products, "has_avx512", lambda: False)
    monkeypatch.setattr(products, "LEAST_OUTPUTS", 4 * OUT)
    layer, head = randn(OUT, IN), randn(4 * OUT, IN)
    x, g, g_head = randn(ROWS, IN), randn(ROWS, OUT), randn(ROWS, 4 * OUT)
    with torch.no_grad():
        assert count(lambda: (products.linear(x, layer), products.times(g, layer))) == 0
        assert count(lambda: products.linear(x, head)) == 1 and count(lambda: products.times(g_head, head)) == 0


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


# --- 16 bits, widened -------------------------------------------------------------------------------------------------


def wide(function, *tensors):
    """What float32 computes of the same numbers, rounded to their dtype."""
    return function(*(tensor.float() for tensor in tensors)).to(tensors[0].dtype)


@torch.no_grad()
def test_widened_products_are_those_of_float32_rounded_once(widened):
    ulp = torch.finfo(widened).eps
    x, g, weight = (randn(*shape, dtype=widened) for shape in ((ROWS, IN), (ROWS, OUT), (OUT, IN)))
    bias, total = randn(OUT, dtype=widened), randn(ROWS, IN, dtype=widened)
    batch_a, batch_b = randn(3, 8, 16, dtype=widened), randn(3, 16, 8, dtype=widened)
    for result, expected in (
        (products.linear(x, weight, bias), wide(torch.nn.functional.linear, x, weight, bias)),
        (products.linear(x.view(2, -1, IN), weight)[1], wide(torch.nn.functional.linear, x, weight)[ROWS // 2 :]),
        (products.times(g, weight), wide(torch.matmul, g, weight)),
        (products.product(batch_a, batch_b), wide(torch.matmul, batch_a, batch_b)),
        (products.add_product(total.clone(), g, weight, 0.5), wide(lambda t, a, b: t + a @ b / 2, total, g, weight)),
    ):
        assert result.dtype == widened and gap(result.float(), expected.float()) <= ulp
    out = torch.empty_like(total)
    products.write_product(out, g, weight, 2.0)
    assert gap(out.float(), wide(lambda a, b: 2 * a @ b, g, weight).float()) <= ulp
    in_float32 = products.add_product(torch.zeros(ROWS, IN), g, weight)
    assert gap(in_float32, g.float() @ weight.float()) < 1e-6  # of a total in float32, not rounded


@torch.no_grad()
def test_the_rows_of_a_generated_token_are_not_widened(widened):
    x, weight = randn(products.UNWIDENED_ROWS + 1, IN, dtype=widened), randn(OUT, IN, dtype=widened)
    for rows, number in ((x[:-1], 1), (x, 0)):
        with Narrow() as narrow:
            products.linear(rows, weight)
        assert len(narrow.products) == number


@torch.no_grad()
def test_what_the_cpu_multiplies_is_not_widened(monkeypatch):
    monkeypatch.setattr(products, "is_native", lambda dtype: True)
    monkeypatch.setattr(products, "_widened", None)
    x, weight = randn(ROWS, IN, dtype=torch.bfloat16), randn(OUT, IN, dtype=torch.bfloat16)
    assert torch.equal(products.linear(x, weight), torch.nn.functional.linear(x, weight))
    assert torch.equal(products.times(x, weight.T), x @ weight.T)


def test_plain_layers_are_widened_with_their_gradients(widened):
    """Those of a model that is trained as a whole, too."""
    model = torch.nn.Sequential(torch.nn.Linear(IN, OUT), torch.nn.Linear(OUT, 8, bias=False)).to(widened)
    x = randn(2, ROWS // 2, IN, dtype=widened).requires_grad_()
    plain = [tensor.detach().float().requires_grad_() for tensor in (x, *model.parameters())]
    expected = torch.nn.functional.linear(torch.nn.functional.linear(*plain[:3]), plain[3])
    expected.sum().backward()
    products.widen_layers(model)
    y = model(x)
    y.sum().backward()
    ulp = torch.finfo(widened).eps
    assert y.dtype == widened and gap(y.float(), expected) <= 4 * ulp
    for tensor, as_float32 in zip((x, *model.parameters()), plain, strict=True):
        assert tensor.grad.dtype == widened and gap(tensor.grad.float(), as_float32.grad) <= 4 * ulp


def test_a_frozen_layer_that_is_widened_keeps_its_weight_alone(widened):
    layer = torch.nn.Linear(IN, OUT).to(widened).requires_grad_(False)
    products.widen_layers(layer)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()), lambda packed: packed):
        layer(randn(ROWS, IN, dtype=widened).requires_grad_())
    assert kept == [layer.weight.data_ptr()]


class Narrow(TorchDispatchMode):
    """The products with factors in 16 bits, with the shapes of these."""

    names = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")

    def __init__(self):
        super().__init__()
        self.products = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [x for x in args if torch.is_tensor(x)]
        if function._schema.name in self.names and any(x.dtype in products.SUPPORT for x in tensors):
            self.products.append([function._schema.name, *(tuple(x.shape) for x in tensors)])
        return function(*args, **(kwargs or {}))


METHODS = {"lora": {}, "dora": {"method": "dora"}, "full": {"method": "full"}, "some layers": {"targets": ("q_proj",)}}


@pytest.mark.parametrize(("name", "kernels"), [*((name, "auto") for name in METHODS), ("lora", "reference")])
def test_a_step_in_bfloat16_multiplies_nothing_in_16_bits(name, kernels, tmp_path, monkeypatch):
    """With `reference`, torch multiplies as it does."""
    monkeypatch.setattr(products, "is_native", lambda dtype: False)
    path = write_tiny_llama(tmp_path / "model")
    adapter = AdapterSpec(**{"rank": 4, "alpha": 8.0, "dropout": 0.1, "targets": TARGETS} | METHODS[name])
    request = LoadRequest(path, "bfloat16", "none", "random", adapter, OptimizerSpec(), seed=1, kernels=kernels)
    engine, batch = get_backend("torch", "cpu").load(request), random_batch([9, 16, 5], 96)
    engine.forward_backward(batch, divisor=batch.num_targets)
    narrow = Narrow()
    with narrow:
        engine.forward_backward(batch, divisor=batch.num_targets)
        engine.optim_step(lr=1e-3, max_grad_norm=1.0)
        engine.evaluate(batch)
    assert (narrow.products == []) == (kernels == "auto"), narrow.products
