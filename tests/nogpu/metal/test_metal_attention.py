"""Attention of packed rows as Metal computes it: no array has a row's tokens squared, in either pass.

Metal has no fused attention for training (mlx 0.32, mlx/backend/metal/scaled_dot_product_attention.cpp: use_fallback):
MLX computes it there from the same parts as on a CPU, where they are measured.
"""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest

from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing.conformance import assert_close, gradient, random_adapter
from dualtune.engine.testing.tiny_models import pack, random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

mx = pytest.importorskip("mlx.core")
attention = importlib.import_module("dualtune_mlx.kernels.attention")
choose = importlib.import_module("dualtune_mlx.kernels.choose")
SPEC = AdapterSpec(4, 8.0, 0.0, ("all-linear",))


@pytest.fixture
def load(open_backend, tmp_path):
    """An engine with the code that Metal compiles, uncompiled: a CPU would call its C++ compiler."""
    path = write_tiny_llama(tmp_path / "model", num_hidden_layers=1, max_position_embeddings=4096)

    def load_(kernels="fused"):
        request = LoadRequest(path, "float32", "none", "pretrained", SPEC, OptimizerSpec(), seed=1, kernels=kernels)
        engine = open_backend("mlx").load(request)
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        return engine

    mx.disable_compile()
    yield load_
    mx.enable_compile()


def packed_row(*lengths):
    return pack(random_batch([*lengths], 96), [[*range(len(lengths))]], pad=3)


@pytest.fixture
def scores(monkeypatch):
    """(queries, keys) of each product of queries and keys, in the order of the calls."""
    found, plain = [], mx.fast.scaled_dot_product_attention

    def watched(q, k, v, **options):
        found.append((q.shape[2], k.shape[2]))
        return plain(q, k, v, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", watched)
    return found


@pytest.mark.parametrize(("longest", "reach"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (17, 32)])
def test_the_reach_is_a_power_of_two_of_chunks(longest, reach):
    pieces = [(0, 2, True), (2, longest, True), (2 + longest, 99, False)]
    assert attention.reach_of([attention.DocumentPiece(*piece) for piece in pieces], chunk=4) == reach


@pytest.mark.parametrize("reach", [4, 8, 16, None])
def test_keys_out_of_reach_change_nothing(reach, scores):
    """Documents of at most four tokens: the result is the same to the rounding of float32, and so are all gradients."""
    segments_BT = mx.array([[1] * 4 + [2] * 3 + [3] * 4 + [4] * 2 + [5] * 4 + [0] * 2, [1] * 3 + [2] * 4 + [0] * 12])
    real_BT = np.array(segments_BT) > 0
    T = segments_BT.shape[1]
    seen = np.array(segments_BT)[:, None, :, None] == np.array(segments_BT)[:, None, None, :]
    mask, weights = mx.array(seen & np.tri(T, dtype=bool)), mx.array(real_BT[:, None, :, None].astype(np.float32))
    inputs = [mx.random.normal((2, heads, T, 8)) for heads in (4, 2, 2)]

    def plain(q, k, v):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask) * weights

    rows = SimpleNamespace(segments_BT=segments_BT, shared=None)

    def ours(q, k, v):
        return attention.chunked(q, k, v, 0.3, rows, chunk=4, reach=reach) * weights

    slope = mx.random.normal((2, 4, T, 8))
    expected = [*mx.vjp(plain, inputs, [slope])[0], *mx.vjp(plain, inputs, [slope])[1]]
    scores.clear()
    found = [*mx.vjp(ours, inputs, [slope])[0], *mx.vjp(ours, inputs, [slope])[1]]
    assert all(bool(mx.allclose(a, b, rtol=1e-5, atol=1e-6)) for a, b in zip(found, expected, strict=True))
    assert max(keys for _, keys in scores) == (T if reach is None else min(T, 4 + reach))


def test_a_long_packed_row_learns_the_gradient_of_the_plain_code(load, scores):
    batch = packed_row(300, 500, 290, 130)
    expected = gradient(load("reference"), batch)
    assert max(scores) == (batch.tokens_BT.shape[1],) * 2, "the plain code multiplies the whole row by itself"
    scores.clear()
    assert_close(gradient(load(), batch), expected, 1e-5)
    assert max(queries for queries, _ in scores) == 512 and max(keys for _, keys in scores) == 1024


def test_memory_grows_with_the_row_and_not_with_its_square(load):
    """Measured by MLX's allocator, over both passes: from 2,048 to 4,096 tokens it doubles."""
    engine, peaks = load(), []
    for documents in (4, 8):
        batch = packed_row(*[509] * documents)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        engine.forward_backward(batch, divisor=7.0)
        mx.synchronize()
        peaks.append(mx.get_peak_memory() - before)
        engine.discard()
    heads, tokens = 4, 8 * 509
    assert peaks[1] < 2.2 * peaks[0] and peaks[1] < heads * tokens**2 * 4, "less than one array of all scores"


def test_code_is_compiled_for_each_reach_of_an_engine():
    """Two micro-batches of the same shape, whose documents have other lengths."""
    chosen = choose.Kernels(attention.Attention(), compiles=True)
    within_reach = chosen.wrap(lambda x: x[: chosen.attention.reach])
    mx.enable_compile()
    for reach in (4, 8, 4, None):
        chosen.attention.reach = reach
        assert within_reach(mx.arange(20)).size == (reach or 20)
    chosen.attention = None  # of a model whose attention stays plain
    assert chosen.wrap(mx.square)(mx.array(3.0)).item() == 9.0
