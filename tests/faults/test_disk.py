"""Disks that are full, read-only or another one, and files that rot: the run says so, and never reads half a truth."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

FULL = "training goes on with the checkpoint before, says save_failed once, saves again at the next interval"


def save_with(before, after, first, last):
    """Lines that do `before` ahead of the saves from number `first` to `last`, and `after` behind that one."""
    return f"""
import resource
from pathlib import Path
from dualtune.train.state import checkpoint
made = 0
def save(*args, save=checkpoint.save):
    global made
    made += 1
    if {first} <= made <= {last}:
        {before}
    try:
        return save(*args)
    finally:
        if made == {last}:
            {after}
checkpoint.save = save
"""


def filled(box):
    """What fills the disk of the run to the last byte, and what empties it."""
    filler = str(box.dir.parent / "filler")
    fill = f"os.system('cat /dev/zero > {filler} 2>/dev/null')"
    return fill, f"Path({filler!r}).unlink()"


def limited(size):
    return f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, -1))"


@pytest.fixture
def full(request, box):
    """A run without evaluations whose disk refuses (first save, last save); returns the lines to inject."""
    box.settings |= {"data.eval": 0, "run.keep": 99}

    def make(kind, first, last):
        if kind == "tmpfs":
            box.settings["run.dir"] = request.getfixturevalue("small_disk") / "run"
            return save_with(*filled(box), first, last)
        return save_with(limited(2000), limited(-1), first, last)

    return make


@pytest.mark.fault(
    row=6,
    fault="disk full at a save",
    injection="a full tmpfs of 1 MiB; `RLIMIT_FSIZE` (EFBIG)",
    expected=FULL,
)
@pytest.mark.parametrize("kind", ["tmpfs", "rlimit"])
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(box, full, kind):
    inject = full(kind, 2, 2)
    said = box.train(0, inject=inject).stdout
    assert box.checkpoints == [f"step-{step:08d}" for step in (2, 6, 8, 9)]
    (event,) = box.events("save_failed")
    newest = box.dir / "checkpoints" / "step-00000002"
    reason = "No space left on device" if kind == "tmpfs" else "File too large"
    assert event["step"] == 4
    assert reason in event["message"] and event["message"].endswith(f"The newest one is {newest}")
    assert said.count("save failed") == 1
    assert not box.leftovers
    assert box.adapter == box.straight()


@pytest.mark.fault(
    row=6,
    fault="disk full at every save",
    injection="as above, from the first save on; the adapter finds room",
    expected="every interval tries again; the adapter is written, exit 5",
)
@pytest.mark.parametrize("kind", ["tmpfs", "rlimit"])
def test_a_run_that_could_never_save_ends_with_5_and_its_adapter(box, full, kind):
    inject = full(kind, 1, 5)
    complaint = box.train(5, inject=inject).stderr
    assert "No checkpoint could be saved; the result is in" in complaint
    assert sorted({event["step"] for event in box.events("save_failed")}) == [2, 4, 6, 8, 9]
    assert not box.leftovers and not box.checkpoints
    assert box.adapter == box.straight()


@pytest.mark.fault(
    row=6,
    fault="disk full from a save on, to the end",
    injection="a full tmpfs of 1 MiB, which is emptied before the resume",
    expected="exit 5, names the newest checkpoint and what to do; adapter bitwise equal after resume",
)
def test_a_run_whose_adapter_finds_no_room_says_how_to_go_on(box, full):
    complaint = box.train(5, inject=full("tmpfs", 2, 99)).stderr
    newest = box.dir / "checkpoints" / "step-00000002"
    assert f"The newest checkpoint is {newest}. Free some space and run the same command again, which" in complaint
    assert box.checkpoints == [newest.name] and not (box.dir / "adapter").exists()
    (box.dir.parent / "filler").unlink()
    box.resume()
    assert box.adapter == box.straight()


@pytest.mark.fault(
    row=6,
    fault="disk full at the save that SIGTERM asks for",
    injection="`RLIMIT_FSIZE`, and a signal between two micro-batches",
    expected="exit 5, names the newest checkpoint; adapter bitwise equal after resume",
)
def test_a_stop_that_cannot_save_says_what_there_is(box, full):
    inject = full("rlimit", 2, 9) + f"enter({box.forward!r}, 14, send('SIGTERM'))"
    box.settings["run.save_every"] = 2
    complaint = box.train(5, inject=inject).stderr
    assert "topped by SIGTERM, but the state could not be saved" in complaint
    assert f"The newest checkpoint is {box.dir / 'checkpoints' / 'step-00000002'}" in complaint
    box.resume()
    assert box.adapter == box.straight()


@pytest.mark.fault(
    row=6,
    fault="too little room for the checkpoints, known before",
    injection="a tmpfs of 1 MiB with 64 KiB free",
    expected="exit 5 before the first step, with the sizes",
)
def test_too_little_room_is_found_before_the_first_step(box, small_disk):
    box.settings |= {"run.dir": small_disk / "run", "adapter.rank": 8}
    with (small_disk / "filler").open("wb") as file:
        file.write(bytes(960 * 1024))
    complaint = box.train(5).stderr
    assert re.search(
        rf"run\.dir: {box.dir} needs .* more, for 5 checkpoints of .* but the disk has .* free\.", complaint
    )
    assert not list(small_disk.rglob("metrics.jsonl"))


NO_ROOM_FOR_ROWS = """
import os, types
from dualtune.train.state import metrics
def write(file, data):
    raise OSError(28, os.strerror(28))
