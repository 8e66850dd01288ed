"""Each fast piece of the torch backend against the plain code beside it: value, gradient, work and memory."""

import math

import numpy as np
import pytest

from dualtune.model.adapter import AdapterSpec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from dualtune_torch.adapter import adapter_buffer  # noqa: E402
from dualtune_torch.kernels import attention, blocks, compiled, cross_entropy  # noqa: E402
from dualtune_torch.kernels.cross_entropy import Scaling  # noqa: E402
from dualtune_torch.kernels.lora import add_groups  # noqa: E402
from dualtune_torch.lora import DropoutSeeds, LoRALinear  # noqa: E402

pytestmark = pytest.mark.covering(2)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CLOSE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}  # relative, by norm
COMPILE = {"plain": lambda function: function, "compiled": compiled.compile_function}


@pytest.fixture(params=DTYPES)
def dtype(request):
    return request.param


def long(*values):
    """Compiling takes seconds for each dtype: one more of a kind that has a case."""
    return pytest.param(*values, marks=pytest.mark.long)


PLAIN = [(dtype, "plain") for dtype in DTYPES]
WITH = ("dtype", "how")
COMPILED = [("float32", "compiled"), ("bfloat16", "compiled"), long("float16", "compiled")]


def randn(*shape, seed=0, dtype="float32"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def leaf(x):
    return x.clone().requires_grad_()


def gap(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


# --- attention --------------------------------------------------------------------------------------------------------

ROWS = {
    "one document": [[7]],
    "several, and padding": [[5, 1, 9], [1, 3]],
    "alike, in batches": [[24, 30, 27, 9], [31, 25, 8]],
    "longer than a block": [[attention.ATTENTION_BLOCK + 33, 40], [2 * attention.ATTENTION_BLOCK + 1]],
}
NO_BORDERS = torch.empty(0, dtype=torch.int32)  # of the GPU's kernel


def segments_of(rows):
    segments = np.zeros((len(rows), max(map(sum, rows))), np.int32)
    for b, lengths in enumerate(rows):
        segments[b, : sum(lengths)] = np.repeat(np.arange(1, 1 + len(lengths)), lengths)
    return segments


ATTENTION = [(4, 4, None, None), (6, 2, 4, None), (3, 1, 100, 2.0)]  # heads, groups, window, cap


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(
    ("dtype", "how", "heads", "groups", "window", "cap"),
    [
        *((dtype, "plain", *each) for dtype in DTYPES for each in ATTENTION),
        ("float32", "compiled", 6, 2, 4, 2.0), ("bfloat16", "compiled", 6, 2, None, None),
        *(long(dtype, "compiled", 6, 2, 4, 2.0) for dtype in ("bfloat16", "float16")),
        *(long(dtype, "compiled", 6, 2, None, None) for dtype in ("float32", "float16")),
    ],
)  # fmt: skip
def test_attention_inside_documents_is_the_masked_one(rows, heads, groups, window, cap, how, dtype):
    segments = segments_of(rows)
    B, T, d = *segments.shape, 8
    shapes = [(B, T, heads, d), (B, T, groups, d), (B, T, groups, d)]
    inputs = [randn(*shape, seed=i, dtype=dtype).transpose(1, 2) for i, shape in enumerate(shapes)]
    real = torch.from_numpy(segments > 0)[..., None, None]
    weights = randn(B, T, heads, d, seed=9) * real  # nothing is asked of the padding
    found, expected = [leaf(x) for x in inputs], [leaf(x.float()) for x in inputs]
    where = attention.DocumentBorders.of(segments, NO_BORDERS, COMPILE[how])
    out, _ = attention.attend(
        torch.nn.Module(), *found, None, scaling=0.3, sliding_window=window, softcap=cap, documents=where
    )
    plain = attention.reference(*expected, torch.from_numpy(segments), 0.3, window, cap)
    assert torch.isfinite(out).all()
    assert gap(out * real, plain * real) <= CLOSE[dtype]
    (out.float() * weights).sum().backward()
    (plain * weights).sum().backward()
    for x, y in zip(found, expected, strict=True):
        assert gap(x.grad, y.grad) <= CLOSE[dtype]


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def flash_flop(q, k, *_, **__):
    """Of two products, from shapes: the counter does not know this kernel."""
    return 4 * math.prod(q[:3]) * k[2] * q[3]


def test_attention_does_no_work_between_documents():
    """Multiplications: of many short documents far fewer than of one long one."""

    def work(rows):
        segments = segments_of(rows)
        where = attention.DocumentBorders.of(segments, NO_BORDERS, COMPILE["plain"])
        q, k, v = (leaf(randn(1, 2, segments.shape[1], 8)) for _ in range(3))
        with FlopCounterMode(display=False, custom_mapping={FLASH: flash_flop}) as counter:
            out, _ = attention.attend(torch.nn.Module(), q, k, v, None, documents=where)
            out.sum().backward()
        return counter.get_total_flops()

    long, short = work([[960]]), work([[96] * 10])
    square = 7 * 2 * 2 * 8 * 960**2  # two products forward and five backward, of 2 heads of size 8
    assert short == square // 10
    # Blocks of 256 queries leave out 3/8 of the keys in the backward pass. The flash kernel of the forward pass leaves
    # out what it can; it is counted in full.
    assert long < (2 + 5 * 0.65) / 7 * square


def test_products_come_again_in_the_same_shapes():
    """A CPU's library compiles a product for every shape, which takes longer than most of the products."""

    def shapes(lengths, chunk):
        segments = segments_of([[*lengths, 100]])
        where = attention.DocumentBorders.of(segments, NO_BORDERS, COMPILE["plain"])
        q, k, v = (leaf(randn(1, 2, segments.shape[1], 8)) for _ in range(3))
        hidden, labels = leaf(randn(chunk, 8)), torch.arange(chunk)
        with Products() as products:
            out, _ = attention.attend(torch.nn.Module(), q, k, v, None, documents=where)
            out.sum().backward()
            cross_entropy.LinearCrossEntropy.apply(hidden, randn(300, 8), None, labels, Scaling(), COMPILE["plain"])
        return products.shapes

    assert shapes([33, 40, 47], 17) == shapes([48, 34, 41], 30)
    assert shapes([33, 40, 47], 17) != shapes([33, 40, 49], 17) != shapes([33, 40, 49], 33)


class Products(TorchDispatchMode):
    """Notes the shapes of matrix products and of the flash kernel."""

    NAMES = ("bmm", "mm", "addmm", "_scaled_dot_product_flash_attention_for_cpu")

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in self.NAMES:
            self.shapes.append([tuple(x.shape) for x in args if isinstance(x, torch.Tensor)])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "value"), [("s_aux", "sinks"), ("position_bias", "slopes"), ("dropout", 0.1)])
