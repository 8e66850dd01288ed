"""What belongs to a base model on disk and on the hub, and what only looks like it."""

import fnmatch
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from dualtune.base.errors import EnvironmentFault, FormatError
from dualtune.model.base_model import HUB_PATTERNS, resolve_model
from dualtune.model.config_file import check_limits, vocabulary_size
from dualtune.model.fingerprint import fingerprint


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    save_file({"model.norm.weight": np.ones(4, np.float32)}, path / "model.safetensors")
    return path


def test_a_second_copy_in_the_maker_s_names_does_not_change_the_fingerprint(model):
    before = fingerprint(model)
    save_file({"norm.weight": np.ones(4, np.float32)}, model / "consolidated.safetensors")
    assert fingerprint(model) == before
    assert list(before["tensors"]) == ["model.norm.weight"]


def test_such_a_copy_alone_is_no_model(model):
    (model / "model.safetensors").rename(model / "consolidated.safetensors")
    with pytest.raises(EnvironmentFault, match="has no weights"):
        resolve_model(str(model))


def test_such_a_copy_is_not_downloaded(model, monkeypatch):
    import huggingface_hub

    on_hub = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
    ]
    asked = []

    def snapshot_download(name, *, allow_patterns, ignore_patterns):
        asked.extend(
            file
            for file in on_hub
            if any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns)
            and not any(fnmatch.fnmatch(file, pattern) for pattern in ignore_patterns)
        )
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("mistralai/Mistral-7B-Instruct-v0.3") == model
    assert asked == ["config.json", "model-00001-of-00002.safetensors"]
    assert any(fnmatch.fnmatch("consolidated.safetensors", pattern) for pattern in HUB_PATTERNS)  # the trap


def test_a_head_without_rotation_may_have_a_rotated_part_of_0(tmp_path):
    file = tmp_path / "config.json"
    check_limits({"head_dim": 0, "qk_rope_head_dim": 0}, file)  # GLM-5
    with pytest.raises(FormatError, match="head_dim: got '0'"):
        check_limits({"head_dim": 0}, file)


def test_a_padded_head_writes_no_token_beyond_the_unpadded_ones(model):
    (model / "config.json").write_text(json.dumps({"vocab_size": 320, "unpadded_vocab_size": 310}))
    assert vocabulary_size(model) == 310


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("model/config.json", "give the model in it: .*/model$"),
        ("first-Q8_0.gguf", r"give the GGUF file in it: .*/first-Q8_0\.gguf$"),
        ("dualtune/first/first-Q8_0.gguf", r"give the GGUF file in it: .*first-Q8_0\.gguf$"),  # for LM Studio
        ("adapter/adapter_config.json", "--adapter or adapter.init_from"),
        ("adapter_config.json", "--adapter or adapter.init_from"),
        ("notes.txt", "a model directory in Hugging Face layout is needed"),
    ],
)
def test_a_run_or_an_export_in_place_of_a_model_is_told_what_to_give(tmp_path, file, what):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(EnvironmentFault, match=f"has no config.json; .*{what}"):
        resolve_model(str(tmp_path))
