"""What fuzzing found in the readers, each as the smallest input that showed it."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from dualtune.base.errors import ConfigError, FormatError, NonFiniteError
from dualtune.base.untrusted import read_json, read_safetensors
from dualtune.config import parse_config
from dualtune.doctor.storage import missing_files
from dualtune.engine.memory.shapes import UnknownShape, decoder_of
from dualtune.engine.testing.tiny_models import write_tiny_llama
from dualtune.model.adapter import AdapterSpec, init_adapter
from dualtune.model.base_model import resolve_model
from dualtune.model.fingerprint import fingerprint
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.model.importing.repair import import_adapter
from dualtune.train.state import checkpoint
from dualtune.train.state.listing import list_runs
from dualtune.train.state.metrics import read_rows

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint_v1"


@pytest.fixture
def adapter(tmp_path):
    tensors = {n: x + 1 for n, x in init_adapter({"model.layers.0.q_proj": (6, 4)}, 2, seed=0).items()}
    write_adapter(tmp_path / "a", Adapter(AdapterSpec(2, 4.0, 0.0, ("q_proj",)), tensors), layout="peft")
    (tmp_path / "a" / "dualtune.json").unlink()
    return tmp_path / "a"


def with_header(path, header, content=b""):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


# --- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (r'{"a": "\ud800"}', "half a surrogate pair"),  # which no UTF-8 file can hold: writing it again failed
        (r'{"\udc00\ud800": 1}', "half a surrogate pair"),
        ('{"a": 1e999}', "beyond the range of a float"),  # became Infinity, which JSON does not have
        ('{"a":' * 80 + "1" + "}" * 80, "nested too deeply"),  # ended the recursion of who printed it
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"a": [' + "[]," * 450_000 + "0]}", "quotes, commas, colons and brackets"),
    ],
)
def test_json_that_cannot_be_held_or_written_again_is_refused(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(FormatError, match=message):
        read_json(tmp_path / "x.json", max_bytes=8 << 20)


@pytest.mark.parametrize("text", [r'{"a": "\ud83e\udd99"}', r'{"a": "\\ud800"}'])
def test_whole_pairs_and_backslashes_are_no_halves(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    assert read_json(tmp_path / "x.json", max_bytes=100) == json.loads(text)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(adapter):
    (adapter / "adapter_config.json").unlink()
    os.mkfifo(adapter / "adapter_config.json")
    with pytest.raises(FormatError, match=r"adapter_config\.json: is not a file"):
        read_adapter(adapter)


# --- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [10**4000] * 8, "data_offsets": [0, 4]},  # Python prints no integer so long
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 10**4200]},
        {"dtype": "F32", "shape": [10**39] * 8, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 10**39]},
        {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]},  # NumPy has no array of this shape
        {"dtype": "F32", "shape": [1], "data_offsets": [False, 4]},
    ],
)
def test_a_forged_entry_is_a_format_error(tmp_path, entry):
    with pytest.raises(FormatError, match=r"tensor 'x': |an integer of \d+ digits"):
        read_safetensors(with_header(tmp_path / "x.safetensors", {"x": entry}, bytes(4)))


def test_names_and_values_of_a_file_do_not_reach_the_terminal_as_they_are(adapter):
    tensors = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    renamed = {name.replace("q_proj", "q\x1b[2Jproj"): x for name, x in tensors.items()}
    safetensors.numpy.save_file(renamed, adapter / "adapter_model.safetensors")
    for read in (read_adapter, import_adapter):
        with pytest.raises(FormatError) as error:
            read(adapter)
        assert str(error.value).isprintable()


def test_a_layer_that_no_model_has_does_not_make_a_list_of_all_before_it(adapter):
    tensors = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    first = {name.replace("q_proj", f"m{i}"): x for i in range(100) for name, x in tensors.items()}
    renamed = {name.replace("layers.0", "layers.9999"): x for name, x in first.items()}
    safetensors.numpy.save_file(renamed, adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": [f"m{i}" for i in range(100)]}))
    with pytest.raises(FormatError, match="layer 9999 is adapted, so there would be 1000000 modules"):
        import_adapter(adapter)


@pytest.mark.filterwarnings("error")
def test_a_factor_that_overflows_is_a_format_error_without_a_warning(adapter):
    config = json.loads((adapter / "adapter_config.json").read_text())
    config |= {"lora_alpha": 1e-9, "alpha_pattern": {"k_proj": 1e9}, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    tensors = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    tensors |= {n.replace("q_proj", m): 1e30 * x for n, x in tensors.items() for m in ("k_proj", "v_proj")}
    safetensors.numpy.save_file(tensors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(NonFiniteError, match="holds NaN or Inf"):  # mlx-lm's file has one scale
        write_adapter(adapter.with_name("dual"), read_adapter(adapter), metadata={})


@pytest.mark.filterwarnings("error")
def test_integers_that_are_no_weights_in_either_format_are_refused_without_a_warning(adapter):
    bits = np.array([[1, 1, 1, 0x7F00]], np.uint16)  # as bfloat16: almost nothing, and almost the largest there is
    names = [f"base_model.model.model.layers.0.q_proj.lora_{part}.weight" for part in "AB"]
    tensors = {names[0]: bits, names[1]: np.ascontiguousarray(bits.T)}
    safetensors.numpy.save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(FormatError, match="neither BF16 nor F16 is plausible"):
        import_adapter(adapter)


# --- base models -----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    return write_tiny_llama(tmp_path / "model", vocab_size=16, hidden_size=8, intermediate_size=8, head_dim=4)


@pytest.mark.parametrize("text", ["[]", "{", '{"a":' * 500 + "1" + "}" * 500, "\ufeff{}", "version https://git-lfs"])
def test_a_broken_config_of_a_model_is_found_before_anybody_reads_it(model, text):
    (model / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match=r"config\.json: "):
        resolve_model(str(model))


def test_a_config_may_have_what_json_has_not(model):
    """As those of some published models do."""
    text = (model / "config.json").read_text().replace("{", '{"time_step_limit": [0.0, Infinity],', 1)
    (model / "config.json").write_text(text)
    assert resolve_model(str(model)) == model
    assert (
        fingerprint(model)["config_sha256"]
        == hashlib.sha256(json.dumps(json.loads(text), sort_keys=True).encode()).hexdigest()
    )


@pytest.mark.parametrize(
    "header", [{"x": 1}, {"x": {"dtype": "F32"}}, {"x": {"dtype": 1, "shape": 2, "data_offsets": 3}}]
)
def test_a_header_without_offsets_is_a_format_error(model, header):
    with_header(model / "model.safetensors", header)
    with pytest.raises(
        FormatError, match=r"model\.safetensors: tensor 'x': the header needs dtype, shape and two data_offsets"
    ):
        fingerprint(model)


def test_a_header_that_is_the_whole_of_a_large_file_is_not_read(model):
    with (model / "model.safetensors").open("wb") as file:
        file.write((1 << 40).to_bytes(8, "little"))
        file.truncate((1 << 40) + 8)  # a hole
    with pytest.raises(FormatError, match="announces a header of 1099511627776 bytes, at most"):
        fingerprint(model)


@pytest.mark.parametrize("text", ["[1]", "{", '{"chat_template":'])
def test_a_broken_config_of_a_tokenizer_is_a_format_error(model, text):
    (model / "tokenizer_config.json").write_text(text)
    with pytest.raises(FormatError, match=r"tokenizer_config\.json: "):
        fingerprint(model)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """A function that changes the state or the tensors of the golden checkpoint, with hashes that are right."""

    def change(state=None, **tensors):
        path = tmp_path / "step-00000003"
        shutil.copytree(GOLDEN, path)
        table = json.loads((path / "state.json").read_text()) | (state or {})
        (path / "state.json").write_text(json.dumps({key: value for key, value in table.items() if value is not ...}))
        for name, edit in tensors.items():
            file = path / f"{name}.safetensors"
            safetensors.numpy.save_file(edit(safetensors.numpy.load_file(file)), file)
        manifest = json.loads((path / "MANIFEST.json").read_text())
        for name in manifest["files"]:
            data = (path / name).read_bytes()
            manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (path / "MANIFEST.json").write_text(json.dumps(manifest))
        return path

    return change


def test_the_changes_below_are_what_is_refused(saved):
    guards = {"losses": [1.0, 2], "in_spike": True, "best_step": None, "best_loss": 0.5}
    assert checkpoint.read(saved({"guards": guards, "optimizer_step": 0})).state["guards"] == guards


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"step": "3"}, "step: got '3', must be a number of steps"),
        ({"step": True}, "step: got 'True'"),
        ({"step": -1}, "step: got '-1'"),
        ({"optimizer_step": 10**39}, "optimizer_step: got"),
        ({"optimizer_step": 10**300}, "an integer of 301 digits"),
        ({"optimizer_step": None}, "optimizer_step: got 'None'"),
        ({"config": [1]}, "config: got"),
        ({"config": ...}, "config: missing"),
        ({"config": {"model": "x"}}, "config: model: got 'x', must be an object"),
        ({"fingerprints": {"data": 1}}, "fingerprints: data: got '1', must be a string"),
        ({"guards": {"losses": ["x"]}}, "guards: losses: got"),
        ({"guards": {"surprise": 1}}, "guards: surprise: got"),
        ({"guards": {"num_skipped": None}}, "guards: num_skipped: got"),
        ({"guards": {"best_loss": "low"}}, "guards: best_loss: got"),
        ({"place": 7}, "place: got '7', must be an object"),
    ],
)
def test_a_state_of_the_wrong_types_is_refused_although_its_hash_is_right(saved, state, message):
    with pytest.raises(FormatError, match=message):
        checkpoint.read(saved(state))


@pytest.mark.parametrize(
    "edit",
    [
        lambda tensors: {name + "x": x for name, x in tensors.items()},
        lambda tensors: {name: np.ascontiguousarray(x.T) for name, x in tensors.items()},
        lambda tensors: dict([*tensors.items()][1:]),
    ],
)
def test_moments_of_other_tensors_than_the_adapter_s_are_refused(saved, edit):
    with pytest.raises(FormatError, match="do not have the same tensors"):
        checkpoint.read(saved(optimizer_v=edit))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"schema_version": 2, "files": [[]]}', "{}", "1", '{"schema_version": "2"}']
)
def test_a_manifest_that_is_none_is_a_problem_and_no_crash(saved, text):
    path = saved()
    (path / "MANIFEST.json").write_text(text)
    assert "MANIFEST.json is not a manifest" in str(checkpoint.problem_of(path))


# --- files that only tell something ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row", ['{"step": 1, "eval_loss": 2.0}', '{"step": true, "loss": 1.0}', '{"step": 1, "loss": "low"}', "[" * 9999]
)
def test_a_row_that_is_none_of_ours_is_left_out(tmp_path, row):
    (tmp_path / "metrics.jsonl").write_text(row + '\n{"step": 2, "loss": 0.5}\n')
    assert [found["step"] for found in read_rows(tmp_path / "metrics.jsonl")] == [2]


@pytest.mark.parametrize("state", ["[1]", '{"schedule": 3}', '{"schedule": {"num_steps": "many"}}', "[" * 100_000])
def test_a_run_is_listed_whatever_its_state_file_holds(tmp_path, state):
    (tmp_path / "run" / "checkpoints" / "step-00000002").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-00000002" / "state.json").write_text(state)
    (run,) = list_runs(tmp_path)
    assert (run.checkpoint, run.num_steps) == (2, None)


@pytest.mark.parametrize("index", ["[]", '{"weight_map": 1}', "1", "[" * 100_000])
def test_an_index_that_is_none_is_named_as_missing(tmp_path, index):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert missing_files(tmp_path, weights=True) == ["a readable model.safetensors.index.json"]


def test_a_shape_that_is_no_table_is_unknown():
    with pytest.raises(UnknownShape, match="text_config"):
        decoder_of({"model_type": "gemma3", "text_config": 3})


@pytest.mark.parametrize("text", ["[" * 100_000, "a: [" + "1," * 60_000 + "1]"])
def test_a_config_that_costs_much_to_read_is_refused_early(text):
    with pytest.raises(ConfigError, match=r"nested too deeply|more than 50000 keys"):
        parse_config(text)
