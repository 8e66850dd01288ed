"""Layers whose weight transformers reads instead of calling them: with packed weights, and with adapters."""

import re
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest, get_backend
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, gradient
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")

import tiny_families  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402

from dualtune_torch.weights import by_module  # noqa: E402
from dualtune_torch.weights.direct_reads import READ  # noqa: E402
from dualtune_torch.weights.frozen import weight_of  # noqa: E402
from dualtune_torch.weights.nf4 import is_nf4  # noqa: E402
from dualtune_torch.weights.packed import PackedLayer  # noqa: E402

BATCH, at_tokens, trained = tiny_families.BATCH, tiny_families.at_tokens, tiny_families.trained
FAMILIES = {
    "longcat_flash": tiny_families.SIZES | tiny_families.LATENT | {
        "num_layers": 1, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "n_routed_experts": 4,
        "zero_expert_num": 2, "moe_topk": 2,
    },
    "mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 8},
    "deepseek_v32": tiny_families.SIZES | tiny_families.EXPERTS | tiny_families.LATENT | {
        "n_routed_experts": 4, "first_k_dense_replace": 1, "index_topk": 32, "index_n_heads": 4, "index_head_dim": 8,
    },
}  # fmt: skip
RWKV = {
    "vocab_size": 96, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 3, "rescale_every": 1,
    "context_length": 32,
}  # fmt: skip
SPEC = AdapterSpec(4, 6.0, 0.0, ("all-linear",))
# What these models read of linear layers without harm, by family.
HARMLESS = {
    # Arguments of a fused kernel, only in training mode.
    **{name: {"out_proj"} for name in ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")},
    "bloom": {"dense", "dense_4h_to_h"},  # if pretraining_tp is above 1, only in tensor parallel pretraining
    "falcon_mamba": {"out_proj", "x_proj"}, "mamba": {"out_proj", "x_proj"},  # in training mode
    "gemma3n": {"correction_coefs", "prediction_coefs"},  # in training mode
    # Of images and sound.
    "gemma4": {"input_proj"}, "gemma4_unified": {"embedding_projection", "patch_dense"},
}  # fmt: skip


def load(directory, quantization, spec=SPEC):
    request = LoadRequest(directory, "float32", quantization, "pretrained", spec, OptimizerSpec(), seed=5)
    return get_backend("torch").load(request)


def with_numbers_of(engine, plain):
    """Give a plain engine the numbers of the frozen weights of another one."""
    packed, found = dict(engine.model.named_modules()), 0
    with torch.no_grad():
        for path, layer in plain.model.named_modules():
            theirs = packed.get(path)
            if isinstance(layer, torch.nn.Linear) and theirs is not None:
                found += isinstance(theirs, PackedLayer) or is_nf4(theirs)
                layer.weight.copy_(weight_of(theirs, torch.float32))
            for name in ("gate_up_proj", "down_proj"):
                stack = getattr(getattr(theirs, "base", None), name, None)
                if hasattr(stack, "matrix"):
                    for number, matrix in enumerate(getattr(layer, name)):
                        matrix.copy_(stack.matrix(number, torch.float32))
    assert found
    return plain


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("longcat_flash", "nf4"), ("longcat_flash", "int8"), ("mamba", "nf4"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("mamba", "int8"), ("deepseek_v32", "int8"))),
    ],
)  # fmt: skip
def test_a_packed_base_computes_with_its_numbers(tmp_path, family, quantization):
    model = tiny_families.write_family(family, tmp_path / "model", **FAMILIES[family])
    engine = load(model, quantization)
    readers = [module for module in engine.model.modules() if type(module).__name__ in READ]
    names = [name for reader in readers for name in READ[type(reader).__name__]]
    assert names and all(getattr(r, n).weight.is_floating_point() for r in readers for n in READ[type(r).__name__])
    engines = [engine, with_numbers_of(engine, load(model, "none"))]
    assert_close(*(gradient(trained(each), BATCH) for each in engines), tolerances.GRADIENT)
    a, b = (at_tokens(each.logprobs(BATCH)) for each in engines)
    assert np.abs(a - b).max() <= tolerances.LOGPROBS


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("olmo_hybrid", "int8"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (
            ("olmo_hybrid", "nf4"), ("zamba2", "nf4"), ("zamba2", "int8"),
        )),
    ],
)  # fmt: skip
def test_what_is_no_single_tensor_of_the_files_is_read_and_packed_too(tmp_path, monkeypatch, family, quantization):
    """Layers of Zamba2 share a block, and OLMo Hybrid's files hold the convolution of a layer in three parts."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    from family.make import make

    make(family, model := tmp_path / "model")
    engine, plain = (load(model, name) for name in (quantization, "none"))
    assert engine.description.num_parameters == plain.description.num_parameters
    a, b = (at_tokens(trained(each).logprobs(BATCH)) for each in (engine, with_numbers_of(engine, plain)))
    assert np.abs(a - b).max() <= tolerances.LOGPROBS


def test_a_parameter_that_is_made_in_an_unknown_way_is_refused_by_name(tmp_path, monkeypatch):
    model = tiny_families.write_family("llama", tmp_path / "model")
    monkeypatch.setattr(by_module.TensorReader, "can_fill", lambda self, name: "layers.1.mlp.up_proj" not in name)
    with pytest.raises(ConfigError, match=r"got 'int8', .* makes model\.layers\.1\.mlp\.up_proj\.weight of"):
        load(model, "int8")


def test_rwkv_divides_no_weight_beside_its_adapter(tmp_path):
    """Which transformers does in eval mode, in place: no adapter would see it. In training mode it divides nothing."""
    model = tiny_families.write_family("rwkv", tmp_path / "model", **RWKV)
    engine = trained(load(model, "none"))
    engine.save_merged(tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).train()
    with torch.no_grad():
        rows = [
            merged(torch.from_numpy(BATCH.tokens_BT[row : row + 1, :n]).long()).logits.log_softmax(-1)[0]
            for row, n in enumerate(tiny_families.LENGTHS)
        ]
    assert np.abs(torch.cat(rows).numpy() - at_tokens(engine.logprobs(BATCH))).max() <= tolerances.MERGE


def test_every_weight_that_transformers_reads_of_a_linear_layer_is_known():
    """A new one is missing in READ, or is listed above with the reason why it does no harm."""
    kinds, new = {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}, {}
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        _, *classes = re.split(r"^class (?=\w)", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        named = {re.match(r"\w+", text)[0]: text for text in classes}
        for kind, text in named.items() if kinds & named.keys() else ():
            layers = set(re.findall(r"self\.(\w+) = nn\.Linear\(", text)) - HARMLESS.get(file.parent.name, set())
            read = set(re.findall(r"self\.(\w+)\.weight\b(?!\.(?:shape|device|data|dtype ==))", text)) & layers
            # No format packs the output head of a plain base.
            if unknown := read - {"lm_head", *READ.get(kind, ())}:
                new[kind] = unknown
    assert new == {}