def test_what_attention_does_not_know_is_refused(name, value):
    where = attention.DocumentBorders.of(segments_of([[4]]), NO_BORDERS, COMPILE["plain"])
    q = randn(1, 1, 4, 8)
    with pytest.raises(attention.NotCovered, match=f"Module needs more .*{name}"):
        attention.attend(torch.nn.Module(), q, q, q, None, documents=where, **{name: value})


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5, 64, 131])
@pytest.mark.parametrize(
    ("bias", "cap", "temperature"),
    [(False, None, None), (True, None, None), (False, 3.0, None), (True, None, 0.7), (False, 3.0, 0.7)],
    ids=["", "bias", "cap", "temperature", "cap and temperature"],
)
@pytest.mark.parametrize(WITH, [*PLAIN, *COMPILED])
def test_the_loss_in_chunks_is_the_plain_one(rows, bias, cap, temperature, dtype, how, monkeypatch):
    monkeypatch.setitem(cross_entropy.LOSS_ROWS, "cpu", 13)
    hidden, head = randn(rows, 24, dtype=dtype), randn(97, 24, seed=1, dtype=dtype)
    offsets = randn(97, seed=2, dtype=dtype) if bias else None
    labels, scaling = torch.arange(rows) * 31 % 97, Scaling(cap, temperature and torch.tensor(temperature))
    a, b = leaf(hidden), leaf(hidden.float())
    loss = cross_entropy.LinearCrossEntropy.apply(a, head, offsets, labels, scaling, COMPILE[how])
    plain = cross_entropy.reference(b, head.float(), offsets.float() if bias else None, labels, scaling)
    assert loss.dtype == torch.float32
    assert gap(loss, plain) <= CLOSE[dtype]
    (loss * 0.125).backward()
    (plain * 0.125).backward()
    assert gap(a.grad, b.grad) <= CLOSE[dtype]


