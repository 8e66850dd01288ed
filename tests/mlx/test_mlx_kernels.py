"""The fast pieces of the MLX backend, each against the plain code beside it: value and gradient."""

import importlib
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest

from dualtune.engine.backend import IGNORE_INDEX, LoadRequest
from dualtune.engine.testing import conformance, conformance_state
from dualtune.engine.testing.conformance import assert_close, gradient, llama_case, random_adapter
from dualtune.engine.testing.tiny_models import pack, random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OPTIMIZERS, OptimizerSpec

pytestmark = pytest.mark.covering(2)

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")
attention = importlib.import_module("dualtune_mlx.kernels.attention")
compiled = importlib.import_module("dualtune_mlx.kernels.compiled")
cross_entropy = importlib.import_module("dualtune_mlx.kernels.cross_entropy")
lora = importlib.import_module("dualtune_mlx.lora")
methods = importlib.import_module("dualtune_mlx.methods")
losses = importlib.import_module("dualtune_mlx.losses")
optimizer = importlib.import_module("dualtune_mlx.optimizer")
packing = importlib.import_module("dualtune_mlx.packing")

DTYPES = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}  # relative, by norm
HEADS = {
    "linear": lambda: nn.Linear(64, 97, bias=False),
    "with a bias": lambda: nn.Linear(64, 97),
    "tied": lambda: nn.Embedding(97, 64),
    "4-bit": lambda: nn.QuantizedLinear(64, 97, bias=False, bits=4),
    "tied 4-bit": lambda: nn.QuantizedEmbedding(97, 64, bits=4),
}
SPEC = AdapterSpec(4, 6.0, 0.3, ("all-linear",))
ROWS = [[2, 0, 3], [1]]


def normal(*shape, seed=0, dtype="float32"):
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(getattr(mx, dtype))


def to_float64(array):
    return np.array(array.astype(mx.float32)).astype(np.float64)


def gap(found, expected, scale=None):
    """Relative, by norm; to `scale` where the sum that is compared has terms that cancel."""
    found, expected = (to_float64(a) if isinstance(a, mx.array) else a for a in (found, expected))
    return np.linalg.norm(found - expected) / (np.linalg.norm(expected) if scale is None else scale)


@pytest.fixture
def labels_BT():
    """A third of them carry loss; one row has none."""
    rng = np.random.default_rng(1)
    labels = np.where(rng.random((3, 7)) < 0.5, rng.integers(0, 97, (3, 7)), IGNORE_INDEX).astype(np.int32)
    labels[1] = IGNORE_INDEX
    return labels


@pytest.fixture
def documents():
    return random_batch([9, 16, 5, 12], 96)


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granule", [1, 8])
@pytest.mark.parametrize("rows_per_chunk", [1, 3, 100])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", HEADS)
def test_the_target_loss_is_that_of_the_whole_logits(kind, dtype, rows_per_chunk, granule, labels_BT):
    layer = HEADS[kind]()
    layer.set_dtype(getattr(mx, dtype))
    head, apply = cross_entropy.Head(layer), getattr(layer, "as_linear", layer)
    hidden_BTH = normal(3, 7, 64, dtype=dtype)
    index_N, labels_N = (mx.array(a) for a in cross_entropy.targets(labels_BT, granule))

    def fast(hidden_BTH):
        return 0.5 * cross_entropy.target_loss(hidden_BTH, index_N, labels_N, head, chunk_elements=97 * rows_per_chunk)

    def plain(hidden_BTH):
        return 0.5 * losses.loss_sum(apply(hidden_BTH), mx.array(labels_BT))

    found, expected = (mx.value_and_grad(f)(hidden_BTH) for f in (fast, plain))
    assert found[0].dtype == mx.float32 and found[1].dtype == hidden_BTH.dtype
    assert gap(found[0], expected[0]) <= DTYPES[dtype]
    assert gap(found[1], expected[1]) <= DTYPES[dtype]
    assert not np.any(to_float64(found[1])[labels_BT == IGNORE_INDEX])


