"""Base models from a stranger: files that are missing, planted, damaged or lead elsewhere.

What must hold on both backends and for every command: what is loaded is what was checked and fingerprinted, and what
is refused is refused in one line that names the fault.
"""

import json
import random
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dualtune.base.errors import ConfigError, DualtuneError, FormatError, NonFiniteError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing.tiny_models import random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.base_model import resolve_model
from dualtune.model.fingerprint import fingerprint
from dualtune.model.importing.foreign import base_shapes
from dualtune.model.optimizer import OptimizerSpec
from dualtune.show.run import run
from dualtune.train.generation.inference import load_model

SPEC = AdapterSpec(rank=2, alpha=4.0, dropout=0.0, targets=("q_proj",))
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def model(tiny_llama, tmp_path):
    """A copy that a test may spoil."""
    return shutil.copytree(tiny_llama, tmp_path / "model")


@pytest.fixture(params=["torch", "mlx"])
def load(request, open_backend):
    backend = open_backend(request.param)

    def load_(path, **options):
        return backend.load(
            LoadRequest(path, "float32", "auto", "pretrained", SPEC, OptimizerSpec(), seed=0, **options)
        )

    return load_


def edit(path, change):
    """Write the tensors again as `change` leaves them."""
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


def configure(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def split(path, name=INDEX):
    """Two shards and their index in place of one file."""
    tensors = load_file(path / WEIGHTS)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, mine in parts.items():
        save_file({n: tensors[n] for n in mine}, path / file, metadata={"format": "pt"})
    (path / WEIGHTS).unlink()
    table = {"metadata": {}, "weight_map": {n: file for file, mine in parts.items() for n in mine}}
    (path / name).write_text(json.dumps(table))
    return table


def logits(engine):
    return engine.logprobs(random_batch([9, 5], 96))


# --- finding 1: the tensors are those of the model -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(NORM), rf"1 missing: {NORM}\."),
        (lambda t: t.update({"planted.weight": np.ones(3, np.float32)}), r"1 not in the model: planted\.weight\."),
        (lambda t: t.update({NORM: np.ones(31, np.float32)}), r"1 of another shape: .*stored \[31\], needed \[32\]"),
        (lambda t: t.update({f"x.{n}": t.pop(n) for n in list(t)}), r"21 missing: .*; 21 not in the model: x\."),
    ],
)
def test_missing_unexpected_and_reshaped_tensors_are_refused_by_name(load, model, change, words):
    edit(model, change)
    with pytest.raises(FormatError, match=words) as refusal:
        load(model)
    assert "\n" not in str(refusal.value) and str(model) in str(refusal.value)


@pytest.mark.parametrize(
    ("layers", "words"), [(1, "9 not in the model: model.layers.1"), (4, "num_hidden_layers: got")]
)
def test_a_config_with_another_number_of_layers_is_refused(load, model, layers, words):
    configure(model, num_hidden_layers=layers)
    with pytest.raises(FormatError, match=words):
        load(model)


def test_what_older_files_hold_and_no_model_reads_is_no_fault(load, model):
    expected = logits(load(model))
    edit(model, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}))
    np.testing.assert_array_equal(logits(load(model)), expected)


@pytest.mark.parametrize("quantization", ["nf4", "affine4"])
def test_tensors_are_checked_where_the_base_is_quantized_on_loading(open_backend, model, quantization):
    backend = open_backend("torch")
    request = LoadRequest(model, "float32", quantization, "pretrained", SPEC, OptimizerSpec(), seed=0)
    backend.load(request)
    edit(model, lambda t: t.pop(NORM))
    with pytest.raises(FormatError, match=f"1 missing: {NORM}"):
        backend.load(request)


# --- finding 4: what is fingerprinted is what is loaded --------------------------------------------------------------


