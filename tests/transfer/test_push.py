"""`dualtune push` and `dualtune pull`: to a directory, to file systems of fsspec, and what is refused."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, DiskError, EnvironmentFault
from dualtune.model.adapter import AdapterSpec, tensor_name
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.show.run import run
from dualtune.use.transfer.bundles.bundle import inspect
from dualtune.use.transfer.bundles.pack import pack
from dualtune.use.transfer.carry import PushRequest, push
from dualtune.use.transfer.remotes import store, target
from dualtune.use.transfer.remotes import store as chunks
from dualtune.use.transfer.remotes.remote_files import DirectoryStore
from dualtune.use.transfer.remotes.retries import Patience
from dualtune.use.transfer.remotes.ssh import SshStore
from dualtune.use.transfer.remotes.store import Chunks, chunk_bytes, chunks_of, missing

NUMPY = ("--platform", "numpy")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_softmax, open_backend):
    """A run of four steps on the NumPy engine, with checkpoints of steps 2 and 4 and an adapter."""
    from dualtune.config import parse_config

    home = tmp_path_factory.mktemp("trained")
    rows = [{"prompt": f"{i} plus {i}?", "completion": f"{2 * i}"} for i in range(16)]
    (home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model.name": tiny_softmax, "adapter.method": "dora", "adapter.rank": 2, "adapter.alpha": 4,
        "adapter.dropout": 0, "adapter.targets": "all-linear", "data.train": home / "train.jsonl",
        "data.eval": 0.25, "data.max_length": 64,
        "train.steps": 4, "train.documents_per_step": 4, "train.learning_rate": 1e-2, "run.save_every": 2,
        "run.dir": home / "runs" / "first",
    }  # fmt: skip
    overrides = [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()]
    return run(parse_config("model: {}", overrides=overrides), open_backend("numpy")).run_dir


@pytest.fixture
def place(trained, tmp_path, monkeypatch):
    """A working directory with runs/first in it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "runs" / "first")
    return tmp_path


def names_in(folder) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the bytes read are counted by Linux")
def test_a_push_reads_an_adapter_no_more_often_than_its_checks_need(tmp_path):
    """The files: integrity, parse (one of two), measure, write. Then the bundle: hash, send, verify."""
    rng = np.random.default_rng(0)
    names = [tensor_name(f"model.layers.{i}.mlp.up_proj", part) for i in range(8) for part in "AB"]
    tensors = {n: rng.normal(size=(16, 8192) if "lora_A" in n else (8192, 16)).astype(np.float32) for n in names}
    write_adapter(tmp_path / "adapter", Adapter(AdapterSpec(16, 32.0, 0.0, ("up_proj",)), tensors))
    num_bytes = sum(file.stat().st_size for file in (tmp_path / "adapter").iterdir())

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    push(f"{tmp_path}/there", PushRequest(tmp_path / "adapter"), force=False, public=False, patience=Patience(0))
    assert 6 < (bytes_read() - before) / num_bytes < 7


# --- there and back, as a user types it ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["share/first", "share/first.tar", "share/first.dualtune"])
def test_a_run_goes_to_a_directory_and_is_continued_elsewhere(place, dualtune_main, tiny_softmax, where):
    pushed = dualtune_main("push", where, "runs/first", "--run")
    assert (pushed.returncode, pushed.stderr) == (0, "")
    assert names_in(place / "share") == ["first/bundle.tar" if where == "share/first" else where.removeprefix("share/")]
    assert f"sent        {where}" in pushed.stdout and "checkpoint after step 4" in pushed.stdout
    assert pushed.stdout.splitlines()[-1] == f"pull        dualtune pull {where}"
    pulled = dualtune_main("pull", where)
    assert (pulled.returncode, pulled.stderr) == (0, "")
    assert f"resume      dualtune train {place}/first/config.yaml --set run.dir={place}/first" in pulled.stdout
    data = (place / "runs" / "first" / "config.yaml").read_text().split("train: ")[1].split()[0]
    done = dualtune_main("train", "first/config.yaml", "--set", "run.dir=first", "--set", f"model.name={tiny_softmax}",
                         "--set", f"data.train={data}", "--set", "train.steps=6", *NUMPY)  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line).get("step") for line in (place / "first" / "metrics.jsonl").read_text().splitlines()]
    assert set(steps) - {None} == {4, 5, 6}  # an evaluation after step 4, and two steps


