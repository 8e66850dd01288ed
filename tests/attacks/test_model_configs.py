"""The values of a stranger's config.json: counts that would hang or fill the machine, and values of another kind.

Both backends build what a config asks for, layer by layer in Python, so every count is compared with the headers of the
weight files first. And whatever a library raises on a value is one line with the name of the file.
"""

import contextlib
import json
import re
import shutil

import pytest
from safetensors.numpy import load_file, save_file

from dualtune.base.errors import DualtuneError, FormatError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.memory.shapes import KNOWN, UnknownShape, decoder_of
from dualtune.engine.testing.tiny_models import GPT2_CONFIG, LLAMA_CONFIG, write_tiny_gpt2, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.base_model import find_weights, resolve_model
from dualtune.model.config_file import read_config
from dualtune.model.optimizer import OptimizerSpec

MANY = [5, 900, 10**5, 10**7, 10**30]
WRONG = ["x", "", -1, 0, 10**30, [], [1], ["x"], {}, {"a": 1}, True, 1.5, float("inf"), float("nan")]


@pytest.fixture
def llama(tmp_path):
    return write_tiny_llama(tmp_path / "llama")


@pytest.fixture
def gpt2(tmp_path):
    return write_tiny_gpt2(tmp_path / "gpt2")


def configure(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(path, key, **options):
    with pytest.raises(FormatError) as refusal:
        resolve_model(str(path), **options)
    assert re.search(rf"config\.json: {key}: got ", str(refusal.value)) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("count", MANY)
@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layers", "num_layers"])
def test_more_layers_than_the_weight_files_hold_are_refused(llama, key, count):
    configure(llama, **{key: count})
    refused(llama, key)


@pytest.mark.parametrize("key", ["n_layer", "n_embd", "n_head", "n_inner", "n_positions", "num_hidden_layers"])
def test_the_older_names_are_counts_too(gpt2, key):
    configure(gpt2, **{key: 10**5})
    refused(gpt2, key)


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads",
     "num_experts", "n_routed_experts", "num_local_experts"],
)  # fmt: skip
def test_nothing_is_wider_than_the_widest_tensor(llama, key):
    configure(llama, **{key: 10**5})
    refused(llama, key)


@pytest.mark.parametrize(("key", "value"), [("vocab_size", 97), ("hidden_size", 63), ("hidden_size", 65)])
def test_the_embedding_tells_vocabulary_and_width_exactly(llama, key, value):
    configure(llama, **{key: value})
    refused(llama, key)


def test_the_counts_of_a_language_model_inside_a_larger_one_are_compared(llama):
    configure(llama, text_config=LLAMA_CONFIG | {"num_hidden_layers": 3})
    refused(llama, "num_hidden_layers")


def test_one_tensor_with_a_high_number_is_one_layer(llama):
    """The largest index in a name is not the number of layers: a name costs a stranger nothing."""
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.899.mlp.up_proj.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, llama / "model.safetensors")
    configure(llama, num_hidden_layers=900)
    refused(llama, "num_hidden_layers")


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 10**5), ("num_experts", 10**6), ("num_labels", 10**9), ("vocab_size", 10**9),
     ("layer_types", ["full_attention"] * 10**5), ("layer_types", ["full_attention"] * 3), ("n_positions", 10**6),
     ("mlp_layer_types", ["dense"] * 10**5), ("num_key_value_heads", [2] * (2 * 10**5)), ("kv_lora_rank", 10**12)],
)  # fmt: skip
def test_without_weight_files_no_count_is_above_that_of_any_model(llama, key, value):
    (llama / "model.safetensors").unlink()
    configure(llama, **{key: value})
    refused(llama, key, weights=False)
    configure(llama, **{key: LLAMA_CONFIG.get(key)}, vision_config={key: value})
    if key != "n_positions" and value != ["full_attention"] * 3:
        refused(llama, key, weights=False)


def test_published_and_tiny_models_raise_no_alarm(llama, gpt2, tmp_path):
    for path in (llama, gpt2, write_tiny_llama(tmp_path / "q", model_type="qwen3", tie_word_embeddings=True)):
        assert len(find_weights(path).tensors) > 10
    configure(llama, layer_types=["full_attention"] * 2, max_window_layers=28, num_experts=0, sliding_window=4096)
    find_weights(llama)
    for name, config in KNOWN.items():
        (tmp_path / "config.json").write_text(json.dumps(dict(config)))
        assert read_config(tmp_path)["num_hidden_layers"] == config["num_hidden_layers"], name


@pytest.mark.parametrize("init", ["pretrained", "random"])
@pytest.mark.parametrize("command", ["check-config", "plan", "train"])
def test_every_command_refuses_a_count_before_it_builds_anything(
    tiny_llama, tmp_path, dualtune_main, write_rows, qa_rows, command, init
):
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    configure(model, num_hidden_layers=10**7)
    data, config = write_rows(qa_rows), tmp_path / "config.yaml"
    config.write_text(
        f"model: {{name: {model}, init: {init}}}\ndata: {{train: {data}}}\nrun: {{dir: {tmp_path / 'run'}}}\n"
    )
    done = dualtune_main(command, config)
    assert done.returncode == FormatError.exit_code, done.stdout + done.stderr
    assert "num_hidden_layers: got" in done.stdout + done.stderr and "Traceback" not in done.stderr


def keys(config):
    more = ("rope_scaling", "rope_parameters", "layer_types", "quantization", "quantization_config", "text_config",
            "pad_token_id", "dtype", "num_labels", "id2label", "sliding_window", "rope_traditional")  # fmt: skip
    return [*config, *more]


def loads_or_is_refused(backend, path, init="pretrained", targets=("q_proj",)):
    """Load the model, and say which line refuses it: any other exception fails the test."""
    adapter = AdapterSpec(rank=2, alpha=4.0, dropout=0.0, targets=targets)
    try:
        backend.load(LoadRequest(path, "float32", "auto", init, adapter, OptimizerSpec(), seed=0))
    except DualtuneError as error:
        assert "\n" not in str(error) and len(str(error)) < 1500
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["torch", "mlx"])
@pytest.mark.parametrize("key", [key for key in keys(LLAMA_CONFIG) if key != "architectures"])  # slow to be refused
def test_a_value_of_any_kind_loads_or_is_one_line(open_backend, llama, name, key):
    backend, value = open_backend(name), WRONG[keys(LLAMA_CONFIG).index(key) % len(WRONG)]
    for each in (value, None, [1]):
        configure(llama, **{key: each})
        refusal = loads_or_is_refused(backend, llama)
        if refusal and "adapter" not in refusal:
            assert str(llama) in refusal


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_a_value_that_only_the_library_rejects_names_the_directory(open_backend, gpt2, name):
    configure(gpt2, n_head=3)  # does not divide the width
    refusal = loads_or_is_refused(open_backend(name), gpt2, targets=("c_attn",))
    assert refusal.startswith(f"{gpt2}: ") and "dualtune-model-" not in refusal


@pytest.mark.parametrize("key", [*GPT2_CONFIG, "head_dim", "num_key_value_heads", "text_config", "rope_theta"])
def test_the_planner_knows_a_shape_or_says_that_it_does_not(gpt2, llama, key):
    for path in (gpt2, llama):
        for value in WRONG:
            configure(path, **{key: value})
            with contextlib.suppress(UnknownShape, FormatError):
                assert decoder_of(read_config(path)).num_parameters >= 0
