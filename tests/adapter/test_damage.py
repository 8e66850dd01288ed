"""Adapter directories that are damaged, forged, incomplete or not adapters at all."""

import contextlib
import json
import os
import pickle
import shutil

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from dualtune.base.errors import FormatError
from dualtune.model.formats.directory import read_adapter, write_adapter

WEIGHTS = ("adapter_model.safetensors", "adapters.safetensors")
LAYOUTS = ("dual", "peft", "mlx")
Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"


def config_of(path):
    return json.loads((path / "adapter_config.json").read_text())


def flip_bit(file, position=-1):
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def without_manifest(path):
    (path / "dualtune.json").unlink()
    return path


@pytest.mark.parametrize("name", ["adapter_config.json", *WEIGHTS])
def test_a_flipped_bit_is_found_by_its_hash_in_any_file(dual, name):
    flip_bit(dual / name)
    with pytest.raises(FormatError, match=f"{name} was changed"):
        read_adapter(dual)


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_truncation_is_found(tmp_path, name, make_adapter):
    write_adapter(tmp_path / "a", make_adapter({Q0: (64, 48)}, rank=8, alpha=8.0))
    whole = (tmp_path / "a" / name).read_bytes()
    for size in range(0, len(whole), 1024):
        (tmp_path / "a" / name).write_bytes(whole[:size])
        with pytest.raises(FormatError, match=f"{name} has {size} bytes, expected {len(whole)}"):
            read_adapter(tmp_path / "a")