def test_of_a_run_that_has_ended_the_adapter_is_sent_and_said(place, dualtune_main, capsys):
    done = dualtune_main("push", "share/a.tar", "runs/first")
    assert done.stdout.startswith("sending     the adapter of runs/first: ") and "--run" in done.stdout
    assert inspect(place / "share" / "a.tar").bundle.step is None
    asked = dualtune_main("push", "share/b.tar", "runs/first", "--adapter")
    assert "sending" not in asked.stdout and inspect(place / "share" / "b.tar").bundle.step is None
    assert dualtune_main("push", "share/c.tar", "runs/first", "--run").returncode == 0
    assert inspect(place / "share" / "c.tar").bundle.step == 4
    both = dualtune_main("push", "share/d.tar", "runs/first", "--run", "--adapter")
    assert both.returncode == 2 and dualtune_main("push", "hf://a/b", "runs/first", "--run").returncode == 2


@pytest.mark.parametrize("change", ["no adapter", "a later checkpoint"])
def test_of_a_run_that_has_not_ended_the_checkpoint_is_sent(place, dualtune_main, change):
    first = place / "runs" / "first"
    if change == "no adapter":
        shutil.rmtree(first / "adapter")
    else:  # it is continued: what it ended with before is of step 2
        manifest = json.loads((first / "adapter" / "dualtune.json").read_text())
        manifest["training"]["steps"] = 2
        (first / "adapter" / "dualtune.json").write_text(json.dumps(manifest))
    assert "sending" not in dualtune_main("push", "share/a.tar", "runs/first").stdout
    assert inspect(place / "share" / "a.tar").bundle.step == 4


def test_the_adapter_the_step_and_a_bundle_can_be_chosen(place, dualtune_main):
    assert dualtune_main("push", "share/a.tar", "runs/first", "--adapter").returncode == 0
    assert dualtune_main("push", "share/2.tar", "runs/first", "--checkpoint", 2).returncode == 0
    assert dualtune_main("push", "share/dir.tar", "runs/first/adapter").returncode == 0
    assert dualtune_main("push", "again/a.tar", "share/a.tar").returncode == 0
    assert inspect(place / "share" / "2.tar").bundle.step == 2
    assert (place / "again" / "a.tar").read_bytes() == (place / "share" / "a.tar").read_bytes()
    pulled = dualtune_main("pull", "again/a.tar", "there")
    assert f"verify      dualtune verify {place}/there/adapter --base " in pulled.stdout
    assert f"--adapter {place}/there/adapter --prompt" in pulled.stdout
    moved, here = (read_adapter(path / "adapter") for path in (place / "there", place / "runs" / "first"))
    assert all((moved.tensors[name] == here.tensors[name]).all() for name in here.tensors)


def test_without_a_source_the_newest_run_is_pushed_and_named(place, dualtune_main, wording):
    shutil.copytree(place / "runs" / "first", place / "runs" / "second")
    os.utime(place / "runs" / "first" / "metrics.jsonl", (2e9, 2e9))
    done = dualtune_main("push", "share")
    assert done.stdout.startswith("source      runs/first: the run in runs/ that was written to last\n")
    shutil.rmtree(place / "runs")
    done = dualtune_main("push", "elsewhere")
    assert done.returncode == 2
    wording(done.stderr)


def test_the_same_is_not_sent_twice_and_another_only_with_force(place, dualtune_main, wording):
    assert "sent  " in dualtune_main("push", "share").stdout
    assert "unchanged " in dualtune_main("push", "share", "runs/first").stdout
    first = (place / "share" / "bundle.tar").read_bytes()
    refused = dualtune_main("push", "share", "runs/first", "--checkpoint", 2)
    assert (refused.returncode, (place / "share" / "bundle.tar").read_bytes() == first) == (2, True)
    wording(refused.stderr)
    assert dualtune_main("push", "share", "runs/first", "--checkpoint", 2, "--force").returncode == 0
    assert inspect(place / "share" / "bundle.tar").bundle.step == 2


