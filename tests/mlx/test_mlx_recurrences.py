"""Recurrences in chunks that are computed again: the outputs, states and gradients of mlx-lm's walks over tokens."""

import importlib

import pytest

mx = pytest.importorskip("mlx.core")
nn = importlib.import_module("mlx.nn")
jamba, mamba = (importlib.import_module(f"mlx_lm.models.{name}") for name in ("jamba", "mamba"))
plain = importlib.import_module("mlx_lm.models.gated_delta").gated_delta_update
gated_delta = importlib.import_module("dualtune_mlx.kernels.gated_delta")
recurrences = importlib.import_module("dualtune_mlx.kernels.recurrences")
flat = importlib.import_module("mlx.utils").tree_flatten

WIDTH = 32
JAMBA = {
    "model_type": "jamba", "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1, "attn_layer_offset": 1, "attn_layer_period": 2,
    "expert_layer_offset": 1, "expert_layer_period": 2,
    "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2, "num_experts": 1, "num_experts_per_tok": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "vocab_size": 50,
}  # fmt: skip
MAMBA = {
    "vocab_size": 50, "hidden_size": WIDTH, "intermediate_size": 64, "state_size": 8, "num_hidden_layers": 1,
    "conv_kernel": 4,
    "use_bias": False, "use_conv_bias": True, "time_step_rank": 4,
}  # fmt: skip
MIXERS = {
    "jamba": lambda: jamba.JambaMambaMixer(jamba.ModelArgs(**JAMBA)),
    "mamba": lambda: mamba.MambaBlock(mamba.ModelArgs(model_type="mamba", **MAMBA)),
    "falcon_mamba": lambda: mamba.MambaBlock(mamba.ModelArgs(model_type="falcon_mamba", **MAMBA)),
}


@pytest.fixture(autouse=True)
def _on_the_cpu():
    with mx.stream(mx.cpu):
        yield


def gap(a, b):
    return float(mx.abs(a - b).max() / mx.maximum(mx.abs(b).max(), 1e-6))


def computed(mixer, x, weights):
    """The output, and the gradients of x and of all weights."""

    def loss(x):
        return (mixer(x, None) * weights).sum()

    slopes = nn.value_and_grad(mixer, lambda: loss(x))()[1]
    return [mixer(x, None), mx.grad(loss)(x), *(slope for _, slope in flat(slopes))]


@pytest.mark.parametrize("name", MIXERS)
def test_a_selective_scan_in_chunks_is_that_of_mlx_lm(name):
    mx.random.seed(1)
    mixer = MIXERS[name]()
    x, weights = mx.random.normal((2, 70, WIDTH)), mx.random.normal((2, 70, WIDTH))
    theirs = computed(mixer, x, weights)
    assert recurrences.install(mixer)
    assert isinstance(mixer, tuple(recurrences.SCANS.values()))
    assert max(map(gap, computed(mixer, x, weights), theirs)) < 1e-5


def test_only_states_between_chunks_are_kept():
    """A walk over tokens keeps some seventeen states for each of them."""
    T, D, N = 512, 256, 16
    shapes = [(1, T, D), (1, T, D), (1, T, N), (1, T, N), (D, N)]
    arrays = [mx.random.normal(shape) * 0.1 for shape in shapes]
    mx.eval(arrays)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mx.grad(lambda *x: recurrences.selective_scan(*x, None)[0].sum(), argnums=tuple(range(5)))(*arrays))
    assert mx.get_peak_memory() - before < 4 * T * D * N * 4  # bytes; 2.2 as measured


@pytest.mark.parametrize("name", MIXERS)
def test_a_scan_goes_on_from_its_state(name):
    mixer, x = MIXERS[name](), mx.random.normal((1, 70, WIDTH))
    recurrences.install(mixer)
    cache = importlib.import_module("mlx_lm.models.cache").ArraysCache(size=2)
    parts = [mixer(x[:, a:b], cache) for a, b in ((0, 66), (66, 67), (67, 70))]
    assert gap(mx.concatenate(parts, axis=1), mixer(x, None)) < 1e-5


@pytest.mark.parametrize("options", [{}, {"lower_bound": -5.0}], ids=str)
@pytest.mark.parametrize("begins", [True, False])
def test_a_decay_of_each_channel_is_walked_in_chunks(options, begins):
    """As Kimi Linear has it. q, k, v, a, b, A_log, dt_bias."""
    mx.random.seed(2)
    B, T, H, d = 2, 70, 2, 16
    shapes = [(B, T, H, d)] * 4 + [(B, T, H), (H, 1), (H, d)]
    arrays = [mx.random.normal(shape) * d**-0.5 for shape in shapes]
    state = None if begins else mx.random.normal((B, H, d, d))
    weights, results = mx.random.normal((B, T, H, d)), []
    for update in (gated_delta.in_chunks(plain), plain):
        function = lambda *x, update=update: update(*x, state, use_kernel=False, **options)  # noqa: E731
        slopes = mx.grad(lambda *x, f=function: (f(*x)[0] * weights).sum(), argnums=tuple(range(7)))
        results.append([*function(*arrays), *slopes(*arrays)])
    assert max(map(gap, *results)) < 1e-5


def test_other_models_are_left_alone():
    assert not recurrences.install(nn.Linear(2, 2))


@pytest.mark.parametrize(("name", "is_ours"), [("rwkv7", True), ("jamba", False)])
def test_the_reference_has_a_walk_of_ours_where_that_of_mlx_lm_has_no_derivative(name, is_ours):
    """On Metal mlx-lm computes RWKV-7 by a kernel, in training too."""
    choose = importlib.import_module("dualtune_mlx.kernels.choose").choose
    mixer = nn.Module()
    if name == "rwkv7":
        mixer.__class__ = importlib.import_module("mlx_lm.models.rwkv7").Rwkv7TimeMixing
    else:
        mixer = MIXERS[name]()
    choose(mixer, "reference")
    assert isinstance(mixer, tuple(recurrences.SCANS.values())) == is_ours


def test_a_walk_of_rwkv7_in_training_is_that_of_mlx_lm():
    rwkv7 = importlib.import_module("mlx_lm.models.rwkv7")
    mixer = nn.Module()
    mixer.__class__, mixer.num_heads, mixer.head_dim = rwkv7.Rwkv7TimeMixing, 2, 8
    arrays = [mx.random.normal((2, 20, 2, 8)) * 0.3 for _ in range(6)]
    results = []
    for prepare in (lambda: None, lambda: recurrences.install(mixer)):
        prepare()
        slopes = mx.grad(lambda *x: mx.square(mixer._wkv7(*x, None)[0]).sum(), argnums=tuple(range(6)))
        results.append([*mixer._wkv7(*arrays, None), *slopes(*arrays)])
    assert mixer.training and isinstance(mixer, recurrences.Rwkv7Walk) and max(map(gap, *results)) < 1e-5
