"""Where the lines go: closed pipes, no streams at all, old encodings, narrow terminals. Real processes, real pipes."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dualtune.cli.terminal import say

pytestmark = pytest.mark.covering(1)

NUMPY = ("--platform", "numpy")
MAIN = [sys.executable, "-m", "dualtune.cli.main"]
PREPARED = "import sys\nfrom dualtune.cli.terminal import prepare_streams, say\nprepare_streams()\n"


def quiet(stderr: bytes) -> bool:
    """Whether nothing of ours was said; transformers remarks that it does not know the NumPy engine's model."""
    return all(line.startswith(b"[transformers]") for line in stderr.splitlines())


@pytest.fixture(scope="session")
def shell():
    """Run a line of bash; $PYTHON and $DUALTUNE are what their names say. The exit code is the first command's."""

    def run(line: str, **env) -> subprocess.CompletedProcess:
        env = os.environ | {"PYTHON": sys.executable, "DUALTUNE": " ".join(MAIN)} | env
        command = ["bash", "-c", f"{line}\nexit ${{PIPESTATUS[0]}}"]
        return subprocess.run(command, env=env, capture_output=True, timeout=1800, check=False)

    return run


# --- closed pipes ----------------------------------------------------------------------------------------------------


def test_training_outlives_the_reader_of_its_lines(config_file, tmp_path):
    """`dualtune train … | head -1`"""
    command = [*MAIN, "train", str(config_file({"run.log_every": 1})), *NUMPY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert b"Z  platform " in process.stdout.readline()
        process.stdout.close()
        stderr = process.stderr.read()
    assert process.returncode == 0, stderr
    assert quiet(stderr)
    assert (tmp_path / "runs" / "a" / "adapter" / "adapter_model.safetensors").exists()


def test_training_needs_no_reader_at_all(config_file, tmp_path):
    read, write = os.pipe()
    os.close(read)
    command = [*MAIN, "train", str(config_file()), *NUMPY]
    with subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE) as process:
        os.close(write)
        stderr = process.stderr.read()
    assert process.returncode == 0, stderr
    assert quiet(stderr)
    assert (tmp_path / "runs" / "a" / "adapter" / "adapter_model.safetensors").exists()


def test_say_is_silent_from_a_broken_pipe_on_and_so_is_the_end(python):
    program = PREPARED + "for number in range(3):\n    say('x' * 9)\nprint('buffered')\nsay('alive', err=True)"
    read, write = os.pipe()
    os.close(read)
    result = python("-c", program, capture_output=False, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (result.returncode, result.stderr) == (0, "alive\n")


def test_a_full_disk_behind_the_output_is_told_once_and_does_not_stop_the_program(shell):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    result = shell(f'$PYTHON -c "{PREPARED}say(str(1)); say(str(2)); say(str(3), err=True)" > /dev/full')
    text = os.strerror(errno.ENOSPC)
    assert result.stderr.decode() == f"standard output: {text}; the lines that follow are not shown\n3\n"
    assert result.returncode == 0


@pytest.mark.parametrize("args", ["config", "config --schema", "--help", "train --help"])
def test_a_reader_that_has_enough_is_no_error_to_talk_about(shell, args):
    result = shell(f"$DUALTUNE {args} | head -1")
    assert result.stderr == b""
    assert result.stdout.count(b"\n") == 1
    assert result.returncode in (0, 1)  # whether `head` was quicker is chance


def test_an_error_that_nobody_reads_keeps_its_exit_code(shell):
    assert shell("$DUALTUNE train no.yaml 2>&1 >/dev/null | true").returncode == 2


# --- no streams ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", "1</dev/null", "1</dev/null 2</dev/null"]
)
@pytest.mark.parametrize(("code", "args"), [(0, "config"), (0, "--help"), (2, "train no.yaml"), (2, "--nonsense")])
def test_closed_streams_change_no_exit_code(shell, closed, code, args):
    result = shell(f"$DUALTUNE {args} {closed}")
    assert result.returncode == code
    assert b"Traceback" not in result.stdout + result.stderr


def test_training_without_streams_keeps_stray_lines_out_of_its_files(shell, config_file, tmp_path):
    """The first file opened without standard output would get its number (here the second one, as 0 is free)."""
    program = PREPARED + "import os; open('file', 'w').write('mine'); say('lost'); os.write(1, b'stray')"
    assert shell(f'cd "{tmp_path}"; $PYTHON -c "{program}" <&- >&-').returncode == 0
    assert (tmp_path / "file").read_text() == "mine"
    result = shell(f'$DUALTUNE train "{config_file()}" --platform numpy >&- 2>&-')
    assert result.returncode == 0
    assert (tmp_path / "runs" / "a" / "adapter").is_dir()


@pytest.mark.parametrize("broken", [None, io.StringIO()])
def test_say_accepts_streams_that_are_absent_or_closed(monkeypatch, broken):
    if broken is not None:
        broken.close()
    monkeypatch.setattr(sys, "stdout", broken)
    monkeypatch.setattr(sys, "stderr", broken)
    say("x")
    say("x", err=True)


def test_say_says(capsys):
    say("one")
    say("two", err=True)
    assert capsys.readouterr() == ("one\n", "two\n")


# --- encodings and widths --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", rb"? ? \udcff"), ("iso-8859-1", b"\xe9 ? \\udcff"), ("utf-8", r"é … \udcff".encode())],
)
def test_characters_that_the_terminal_lacks_are_replaced(python, encoding, shown):
    program = PREPARED + r"say('\xe9 \u2026 \udcff'); say('\xe9 \u2026 \udcff', err=True)"
    env = os.environ | {"PYTHONIOENCODING": encoding}
    result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, shown + b"\n", shown + b"\n")


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1"])
def test_errors_and_lines_of_commands_reach_an_old_terminal(shell, config_file, tmp_path, encoding):
    result = shell("$DUALTUNE train 'nö…pe.yaml'", PYTHONIOENCODING=encoding)
    assert (result.returncode, result.stderr[:9]) == (2, b"Error: n" + (b"?" if encoding == "ascii" else b"\xf6"))
    file = config_file({"run.dir": str(tmp_path / "läuf…")})
    result = shell(f'$DUALTUNE train "{file}" --platform numpy', PYTHONIOENCODING=encoding)
    assert result.returncode == 0, result.stderr
    assert quiet(result.stderr)


def test_help_fits_a_narrow_terminal(shell):
    narrow, wide = (shell("$DUALTUNE --help", COLUMNS=columns).stdout.decode() for columns in ("40", "100"))
    assert max(map(len, narrow.splitlines())) <= 40
    assert max(map(len, wide.splitlines())) > 60
    assert narrow.split() == wide.split()