def test_the_packed_file_can_be_kept(place, dualtune_main, wording):
    dualtune_main("push", "share")
    done = dualtune_main("pull", "share", "here.tar", "--keep-packed")
    assert done.stdout.splitlines()[-1] == f"unpack      dualtune bundle unpack {place}/here.tar {place}/here"
    assert (place / "here.tar").read_bytes() == (place / "share" / "bundle.tar").read_bytes()
    taken = dualtune_main("pull", "share", "here.tar", "--keep-packed")
    assert taken.returncode == 2
    wording(taken.stderr)


def test_a_signature_travels_beside_the_bundle(place, dualtune_main):
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "key"], check=True)
    (place / "allowed").write_text(f"alice@example.org {(place / 'key.pub').read_text()}")
    trust = ("--verify-signature", "allowed", "--identity", "alice@example.org")
    assert dualtune_main("push", "share", "runs/first", "--sign", "key").returncode == 0
    assert names_in(place / "share") == ["bundle.tar", "bundle.tar.sig"]
    assert dualtune_main("pull", "share", "there", *trust).returncode == 0
    assert dualtune_main("pull", "share", "there.tar", "--keep-packed", *trust).returncode == 0
    assert (place / "there.tar.sig").read_bytes() == (place / "share" / "bundle.tar.sig").read_bytes()
    (place / "share" / "bundle.tar.sig").unlink()
    refused = dualtune_main("pull", "share", "unsigned", *trust)
    assert (refused.returncode, "has no signature" in refused.stderr) == (6, True)
    assert not (place / "unsigned").exists()


@pytest.mark.parametrize("keep", [(), ("--keep-packed",)])
def test_a_bundle_that_was_changed_leaves_nothing(place, dualtune_main, keep):
    dualtune_main("push", "share")
    path = place / "share" / "bundle.tar"
    raw = bytearray(path.read_bytes())
    raw[-2000] ^= 1
    path.write_bytes(raw)
    before = names_in(place)
    done = dualtune_main("pull", "share", "there", *keep)
    assert (done.returncode, "share/bundle.tar: " in done.stderr, ".part-" in done.stderr) == (6, True, False)
    assert names_in(place) == before and not (place / "there").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("push", "runs/first"), 2, "TARGET: runs/first is a run or an adapter, not a remote"),
        (("push", "runs/first", "share"), 2, "The order is: push TARGET SOURCE"),
        (("push", "share", "nowhere"), 2, "SOURCE: nowhere: no such file or directory. The order is: dualtune push"),
        (("push", "share", "runs/first", "--public"), 2, "--public: got share, allowed only with hf://"),
        (("push", "hf://me/x", "runs/first", "--checkpoint", 2), 2, "--checkpoint: the hub takes only adapters"),
        (("push", "hf://me", "runs/first"), 2, "allowed: hf://owner/name"),
        (("push", "nowhere://x/y", "runs/first"), 2, "Allowed: user@host:path, ssh://"),
        (("push", "ssh://me:hunter22@host/x", "runs/first"), 2, "ssh://user@host:port/path, without a password"),
        (("push", "me@host:~other/x", "runs/first"), 2, "allowed with ~: only your own home directory"),
        (("pull", "share"), 4, "share/bundle.tar: no such file. Copy one there with `dualtune push`"),
        (("pull", "share", "runs/first"), 2, "already exists and is not an empty directory"),
        (("pull", "hf://me/x", "--identity", "me"), 2, "Give --verify-signature and --identity together"),
    ],
)
def test_what_cannot_be_meant_is_one_clear_error(place, dualtune_main, words, code, message):
    before = names_in(place)
    done = dualtune_main(*words)
    assert (done.returncode, message in " ".join(done.stderr.split())) == (code, True), done.stderr
    assert "hunter22" not in done.stderr
    assert names_in(place) == before


def test_a_secret_is_not_pushed(place, dualtune_main, monkeypatch, wording):
    monkeypatch.setenv("HF_TOKEN", "canary-0f0f0f0f")
    config = place / "runs" / "first" / "config.yaml"
    config.write_text(config.read_text().replace("dtype: auto", "dtype: auto  # canary-0f0f0f0f"))
    assert dualtune_main("push", "share").returncode == 0  # a comment is no part of the config
    state = place / "runs" / "first" / "adapter" / "dualtune.json"
    state.write_text(state.read_text().replace('"notes": []', '"notes": ["canary-0f0f0f0f"]'))
    done = dualtune_main("push", "elsewhere", "runs/first", "--adapter")
    assert done.returncode == 6
    wording(done.stderr)
    everything = b"".join(path.read_bytes() for path in place.glob("share/*")) + (done.stdout + done.stderr).encode()
    assert b"canary-0f0f" not in everything
    assert not (place / "elsewhere").exists()


