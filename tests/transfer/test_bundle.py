"""Bundles: what is packed, that it arrives whole, and that nothing of the machine or its user is in them."""

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dualtune.base.errors import ConfigError, DiskError, FormatError
from dualtune.data.tokens.tokenizer import TOKENIZER_FILES
from dualtune.model.adapter import AdapterSpec, init_adapter
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.model.optimizer import OPTIMIZERS, slots_of
from dualtune.show.run import run
from dualtune.train.state import checkpoint
from dualtune.use.transfer.bundles import manifest, names
from dualtune.use.transfer.bundles.bundle import inspect, unpack
from dualtune.use.transfer.bundles.pack import pack

CANARY = "hf_" + "C4nAry" * 6


@pytest.fixture
def adapter(tmp_path):
    """A directory with a base model that lies in somebody's home."""
    tensors = init_adapter({"model.layers.0.self_attn.q_proj": (8, 8)}, 2, seed=0)
    tensors = {name: x + np.float32(1) for name, x in tensors.items()}
    write_adapter(tmp_path / "a", Adapter(AdapterSpec(2, 4, 0.0, ("q_proj",)), tensors, "/home/somebody/models/base"))
    return tmp_path / "a"


@pytest.fixture
def trained(make_config, write_rows, qa_rows, tiny_softmax, open_backend):
    """A run of four steps on the NumPy engine, with checkpoints of steps 2 and 4 and an adapter."""

    def train(**changes):
        settings = {"run.save_every": 2, "data.eval": 0.25} | {k.replace("__", "."): v for k, v in changes.items()}
        return run(make_config(write_rows(qa_rows), settings, tiny_softmax), open_backend("numpy")).run_dir

    return train