def test_a_tampered_file_has_another_fingerprint_whatever_lies_beside_it(model):
    before = fingerprint(model)
    shutil.copy(model / WEIGHTS, model / "zz.safetensors")
    shutil.copy(model / WEIGHTS, model / "model-zz.safetensors")
    assert fingerprint(model) == before
    edit(model, lambda t: t.update({n: x + 1 for n, x in t.items()}))
    after = fingerprint(model)
    assert after["tensors"] != before["tensors"] and after["weights_sha256"] != before["weights_sha256"]


def test_a_change_behind_the_first_64_kib_of_an_unsampled_tensor_changes_the_fingerprint(tmp_path):
    model = write_tiny_llama(tmp_path / "model", hidden_size=256)
    before = fingerprint(model)
    edit(model, lambda t: t["model.layers.0.mlp.up_proj.weight"].reshape(-1)[-1:].fill(7))
    after = fingerprint(model)
    assert after["tensors"] == before["tensors"] and after["weights_sha256"] != before["weights_sha256"]


@pytest.mark.parametrize("name", ["zz.safetensors", "model-zz.safetensors", "adapter_model.safetensors"])
def test_a_file_beside_the_weights_is_not_loaded(load, model, name):
    expected = logits(load(model))
    save_file({n: x * 2 for n, x in load_file(model / WEIGHTS).items()}, model / name, metadata={"format": "pt"})
    np.testing.assert_array_equal(logits(load(model)), expected)


def test_shards_are_loaded_as_one_model_with_an_index_or_without(load, model):
    expected = logits(load(model))
    split(model)
    np.testing.assert_array_equal(logits(load(model)), expected)
    (model / INDEX).unlink()
    np.testing.assert_array_equal(logits(load(model)), expected)
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FormatError, match=r"and model-00002-of-00002\.safetensors is missing"):
        load(model)


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/x.safetensors", "evil.bin", "a\\b.safetensors", "", 3])
def test_an_index_names_safetensors_files_of_its_directory_and_no_others(model, name):
    table = split(model)
    table["weight_map"][NORM] = name
    (model / INDEX).write_text(json.dumps(table))
    with pytest.raises(FormatError, match="the name of a safetensors file in this directory"):
        resolve_model(str(model))


def test_an_index_that_disagrees_with_the_headers_is_refused(model):
    table = split(model)
    del table["weight_map"][NORM]
    (model / INDEX).write_text(json.dumps(table))
    with pytest.raises(FormatError, match="is in the file, but not listed there"):
        resolve_model(str(model))
    table["weight_map"] |= {NORM: "model-00001-of-00002.safetensors", "x": "model-00001-of-00002.safetensors"}
    (model / INDEX).write_text(json.dumps(table))
    with pytest.raises(FormatError, match="is listed there, but not in the file"):
        resolve_model(str(model))


def test_a_tensor_in_two_files_is_refused(model):
    split(model)
    (model / INDEX).unlink()
    shard = model / "model-00002-of-00002.safetensors"
    save_file({**load_file(shard), **load_file(model / "model-00001-of-00002.safetensors")}, shard)
    with pytest.raises(FormatError, match=r"the tensor .* is in model-00001-of-00002\.safetensors too"):
        resolve_model(str(model))


def test_two_models_in_one_directory_are_refused(model):
    whole = (model / WEIGHTS).read_bytes()
    split(model)
    (model / WEIGHTS).write_bytes(whole)
    with pytest.raises(FormatError, match="holds two models"):
        resolve_model(str(model))


def test_an_adapter_config_does_not_lead_to_another_base(load, model, tmp_path):
    """With PEFT installed transformers would follow it."""
    expected = logits(load(model))
    evil = write_tiny_llama(tmp_path / "evil", seed=5, vocab_size=262, hidden_size=32, intermediate_size=64, head_dim=8)
    config = {"base_model_name_or_path": str(evil), "peft_type": "LORA", "r": 1, "target_modules": ["q_proj"]}
    (model / "adapter_config.json").write_text(json.dumps(config))
    np.testing.assert_array_equal(logits(load(model)), expected)


