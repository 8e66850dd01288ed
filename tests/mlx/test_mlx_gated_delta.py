"""The gated delta rule in chunks: the outputs, the state and the gradients of mlx-lm's loop over tokens."""

import importlib

import pytest

mx = pytest.importorskip("mlx.core")
plain = pytest.importorskip("mlx_lm.models.gated_delta").gated_delta_update
gated_delta = importlib.import_module("dualtune_mlx.kernels.gated_delta")

OURS = gated_delta.in_chunks(plain)
# Rows, tokens, heads of keys and of values, their sizes.
SHAPES = [
    (2, 70, 2, 4, 16, 16),
    (1, 200, 2, 2, 32, 16),
    (2, 7, 1, 3, 16, 32),
    (1, 64, 1, 1, 16, 16),
    (1, 2, 1, 1, 8, 8),
]


@pytest.fixture(autouse=True)
def _on_the_cpu():
    with mx.stream(mx.cpu):
        yield


def inputs(B, T, K, H, d, e, *, dtype=mx.float32):
    """q, k, v, a, b, A_log, dt_bias, as the layers of Qwen3.5 give them. The keys have a length of one."""
    mx.random.seed(T)
    shapes = [(B, T, K, d), (B, T, K, d), (B, T, H, e), (B, T, H), (B, T, H), (H,), (H,)]
    q, k, *others = (mx.random.normal(shape) for shape in shapes)
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return [x.astype(dtype) for x in (q * d**-0.5, k, *others)]


def gap(a, b):
    return float(mx.abs(a - b).max() / mx.maximum(mx.abs(b).max(), 1e-6))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"allow_neg_eigval": True}], ids=["beta to 1", "beta to 2"])
def test_chunks_compute_what_the_loop_computes(shape, options):
    given = inputs(*shape)
    weights = mx.random.normal((*shape[:2], shape[3], shape[5]))
    results = []
    for update in (OURS, plain):
        function = lambda *x, update=update: (update(*x, use_kernel=False, **options)[0] * weights).sum()  # noqa: E731
        y, state = update(*given, use_kernel=False, **options)
        results.append([y, state, *mx.grad(function, argnums=tuple(range(7)))(*given)])
    assert max(map(gap, *results)) < 1e-4
    assert gated_delta.CHUNK == 64 and shape[:2] == results[0][0].shape[:2]


def test_decays_that_end_in_zero_leave_no_nan():
    """A head that forgets everything at each token: the decay over a chunk is below the smallest float."""
    q, k, v, a, b, A_log, dt_bias = inputs(1, 130, 1, 2, 16, 16)
    given = q, k, v, a + 50, b, A_log + 4, dt_bias
    slopes = mx.grad(lambda *x: OURS(*x, use_kernel=False)[0].sum(), argnums=(0, 1, 2, 3, 4))(*given)
    assert all(bool(mx.isfinite(each).all()) for each in slopes)
    assert gap(OURS(*given)[0], plain(*given, use_kernel=False)[0]) < 1e-4


def test_a_text_that_goes_on_and_a_decay_for_each_channel_are_left_to_mlx_lm():
    given = inputs(1, 6, 1, 2, 16, 16)
    _, state = OURS(*given)
    whole, _ = plain(*(x if x.ndim == 1 else mx.concatenate([x, x], axis=1) for x in given), use_kernel=False)
    assert gap(OURS(*given, state)[0], whole[:, 6:]) < 1e-5
    called = []
    update = gated_delta.in_chunks(lambda *args, **options: called.append(options))
    update(*given[:3], mx.zeros((1, 6, 2, 16)), *given[4:])
    update(*given, lower_bound=-5.0)
    assert called == [{}, {"lower_bound": -5.0}]
