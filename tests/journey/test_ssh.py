"""Files over ssh, against a real sshd: names, login shells, tools, errors."""

import os
import shutil
import subprocess

import pytest

from dualtune.base.errors import ConfigError, DiskError, EnvironmentFault
from dualtune.use.transfer.remotes import target

MORE = pytest.mark.journey
CHUNK = 256 << 10  # of a file of up to 64 MiB
SIZE = 6 * CHUNK + 777  # of the fixture `file`


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [pytest.param(1, marks=MORE), pytest.param(CHUNK, marks=MORE), SIZE])
def test_a_file_comes_there_and_back_whole(cluster, file, tmp_path, num_bytes):
    """Whatever the size; the directories there are made."""
    file.write_bytes(file.read_bytes()[:num_bytes])
    assert cluster.push(file, "cluster:new/dir/a.tar") is True
    assert (cluster.home / "new" / "dir" / "a.tar").read_bytes() == file.read_bytes()
    assert names_in(cluster.home / "new" / "dir") == ["a.tar"]
    assert cluster.pull(tmp_path / "b", "cluster:new/dir/a.tar").read_bytes() == file.read_bytes()


def test_another_file_is_only_replaced_when_asked_and_the_same_is_not_sent_again(cluster, file):
    there = cluster.home / "runs" / "a.tar"
    there.parent.mkdir()
    for name in (".a.tar.part-0123456789abcdef", ".b.tar.part-0123456789abcdef"):
        (there.parent / name).write_text("of another content")
    assert cluster.push(file) is True
    assert names_in(there.parent) == [".b.tar.part-0123456789abcdef", "a.tar"]
    assert cluster.push(file) is False
    for other in (b"short", bytes(SIZE)):  # another size, and the same size
        there.write_bytes(other)
        with pytest.raises(
            ConfigError, match=r"^cluster:runs/a.tar: another file already exists there. Replace it with"
        ):
            cluster.push(file)
        assert there.read_bytes() == other
        assert cluster.push(file, force=True) is True
        assert there.read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    "name", ["it's $(touch x) `touch y`;touch z.tar", "-rf.tar", pytest.param("*?[a]ü.tar", marks=MORE)]
)
def test_names_are_names_to_the_shell_there(cluster, file, tmp_path, name):
    assert cluster.push(file, f"cluster:{name}") is True
    assert names_in(cluster.home) == [name]
    assert cluster.pull(tmp_path / "b", f"cluster:{name}").read_bytes() == file.read_bytes()


@MORE
def test_a_url_with_a_port_has_an_absolute_path(cluster, file):
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    place = f"ssh://{user}@127.0.0.1:{cluster.port}"
    assert cluster.push(file, f"{place}{cluster.home}/url/a.tar") is True
    assert cluster.push(file, f"{place}/~/url/a.tar") is False
    assert names_in(cluster.home / "url") == ["a.tar"]


# --- other machines --------------------------------------------------------------------------------------------------


@MORE
@pytest.mark.parametrize("shell", ["dash", "bash", "zsh", "tcsh", "fish", "busybox sh"])
def test_the_login_shell_there_may_be_any(cluster, file, tmp_path, shell):
    if shutil.which(shell.split()[0]) is None:
        pytest.skip(f"{shell} is not installed")
    cluster.use(shell=shell)
    assert cluster.push(file) is True
    assert cluster.push(file) is False
    assert cluster.pull(tmp_path / "b").read_bytes() == file.read_bytes()


@MORE
@pytest.mark.parametrize("tool", ["shasum", "openssl", "busybox"])
def test_the_tools_there_may_be_those_of_another_system(cluster, file, tmp_path, tool):
    """A PATH with nothing but what the scripts say they need; macOS has shasum, Alpine has busybox."""
    if (program := shutil.which(tool)) is None:
        pytest.skip(f"{tool} is not installed")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "dd", "mkdir", "mv", "rm", "wc", "sync", *(["sha256sum"] if tool == "busybox" else [])):
        (tools / name).symlink_to(program if tool == "busybox" else shutil.which(name))
    if tool != "busybox":
        (tools / tool).symlink_to(program)
    if tool == "shasum":
        (tools / "perl").symlink_to(shutil.which("perl"))
    cluster.use(prelude=f"PATH={tools}; export PATH", shell=f"{tools}/sh")
    cluster.relay.cuts[:] = [3 * CHUNK]
    assert cluster.push(file, "cut:runs/a.tar") is True
    assert cluster.relay.num_cut == 1
    assert cluster.pull(tmp_path / "b").read_bytes() == file.read_bytes()


