"""Copies of a stranger's model directory: only the files of a model leave it, not links and code."""

import json
import os
import pickle
import shutil
import sys

import pytest

from dualtune.base.errors import FormatError
from dualtune.model.copies import copy_model
from dualtune.use.transfer.bundles.pack import pack

OURS = {"README.md", "generation_config.json"}  # the card, and where an answer ends
FILES = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"}


@pytest.fixture
def model(tiny_llama, tmp_path):
    return shutil.copytree(tiny_llama, tmp_path / "model")


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "home" / "id"
    path.parent.mkdir()
    path.write_text("my own secret")
    return path


def spoil(model, key):
    """Add what a model directory may hold and no copy may take; return the names."""
    (model / "modeling.py").write_text("raise SystemExit")
    (model / "linked.py").symlink_to(key)
    (model / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    (model / "environment.json").symlink_to("/proc/self/environ")
    (model / "home").symlink_to(key.parent)
    (model / "notes.txt").symlink_to(key)
    os.mkfifo(model / "pipe")
    (model / "original").mkdir()
    shutil.copy(model / "model.safetensors", model / "original" / "model.safetensors")
    return [
        "environment.json",
        "home",
        "linked.py",
        "modeling.py",
        "notes.txt",
        "original",
        "pipe",
        "pytorch_model.bin",
    ]


def test_a_copy_of_a_whole_model_takes_the_model_and_names_the_rest(model, key, tmp_path):
    expected = FILES | {"README.md", "tekken.json", "LICENSE"}
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    (model / "additional_chat_templates" / "tool_use.py").write_text("")
    for name in expected - FILES:
        (model / name).write_text("{}")
    assert copy_model(model, tmp_path / "copy") == []
    left_out = spoil(model, key)
    assert copy_model(model, tmp_path / "again") == left_out
    for copy in (tmp_path / "copy", tmp_path / "again"):
        names = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
        assert names == expected | {"additional_chat_templates/tool_use.jinja"}
        assert not any(path.is_symlink() for path in copy.rglob("*"))
        assert (copy / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["LICENSE.txt", "README.md", "dualtune.json", "chat_template.json", "tiktoken.model"])
def test_a_link_with_the_name_of_a_model_s_file_is_refused(model, key, tmp_path, name):
    (model / name).symlink_to(key)
    with pytest.raises(FormatError, match="outside of the model directory"):
        copy_model(model, tmp_path / "copy")


def test_a_directory_of_templates_elsewhere_is_refused(model, key, tmp_path):
    (key.parent / "secret.jinja").write_text("my own secret")
    (model / "additional_chat_templates").symlink_to(key.parent)
    with pytest.raises(FormatError, match="outside of the model directory"):
        copy_model(model, tmp_path / "copy")


@pytest.mark.parametrize("kind", ["fifo", "directory", "device"])
def test_what_is_no_file_is_refused(model, tmp_path, kind):
    path = model / "LICENSE"
    {"fifo": os.mkfifo, "directory": os.mkdir, "device": lambda path: path.symlink_to("/dev/zero")}[kind](path)
    with pytest.raises(FormatError, match=r"not a regular file|outside of the model directory"):
        copy_model(model, tmp_path / "copy")


def test_an_export_of_a_whole_model_takes_only_the_model(model, key, tmp_path, dualtune_main, open_backend):
    open_backend("torch")
    left_out = spoil(model, key)
    done = dualtune_main("export", model, tmp_path / "out", "--to", "hf", "--platform", "cpu")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {*record["files"]} == FILES | OURS == written - {"export.json"}
    assert all(name in record["notes"][0] for name in left_out)
    (model / "LICENSE.txt").symlink_to(key)
    refused = dualtune_main("export", model, tmp_path / "refused", "--to", "hf", "--platform", "cpu")
    assert refused.returncode == 6 and "outside of the model directory" in refused.stderr
    assert not [path for path in tmp_path.iterdir() if "refused" in path.name]


def test_another_program_s_converter_sees_only_the_model(
    model, key, tmp_path, dualtune_main, open_backend, monkeypatch
):
    """mlx-lm's converter copies every *.py, also through links."""
    open_backend("torch")
    spoil(model, key)
    script = tmp_path / "python"
    seen = tmp_path / "seen"
    others = f'[ "$3" = mlx_lm ] || exec {sys.executable} "$@"'
    script.write_text(f'#!/bin/sh\n{others}\nls -A "$6" > {seen}\ncp -rL "$6" "$8"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    done = dualtune_main("export", model, tmp_path / "out", "--to", "mlx", "--platform", "cpu")
    assert done.returncode == 0, done.stderr
    assert {*seen.read_text().split()} == FILES | {"generation_config.json"}
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


@pytest.mark.parametrize("name", ["chat_template.jinja", "adapters.safetensors", "dualtune.json"])
def test_a_link_out_of_an_adapter_s_directory_is_not_packed(place, key, name):
    """A template would be copied into merged models too."""
    adapter = place / "adapter"
    (adapter / "dualtune.json").unlink()  # which would notice that the file was added
    moved = shutil.move(adapter / name, key.parent) if (adapter / name).exists() else key
    (adapter / name).symlink_to(moved)
    with pytest.raises(FormatError, match=r"outside of the adapter directory|dualtune\.json"):
        pack(adapter, place / "bundle.tar")
    assert not (place / "bundle.tar").exists()
