"""setup_m4.sh on Macs and other machines that are made up of stubs: every gate passes and stops."""

import pytest

GIB = 2**30
INSTALL = [
    "python3.12 -m venv .venv",
    "python -m pip install --disable-pip-version-check --constraint constraints.txt --editable .[mlx]",
    "dualtune check-gpu --probe",
    "dualtune check-env --for m4",
]


@pytest.fixture
def mac(stubs):
    """Make the machine a Mac."""

    def make(*, arch="arm64", macos="15.6", gib=32, translated=0):
        stubs.stub("uname", f'case "$1" in -s) echo Darwin ;; -m) echo {arch} ;; esac')
        stubs.stub("sw_vers", f"echo {macos}")
        answers = {
            "hw.memsize": gib * GIB,
            "sysctl.proc_translated": translated,
            "machdep.cpu.brand_string": "Apple M4",
        }
        cases = " ".join(f"{key}) echo {value} ;;" for key, value in answers.items())
        stubs.stub("sysctl", f'case "$2" in {cases} esac')
        return stubs

    return make


def test_a_good_mac_is_set_up_in_order(mac):
    machine = mac()
    result = machine.run("setup_m4.sh")
    assert (result.returncode, result.stderr) == (0, "")
    assert machine.changes == INSTALL
    assert (machine.root / ".venv" / ".demo").exists() and (machine.root / ".venv" / ".python").exists()
    for line in ("ok    Apple silicon: Apple M4", "ok    macOS 15.6", "ok    32 GiB", "make demo", "dualtune train"):
        assert line in result.stdout


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"arch": "x86_64", "translated": 1}, "this terminal runs under Rosetta"),
        ({"arch": "x86_64"}, "this Mac has an Intel chip (x86_64)"),
        ({"macos": "13.7.8"}, "got macOS 13.7.8, MLX needs 14 or newer"),
        ({"gib": 8}, "got 8 GiB of unified memory, at least 16 is needed"),
    ],
)
def test_a_mac_that_lacks_something_is_told_and_left_alone(mac, changes, text):
    machine = mac(**changes)
    result = machine.run("setup_m4.sh")
    assert (result.returncode, machine.changes) == (4, [])
    assert result.stderr.startswith(f"Error: {text}")


@pytest.mark.parametrize("changes", [{"macos": "14.0"}, {"macos": "26.0.1"}, {"gib": 16}, {"gib": 192}])
def test_the_least_that_is_enough_is_enough(mac, changes):
    assert mac(**changes).run("setup_m4.sh").returncode == 0


def test_16_gib_come_with_the_advice_to_take_less(mac):
    assert "note  16 GiB of unified memory, 32 is good: set data.max_length" in mac(gib=16).run("setup_m4.sh").stdout


def test_without_a_python_that_fits_the_line_that_installs_one_is_given(mac):
    machine = mac()
    machine.python(fits="exit 1")
    result = machine.run("setup_m4.sh")
    assert (result.returncode, machine.changes) == (4, [])
    assert "brew install python@3.12" in result.stderr


def test_the_interpreter_is_asked_for_its_version_and_for_arm64(mac):
    machine = mac()
    machine.run("setup_m4.sh")
    (asked,) = [line for line in machine.calls.read_text().splitlines() if " -c " in line]
    assert "sys.version_info >= (3, 11)" in asked and 'platform.machine() == "arm64"' in asked


def test_another_interpreter_can_be_named(mac):
    machine = mac()
    machine.python("mypython")
    machine.environment["PYTHON"] = "mypython"
    assert machine.run("setup_m4.sh").returncode == 0
    assert machine.changes[0] == "mypython -m venv .venv"


def test_running_it_again_keeps_the_environment(mac):
    machine = mac()
    machine.run("setup_m4.sh")
    machine.calls.unlink()
    result = machine.run("setup_m4.sh")
    assert result.returncode == 0 and machine.changes == INSTALL[1:]
    assert ".venv is there already and is kept" in result.stdout


def test_an_environment_with_another_python_stops_it(mac):
    machine = mac()
    machine.run("setup_m4.sh")
    path = machine.root / ".venv" / "bin" / "python"
    path.write_text("#!/bin/bash\nexit 1\n")
    result = machine.run("setup_m4.sh")
    assert result.returncode == 4 and "rm -rf .venv" in result.stderr


@pytest.mark.parametrize(
    ("failing", "text"),
    [("check-gpu", "the GPU does not work"), ("check-env", "something is missing")],
)
def test_what_does_not_work_in_the_end_is_a_failure(mac, failing, text):
    machine = mac()
    machine.stub("dualtune", f'if [ "$1" = {failing} ]; then exit 4; fi')
    result = machine.run("setup_m4.sh")
    assert result.returncode == 4 and text in result.stderr and "Next:" not in result.stdout


@pytest.mark.parametrize("failing", ["venv", "pip"])
def test_an_installation_that_fails_ends_it(mac, failing):
    machine = mac()
    machine.python(last=f'if [ "$2" = {failing} ]; then exit 3; fi')
    result = machine.run("setup_m4.sh")
    assert result.returncode == 3 and "Next:" not in result.stdout
    assert failing in machine.called[-1]


def test_a_dry_run_on_a_mac_prints_the_commands_and_runs_none(mac):
    machine = mac()
    result = machine.run("setup_m4.sh", "--dry-run")
    assert (result.returncode, machine.changes) == (0, [])
    assert [line for line in result.stdout.splitlines() if line.startswith("+ ")] == [
        "+ python3.12 -m venv .venv",
        "+ .venv/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt "
        "--editable .\\[mlx\\]",
        "+ touch .venv/.python .venv/.demo",
        "+ .venv/bin/dualtune check-gpu --probe",
        "+ .venv/bin/dualtune check-env --for m4",
    ]
    assert not (machine.root / ".venv").exists()


def test_a_dry_run_says_where_the_real_run_would_end_and_goes_on(mac):
    result = mac(macos="12.6", gib=8).run("setup_m4.sh", "--dry-run")
    assert result.returncode == 0
    assert "stop  got macOS 12.6" in result.stdout and "stop  got 8 GiB" in result.stdout
    assert "+ .venv/bin/dualtune check-env --for m4" in result.stdout


def test_a_dry_run_on_linux_explains_itself(stubs):
    stubs.stub("uname", "echo Linux")
    result = stubs.run("setup_m4.sh", "--dry-run")
    assert (result.returncode, result.stderr, stubs.changes) == (0, "", [])
    assert result.stdout.startswith("This is Linux, not a Mac")
    assert "+ python3 -m venv .venv" in result.stdout and "Nothing was run or changed." in result.stdout


def test_linux_is_sent_to_the_other_script(stubs):
    stubs.stub("uname", "echo Linux")
    result = stubs.run("setup_m4.sh")
    assert (result.returncode, stubs.changes) == (4, [])
    assert "scripts/setup_cuda.sh" in result.stderr


@pytest.mark.parametrize(("option", "code"), [("--help", 0), ("-h", 0), ("--bogus", 2)])
def test_options_are_explained_or_refused_before_anything_else(stubs, option, code):
    result = stubs.run("setup_m4.sh", option)
    assert (result.returncode, stubs.called) == (code, [])
    assert ("Usage:" in result.stdout) == (code == 0)
    assert ("--bogus" in result.stderr) == (code == 2)