@pytest.mark.parametrize("granule", [1, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_target_loss_takes_weights(dtype, granule, labels_BT):
    """Fractions, 0, negative ones, and ones so small that float16 holds them only with its loss scale."""
    layer = HEADS["with a bias"]()
    layer.set_dtype(getattr(mx, dtype))
    head, hidden_BTH = cross_entropy.Head(layer), normal(3, 7, 64, dtype=dtype)
    index_N, labels_N = cross_entropy.targets(labels_BT, granule)
    mixed_BT = np.resize(np.float32([0.3, 0.0, -1.5, 2.0]), labels_BT.shape)
    for weights_BT in (mixed_BT, np.full_like(mixed_BT, 1e-6)):
        weights_N = mx.array(weights_BT.flat[index_N])

        def fast(hidden_BTH, slopes=True, weights_N=weights_N):
            return 1024.0 * cross_entropy.target_loss(
                hidden_BTH, mx.array(index_N), mx.array(labels_N), head,
                weights_N=weights_N, slopes=slopes, chunk_elements=97 * 3,
            )  # fmt: skip

        def plain(hidden_BTH, weights_BT=weights_BT):
            return 1024.0 * losses.loss_sum(layer(hidden_BTH), mx.array(labels_BT), mx.array(weights_BT))

        found, expected = (mx.value_and_grad(f)(hidden_BTH) for f in (fast, plain))
        terms = to_float64(plain(hidden_BTH, weights_BT=np.abs(weights_BT)))
        assert found[1].dtype == hidden_BTH.dtype
        assert gap(found[0], expected[0], terms) <= DTYPES[dtype] and gap(found[1], expected[1]) <= DTYPES[dtype]
        assert gap(fast(hidden_BTH, slopes=False), expected[0], terms) <= DTYPES[dtype]
        assert not np.any(to_float64(found[1])[(labels_BT == IGNORE_INDEX) | (weights_BT == 0)])


@pytest.mark.parametrize("granule", [1, 8])
def test_the_logprobs_of_targets_come_in_chunks(granule, labels_BT):
    layer, hidden_BTH = HEADS["with a bias"](), normal(3, 7, 64)
    index_N, labels_N = (mx.array(a) for a in cross_entropy.targets(labels_BT, granule))
    head = cross_entropy.Head(layer)
    found_N = cross_entropy.target_logprobs(hidden_BTH, index_N, labels_N, head, chunk_elements=97 * 3)
    expected_BT = losses.target_logprobs(layer(hidden_BTH), mx.array(labels_BT))
    where = np.flatnonzero(labels_BT != IGNORE_INDEX)
    assert gap(to_float64(found_N)[: len(where)], to_float64(expected_BT).ravel()[where]) <= 1e-5
    assert not np.any(to_float64(expected_BT)[labels_BT == IGNORE_INDEX])


def test_the_target_loss_is_the_formula_in_float64(labels_BT):
    """Also where logits are far apart, and where the label is all but certain."""
    layer = nn.Linear(64, 97)
    layer.weight = 3 * normal(97, 64)
    hidden_BTH, index_N, labels_N = normal(3, 7, 64), *cross_entropy.targets(labels_BT)
    head = cross_entropy.Head(layer)
    loss, slopes = mx.value_and_grad(cross_entropy.target_loss)(hidden_BTH, mx.array(index_N), mx.array(labels_N), head)
    weight_VH = to_float64(layer.weight)
    logits_NV = to_float64(hidden_BTH).reshape(-1, 64)[index_N] @ weight_VH.T + to_float64(layer.bias)
    logits_NV -= logits_NV.max(axis=1, keepdims=True)
    p_NV = np.exp(logits_NV) / np.exp(logits_NV).sum(axis=1, keepdims=True)
    expected = np.zeros((21, 64))
    expected[index_N] = (p_NV - np.eye(97)[labels_N]) @ weight_VH
    assert abs(loss.item() / -np.log(p_NV[np.arange(len(index_N)), labels_N]).sum() - 1) <= 1e-6
    assert gap(to_float64(slopes).reshape(-1, 64), expected) <= 1e-6


def test_no_target_at_all_has_neither_loss_nor_gradient():
    targets = cross_entropy.targets(np.full((2, 3), IGNORE_INDEX, np.int32))
    head = cross_entropy.Head(nn.Linear(64, 97))
    loss, slopes = mx.value_and_grad(cross_entropy.target_loss)(normal(2, 3, 64), *map(mx.array, targets), head)
    assert loss.item() == 0.0 and not np.any(to_float64(slopes))


def test_logits_are_held_for_few_chunks_at_a_time():
    """Of 1 MiB each; the logits of all rows would be 64 MiB, and plain autograd holds several such arrays."""
    head, hidden_BTH = cross_entropy.Head(nn.Embedding(8192, 8)), normal(1, 2048, 8)
    targets = [mx.array(a) for a in cross_entropy.targets(np.zeros((1, 2048), np.int32))]
    mx.eval(hidden_BTH, targets)

    def loss(hidden_BTH, *, slopes=True):
        return cross_entropy.target_loss(hidden_BTH, *targets, head, slopes=slopes, chunk_elements=8192 * 32)

    for work in (
        lambda: loss(hidden_BTH, slopes=False),
        lambda: mx.value_and_grad(loss)(hidden_BTH),
        lambda: cross_entropy.target_logprobs(hidden_BTH, *targets, head, chunk_elements=8192 * 32),
    ):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(work())
        assert mx.get_peak_memory() - before <= 24 * 2**20


# --- attention --------------------------------------------------------------------------------------------------------


def attention_inputs(dtype, B, T):
    """Four heads of queries, two of keys."""
    return [normal(B, heads, T, 8, seed=seed, dtype=dtype) for seed, heads in enumerate((4, 2, 2))]


def assert_same_attention(found, expected, inputs, tolerance, is_token_BT=None):
    """Value and gradients, at the tokens that are none of padding."""
    weights = normal(*inputs[0].shape, seed=7) * (
        1.0 if is_token_BT is None else mx.array(is_token_BT)[:, None, :, None]
    )
    values = [weights * f(*inputs) for f in (found, expected)]
    slopes = [mx.grad(lambda *x, f=f: (weights * f(*x)).sum(), argnums=(0, 1, 2))(*inputs) for f in (found, expected)]
    assert gap(*values) <= tolerance
    for own, plain in zip(*slopes, strict=True):
        assert own.dtype == plain.dtype and gap(own, plain) <= tolerance


@pytest.mark.parametrize("segments", [None, [[1] * 6 + [2] * 7, [1] * 3 + [2] * 9 + [0]]], ids=["whole", "packed"])
@pytest.mark.parametrize("chunk", [1, 4, 6, 13])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_in_chunks_is_attention_with_a_mask(dtype, chunk, segments):
    inputs = attention_inputs(dtype, B=2, T=13)
    rows = None if segments is None else packing.PackedRows(mx.array(segments), mx.zeros((2, 13), mx.int32))
    seen = np.tri(13, dtype=bool)[None]
    if segments is not None:
        seen = seen & (np.array(segments)[:, :, None] == np.array(segments)[:, None])
    mask = mx.array(seen[:, None])

    def found(q, k, v):
        return attention.chunked(q, k, v, 0.3, rows, chunk=chunk)

    def expected(q, k, v):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask)

    assert_same_attention(found, expected, inputs, DTYPES[dtype])


@pytest.mark.parametrize("layout", [ROWS, [[0], [1], [2], [3]]], ids=["packed", "padded"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_by_document_is_attention_with_a_mask(dtype, layout, documents):
    batch = pack(documents, layout, pad=3)
    inputs = attention_inputs(dtype, *batch.tokens_BT.shape)
    rows = packing.PackedRows(mx.array(batch.segments_BT), mx.array(batch.positions_BT))
    pieces = attention.pieces_of(batch)
    assert sum(piece.is_document for piece in pieces) == 4

    def found(q, k, v):
        return attention.by_document(q, k, v, 0.3, pieces)

    def expected(q, k, v):
        mask = rows.make_mask(q.shape[2])
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask)

    assert_same_attention(found, expected, inputs, DTYPES[dtype], batch.segments_BT > 0)
    assert not np.any(to_float64(found(*inputs)).swapaxes(1, 2)[batch.segments_BT == 0])


def test_scores_are_held_for_few_chunks_at_a_time():
    """All scores of the row would be 64 MiB, and plain autograd holds three such arrays."""
    inputs = attention_inputs("float32", B=1, T=2048)
    mx.eval(inputs)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(mx.grad(lambda *x: attention.chunked(*x, 0.3, chunk=64).sum(), argnums=(0, 1, 2))(*inputs))
    assert mx.get_peak_memory() - before <= 24 * 2**20


def test_long_rows_of_a_compiled_step_are_attended_to_in_chunks(tmp_path, open_backend, documents, monkeypatch):
    """Whose mask knows the documents, because the layout of these is data there."""
    case = llama_case(open_backend("mlx"), tmp_path)
    packed = pack(documents, ROWS)
    expected = gradient(replace(case, kernels="reference").engine(), packed)
    monkeypatch.setattr(attention, "ATTENTION_CHUNK", 7)
    calls = Mock(side_effect=partial(attention.chunked, chunk=7))
    monkeypatch.setattr(attention, "chunked", calls)
    assert_close(gradient(replace(case, kernels="fused").engine(), packed), expected, 1e-5)
    assert calls.call_count == 2  # one for each layer: traced once
    assert all(call.args[4] is not None for call in calls.call_args_list)


# --- adapters and optimizer -------------------------------------------------------------------------------------------


def test_layers_with_the_same_input_drop_and_multiply_it_once(monkeypatch):
    """And with inputs of their own, each its own."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))

        def __call__(self, x, other):
            return self.q_proj(x) + self.k_proj(x) * self.v_proj(other) + self.o_proj(x)

    results, dropped = [], []
    for group in (False, True):
        mx.random.seed(0)
        block, seeds = Block(), lora.DropoutSeeds()
        layers = methods.add_layers(block, SPEC, seeds, group=group)
        for seed, layer in enumerate(layers.values()):
            layer.weights.lora_A_rI, layer.weights.lora_B_Or = normal(4, 8, seed=seed), normal(8, 4, seed=seed + 9)
        seeds.seeds_BT = mx.arange(6, dtype=mx.uint32).reshape(2, 3)
        for other in (None, normal(2, 3, 8, seed=20)):
            times = []
            plain = lora.SharedInput._dropped
            monkeypatch.setattr(lora.SharedInput, "_dropped", lambda s, x, p=plain, t=times: t.append(s) or p(s, x))
            x = normal(2, 3, 8, seed=19)
            results.append(block(x, x if other is None else other))
            monkeypatch.undo()
            dropped.append(len(times))
    assert dropped == [4, 4, 2, 3]
    assert gap(results[2], results[0]) <= 1e-6 and gap(results[3], results[1]) <= 1e-6
    assert gap(results[1], results[0]) > 1e-2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_flat_update_is_that_of_each_tensor(name, monkeypatch):
    monkeypatch.setattr(optimizer, "UPDATE_CHUNK", 256)  # of 8 bits: several in a tensor
    shapes = {"a": (3, 100), "b": (256,), "c": (7,), "d": (2, 300), "e": (3, 100)}
    spec = OptimizerSpec(name)
    params, grads, *values = (
        {n: mx.abs(normal(*own, seed=i * 7 + j)) for j, (n, own) in enumerate(each.items())}
        for i, each in enumerate((shapes, shapes, *spec.slot_shapes(shapes).values()))
    )
    of_slots = dict(zip(spec.slots, values, strict=True))

    def updated(names):
        layout = optimizer.FlatLayout({n: shapes[n] for n in names})
        layouts = {slot: optimizer.FlatLayout(own) for slot, own in spec.slot_shapes(layout.shapes).items()}
        one = optimizer.flat_optimizer(spec, layout)
        before = one.load({slot: own.flat(of_slots[slot]) for slot, own in layouts.items()}, step=2)
        numbers = {"step": 3.0, "lr": 1e-2, "shrink": 0.999, "is_good": True}
        flat, after = one.update(
            layout.flat(params), before, layout.flat(grads), **{key: mx.array(x) for key, x in numbers.items()}
        )
        read = one.read(after)
        found = {"w": layout.named(flat)} | {slot: own.named(read[slot]) for slot, own in layouts.items()}
        return {(key, n): np.array(x) for key, tensors in found.items() for n, x in tensors.items()}

    together, alone = updated(shapes), {}
    for n in shapes:
        alone |= updated([n])
    assert together.keys() == alone.keys() and {n for _, n in alone} == {*shapes}
    for key, whole in together.items():
        if name == "muon" and whole.ndim == 2:  # a product of many matrices adds up in another order
            np.testing.assert_allclose(whole, alone[key], rtol=1e-4, atol=1e-6)
        else:
            assert np.array_equal(whole, alone[key])


def test_the_norm_of_a_long_gradient_keeps_its_digits():
    """Summed one after another, four million equal squares are 5e-3 off in float32."""
    grads = np.full(4_000_003, 0.1, np.float32)
    norm = optimizer.clip(mx.array(grads), mx.array(1.0))[1].item()
    assert abs(norm / np.linalg.norm(grads.astype(np.float64)) - 1) <= 1e-5


# --- all together -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["none", "affine4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", ["auto", "fused"])
def test_the_gradient_is_that_of_the_plain_code(kernels, dtype, quantization, tmp_path, open_backend, documents):
    """With dropout, packed and padded, in two micro-batches."""
    backend = open_backend("mlx")
    model_dir = write_tiny_llama(tmp_path / "model", tie_word_embeddings=True, hidden_size=64)
    request = LoadRequest(model_dir, dtype, quantization, "pretrained", SPEC, OptimizerSpec(), seed=4, kernels=kernels)

    def learned(kernels):
        engine = backend.load(replace(request, kernels=kernels))
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        batches = documents, pack(documents, ROWS, pad=2)
        loss = engine.evaluate(batches[1]).loss_sum
        grads = gradient(engine, *batches)
        assert all(np.any(g) for g in grads.values())
        return loss, grads

    (loss, grads), (plain_loss, plain_grads) = learned(kernels), learned("reference")
    assert abs(loss / plain_loss - 1) <= DTYPES[dtype]
    assert_close(grads, plain_grads, 2 * DTYPES[dtype])


COMPILED_CHECKS = [
    conformance.check_accumulation_does_not_matter,
    conformance.check_ignored_labels_do_not_matter,
    conformance.check_optimizer_is_its_formula,
    conformance_state.check_packed_gradient_is_the_padded_gradient,
]


@pytest.mark.parametrize("check", COMPILED_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_the_compiled_step_conforms(check, tmp_path, open_backend):
    check(replace(llama_case(open_backend("mlx"), tmp_path), kernels="fused"))


# --- compiled shapes --------------------------------------------------------------------------------------------------


def test_no_more_shapes_are_compiled_than_fit():
    traces = []

    def double(x):
        traces.append(x.shape)
        return 2 * x

    function = compiled.Compiled(double, max_shapes=3)
    for size in (1, 2, 3, 1, 2, 3):
        assert function(mx.ones(size)).sum().item() == 2 * size
    assert len(traces) == 3
    function(mx.ones(1)), function(mx.ones(4)), function(mx.ones(1))  # 2 was not used for longest
    assert len(traces) == 4
    function(mx.ones(2))
    assert len(traces) == 5 and len(function._by_shape) == 3


def test_few_shapes_occur_in_varied_batches(tmp_path, open_backend):
    """Of each width and number of rows, eight numbers of targets at most."""
    engine = replace(llama_case(open_backend("mlx"), tmp_path), kernels="fused").engine()
    rng = np.random.default_rng(0)
    shapes = set()
    for seed in range(300):
        lengths = [16, *rng.integers(4, 16, 3)]
        batch = random_batch(lengths, 96, seed=seed, prompt=int(rng.integers(1, min(lengths))))
        shapes.add(tuple((name, a.shape) for name, a in engine._inputs(batch).items()))
    assert 1 < len(shapes) <= 8