metrics.os = types.SimpleNamespace(**{**vars(os), "write": write})
"""


@pytest.mark.fault(
    row=7,
    fault="disk full for metrics.jsonl alone",
    injection="ENOSPC from every `write` to `metrics.jsonl`",
    expected="training goes on and saves; one warning",
)
def test_metrics_that_cannot_be_written_do_not_end_the_run(box):
    said = box.train(0, inject=NO_ROOM_FOR_ROWS).stdout
    assert said.count("metrics failed") == said.count("metrics.jsonl cannot be written (No space left on device)") == 1
    assert box.checkpoints[-1] == "step-00000009"
    assert box.adapter == box.straight()


@pytest.mark.fault(
    row=8,
    fault="read-only output directory",
    injection="a tmpfs mounted `ro`; a directory of root's for user 65534",
    expected="exit 5 before the model is loaded",
)
@pytest.mark.parametrize("kind", ["new", "empty", "begun", "foreign"])
def test_a_directory_that_cannot_be_written_is_found_at_once(request, box, kind):
    inject = "enter('dualtune.train.prepare.prepare', 1, throw(AssertionError('too late')))"
    if kind == "foreign":
        return _as_nobody(box, inject)
    disk = request.getfixturevalue("small_disk")
    box.settings["run.dir"] = disk / "run"
    if kind == "begun":
        box.train(-9, fault="step:5")
    elif kind == "empty":
        box.dir.mkdir()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    complaint = box.train(5, inject=inject).stderr
    assert f"run.dir: {box.dir} cannot be written: Read-only file system" in complaint
    return None


def _as_nobody(box, inject, mode=0o555):
    """The same as a user who may not write there. Root may write everywhere, whatever the mode says."""
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        home.chmod(0o755)
        box.home = home
        (home / "mine").mkdir(mode)
        box.settings |= {
            "run.dir": home / "mine" / "run",
            "model.name": shutil.copytree(box.settings["model.name"], home / "model"),
            "data.train": shutil.copy(box.settings["data.train"], home),
        }
        user = ["setpriv", "--reuid", "65534", "--clear-groups"] if os.geteuid() == 0 else []
        if user and not shutil.which("setpriv"):
            pytest.skip("needs setpriv")
        env = box.environment(inject)
        command = [*user, sys.executable, "-m", "dualtune.cli.main", *box.command()]
        result = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False)
        (home / "mine").chmod(0o755)
        if "No module named" in result.stderr:
            pytest.skip("another user cannot read this interpreter's packages")
        assert result.returncode == 5, result.stderr
        assert f"run.dir: {box.dir} cannot be " in result.stderr and "Permission denied" in result.stderr


@pytest.mark.fault(
    row=8,
    fault="output directory below one that may not be searched",
    injection="a directory of root's with mode 0700, for user 65534",
    expected="exit 5 with the reason",
)
def test_a_directory_that_cannot_be_looked_into_is_said(box):
    _as_nobody(box, "", 0o000 if os.geteuid() else 0o700)


@pytest.mark.fault(
    row=7,
    fault="a line in metrics.jsonl that is no row of ours",
    injection="a JSON object without a step, appended before the resume",
    expected="ignored; adapter bitwise equal",
)
def test_a_foreign_line_in_metrics_does_not_stop_a_resume(box):
    begun(box)
    with (box.dir / "metrics.jsonl").open("a") as file:
        file.write('{"note": "restarted by hand"}\n')
    box.resume()
    assert box.adapter == box.straight()


@pytest.mark.fault(
    row=9,
    fault="run directory on another file system",
    injection="a tmpfs, as a directory in it and as its root; killed and resumed",
    expected="works: what is renamed lies beside its target, so no EXDEV",
)
@pytest.mark.parametrize("name", ["run", "."])
def test_another_file_system_is_no_obstacle(box, small_disk, name):
    box.settings |= {"run.dir": small_disk / name, "run.keep": 2}
    box.train(-9, fault="renamed:2")
    box.resume()
    assert box.adapter == box.straight()


# --- files that rot --------------------------------------------------------------------------------------------------


def begun(box) -> Path:
    """A run that ended in step 5, and its newest checkpoint, of step 4. The one before is of step 2."""
    box.settings["data.eval"] = 0
    box.stop(5)
    assert box.checkpoints == ["step-00000002", "step-00000004"]
    return box.dir / "checkpoints" / "step-00000004"


def falls_back(box, newest, reason):
    """The run goes on from the checkpoint before, says why, keeps the damaged one, and ends as ever."""
    said = box.resume().stdout
    assert f"ignored the checkpoint {newest}: {reason}" in said
    assert f"after step 2, from {newest.with_name('step-00000002')}" in said
    assert newest.with_name("step-00000004.old-1").is_dir()
    assert box.adapter == box.straight()


WEIGHTS = ("adapter.safetensors", "optimizer_m.safetensors", "optimizer_v.safetensors")
OLDER = "not loaded; the checkpoint before is taken, the damaged one is kept aside; named"


@pytest.mark.fault(
    row=10,
    fault="a checkpoint's file was cut",
    injection="cut at 0 bytes, in the header, every KiB, and before the last byte",
    expected=f"{OLDER} with both sizes",
)
def test_a_cut_file_is_named_with_both_sizes(box):
    from dualtune.train.state.checkpoint import problem_of

    newest = begun(box)
    for name in (*WEIGHTS, "state.json"):
        whole = (newest / name).read_bytes()
        for cut in (0, 7, *range(1024, len(whole), 1024), len(whole) - 1):
            (newest / name).write_bytes(whole[:cut])
            problem = f"{name} has {cut} bytes, but the manifest says {len(whole)}"
            assert problem_of(newest) == problem
        if name != "state.json":
            (newest / name).write_bytes(whole)
    falls_back(box, newest, problem)


@pytest.mark.fault(
    row=11,
    fault="one bit of a checkpoint flipped",
    injection="a bit of each file: first byte, header, weights, last byte; every eleventh bit of the manifest",
    expected=f"{OLDER} with its file and reason",
)
def test_a_flipped_bit_is_found_by_its_hash(box):
    from dualtune.train.state.checkpoint import problem_of

    newest = begun(box)
    for name in (*WEIGHTS, "state.json"):
        whole = (newest / name).read_bytes()
        for place in (0, 40, len(whole) // 2, len(whole) - 1):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << place % 8
            (newest / name).write_bytes(damaged)
            assert problem_of(newest) == f"{name} is damaged: its sha256 differs from the manifest's"
        (newest / name).write_bytes(whole)
    manifest = (newest / "MANIFEST.json").read_bytes()
    for bit in range(0, 8 * len(manifest), 11):
        changed = bytearray(manifest)
        changed[bit // 8] ^= 1 << bit % 8
        (newest / "MANIFEST.json").write_bytes(changed)
        # Some bits mean nothing: spaces, and the note of the step, which is read from elsewhere.
        assert problem_of(newest) or json.loads(changed)["files"] == json.loads(manifest)["files"]
    (newest / "MANIFEST.json").write_bytes(manifest)
    (newest / "state.json").write_bytes(damaged)
    falls_back(box, newest, "state.json is damaged: its sha256 differs from the manifest's")


@pytest.mark.fault(
    row=11,
    fault="every checkpoint is damaged",
    injection="a bit flipped in each",
    expected="exit 6, a line for each, nothing changed: never begins anew by itself",
)
def test_a_run_without_a_true_checkpoint_is_not_begun_anew(box):
    newest = begun(box)
    for path in (newest, newest.with_name("step-00000002")):
        (path / "adapter.safetensors").write_bytes(b"\0" + (path / "adapter.safetensors").read_bytes()[1:])
    before = {path: path.read_bytes() for path in newest.parent.rglob("*.*") if path.is_file()}
    complaint = box.resume(6).stderr
    assert complaint.count("adapter.safetensors is damaged") == 2
    assert {path: path.read_bytes() for path in newest.parent.rglob("*.*") if path.is_file()} == before


@pytest.mark.fault(
    row=14,
    fault="NaN in weights or moments that are to be saved",
    injection="the engine's state gets a NaN in step 5",
    expected="never written: exit 7, the checkpoints before are intact, no adapter",
)
@pytest.mark.parametrize("what", ["adapter", "m", "v"])
@pytest.mark.parametrize("save_every", [2, None])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_is_never_written(box, monkeypatch, what, save_every):
    from dualtune.engine.testing.numpy_engine import NumpyEngine

    box.settings |= {"data.eval": 0, "run.save_every": save_every, "guards.nonfinite_limit": 99}
    update = NumpyEngine._update

    def poisoned(engine, lr, clip):
        update(engine, lr, clip)
        if engine._step == 5:
            tensors = engine._params if what == "adapter" else engine._slots[what]
            next(iter(tensors.values())).flat[3] = float("nan")

    monkeypatch.setattr(NumpyEngine, "_update", poisoned)
    complaint = box.resume(7).stderr
    assert "holds NaN or Inf. Nothing was saved" in complaint
    assert box.checkpoints == (["step-00000002", "step-00000004"] if save_every else [])
    assert not (box.dir / "adapter").exists()


@pytest.mark.fault(
    row=14,
    fault="files of a checkpoint that are empty or zeroed",
    injection="0 bytes; as many zeros as there were bytes",
    expected=f"{OLDER} with its file and reason",
)
@pytest.mark.parametrize("name", [WEIGHTS[0], "MANIFEST.json"])
@pytest.mark.parametrize("zeros", [False, True])
def test_empty_and_zeroed_files_are_not_loaded(box, name, zeros):
    newest = begun(box)
    size = (newest / name).stat().st_size
    (newest / name).write_bytes(bytes(size) if zeros else b"")
    reasons = {
        (WEIGHTS[0], False): f"{name} has 0 bytes, but the manifest says {size}",
        (WEIGHTS[0], True): f"{name} is damaged: its sha256 differs from the manifest's",
    }
    falls_back(box, newest, reasons.get((name, zeros), "MANIFEST.json is not a manifest"))
