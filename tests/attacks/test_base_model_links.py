"""Links in a stranger's model directory: they must not carry a private file away, nor bring one in."""

import json
import os
import shutil

import pytest

from dualtune.base.errors import DualtuneError, FormatError
from dualtune.engine.testing.tiny_models import write_tiny_llama
from dualtune.model.base_model import find_weights, resolve_model
from dualtune.model.copies import copy_without_weights
from dualtune.show.run import run
from dualtune.use.transfer.bundles.pack import pack

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def model(tiny_llama, tmp_path):
    """A copy that a test may spoil."""
    return shutil.copytree(tiny_llama, tmp_path / "model")


@pytest.fixture
def key(tmp_path):
    """A private key outside of the model's directory, in a form that no scan knows."""
    path = tmp_path / "home/.ssh/id"
    path.parent.mkdir(parents=True)
    path.write_text("my own secret")
    return path


@pytest.mark.parametrize("name", ["config.json", "LICENSE.txt", "tokenizer_config.json"])
def test_a_link_out_of_the_directory_is_not_copied(model, key, tmp_path, name):
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(key)
    with pytest.raises(FormatError, match=r"is a link to .* outside of the model directory"):
        copy_without_weights(model, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_copy_takes_the_files_of_a_model_and_no_others(model, tmp_path):
    for name in ("passwords.txt", "private.json", "LICENSE.txt"):
        (model / name).write_text("{}")
    (model / "here.txt").symlink_to(model / "LICENSE.txt")
    copy_without_weights(model, tmp_path / "merged")
    copied = {file.name for file in (tmp_path / "merged").iterdir()}
    assert copied == {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE.txt"}


def test_a_secret_in_a_file_that_would_be_copied_is_refused(model, tmp_path):
    config = json.loads((model / "config.json").read_text()) | {"note": "hf_" + "a1B2" * 9}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=r"config\.json: holds a Hugging Face token \(not shown\)"):
        copy_without_weights(model, tmp_path / "merged")


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tokenizer.json"])
def test_a_link_out_of_the_directory_is_not_packed(model, key, make_config, write_rows, qa_rows, open_backend, name):
    adapter = run(make_config(write_rows(qa_rows)), open_backend("torch")).adapter_dir
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(key)
    with pytest.raises(FormatError, match="outside of the model directory"):
        pack(adapter, model.parent / "bundle.tar", tokenizer=str(model))
    assert not (model.parent / "bundle.tar").exists()


def test_weights_and_config_behind_links_out_of_the_directory_are_refused(model, tmp_path):
    for name in ("config.json", WEIGHTS):
        elsewhere = tmp_path / f"elsewhere-{name}"
        shutil.move(model / name, elsewhere)
        (model / name).symlink_to(elsewhere)
        with pytest.raises(FormatError, match="outside of the model directory"):
            resolve_model(str(model))
        (model / name).unlink()
        shutil.move(elsewhere, model / name)


def test_links_within_the_directory_and_to_it_are_followed(model, tmp_path):
    (model / WEIGHTS).rename(model / "real.safetensors")
    (model / WEIGHTS).symlink_to("real.safetensors")
    (tmp_path / "link").symlink_to(model)
    assert [file.name for file in find_weights(tmp_path / "link").files] == [WEIGHTS]


@pytest.mark.parametrize("target", ["../../blobs/../../../secret", "../../../secret", "../other/x"])
def test_in_the_hub_s_cache_only_blobs_may_be_linked_to(model, tmp_path, target):
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    (tmp_path / "models--a--b/blobs").mkdir(parents=True)
    (snapshot.parent / "other").mkdir(parents=True)
    shutil.copytree(model, snapshot)
    for file in (tmp_path / "secret", snapshot.parent / "other/x"):
        shutil.copy(model / WEIGHTS, file)
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to(target)
    with pytest.raises(FormatError, match=r"outside of the model directory|cannot be read"):
        resolve_model(str(snapshot))


def test_a_pipe_in_place_of_a_file_does_not_keep_anybody_waiting(model):
    for name in ("config.json", WEIGHTS, INDEX):
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)
        with pytest.raises(DualtuneError, match=r"not a regular file|no config\.json"):
            resolve_model(str(model))
        (model / name).unlink()
        shutil.copy(write_tiny_llama(model.parent / "fresh") / "config.json", model / "config.json")
