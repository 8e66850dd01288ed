"""`dualtune.engine.kernels.lora_backward`: against autograd in float64, in every form of input, and what it refuses."""

import gc
import importlib

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.engine.kernels import lora_backward

torch = pytest.importorskip("torch")

SCALE = 1.7
# Tokens, input features K, output features N, rank: M > N, M < N, K = N, and none a multiple of anything.
SHAPES = [(64, 32, 48, 8), (16, 128, 256, 8), (96, 64, 64, 16), (33, 300, 17, 5), (1, 40, 24, 4)]
# Of the largest number, and of the norm.
LIMITS = {"float64": (1e-6, 1e-6), "float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-3), "float16": (2e-2, 2e-3)}
NAMES = ("grad_down", "grad_up", "grad_x")


def inputs(M, K, N, r, dtype=torch.float32):
    """grad_out, x, lora_down, lora_up."""
    return [torch.randn(*shape).to(dtype) for shape in ((M, N), (M, K), (r, K), (N, r))]


def by_autograd(grad_out, *leaves):
    x, down, up = (leaf.detach().double().requires_grad_() for leaf in leaves)
    (SCALE * (x @ down.T) @ up.T).backward(grad_out.double())
    return down.grad, up.grad, x.grad


def assert_close(found, expected, limits):
    for name, ours, theirs in zip(NAMES[: len(found)], found, expected, strict=True):
        gap = ours.double() - theirs
        assert gap.abs().max() <= limits[0] * theirs.abs().max(), name
        assert gap.norm() <= limits[1] * theirs.norm(), name


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_autograd_s_gradient(shape, dtype):
    given = inputs(*shape, getattr(torch, dtype))
    found = lora_backward(*given, SCALE, need_grad_x=True)
    assert_close(found, by_autograd(*given), LIMITS[dtype])
    for ours, argument in zip(found, (given[2], given[3], given[1]), strict=True):
        assert (ours.shape, ours.dtype) == (argument.shape, argument.dtype)


def test_rows_of_a_batch_and_any_strides():
    grad_out, x, down, up = inputs(24, 32, 48, 8)
    expected = lora_backward(grad_out, x, down, up, SCALE, need_grad_x=True)
    batched = lora_backward(grad_out.view(4, 6, 48), x.view(4, 6, 32), down, up, SCALE, need_grad_x=True)
    assert batched[2].shape == (4, 6, 32)
    turned = [t.T.contiguous().T for t in (grad_out, x, down, up)]
    across = [t.view(4, 6, -1).transpose(0, 1).contiguous().transpose(0, 1) for t in (grad_out, x)]
    assert not any(t.is_contiguous() for t in (*turned, *across))
    strided = lora_backward(*turned, SCALE, need_grad_x=True)
    both = lora_backward(*across, *turned[2:], SCALE, need_grad_x=True)
    for found in (batched, strided, both):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.reshape(theirs.shape), theirs, rtol=1e-5, atol=1e-4)


def test_the_gradient_of_the_input_only_if_asked_for():
    given = inputs(8, 16, 24, 4)
    two, three = (lora_backward(*given, SCALE, need_grad_x=needed) for needed in (False, True))
    assert (len(two), len(three)) == (2, 3)
    assert all(torch.equal(a, b) for a, b in zip(two, three, strict=False))


def test_micro_batches_add_up_in_grad():
    """With autograd: a function of one's own whose backward pass is ours."""

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, down, up):
            ctx.save_for_backward(x, down, up)
            return SCALE * (x @ down.T) @ up.T

        @staticmethod
        def backward(ctx, grad_out):
            down, up, x = lora_backward(grad_out, *ctx.saved_tensors, SCALE, need_grad_x=True)
            return x, down, up

    grad_out, x, down, up = inputs(64, 32, 48, 8)
    leaves = [t.requires_grad_() for t in (x, down, up)]
    for rows in torch.arange(64).split(16):
        Layer.apply(x[rows], down, up).backward(grad_out[rows])
    assert_close((down.grad, up.grad, x.grad), by_autograd(grad_out, *leaves), (1e-5, 1e-5))


def test_master_weights_in_float32_get_gradients_in_float32():
    grad_out, x, down, up = inputs(16, 32, 48, 8, torch.bfloat16)
    found = lora_backward(grad_out, x, down.float(), up.float(), SCALE)
    assert [grad.dtype for grad in found] == [torch.float32] * 2
    assert_close(found, by_autograd(grad_out, x, down, up)[:2], (1e-4, 1e-4))  # not rounded to 16 bits