def files_of(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


# --- what arrives ----------------------------------------------------------------------------------------------------


def test_an_adapter_arrives_as_the_same_function(adapter, tmp_path):
    pack(adapter, tmp_path / "a.tar")
    unpack(tmp_path / "a.tar", tmp_path / "there")
    moved, here = read_adapter(tmp_path / "there" / "adapter"), read_adapter(adapter)
    assert moved.spec == here.spec and moved.tensors.keys() == here.tensors.keys()
    assert all((moved.tensors[name] == here.tensors[name]).all() for name in here.tensors)
    assert (here.base_model, moved.base_model) == ("/home/somebody/models/base", "base")


@pytest.mark.parametrize("average", ["none", "tail"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_arrives_with_all_its_numbers(trained, tmp_path, optimizer, average):
    if optimizer == "schedule_free":
        run_dir = trained(train__schedule=optimizer)
    else:
        run_dir = trained(train__optimizer=optimizer, train__average=average)
    pack(run_dir, tmp_path / "r.tar")
    unpack(tmp_path / "r.tar", tmp_path / "there")
    (here, _), (there, _) = (checkpoint.newest(path / "checkpoints") for path in (run_dir, tmp_path / "there"))
    assert there.step == here.step == 4
    slots = slots_of(optimizer, averages=average != "none" and optimizer != "schedule_free")
    assert here.optimizer.slots.keys() == there.optimizer.slots.keys() == {*slots}
    pairs = [(tensors, there.optimizer.slots[slot]) for slot, tensors in here.optimizer.slots.items()]
    for ours, theirs in ((here.adapter, there.adapter), *pairs):
        assert all((ours[name] == theirs[name]).all() for name in ours) and ours.keys() == theirs.keys()
    for key in ("guards", "place", "fingerprints", "schedule", "optimizer_step"):
        assert there.state[key] == here.state[key], key


def test_the_step_the_best_and_the_adapter_can_be_chosen(trained, tmp_path):
    run_dir = trained(guards__restore_best=True, run__eval_every=2)
    pack(run_dir, tmp_path / "2.tar", step=2)
    pack(run_dir, tmp_path / "a.tar", adapter=True)
    assert inspect(tmp_path / "2.tar").bundle.step == 2
    report = inspect(tmp_path / "a.tar").bundle
    assert (report.kind, report.step) == ("adapter", None)
    assert report.data == {key: value for key, value in report.data.items() if key.endswith("documents")} != {}
    with pytest.raises(ConfigError, match=r"--checkpoint: got 3, .* has 4, 2"):
        pack(run_dir, tmp_path / "3.tar", step=3)
    # As if the evaluation of step 2 had been the best: restore_best needs that checkpoint to the end of the run.
    path = run_dir / "checkpoints" / "step-00000004"
    state, manifest = (json.loads((path / name).read_text()) for name in ("state.json", "MANIFEST.json"))
    state["guards"]["best_step"] = 2
    raw = json.dumps(state).encode()
    manifest["files"]["state.json"] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (path / "state.json").write_bytes(raw)
    (path / "MANIFEST.json").write_text(json.dumps(manifest))
    assert "the checkpoint of step 2 is packed too" in pack(run_dir, tmp_path / "both.tar").notes[0]
    unpack(tmp_path / "both.tar", tmp_path / "there")
    assert checkpoint.steps(tmp_path / "there" / "checkpoints") == [4, 2]
    (run_dir / "checkpoints" / "step-00000002" / "state.json").unlink()
    assert "the checkpoint for guards.restore_best is left out" in pack(run_dir, tmp_path / "one.tar").notes[0]


def test_a_damaged_checkpoint_is_passed_over_and_named(trained, tmp_path):
    run_dir = trained()
    (run_dir / "checkpoints" / "step-00000004" / "adapter.safetensors").write_bytes(b"")
    assert "step-00000004" in pack(run_dir, tmp_path / "r.tar").notes[0]
    assert inspect(tmp_path / "r.tar").bundle.step == 2
    with pytest.raises(FormatError, match=r"adapter\.safetensors has 0 bytes"):
        pack(run_dir, tmp_path / "no.tar", step=4)


def test_the_tokenizer_comes_along(adapter, tiny_llama, tmp_path):
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"name_or_path": "/home/somebody/x", "k": "/"}))
    pack(adapter, tmp_path / "a.tar", tokenizer=str(model))
    unpack(tmp_path / "a.tar", tmp_path / "there")
    there = tmp_path / "there" / "tokenizer"
    assert (there / "tokenizer.json").read_bytes() == (tiny_llama / "tokenizer.json").read_bytes()
    assert json.loads((there / "tokenizer_config.json").read_text()) == config | {"name_or_path": "x", "k": "/"}
    assert {*TOKENIZER_FILES, "chat_template.jinja"} == {*names.TOKENIZER_FILES}


# --- the file --------------------------------------------------------------------------------------------------------


def test_the_same_content_gives_the_same_bytes(adapter, tmp_path):
    elsewhere = shutil.copytree(adapter, tmp_path / "copied later" / "b")
    pack(adapter, tmp_path / "a.tar", name="first")
    pack(elsewhere, tmp_path / "b.tar", name="first")
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


def test_the_container_is_what_python_writes_and_tar_reads(adapter, tmp_path):
    """The oracles are tarfile and the tar of the system."""
    pack(adapter, tmp_path / "a.tar")
    ours, theirs = (tmp_path / "a.tar").read_bytes(), io.BytesIO()
    with tarfile.open(tmp_path / "a.tar") as source, tarfile.open(fileobj=theirs, mode="w", format=0) as target:
        for member in source:
            info = tarfile.TarInfo(member.name)
            info.size = member.size
            target.addfile(info, source.extractfile(member))
    assert theirs.getvalue()[: len(ours)] == ours and not any(theirs.getvalue()[len(ours) :])
    unpack(tmp_path / "a.tar", tmp_path / "there")
    (tmp_path / "by tar").mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "a.tar", "-C", tmp_path / "by tar"], check=True)
    assert files_of(tmp_path / "by tar") == files_of(tmp_path / "there")


def test_nothing_absolute_is_inside(trained, adapter, tmp_path):
    run_dir = trained()
    assert str(tmp_path).encode() in (run_dir / "config.yaml").read_bytes()
    pack(run_dir, tmp_path / "r.tar")
    pack(run_dir, tmp_path / "ra.tar", adapter=True)
    pack(adapter, tmp_path / "a.tar")
    for name in ("r.tar", "ra.tar", "a.tar"):
        raw = (tmp_path / name).read_bytes()
        assert str(tmp_path).encode() not in raw and b"somebody" not in raw and b'"/' not in raw, name
    assert inspect(tmp_path / "r.tar").bundle.relocate == ("data.train", "model.name")