# --- fsspec ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory():
    fsspec = pytest.importorskip("fsspec")
    fs = fsspec.filesystem("memory")
    yield fs
    for path in fs.find("/"):
        fs.rm(path)


def test_a_run_goes_through_a_file_system_of_fsspec(place, dualtune_main, memory):
    done = dualtune_main("push", "memory://bucket/first", "runs/first")
    assert (done.returncode, done.stderr) == (0, "")
    assert memory.find("/") == ["/bucket/first/bundle.tar"]
    pack(place / "runs" / "first", place / "expected.tar", name="first", adapter=True)
    assert memory.cat_file("/bucket/first/bundle.tar") == (place / "expected.tar").read_bytes()
    assert "unchanged " in dualtune_main("push", "memory://bucket/first", "runs/first").stdout
    assert dualtune_main("push", "memory://bucket/first", "runs/first", "--checkpoint", 2).returncode == 2
    assert dualtune_main("push", "memory://bucket/first", "runs/first", "--checkpoint", 2, "--force").returncode == 0
    assert dualtune_main("pull", "memory://bucket/first").returncode == 0
    assert json.loads((place / "first" / "BUNDLE.json").read_text())["step"] == 2
    assert dualtune_main("pull", "memory://bucket/nothing").returncode == 4
    assert [name for name in names_in(place) if ".part-" in name] == []


def test_a_put_that_fails_leaves_nothing_under_the_final_name_and_is_tried_again(place, memory, monkeypatch):
    pack(place / "runs" / "first", place / "a.tar")
    failed = set()
    info = memory.info

    def failing(path, **options):
        if ".part-" in path and path not in failed and len(failed) < 2:
            assert "/b/a.tar" not in memory.store and path in memory.store
            failed.add(path)
            raise OSError("reset")
        return info(path, **options)

    monkeypatch.setattr(memory, "info", failing)
    lines = []
    assert target.parse("memory://b/a.tar").push(place / "a.tar", patience=Patience(3, lines.append, first_pause_s=0))
    assert (len(lines), memory.find("/")) == (2, ["/b/a.tar"])


def test_a_short_read_is_tried_again_and_given_up_after_the_limit(place, memory, monkeypatch):
    pack(place / "runs" / "first", place / "a.tar")
    memory.pipe_file("/b/a.tar", (place / "a.tar").read_bytes())
    read = memory.cat_file
    lengths = [10, None]
    monkeypatch.setattr(memory, "cat_file", lambda path, start, end: read(path, start, end)[: lengths.pop(0)])
    found = target.parse("memory://b/a.tar").pull(place / "x", patience=Patience(1, first_pause_s=0))
    assert found.read_bytes() == (place / "a.tar").read_bytes()
    lengths[:] = [10, 10]
    with pytest.raises(EnvironmentFault, match="gave up after 2 attempts in a row without progress"):
        target.parse("memory://b/a.tar").pull(place / "y", patience=Patience(1, first_pause_s=0))
    assert [name for name in names_in(place) if name.startswith(".y")] == []


def test_a_file_system_that_is_not_installed_says_what_to_install():
    fsspec = pytest.importorskip("fsspec")
    missing_ones = [name for name in ("oci", "dvc", "wandb") if name in fsspec.available_protocols()]
    with pytest.raises(EnvironmentFault, match=rf"^{missing_ones[0]}://b/x: .*[Ii]nstall"):
        target.parse(f"{missing_ones[0]}://b/x")


# --- chunks and names ------------------------------------------------------------------------------------------------


