"""NF4 made tensor by tensor from plain files: to the bits of transformers' own loader."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")

from bitsandbytes.functional import dequantize_blockwise  # noqa: E402

from dualtune.engine.backend import LoadRequest  # noqa: E402
from dualtune.engine.testing.tiny_models import write_tiny_gpt2, write_tiny_llama  # noqa: E402
from dualtune.model.adapter import AdapterSpec  # noqa: E402
from dualtune.model.optimizer import OptimizerSpec  # noqa: E402
from dualtune_torch import model as loading  # noqa: E402
from dualtune_torch.weights import nf4  # noqa: E402

SMALL = {
    "hidden_size": 72,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


def llama(path, **changes):
    return write_tiny_llama(path, hidden_size=72, intermediate_size=200, num_attention_heads=4, head_dim=18, **changes)


def saved(path, family, **options):
    """A model with random weights and biases, in bfloat16 and several files, as transformers saves it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SMALL | options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path, max_shard_size="50KB")
    assert len([*path.glob("*.safetensors")]) > 1
    return path


MODELS = {
    "llama": llama,
    "a tied head": lambda path: llama(path, tie_word_embeddings=True),
    "gpt2, whose layers are Conv1D": lambda path: write_tiny_gpt2(path, n_embd=96),
    "biases": lambda path: saved(path, "qwen2", num_key_value_heads=2),
}


def load(model_dir, dtype, quantization="nf4"):
    spec = AdapterSpec(2, 2.0, 0.0, ("all-linear",))
    request = LoadRequest(model_dir, dtype, quantization, "pretrained", spec, OptimizerSpec(), seed=1)
    return loading.load_base(request, torch.device("cpu"))


def by_transformers(model_dir, dtype):
    return transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, quantization_config=nf4.config(getattr(torch, dtype)), device_map="cpu"
    )


def assert_same_bits(model, expected):
    """Codes, both levels of scales, their tables, shapes and dtypes: all that bitsandbytes would save."""
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert sum("quant_state.bitsandbytes__nf4" in name for name in ours) >= 8
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
    for path, layer in expected.named_modules():
        assert type(model.get_submodule(path)) is type(layer), path


@pytest.fixture
def only_by_module(monkeypatch):
    def refused(*_, **__):
        raise AssertionError("loaded by transformers")

    monkeypatch.setattr(loading, "_pretrained", refused)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_bits_are_those_of_transformers(kind, dtype, tmp_path, only_by_module, monkeypatch):
    monkeypatch.setattr(nf4, "WEIGHTS_AT_ONCE", 1)  # every matrix in parts of 64 rows
    model, described = load(MODELS[kind](tmp_path / "model"), dtype)
    expected = by_transformers(tmp_path / "model", dtype)
    assert_same_bits(model, expected)
    assert described["num_parameters"] == expected.num_parameters()


def test_a_matrix_is_quantized_in_parts(monkeypatch):
    """What bitsandbytes needs beside its input must not grow with the matrix."""
    from bitsandbytes import functional

    sizes, quantize = [], functional.quantize_4bit

    def recorded(part, **options):
        sizes.append(part.numel())
        return quantize(part, **options)

    monkeypatch.setattr(functional, "quantize_4bit", recorded)
    weight = torch.randn(1500, 2048).bfloat16()
    codes, state = nf4.quantize(weight, torch.bfloat16)
    assert sum(sizes) == weight.numel() and max(sizes) <= nf4.WEIGHTS_AT_ONCE and len(sizes) == 3
    whole, expected = quantize(weight, compress_statistics=True, quant_type="nf4")
    assert torch.equal(codes, whole) and state.nested
    for name, found in state.as_dict(packed=True).items():
        assert torch.equal(found, expected.as_dict(packed=True)[name]), name


def test_a_family_with_other_names_in_its_files_is_loaded_by_transformers(tmp_path):
    """It renames GPT-NeoX's tensors. Experts, which it leaves plain, are in test_packed_experts.py."""
    model, described = load(saved(tmp_path / "model", "gpt_neox"), "float32")
    expected = by_transformers(tmp_path / "model", "float32")
    assert_same_bits(model, expected)
    assert described["num_parameters"] == expected.num_parameters()


def test_random_weights_are_counted_as_if_they_were_plain(tmp_path):
    spec = AdapterSpec(2, 2.0, 0.0, ("all-linear",))
    request = LoadRequest(llama(tmp_path / "model"), "float32", "none", "random", spec, OptimizerSpec(), seed=1)
    counts = {
        loading.load_base(replace(request, quantization=name), torch.device("cpu"))[1]["num_parameters"]
        for name in ("none", "nf4", "int8")
    }
    assert len(counts) == 1


@pytest.mark.parametrize("shape", [(64, 64), (32, 32), (64, 172), (3, 72), (5, 6), (2, 3)])
def test_a_matrix_is_unpacked_by_the_definition_also_where_a_row_splits_a_block(shape):
    """bitsandbytes' own code for CPUs takes wrong scales there."""
    torch.manual_seed(0)
    weight = 3 * torch.randn(shape)
    codes, state = nf4.quantize(weight, torch.float32)
    scales = dequantize_blockwise(state.absmax, state.state2) + state.offset
    nibbles = torch.stack([codes.flatten() >> 4, codes.flatten() & 15], 1).flatten()[: weight.numel()].long()
    blocks = torch.arange(weight.numel()) // 64
    expected = (state.code[nibbles] * scales[blocks]).view(shape)
    assert torch.equal(nf4.unpack(codes, state), expected)
    largest = torch.zeros(len(scales)).scatter_reduce(0, blocks, weight.flatten().abs(), "amax")
    assert ((expected - weight).flatten().abs() <= 0.16 * largest[blocks] + 0.01 * weight.abs().max()).all()


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_model_whose_rows_split_blocks_computes_with_the_unpacked_weights(tmp_path, num_tokens):
    """Its hidden states are those of a plain model with the same weights, in training and for one token."""
    path, tokens = llama(tmp_path / "model"), torch.arange(num_tokens)[None]
    (packed, _), (plain, _) = load(path, "float32"), load(path, "float32", "none")
    for name, module in packed.named_modules():
        if nf4.is_nf4(module):
            plain.get_submodule(name).weight.data = nf4.unpacked(module, torch.float32)
    with torch.no_grad():
        found, expected = (model(tokens).logits for model in (packed, plain))
    assert torch.allclose(found, expected, atol=1e-5)


def test_importing_bitsandbytes_says_nothing_of_kernels_that_no_one_has_asked_for(forked, tmp_path):
    program = tmp_path / "imports.py"
    program.write_text(
        "import sys, dualtune_torch.weights.nf4\nassert 'bitsandbytes' not in sys.modules\nimport bitsandbytes\n"
    )
    done = forked(program)
    assert done.returncode == 0 and "gemm_4bit_forward" not in done.stderr, done.stderr