@pytest.mark.parametrize(("cap", "weights"), [(None, None), (3.0, torch.arange(5.0))], ids=["", "cap and weights"])
@pytest.mark.parametrize(("dtype", "how"), [("float32", "plain"), ("bfloat16", "compiled")])
def test_the_loss_of_a_gpu_is_that_of_a_cpu(cap, weights, dtype, how):
    labels = torch.tensor([3, 0, 96, 3, 50])
    a, b = (randn(5, 97, dtype=dtype) for _ in range(2))
    loss = COMPILE[how](cross_entropy.loss_and_gradient_in_place)(a, labels, Scaling(cap), weights)
    assert gap(loss, cross_entropy.loss_and_gradient(b, labels, Scaling(cap), weights)) <= 1e-6
    assert gap(a, b) <= CLOSE[dtype]


def test_no_tensor_is_as_large_as_the_logits(monkeypatch):
    monkeypatch.setitem(cross_entropy.LOSS_ROWS, "cpu", 16)
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    hidden, head = leaf(randn(160, 8)), randn(500, 8)
    with Sizes():
        loss = cross_entropy.LinearCrossEntropy.apply(
            hidden, head, None, torch.arange(160), Scaling(), COMPILE["plain"]
        )
        loss.backward()
        cross_entropy.target_logprobs(hidden, head, None, torch.arange(160), Scaling(), COMPILE["plain"])
    assert 16 * 500 in sizes
    assert max(sizes) == 16 * 500


def test_the_loss_alone_takes_half_the_products():
    hidden, head = randn(48, 8), randn(500, 8)
    with FlopCounterMode(display=False) as counter:
        cross_entropy.LinearCrossEntropy.apply(hidden, head, None, torch.arange(48), Scaling(), COMPILE["plain"])
    assert counter.get_total_flops() == 2 * 48 * 8 * 500


# --- LoRA -------------------------------------------------------------------------------------------------------------

WIDTHS = {"q_proj": 24, "k_proj": 8, "v_proj": 8}  # outputs


def make_layers(dtype, *, dropout=0.0, bias=False, rank=3, inputs=40):
    """Two copies of three layers with the same weights: plain ones, and a group with its buffer."""
    seeds, sides = DropoutSeeds(), []
    for _ in range(2):
        layers = {}
        for i, (name, out) in enumerate(WIDTHS.items()):
            base = torch.nn.Linear(inputs, out, bias=bias).requires_grad_(False)
            base.weight.copy_(randn(out, inputs, seed=i))
            if bias:
                base.bias.copy_(randn(out, seed=30 + i))
            path = f"model.layers.0.self_attn.{name}"
            layers[path] = LoRALinear(base.to(DTYPES[dtype]), path, AdapterSpec(rank, 2.0 * rank, dropout, ()), seeds)
        buffer = adapter_buffer(layers, torch.device("cpu"), DTYPES[dtype])
        for i, layer in enumerate(layers.values()):
            layer.lora_A.data.copy_(randn(rank, inputs, seed=10 + i))
            layer.lora_B.data.copy_(randn(layer.base.out_features, rank, seed=20 + i))
        buffer.refresh()
        sides.append((list(layers.values()), buffer))
    return seeds, *sides