def test_a_cut_copy_to_a_directory_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    file = tmp_path / "a.tar"
    file.write_bytes(os.urandom(5 * chunks.LEAST_CHUNK_BYTES + 9))
    goal = target.parse(str(tmp_path / "share" / "a.tar"))
    written = []
    pieces_of = chunks.pieces_of

    def full_after_three(path, parts, run):
        for piece in pieces_of(path, parts, run):
            if len(written) == 3:
                raise OSError(28, "No space left on device")
            written.append(piece)
            yield piece

    monkeypatch.setattr("dualtune.use.transfer.remotes.remote_files.pieces_of", full_after_three)
    with pytest.raises(DiskError, match=r"share/a.tar: cannot be written: No space left on device"):
        goal.push(file, patience=Patience())
    assert [path.name.startswith(".a.tar.part-") for path in (tmp_path / "share").iterdir()] == [True]
    runs = []
    monkeypatch.setattr(
        "dualtune.use.transfer.remotes.remote_files.pieces_of",
        lambda *args: (runs.append(args[2]), pieces_of(*args))[1],
    )
    assert goal.push(file, patience=Patience()) is True
    assert runs == [range(3, 6)]
    assert names_in(tmp_path / "share") == ["a.tar"]
    assert (tmp_path / "share" / "a.tar").read_bytes() == file.read_bytes()


def test_what_is_missing_is_what_has_another_hash():
    wanted = Chunks(5, tuple("abcde"))
    assert missing(wanted, None) == [range(0, 5)]
    assert missing(wanted, Chunks(5, tuple("abcde"))) == []
    assert missing(wanted, Chunks(4, tuple("aXcX"))) == [range(1, 2), range(3, 5)]


def test_the_size_of_chunks_grows_with_the_file(tmp_path):
    sizes = {1: 256 << 10, 64 << 20: 256 << 10, (64 << 20) + 1: 512 << 10, 1 << 30: 4 << 20, 30 << 30: 8 << 20}
    assert {num_bytes: chunk_bytes(num_bytes) for num_bytes in sizes} == sizes
    (tmp_path / "f").write_bytes(bytes(600_000))
    assert [len(chunks_of(tmp_path / "f").sha256s), len(chunks_of(tmp_path / "f", 65 << 20).sha256s)] == [3, 2]


@pytest.mark.parametrize(
    ("text", "host", "port", "path"),
    [
        ("me@host:runs/a.tar", "me@host", None, "./runs/a.tar"),
        ("host:/data/first", "host", None, "/data/first/bundle.tar"),
        ("host:", "host", None, "./bundle.tar"),
        ("host:~/x.tar", "host", None, "./x.tar"),
        ("host:-x.tar", "host", None, "./-x.tar"),
        ("me@[::1]:x.tar", "me@::1", None, "./x.tar"),
        ("host:a:b.tar", "host", None, "./a:b.tar"),
        ("ssh://me@host:2222/data/a%20b.tar", "me@host", 2222, "/data/a b.tar"),
        ("ssh://host/~/x", "host", None, "./x/bundle.tar"),
    ],
)
def test_a_target_over_ssh_is_read_as_scp_and_git_read_it(text, host, port, path):
    found = target.parse(text)
    assert isinstance(found.remote, SshStore)
    assert (found.remote.host, found.remote.port, found.path) == (host, port, path)
    assert target.parse(str(found)).path == path


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("./a:b.tar", "a:b.tar"),
        ("/data/a:b.tar", "/data/a:b.tar"),
        ("file:///data/a%3Ab.tar", "/data/a:b.tar"),
        ("runs/x", "runs/x/bundle.tar"),
        ("~/x", str(Path("~/x/bundle.tar").expanduser())),
    ],
)
def test_a_target_without_a_host_is_a_directory(text, path):
    found = target.parse(text)
    assert (type(found.remote), found.path) == (DirectoryStore, path)


@pytest.mark.parametrize("text", ["", "a\nb", "host:a\nb", "ssh:///x", "ssh://host:99999/x", "ssh://host/x?y"])
def test_what_is_no_target_is_refused(text):
    with pytest.raises(ConfigError, match="TARGET: "):
        target.parse(text)


def test_a_store_that_announces_too_much_is_not_believed(tmp_path, monkeypatch):
    goal = target.parse("host:a.tar")
    monkeypatch.setattr(SshStore, "chunks", lambda self, path: Chunks(1 << 40, ("0" * 64,)))
    words = rf"^host:a.tar: has {1 << 40} bytes, at most {store.MAX_FILE_BYTES} are allowed"
    with pytest.raises(Exception, match=words):
        goal.pull(tmp_path / "x", patience=Patience())
    assert names_in(tmp_path) == []