def test_a_thousand_calls_leave_nothing_behind(unscanned):
    given = inputs(8, 16, 24, 4, torch.bfloat16)

    def tensors():
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    lora_backward(*given, SCALE, need_grad_x=True)
    before = tensors()
    for _ in range(1000):
        lora_backward(*given, SCALE, need_grad_x=True)
    assert tensors() == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_thousand_calls_need_the_memory_of_one(dtype):
    """Counted by torch's allocator on a CPU: one byte that stayed would be a thousand here."""
    given = inputs(64, 96, 128, 4, getattr(torch, dtype))

    def calls(count):
        for _ in range(count):
            lora_backward(*given, SCALE, need_grad_x=True)

    calls(1)
    profile = importlib.import_module("dualtune_torch.profile")
    once, often = (profile.peak_of(lambda count=count: calls(count), given[0].device) for count in (1, 1000))
    outputs = sum(t.nbytes for t in given[1:])
    assert outputs < once == often


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("grad_out", lambda t: t[:7], r"grad_out: got \[7, 24\], allowed: \[8, 24\]: the tokens of x"),
        ("grad_out", lambda t: t[:, :5], r"grad_out: got \[8, 5\], allowed: \[8, 24\]"),
        ("x", lambda t: t[:, :5], r"x: got \[8, 5\], allowed: \[8, 16\]: \[…, K\], with K = 16 as in lora_down \[4,"),
        ("x", lambda t: t[0], r"x: got \[16\], allowed: a tensor of 2 or 3 dimensions"),
        ("x", lambda t: t.double(), r"x: got torch\.float64, allowed: torch\.float32, as grad_out"),
        ("x", lambda t: t.to("meta"), r"x: got a tensor on meta, allowed: cpu, as grad_out"),
        ("lora_up", lambda t: t[:, :3], r"lora_up: got \[24, 3\], allowed: \[24, 4\]: \[N, r\], with r = 4"),
        ("lora_up", lambda t: t.int(), r"lora_up: got torch\.int32, allowed: float64, float32, bfloat16, float16"),
        ("lora_down", lambda t: t[None], r"lora_down: got \[1, 4, 16\], allowed: a tensor of 2 dimensions"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(name, change, message):
    given = dict(zip(("grad_out", "x", "lora_down", "lora_up"), inputs(8, 16, 24, 4), strict=True))
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=f"^lora_backward: {message}"):
        lora_backward(**given, scale=SCALE)


def test_tensors_of_nobody_are_refused():
    with pytest.raises(TypeError, match=r"grad_out: got numpy\.ndarray"):
        lora_backward(*[np.ones((2, 2))] * 4, 1.0)


def test_a_gpu_that_is_required_and_absent_is_an_error():
    with pytest.raises(EnvironmentFault, match=r"require_gpu=True, but grad_out is on cpu.*check-gpu|Move the arg"):
        lora_backward(*inputs(8, 16, 24, 4), SCALE, require_gpu=True)


@pytest.mark.parametrize(("value", "message"), [("cutlass", "got 'cutlass', allowed: auto, triton, torch"),
                                               ("triton", "got triton, but the device is cpu")])  # fmt: skip
def test_a_wrong_choice_of_kernels_is_an_error(value, message, monkeypatch):
    monkeypatch.setenv("DUALTUNE_KERNELS", value)
    with pytest.raises(ConfigError, match=f"^DUALTUNE_KERNELS: {message}"):
        lora_backward(*inputs(8, 16, 24, 4), SCALE)


def on_a_gpu(test):
    test = pytest.mark.parametrize("kernels", ["torch", "triton"])(test)
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")(test))


@on_a_gpu
@pytest.mark.parametrize("dtype", LIMITS)
def test_both_paths_are_right_on_a_gpu(dtype, kernels, monkeypatch):
    monkeypatch.setenv("DUALTUNE_KERNELS", kernels)
    given = [t.cuda() for t in inputs(512, 768, 768, 16, getattr(torch, dtype))]
    with torch.cuda.stream(torch.cuda.Stream()):
        found = lora_backward(*given, SCALE, need_grad_x=True, require_gpu=True)
    torch.cuda.synchronize()
    assert_close(found, by_autograd(*given), LIMITS[dtype])


@on_a_gpu
def test_a_thousand_calls_leave_cuda_s_allocator_as_it_was(kernels, monkeypatch):
    monkeypatch.setenv("DUALTUNE_KERNELS", kernels)
    given = [t.cuda() for t in inputs(512, 768, 768, 16, torch.bfloat16)]

    def counters():
        torch.cuda.synchronize()
        found = torch.cuda.memory_stats()
        return {name: found[name] for name in found if name.endswith(".current") or name == "num_alloc_retries"}

    def peak_of_calls(count):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(count):
            lora_backward(*given, SCALE, need_grad_x=True)
        return torch.cuda.max_memory_allocated()

    peak_of_calls(3)
    before, once = counters(), peak_of_calls(1)
    assert peak_of_calls(1000) == once and counters() == before


@on_a_gpu
def test_a_graph_of_it_computes_the_same_of_other_inputs(kernels, monkeypatch):
    monkeypatch.setenv("DUALTUNE_KERNELS", kernels)
    sizes = (512, 768, 768, 16, torch.bfloat16)
    static, stream = [t.cuda() for t in inputs(*sizes)], torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compiles; the libraries set up their workspaces
        lora_backward(*static, SCALE, need_grad_x=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = lora_backward(*static, SCALE, need_grad_x=True)
    for _ in range(2):
        given = [t.cuda() for t in inputs(*sizes)]
        for old, new in zip(static, given, strict=True):
            old.copy_(new)
        graph.replay()
        assert_close(replayed, by_autograd(*given), LIMITS["bfloat16"])
