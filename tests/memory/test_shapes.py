"""Shapes of models against transformers' own classes and the published numbers of parameters."""

import json

import pytest

from dualtune.engine.memory.shapes import FAMILIES, KNOWN, UnknownShape, decoder_of

# From the models' pages and their files on the hub.
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
}
TINY = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_model_has_its_published_number_of_parameters(name):
    assert decoder_of(KNOWN[name]).num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_config_builds_the_model_that_the_shape_describes(name, tmp_path):
    """Whole, by transformers, of tensors without numbers in them."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(dict(KNOWN[name])))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    decoder = decoder_of(KNOWN[name])
    first = model.model.layers[0]
    found = {
        path: tuple(layer.weight.shape) for path, layer in first.named_modules() if isinstance(layer, torch.nn.Linear)
    }
    assert found == {path: (layer.out, layer.in_) for path, layer in decoder.linears().items()}
    assert model.num_parameters() == decoder.num_parameters
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == decoder.tied


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "head_dim": 24}])
def test_a_family_is_counted_by_its_config(kind, changes):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.AutoConfig.for_model(kind, **TINY | changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert decoder_of(config.to_dict()).num_parameters == model.num_parameters()


def test_biases_that_a_config_asks_for_are_counted():
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.AutoConfig.for_model("llama", **TINY, attention_bias=True, mlp_bias=True)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert decoder_of(config.to_dict()).num_parameters == model.num_parameters()


def test_what_a_config_leaves_out_is_as_transformers_has_it():
    config = {"model_type": "llama"} | {key: TINY[key] for key in TINY if key != "num_key_value_heads"}
    decoder = decoder_of(config)
    assert (decoder.tied, decoder.kv_heads, decoder.head_dim) == (False, 4, 8)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "it is a mixture of experts"),
        ({"model_type": "falcon_h1"}, "its model_type is falcon_h1; there are formulas for gpt2, llama, mistral"),
        ({"intermediate_size": None}, "its config.json has no intermediate_size"),
        ({"hidden_size": None}, "its config.json has no hidden_size"),
        ({"num_hidden_layers": "24"}, "its config.json has no num_hidden_layers"),
    ],
)
def test_a_model_that_there_is_no_formula_for_is_refused_with_the_reason(changes, reason):
    with pytest.raises(UnknownShape, match=reason):
        decoder_of({"model_type": "llama"} | TINY | changes)


def test_the_text_part_of_a_config_is_what_counts():
    inner = {"model_type": "qwen3"} | TINY
    assert decoder_of({"model_type": "many_things", "text_config": inner}) == decoder_of(inner)