def test_a_machine_without_a_hash_is_told(cluster, file, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "dd", "mkdir"):
        (tools / name).symlink_to(shutil.which(name))
    cluster.use(prelude=f"PATH={tools}; export PATH")
    with pytest.raises(EnvironmentFault, match="sha256sum, shasum or openssl is needed, and none is installed"):
        cluster.push(file)


def test_what_a_login_shell_prints_harms_nothing(cluster, file, tmp_path):
    cluster.use(prelude="echo welcome; echo dualtune; echo bashrc is loud >&2")
    assert cluster.push(file) is True
    assert cluster.pull(tmp_path / "b").read_bytes() == file.read_bytes()


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_full_disk_there_is_one_clear_error(cluster, file, tmp_path):
    full = cluster.wrapped("dd", f'case "$*" in *seek=*) exec {shutil.which("dd")} of=/dev/full bs=64k;; esac')
    cluster.use(prelude=f"PATH={full}:$PATH; export PATH")
    with pytest.raises(DiskError, match=r"cluster: cannot be written there: .*No space left on device"):
        cluster.push(file)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_directory_that_may_not_be_written_is_one_clear_error(cluster, file):
    (cluster.home / "runs").mkdir(mode=0o500)
    with pytest.raises(DiskError, match="Permission denied"):
        cluster.push(file)


@pytest.mark.parametrize(("make", "words"), [("file", "runs"), ("directory", "is a directory")])
def test_what_is_in_the_way_is_one_clear_error(cluster, file, make, words):
    if make == "file":
        (cluster.home / "runs").write_text("a file where a directory should be")
    else:
        (cluster.home / "runs" / "a.tar").mkdir(parents=True)
    with pytest.raises(DiskError, match=rf"^cluster: cannot be written there: .*{words}"):
        cluster.push(file)


def test_what_is_not_there_cannot_be_fetched(cluster, tmp_path):
    with pytest.raises(EnvironmentFault, match=r"^cluster:no.tar: no such file. Copy one there with `dualtune push`"):
        cluster.pull(tmp_path / "b", "cluster:no.tar")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("/user\n", "/host\n"), "Permission denied"),
        (("HostKeyAlias throwaway", "HostKeyAlias stranger"), "Host key verification failed"),
        (("StrictHostKeyChecking yes", "NoSuchOption yes"), "[Bb]ad configuration option"),
    ],
)
def test_what_no_other_attempt_fixes_ends_at_once(cluster, file, monkeypatch, patience, change, words):
    patient, lines = patience
    other = cluster.folder / "other_config"
    text = (cluster.folder / "ssh_config").read_text().replace("ControlMaster auto", "ControlPath none")
    other.write_text(text.replace(*change))
    monkeypatch.setenv("DUALTUNE_SSH", f"ssh -F {other}")
    with pytest.raises(EnvironmentFault, match=rf"^cluster: ssh cannot connect: .*{words}.*Fix this first: `ssh -F "):
        cluster.push(file, patience=patient)
    assert lines == []


def test_a_refused_connection_is_tried_again_up_to_the_limit(cluster, file, patience):
    patient, lines = patience
    patient.retries = 2
    with pytest.raises(EnvironmentFault, match=r"gave up after 3 attempts.*[Cc]onnection refused"):
        cluster.push(file, "ssh://127.0.0.1:1/x/a.tar", patience=patient)
    assert len(lines) == 2


@pytest.mark.parametrize(
    "text",
    [
        "-oProxyCommand=touch x:a.tar",
        "me@-oProxyCommand=x:a.tar",
        "a b:c.tar",
        "`touch x`:a.tar",
        "$(touch x):a.tar",
        "me;x@host:a.tar",
        "ssh://-oProxyCommand=x/a.tar",
        "ssh://me@-v/a.tar",
        "ssh://%60x%60@host/a.tar",
    ],
)
def test_a_host_is_neither_an_option_nor_a_command(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="TARGET: "):
        target.parse(text)


def test_without_ssh_the_error_says_what_to_install(cluster, monkeypatch, file):
    monkeypatch.setenv("DUALTUNE_SSH", "no-such-ssh -v")
    with pytest.raises(EnvironmentFault, match=r"^no-such-ssh: cannot be run: .* Install the OpenSSH client"):
        cluster.push(file)
    monkeypatch.setenv("DUALTUNE_SSH", "ssh 'unbalanced")
    with pytest.raises(ConfigError, match=r"^DUALTUNE_SSH: got "):
        cluster.push(file)