def test_nothing_is_overwritten_and_what_fails_leaves_nothing(adapter, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("mine")
    for call in (lambda: pack(adapter, tmp_path / "taken"), lambda: unpack(tmp_path / "a.tar", tmp_path / "a")):
        with pytest.raises(ConfigError, match="already exists"):
            call()
    assert (tmp_path / "taken").read_text() == "mine"
    before = files_of(tmp_path)
    monkeypatch.setattr("dualtune.use.transfer.bundles.archive.END", None)  # the last bytes fail
    with pytest.raises(TypeError):
        pack(adapter, tmp_path / "a.tar")
    assert files_of(tmp_path) == before


def test_a_link_as_the_destination_is_not_followed(adapter, tmp_path):
    pack(adapter, tmp_path / "a.tar")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with pytest.raises(ConfigError, match="already exists and is not an empty directory"):
        unpack(tmp_path / "a.tar", tmp_path / "link")
    unpack(tmp_path / "a.tar", tmp_path / "empty")
    assert (tmp_path / "empty" / "adapter").is_dir()


def test_what_is_no_source_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"got neither a run directory .* nor an adapter directory"):
        pack(tmp_path, tmp_path / "x.tar")


# --- the disk ------------------------------------------------------------------------------------------------


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(FormatError, match="is not a file"):
            inspect(path)


def test_a_full_disk_is_known_before_anything_is_written(adapter, tmp_path, monkeypatch):
    pack(adapter, tmp_path / "a.tar")
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(DiskError, match=r"needs .*, the disk has 0 B free"):
        unpack(tmp_path / "a.tar", tmp_path / "there")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "a.tar"}


def test_a_disk_that_refuses_leaves_nothing(adapter, tmp_path, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    pack(adapter, tmp_path / "a.tar")
    monkeypatch.setattr("dualtune.use.transfer.bundles.bundle.fsync", full)
    with pytest.raises(DiskError, match=r"No space left on device\. Nothing was left there"):
        unpack(tmp_path / "a.tar", tmp_path / "deep" / "there")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "a.tar"}


# --- secrets ---------------------------------------------------------------------------------------------------------


def put_in_config(adapter, model):
    (adapter / "dualtune.json").unlink()  # which would notice
    path = adapter / "adapter_config.json"
    path.write_text(path.read_text().replace("CAUSAL_LM", CANARY))


def put_in_manifest(adapter, model):
    path = adapter / "dualtune.json"
    path.write_text(path.read_text().replace("{", f'{{"training": "{CANARY}", ', 1))


def put_in_weights(adapter, model):
    tensors = read_adapter(adapter).tensors
    for name in ("dualtune.json", "adapters.safetensors"):
        (adapter / name).unlink()
    save_file(tensors, adapter / "adapter_model.safetensors", {"note": CANARY})


def put_in_template(adapter, model):
    (model / "chat_template.jinja").write_text(CANARY)


@pytest.mark.parametrize(
    ("put", "name"),
    [
        (put_in_config, "adapter/adapter_config.json"),
        (put_in_manifest, "adapter/dualtune.json"),
        (put_in_weights, "adapter/adapter_model.safetensors"),
        (put_in_template, "tokenizer/chat_template.jinja"),
    ],
)
def test_a_secret_is_refused_by_the_name_of_the_file(adapter, dualtune_main, tiny_llama, tmp_path, put, name, wording):
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    put(adapter, model)
    done = dualtune_main("bundle", "pack", adapter, tmp_path / "x.tar", "--tokenizer", model)
    assert (done.returncode, done.stdout) == (6, "")
    assert "C4nAry" not in done.stderr
    wording(done.stderr)
    assert not (tmp_path / "x.tar").exists()