def run(layers, x, seeds):
    """The outputs, added up with weights of their own, and the gradient by x."""
    x = leaf(x)
    outputs = [layer(x) for layer in layers]
    sum((y.float() * randn(*y.shape, seed=40 + i)).sum() for i, y in enumerate(outputs)).backward()
    return outputs, x.grad


@pytest.mark.parametrize("dropout", [0.0, 0.3, 0.05])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (1, 33)])
@pytest.mark.parametrize(WITH, [*PLAIN, *COMPILED])
def test_a_group_computes_what_its_layers_do(shape, bias, dropout, dtype, how):
    seeds, (plain, _), (layers, buffer) = make_layers(dtype, dropout=dropout, bias=bias)
    add_groups(paths(layers), buffer, COMPILE[how])
    seeds.seeds_BT = torch.from_numpy(np.random.default_rng(0).integers(-(1 << 31), 1 << 31, shape).astype(np.int32))
    x = randn(*shape, 40, seed=50, dtype=dtype)
    (expected, dx_plain), (found, dx) = run(plain, x, seeds), run(layers, x, seeds)
    for y, z in zip(found, expected, strict=True):
        assert gap(y, z) <= CLOSE[dtype]
    assert gap(dx, dx_plain) <= CLOSE[dtype]
    for ours, theirs in zip(layers, plain, strict=True):
        assert gap(ours.lora_A.grad, theirs.lora_A.grad) <= CLOSE[dtype]
        assert gap(ours.lora_B.grad, theirs.lora_B.grad) <= CLOSE[dtype]
        assert ours.lora_A.grad.dtype == torch.float32


def paths(layers):
    return {f"model.layers.0.self_attn.{name}": layer for name, layer in zip(WIDTHS, layers, strict=True)}


def addmm_flop(y, a, b, **options):
    """The counter does not know the in-place kind."""
    return 2 * a[0] * a[1] * b[1]


def make_group(**options):
    seeds, (plain, _), (layers, buffer) = make_layers("float32", **options)
    add_groups(paths(layers), buffer, COMPILE["plain"])
    return seeds, plain, layers


def test_layers_of_a_group_may_be_called_alone_and_with_other_inputs():
    _, plain, layers = make_group()
    for seed in range(3):
        for i in (2, 0):  # never all of them, and not in their order
            x = randn(2, 5, 40, seed=3 * seed + i)
            assert gap(layers[i](x), plain[i](x)) <= 1e-5


def test_a_group_adds_to_the_gradients_that_are_there():
    _, _, layers = make_group()
    x = randn(2, 5, 40)
    run(layers, x, None)
    once = [weight.grad.clone() for layer in layers for weight in layer.parameters() if weight.requires_grad]
    run(layers, x, None)
    twice = [weight.grad for layer in layers for weight in layer.parameters() if weight.requires_grad]
    assert len(twice) == 6
    for after, before in zip(twice, once, strict=True):
        assert gap(after, 2 * before) <= 1e-6


def test_the_backward_pass_takes_the_least_work():
    """4Mr(in+out) for the adapters and 2M·in·out for the base, none of the latter where the input needs no gradient."""
    tokens, width, rank = 64, 40, 3
    _, _, layers = make_group(rank=rank)
    base = sum(2 * tokens * width * out for out in WIDTHS.values())
    adapters = sum(4 * tokens * rank * (width + out) for out in WIDTHS.values())
    for needs_grad, expected in ((True, base + adapters), (False, adapters - 2 * tokens * 3 * rank * width)):
        x = randn(1, tokens, width).requires_grad_(needs_grad)
        loss = sum(layer(x).sum() for layer in layers)
        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm_flop}) as counter:
            loss.backward()
        assert counter.get_total_flops() == expected


