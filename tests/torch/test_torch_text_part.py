"""Multimodal models on torch: the text part computes as in the whole model, and the towers are not there."""

from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import random_adapter
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.model_checks import check_packing

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dualtune_torch.methods import adaptable_layers  # noqa: E402
from dualtune_torch.weights.text_part import empty_model, text_model, whole_class  # noqa: E402

SPEC = AdapterSpec(rank=4, alpha=6.0, dropout=0.0, targets=("all-linear",))
BATCH = random_batch([9, 16], 96)
TEXT = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28}
QWEN_TOWER = {"hidden_size": 32, "depth": 2, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
GATED_DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}
# The config, and the class that a user loads the whole model with.
WRAPPERS = {
    "gemma 3": lambda: transformers.Gemma3Config(
        text_config=TEXT | {"sliding_window": 8}, vision_config=TOWER | {"patch_size": 14}, mm_tokens_per_image=4
    ),
    "mistral 3": lambda: transformers.Mistral3Config(
        text_config=TEXT | {"model_type": "mistral"},
        vision_config=TOWER | {"model_type": "pixtral", "head_dim": 16, "patch_size": 14},
    ),
    "qwen 3.5": lambda: transformers.Qwen3_5Config(
        text_config=TEXT | GATED_DELTA | {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}},
        vision_config=QWEN_TOWER,
    ),
    "qwen 3 vl": lambda: transformers.Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": ROPE}, vision_config=QWEN_TOWER | {"deepstack_visual_indexes": [0]}
    ),
}


@pytest.fixture(scope="module", params=WRAPPERS)
def wrapper(request, tmp_path_factory):
    """The directory of a model, and the log-probabilities of the whole model, [B, T, V]."""
    directory, config = tmp_path_factory.mktemp("model"), WRAPPERS[request.param]()
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory)
    with torch.no_grad():
        logits = model(torch.from_numpy(BATCH.tokens_BT).long(), use_cache=False).logits
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return directory, logits.float().log_softmax(-1).numpy(), num_parameters


def request_of(directory, **options):
    request = LoadRequest(directory, "float32", "auto", "pretrained", SPEC, OptimizerSpec(), seed=4)
    return replace(request, **options)


@pytest.fixture
def backend(open_backend):
    return open_backend("torch")


def test_text_is_computed_as_in_the_whole_model(wrapper, backend):
    directory, expected, num_parameters = wrapper
    engine = backend.load(request_of(directory))
    real = BATCH.segments_BT > 0
    assert np.abs(engine.logprobs(BATCH) - expected)[real].max() <= tolerances.LOGPROBS
    assert engine.description.num_parameters < num_parameters
    names = " ".join(engine.adapter_state())
    assert "q_proj" in names and not any(word in names for word in ("vision", "visual", "tower", "projector"))
    check_packing(engine)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_it_is_quantized_module_by_module(quantization, wrapper, backend):
    directory, expected, _ = wrapper
    engine = backend.load(request_of(directory, quantization=quantization))
    assert engine.description.quantization == quantization
    gap = np.abs(engine.logprobs(BATCH) - expected)[BATCH.segments_BT > 0].mean()
    assert 1e-4 < gap < 0.5
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    engine.forward_backward(BATCH, divisor=BATCH.num_targets)
    assert float(engine.optim_step(lr=1e-2, max_grad_norm=None).grad_norm) > 0


def test_text_is_continued(wrapper, backend):
    """With a cache, each token as without one."""
    engine, tokens = backend.load(request_of(wrapper[0])), BATCH.tokens_BT[1].tolist()
    seen = []

    def choose(logits):
        seen.append(logits - np.logaddexp.reduce(logits))
        return tokens[8 + len(seen) - 1] if len(seen) < 8 else None

    list(engine.generate(np.array(tokens[:8], np.int32), choose=choose))
    assert np.abs(np.array(seen) - wrapper[1][1, 7:15]).max() <= tolerances.LOGPROBS


def test_a_model_that_writes_no_text_is_refused(tmp_path, backend):
    transformers.CLIPConfig(
        text_config=TEXT, vision_config=TOWER | {"patch_size": 14}, projection_dim=16
    ).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no class that writes text for model_type 'clip'"):
        backend.load(request_of(tmp_path, init="random"))


@pytest.mark.parametrize("name", ["ShieldGemma2ForImageClassification", "LlamaForSequenceClassification"])
def test_a_classifier_is_refused(name, tmp_path, backend):
    config = transformers.Gemma3TextConfig(**TEXT)
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"the model is a {name}, which does not write text"):
        backend.load(request_of(tmp_path, init="random"))


def test_a_diffusion_model_is_refused():
    config = transformers.DiffusionGemmaConfig()
    with pytest.raises(ConfigError, match="DiffusionGemmaForBlockDiffusion, which does not write text one token after"):
        whole_class(config)


def test_the_whole_model_is_loaded_where_no_auto_class_loads_its_text_part():
    config = transformers.MllamaConfig()
    assert transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__ == "MllamaForCausalLM"
    assert whole_class(config).__name__ == "MllamaForConditionalGeneration"


def test_of_several_models_side_by_side_the_one_that_writes_text_is_loaded():
    config = transformers.Qwen2_5OmniConfig()
    kind, part = text_model(config)
    assert kind.__name__ == "Qwen2_5OmniThinkerForConditionalGeneration"
    assert part is config.thinker_config


def test_a_model_that_needs_an_image_is_refused(tmp_path, backend):
    tower = {"embed_dim": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    config = transformers.IdeficsConfig(**sizes, num_hidden_layers=1, vision_config=tower | {"image_size": 28})
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="computes nothing from text alone: Exactly 1 of pixel_values"):
        backend.load(request_of(tmp_path, init="random"))


def test_a_block_that_several_layers_share_has_no_adapter():
    shared = {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4}
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "mamba_d_state": 8}
    with torch.device("meta"):
        model = empty_model(transformers.ZambaConfig(**shared, **sizes), torch.float32)
    assert any("shared_transf" in path for path, each in model.named_modules() if isinstance(each, torch.nn.Linear))
    paths = set(adaptable_layers(model))
    assert paths
    assert not [path for path in paths if "shared_transf" in path]