def test_comments_of_a_config_stay_at_home(trained, tmp_path):
    run_dir = trained()
    path = run_dir / "config.yaml"
    path.write_text(f"# {CANARY}\n{path.read_text()}")
    pack(run_dir, tmp_path / "r.tar")
    assert b"C4nAry" not in (tmp_path / "r.tar").read_bytes()


def test_a_secret_of_the_environment_is_refused_whatever_its_form(adapter, tmp_path, monkeypatch):
    (adapter / "dualtune.json").unlink()
    path = adapter / "adapter_config.json"
    path.write_text(path.read_text().replace("CAUSAL_LM", "0f" * 12))
    pack(adapter, tmp_path / "harmless.tar")
    monkeypatch.setenv("WANDB_API_KEY", "0f" * 12)
    with pytest.raises(FormatError, match=r"adapter_config\.json: holds the value of a secret environment variable"):
        pack(adapter, tmp_path / "x.tar")


# --- the specification ----------------------------------------------------------------------------------------------


def test_the_specification_names_what_the_reader_allows():
    text = (Path(__file__).parents[2] / "docs" / "adapter_format.md").read_text(encoding="utf-8")
    files = [*names.ADAPTER_FILES, *names.CHECKPOINT_FILES, *names.SLOT_FILES, *names.TOKENIZER_FILES]
    files += [names.CONFIG, names.BUNDLE_FILE]
    (table,) = re.findall(r"### Names\n(.*?)\n### ", text, re.S)
    assert {*re.findall(r"`([\w.]+\.\w+)`", table)} == {*files, names.POLICY}
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB - 1": 1 << 30}
    for line in table.splitlines()[3:]:
        if found := re.fullmatch(r"\| (.*) \| (\d+) (KiB|MiB|GiB - 1) \|", line):
            folder = re.match(r"`([\w/-]+/)`", found[1].replace("NNNNNNNN", "00000004"))
            limit = int(found[2]) * units[found[3]] - found[3].endswith("- 1")
            for file in re.findall(r"`([\w.]+\.\w+)`", found[1]):
                name = (folder[1] if folder else "") + file
                assert names.is_allowed(name), name
                assert limit == (names.MAX_BUNDLE_FILE_BYTES if file == "BUNDLE.json" else names.max_bytes(name)), name
    assert all(f"`{key}`" in text for key in manifest.KEYS)


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_commands_say_what_they_did_and_what_comes_next(trained, dualtune_main, tmp_path):
    run_dir, file, there = trained(), tmp_path / "r.tar", tmp_path / "there"
    done = dualtune_main("bundle", "pack", run_dir, file)
    assert (done.returncode, done.stderr) == (0, "")
    shown = dualtune_main("bundle", "inspect", file)
    assert shown.stdout == done.stdout and "checkpoint after step 4" in shown.stdout
    report = json.loads(dualtune_main("bundle", "inspect", file, "--json").stdout)
    listed = {name: entry["sha256"] for name, entry in report["files"].items()}
    assert report["ok"] and (report["kind"], report["step"]) == ("checkpoint", 4)
    done = dualtune_main("bundle", "unpack", file, there)
    assert f"train {there}/config.yaml --set run.dir={there} --set data.train=… --set model.name=…" in done.stdout
    found = files_of(there)
    del found["BUNDLE.json"]
    assert {name: hashlib.sha256(raw).hexdigest() for name, raw in found.items()} == listed


def test_what_cannot_be_trusted_ends_with_6(dualtune_main, tmp_path):
    file = tmp_path / "x.tar"
    file.write_bytes(Path(__file__).read_bytes())
    done = dualtune_main("bundle", "inspect", file)
    assert (done.returncode, done.stdout) == (6, "") and done.stderr.startswith(f"Error: {file}: ")
    done = dualtune_main("bundle", "inspect", file, "--json")
    assert done.returncode == 6 and json.loads(done.stdout)["ok"] is False
    done = dualtune_main("bundle", "unpack", file, tmp_path / "there")
    assert done.returncode == 6 and not (tmp_path / "there").exists()
    assert dualtune_main("bundle", "inspect", tmp_path / "nowhere").returncode == 6
    assert dualtune_main("bundle", "inspect", tmp_path).returncode == 6