def test_a_group_keeps_its_input_once_and_no_mask():
    """Saved for the backward pass: the dropped x [M, in], u [M, 3r] and the seeds [M]. Plain layers keep far more."""
    tokens = 64
    seeds, plain, layers = make_group(dropout=0.3)
    seeds.seeds_BT = torch.arange(tokens, dtype=torch.int32)[None]

    def saved(layers):
        kept = {}

        def note(x):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        x = leaf(randn(1, tokens, 40))
        weights = {p.untyped_storage().data_ptr() for layer in layers for p in layer.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            outputs = [layer(x) for layer in layers]
        del outputs
        return sum(size for pointer, size in kept.items() if pointer not in weights)

    assert saved(layers) == 4 * tokens * (40 + 3 * 3 + 1)
    assert saved(plain) > 3 * saved(layers)


# --- elementwise ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "how", "r"),
    [
        *((*each, r) for each in PLAIN for r in (8, 4)), ("float32", "compiled", 4), ("bfloat16", "compiled", 8),
        *(long(*each) for each in (("float32", "compiled", 8), ("bfloat16", "compiled", 4))),
        *(long("float16", "compiled", r) for r in (8, 4)),
    ],
)  # fmt: skip
def test_rotation_and_its_gradient_are_those_of_transformers(r, dtype, how):
    """Of all 8 channels of a head, and of half of them."""
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    angles = torch.arange(10)[None, :, None] / 3.0 ** torch.arange(r // 2)
    cos, sin = (torch.cat((f(angles), f(angles)), -1).to(DTYPES[dtype]) for f in (torch.cos, torch.sin))
    inputs = [randn(1, 10, heads, 8, seed=heads, dtype=dtype).transpose(1, 2) for heads in (4, 2)]
    found, expected = [leaf(x) for x in inputs], [leaf(x.float()) for x in inputs]
    ours = blocks.rotate_both(*found, cos, sin, maybe_compile=COMPILE[how])
    theirs = apply_rotary_pos_emb(*expected, cos.float(), sin.float())
    for y, z in zip(ours, theirs, strict=True):
        assert gap(y, z) <= CLOSE[dtype]
    sum((y.float() * randn(*y.shape, seed=9)).sum() for y in ours).backward()
    sum((y * randn(*y.shape, seed=9)).sum() for y in theirs).backward()
    for x, y in zip(found, expected, strict=True):
        assert gap(x.grad, y.grad) <= CLOSE[dtype]


def test_an_interleaved_rotation_is_left_alone():
    from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as interleaved
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as halves

    assert blocks._rotates_alike(halves)
    assert not blocks._rotates_alike(interleaved)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("float32", "llama"), ("bfloat16", "gemma"), long("float32", "gemma"), long("bfloat16", "llama"),
        long("float16", "llama"), long("float16", "gemma"),
    ],
)  # fmt: skip
def test_compiled_norms_and_mlps_are_the_plain_ones(kind, dtype):
    import transformers

    config = {"llama": transformers.LlamaConfig, "gemma": transformers.GemmaConfig}[kind](
        hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2, vocab_size=32, head_dim=12
    )
    torch.manual_seed(0)
    layer = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).model.layers[0]
    layer.requires_grad_(False)
    for part, install in ((layer.input_layernorm, blocks.compile_norms), (layer.mlp, blocks.compile_mlps)):
        x, y = (leaf(randn(2, 7, 24, dtype=dtype)) for _ in range(2))
        plain = part(x)
        assert install(layer, compiled.compile_function)
        fused = part(y)
        assert "forward" in part.__dict__
        assert gap(fused, plain) <= CLOSE[dtype]
        weights = randn(2, 7, 24, seed=3, dtype=dtype)
        (plain * weights).sum().backward()
        (fused * weights).sum().backward()
        assert gap(y.grad, x.grad) <= CLOSE[dtype]