def test_a_lfs_pointer_is_explained(dual):
    (dual / "adapter_model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    with pytest.raises(FormatError, match=r"adapter_model\.safetensors is a git-lfs pointer.*git lfs pull"):
        read_adapter(dual)


def test_files_that_come_or_go_are_noticed(tmp_path, make_adapter):
    write_adapter(tmp_path / "a", make_adapter())
    (tmp_path / "a" / "adapters.safetensors").unlink()
    with pytest.raises(FormatError, match=r"adapters\.safetensors is missing"):
        read_adapter(tmp_path / "a")
    write_adapter(tmp_path / "b", make_adapter(), layout="peft")
    safetensors.numpy.save_file(make_adapter().tensors, tmp_path / "b" / "adapters.safetensors")
    with pytest.raises(FormatError, match=r"adapters\.safetensors is not listed"):
        read_adapter(tmp_path / "b")


def test_the_manifest_cannot_point_outside(dual):
    manifest = json.loads((dual / "dualtune.json").read_text())
    manifest["files"]["../../etc/passwd"] = {"bytes": 1, "sha256": ""}
    (dual / "dualtune.json").write_text(json.dumps(manifest))
    with pytest.raises(FormatError, match="not part of an adapter"):
        read_adapter(dual)


def test_a_newer_schema_is_refused(dual):
    (dual / "dualtune.json").write_text('{"schema_version": 2, "files": {}}')
    with pytest.raises(FormatError, match=r"newer than 1\. Update dualtune"):
        read_adapter(dual)


@pytest.mark.parametrize(
    ("value", "message"), [(np.nan, "NaN or Inf"), (np.inf, "NaN or Inf"), (0, "A and B are all zeros")]
)
def test_bad_values_are_refused_even_without_a_manifest(tmp_path, value, message, make_adapter):
    write_adapter(tmp_path / "a", make_adapter(), layout="peft")
    without_manifest(tmp_path / "a")
    tensors = make_adapter().tensors
    for name, x in tensors.items():
        x[:] = value if Q1 in name else x
    safetensors.numpy.save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    with pytest.raises(FormatError, match=message):
        read_adapter(tmp_path / "a")


def test_a_pickle_is_never_opened(tmp_path):
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(canary),)

    path = tmp_path / "a"
    path.mkdir()
    (path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (path / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(FormatError, match=r"'adapter_model\.bin' is a pickle.*safe_serialization"):
        read_adapter(path)
    assert not canary.exists()


def test_path_problems_say_what_is_there(tmp_path):
    with pytest.raises(FormatError, match="absent: No such file or directory"):
        read_adapter(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    with pytest.raises(FormatError, match="file: Not a directory"):
        read_adapter(tmp_path / "file")
    with pytest.raises(FormatError, match=r"has neither .*\. It contains: nothing"):
        read_adapter(tmp_path_with(tmp_path / "empty"))
    with pytest.raises(FormatError, match=r"has neither .* It contains: 'model\.gguf', 'notes\.txt'"):
        read_adapter(tmp_path_with(tmp_path / "other", "notes.txt", "model.gguf"))
    (tmp_path / "sweep/b/adapter").mkdir(parents=True)
    (tmp_path / "sweep/a/adapter").mkdir(parents=True)
    with pytest.raises(FormatError, match=r"holds 2 runs with an adapter\. Give one of them, such as .*/sweep/a; "):
        read_adapter(tmp_path / "sweep")
    with pytest.raises(FormatError, match=r"adapter_config\.json is missing"):
        read_adapter(tmp_path_with(tmp_path / "bare", "adapter_model.safetensors"))


def tmp_path_with(path, *names):
    path.mkdir()
    for name in names:
        (path / name).write_text("x")
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be an object"),
        ("{}", "peft_type: missing"),
        ('{"peft_type": "LORA", "r": 3, "target_modules": ["q_proj"]}', "lora_alpha: missing"),
        ('{"peft_type": "LORA", "lora_alpha": 3, "target_modules": ["q_proj"]}', "r: missing"),
        ('{"a": "' + "x" * 2**20 + '"}', "at most 1048576"),
    ],
)
def test_a_broken_config_is_named(tmp_path, text, message, make_adapter):
    write_adapter(tmp_path / "a", make_adapter(), layout="peft")
    (without_manifest(tmp_path / "a") / "adapter_config.json").write_text(text)
    with pytest.raises(FormatError, match=rf"adapter_config\.json: .*{message}"):
        read_adapter(tmp_path / "a")


def test_two_files_of_other_tools_must_agree(dual):
    without_manifest(dual)
    assert read_adapter(dual).layout == "dual"
    config = config_of(dual)
    config["lora_parameters"]["scale"] = 20.0
    (dual / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=r"updates of the two weight files differ by 9\.0e-01"):
        read_adapter(dual)


def test_a_transposed_update_of_a_square_matrix_is_found(dual):
    """Its shapes are right: Aᵀ Bᵀ in place of (B A)ᵀ."""
    without_manifest(dual)
    file = dual / "adapters.safetensors"
    mlx = safetensors.numpy.load_file(file)
    a, b = mlx[f"{Q0}.lora_a"], mlx[f"{Q0}.lora_b"]
    mlx |= {f"{Q0}.lora_a": np.ascontiguousarray(b.T), f"{Q0}.lora_b": np.ascontiguousarray(a.T)}
    safetensors.numpy.save_file(mlx, file)
    with pytest.raises(FormatError, match=f"{Q0}: the updates"):
        read_adapter(dual)
    del mlx[f"{Q0}.lora_a"], mlx[f"{Q0}.lora_b"]
    safetensors.numpy.save_file(mlx, file)
    with pytest.raises(FormatError, match=f"{Q0} is adapted in one weight file only"):
        read_adapter(dual)


json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.just(10**400)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)
KEYS = (
    *("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "rank_pattern"),
    *("alpha_pattern", "layers_to_transform", "layers_pattern", "init_lora_weights", "base_model_name_or_path"),
    *("fine_tune_type", "lora_parameters", "use_rslora", "rank", "scale", "dropout", "keys"),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory, make_adapter):
    """One directory of each layout, to be spoilt and restored."""
    root = tmp_path_factory.mktemp("written")
    for layout in LAYOUTS:
        write_adapter(root / layout, make_adapter(), layout=layout)
    return root


@settings(deadline=None)
@given(key=st.sampled_from(KEYS), inside=st.booleans(), value=json_values, layout=st.sampled_from(LAYOUTS))
def test_any_value_in_a_config_is_read_or_a_format_error(tmp_path_factory, written, key, inside, value, layout):
    path = tmp_path_factory.mktemp("fuzz") / "a"
    shutil.copytree(written / layout, path)
    config = config_of(without_manifest(path))
    table = config["lora_parameters"] if inside and layout != "peft" else config
    table[key] = value
    (path / "adapter_config.json").write_text(json.dumps(config))
    with contextlib.suppress(FormatError):
        read_adapter(path)


@settings(deadline=None)
@given(key=st.sampled_from(["schema_version", "files", "notes"]), value=json_values)
def test_any_value_in_a_manifest_is_read_or_a_format_error(tmp_path_factory, written, key, value):
    path = tmp_path_factory.mktemp("fuzz") / "a"
    shutil.copytree(written / "dual", path)
    manifest = json.loads((path / "dualtune.json").read_text())
    (path / "dualtune.json").write_text(json.dumps({**manifest, key: value}))
    with contextlib.suppress(FormatError):
        read_adapter(path)
    (path / "dualtune.json").write_text(json.dumps({**manifest, "files": {"adapter_config.json": value}}))
    with pytest.raises(FormatError):
        read_adapter(path)