def test_a_run_does_not_resume_on_a_base_whose_tampered_weights_lie_beside_the_true_ones(
    model, make_config, write_rows, qa_rows, open_backend
):
    config = make_config(write_rows(qa_rows), {"train.steps": 2, "run.save_every": 1}, model=model)
    backend = open_backend("torch")
    run(config, backend)
    shutil.copy(model / WEIGHTS, model / "zz.safetensors")
    edit(model, lambda t: t.update({n: x * 1.01 for n, x in t.items()}))
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 4})})
    with pytest.raises(ConfigError, match="base model's weights"):
        run(longer, backend)


# --- finding 8: damaged files ----------------------------------------------------------------------------------------


def test_truncated_weights_are_one_line_with_both_sizes_and_the_remedy(model, dualtune_main, tmp_path):
    whole = (model / WEIGHTS).stat().st_size
    with (model / WEIGHTS).open("r+b") as file:
        file.truncate(whole - 1000)
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {{name: {model}}}\ndata: {{train: {tmp_path / 'x.jsonl'}}}\nrun: {{dir: {tmp_path / 'r'}}}\n"
    )
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 20)
    for command in (["check-config", config], ["train", config], ["generate", model, "--prompt", "x"]):
        done = dualtune_main(*command)
        told = [line for line in (done.stdout + done.stderr).splitlines() if "is truncated" in line]
        assert done.returncode == FormatError.exit_code and len(told) == 1, (command, done.stdout, done.stderr)
        assert f"{WEIGHTS}: {whole - 1000} bytes, expected {whole}" in told[0] and "hf download" in told[0]
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("seed", range(10))
def test_a_damaged_header_is_refused_in_one_line(model, seed):
    draw = random.Random(seed)
    data = bytearray((model / WEIGHTS).read_bytes())
    size = int.from_bytes(data[:8], "little")
    for _ in range(draw.randrange(1, 20)):
        data[draw.randrange(8 + size)] = draw.randrange(256)
    (model / WEIGHTS).write_bytes(data)
    with pytest.raises(FormatError) as refusal:
        resolve_model(str(model))
    assert WEIGHTS in str(refusal.value) and "hf download" in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_git_lfs_pointer_says_what_to_run(model):
    (model / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(FormatError, match="git lfs pull"):
        resolve_model(str(model))


def test_weights_in_the_hub_s_cache_are_checked_as_any_others(model, tmp_path, monkeypatch):
    repo = tmp_path / "hub/models--a--b"
    snapshot = repo / "snapshots/0123"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for file in model.iterdir():
        shutil.copy(file, repo / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **options: str(snapshot))
    assert resolve_model("a/b") == snapshot
    with (repo / "blobs" / WEIGHTS).open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(FormatError, match="5000 bytes, expected"):
        resolve_model("a/b")


# --- finding 2: token ids beyond the vocabulary ----------------------------------------------------------------------


@pytest.fixture
def beyond(model):
    """The model with a tokenizer in which "=7" has an id that the model does not know."""
    table = json.loads((model / "tokenizer.json").read_text())
    table["model"]["vocab"]["=7"] = 700
    (model / "tokenizer.json").write_text(json.dumps(table))
    return model


@pytest.fixture
def data(write_rows):
    """Rows of which one, in the middle, has that token."""
    return write_rows([{"prompt": f"{i} is", "completion": "x=7" if i == 9 else f"{i}"} for i in range(16)])


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_data_with_a_token_beyond_the_vocabulary_is_refused_before_anything_loads(
    beyond, make_config, data, open_backend, backend, monkeypatch
):
    opened = open_backend(backend)
    monkeypatch.setattr(opened, "load", lambda request: pytest.fail("it was loaded"))
    with pytest.raises(FormatError, match=r"gives '=7' the id 700.*embeddings for 262 tokens"):
        run(make_config(data, model=beyond), opened)


def test_a_prompt_with_a_token_beyond_the_vocabulary_is_refused(beyond, open_backend):
    loaded = load_model(open_backend("torch"), str(beyond))
    with pytest.raises(FormatError, match="the id 700"):
        loaded.tokenizer.encode_prompt("1+1=7")


def test_data_that_was_tokenized_for_a_larger_model_is_tokenized_again(
    tiny_llama, model, make_config, data, open_backend
):
    """The cache of tokenized data must not pass the check by: the tokenizer is the same."""
    backend = open_backend("torch")
    run(make_config(data, model=tiny_llama), backend)
    write_tiny_llama(model, vocab_size=261, hidden_size=32, intermediate_size=64, head_dim=8)
    with pytest.raises(FormatError, match="embeddings for 261 tokens"):
        run(make_config(data, {"run.dir": model.parent / "other"}, model=model), backend)


def test_preview_and_check_config_see_it(beyond, dualtune_main, tmp_path, data):
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {{name: {beyond}}}\ndata: {{train: {data}}}\nrun: {{dir: {tmp_path / 'r'}}}\n")
    for command in ("preview", "check-config"):
        done = dualtune_main(command, config)
        assert done.returncode == FormatError.exit_code and "the id 700" in done.stdout + done.stderr
    assert "ids up to 700" in done.stdout


# --- findings 3 and 14: configs that lead to code --------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"model_file": "x.py"},
        {"transformers_weights": "evil.bin"},
        {"attn_implementation": "evil/kernel"},
        {"_attn_implementation": "evil/kernel@main:f"},
        {"_attn_implementation_internal": "kernels-community/x"},
        {"attn_implementation": {"text_config": "evil/kernel"}},
        {"text_config": {"layers": [{"attn_implementation": "evil/kernel"}]}},
        {"attn_implementation": ["eager"]},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_a_config_that_leads_to_code_is_refused_by_every_way_in(model, open_backend, changes, init):
    configure(model, **changes)
    with pytest.raises(FormatError, match=r"config\.json: "):
        resolve_model(str(model), weights=init == "pretrained")
    for name in ("torch", "mlx"):
        with pytest.raises(FormatError, match=r"config\.json: "):
            open_backend(name).load(LoadRequest(model, "float32", "auto", init, SPEC, OptimizerSpec(), seed=0))


def test_code_beside_a_known_model_type_is_ignored(load, model):
    """Many published models keep auto_map from the time before transformers knew them."""
    expected = logits(load(model))
    (model / "x.py").write_text("raise SystemExit('run')")
    configure(model, auto_map={"AutoConfig": "x.Config", "AutoModelForCausalLM": "x.Model"})
    np.testing.assert_array_equal(logits(load(model)), expected)
    configure(model, model_type="unheard_of")
    with pytest.raises(DualtuneError, match="unheard_of"):
        load(model)


def test_a_plain_name_of_attention_is_no_fault_and_does_not_reach_the_library(load, model):
    """Without flash-attn transformers would take a kernel from the hub for it."""
    expected = logits(load(model))
    configure(model, _attn_implementation="flash_attention_2", auto_map=None)
    np.testing.assert_array_equal(logits(load(model)), expected)


def test_plain_weights_that_are_called_quantized_are_refused(load, model):
    configure(model, quantization={"group_size": 64, "bits": 4})
    with pytest.raises(ConfigError, match="says that it is quantized, but its weights are not"):
        load(model)


def test_nan_in_the_base_is_said_to_be_the_base_s(model, make_config, write_rows, qa_rows, open_backend):
    edit(model, lambda t: t["model.norm.weight"].fill(np.nan))
    with pytest.raises(NonFiniteError, match=r"model\.name: before training, the loss of the model.*hold NaN"):
        run(make_config(write_rows(qa_rows), {"data.packing": True}, model=model), open_backend("torch"))


@pytest.mark.parametrize("kind", [{"a": 1}, ["gpt2"], 7])
def test_a_model_type_that_is_no_text_is_refused_by_every_reader(model, kind):
    configure(model, model_type=kind)
    for read in (resolve_model, base_shapes):
        with pytest.raises(FormatError, match=r"model_type: got .*, must be a printable string or null"):
            read(model)
