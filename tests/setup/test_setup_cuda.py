"""scripts/setup_cuda.sh on machines that are made up of stubs: drivers, GPUs, the CPU, and which torch each gets."""

import pytest

SCRIPT = "scripts/setup_cuda.sh"
PIP = "python -m pip install --disable-pip-version-check --constraint constraints.txt"
INDEX = " --extra-index-url https://download.pytorch.org/whl/"


@pytest.fixture
def linux(stubs):
    """Make the machine a Linux one, with GPUs of these compute capabilities and a driver; without a driver: none."""

    def make(*capabilities, driver="580.95.05", system="Linux"):
        stubs.stub("uname", f"echo {system}")
        if capabilities:
            lines = "\n".join(f"{driver}, {capability}, NVIDIA GPU" for capability in capabilities)
            stubs.stub("nvidia-smi", f"cat <<'EOF'\n{lines}\nEOF")
        return stubs

    return make


def test_a_good_machine_is_set_up_in_order(linux):
    machine = linux("9.0")
    result = machine.run(SCRIPT)
    assert (result.returncode, result.stderr) == (0, "")
    assert machine.changes == [
        "python3.12 -m venv .venv",
        f"{PIP} torch",
        f"{PIP} --editable .[torch]",
        "dualtune check-gpu --probe --require-memory 4GB",
        "dualtune check-env --for auto",
    ]
    assert (machine.root / ".venv" / ".demo").exists()
    assert "ok    NVIDIA GPU, compute capability 9.0, driver 580.95.05" in result.stdout and "Next:" in result.stdout


@pytest.mark.parametrize(
    ("capabilities", "driver", "wheels"),
    [
        (["9.0"], "580.65.06", ""),
        (["7.5"], "595.10", ""),
        (["12.0"], "580.65.06", ""),
        (["9.0"], "575.57.08", "cu126"),  # a driver of CUDA 12
        (["9.0"], "530.30.02", "cu126"),
        (["7.0"], "580.65.06", "cu126"),  # CUDA 13 has no code for Volta
        (["9.0", "7.0"], "580.65.06", "cu126"),
        (["8.9", "8.6"], "580.65.06", ""),
    ],
)
def test_the_torch_is_one_that_driver_and_gpu_can_run(linux, capabilities, driver, wheels):
    machine = linux(*capabilities, driver=driver)
    assert machine.run(SCRIPT).returncode == 0
    assert machine.changes[1] == f"{PIP} torch{INDEX + wheels if wheels else ''}"


@pytest.mark.parametrize(
    ("capability", "driver", "text"),
    [
        ("9.0", "525.147.05", "got driver 525.147.05, at least 530 (CUDA 12.1) is needed"),
        ("6.1", "580.65.06", "got compute capability 6.1, at least 7.0 is needed"),
        ("12.0", "575.57.08", "got driver 575.57.08; a GPU of compute capability 12.0 needs 580 or newer"),
    ],
)
def test_a_gpu_or_driver_that_is_too_old_stops_it(linux, capability, driver, text):
    machine = linux(capability, driver=driver)
    result = machine.run(SCRIPT)
    assert (result.returncode, machine.changes) == (4, [])
    assert result.stderr.startswith(f"Error: {text}")


def test_without_a_driver_the_two_ways_on_are_named(linux):
    machine = linux()
    result = machine.run(SCRIPT)
    assert (result.returncode, machine.changes) == (4, [])
    assert "nvidia-smi was not found" in result.stderr and "setup_cuda.sh --cpu" in result.stderr


def test_a_driver_that_does_not_answer_is_quoted(linux):
    machine = linux()
    machine.stub("nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    result = machine.run(SCRIPT)
    assert (result.returncode, machine.changes) == (4, [])
    assert "Driver/library version mismatch" in result.stderr and "restart" in result.stderr


def test_the_cpu_needs_no_driver_and_gets_the_torch_for_it(linux):
    machine = linux()
    result = machine.run(SCRIPT, "--cpu")
    assert result.returncode == 0, result.stderr
    assert machine.changes[1] == f"{PIP} torch{INDEX}cpu"
    assert machine.changes[-1] == "dualtune check-env --for cpu"
    assert not any("check-gpu" in line for line in machine.changes)


def test_without_a_python_that_fits_the_line_that_installs_one_is_given(linux):
    machine = linux("9.0")
    machine.python(fits="exit 1")
    result = machine.run(SCRIPT)
    assert (result.returncode, machine.changes) == (4, [])
    assert "sudo apt install python3 python3-venv" in result.stderr


@pytest.mark.parametrize(
    ("failing", "text"), [("check-gpu", "the GPU does not work"), ("check-env", "something is missing")]
)
def test_what_does_not_work_in_the_end_is_a_failure(linux, failing, text):
    machine = linux("9.0")
    machine.stub("dualtune", f'if [ "$1" = {failing} ]; then exit 4; fi')
    result = machine.run(SCRIPT)
    assert result.returncode == 4 and text in result.stderr and "Next:" not in result.stdout


@pytest.mark.parametrize("options", [["--dry-run"], ["--dry-run", "--cpu"], ["--cpu", "--dry-run"]])
def test_a_dry_run_runs_nothing(linux, options):
    machine = linux("9.0")
    result = machine.run(SCRIPT, *options)
    assert (result.returncode, machine.changes) == (0, [])
    assert not (machine.root / ".venv").exists()
    shown = [line for line in result.stdout.splitlines() if line.startswith("+ ")]
    assert shown[0] == "+ python3.12 -m venv .venv" and "torch" in shown[1] and "check-env" in shown[-1]


def test_a_dry_run_without_a_driver_says_where_the_real_run_would_end(linux):
    result = linux().run(SCRIPT, "--dry-run")
    assert result.returncode == 0
    assert "stop  nvidia-smi was not found" in result.stdout and "+ .venv/bin/dualtune check-env" in result.stdout


def test_a_mac_is_sent_to_the_other_script(linux):
    real, dry = (linux(system="Darwin").run(SCRIPT, *options) for options in ([], ["--dry-run"]))
    assert (real.returncode, dry.returncode) == (4, 0)
    assert "./setup_m4.sh" in real.stderr
    assert dry.stdout.startswith("This is Darwin, not Linux") and "Nothing was run or changed." in dry.stdout


@pytest.mark.parametrize(("option", "code"), [("--help", 0), ("--gpu", 2)])
def test_options_are_explained_or_refused_before_anything_else(stubs, option, code):
    result = stubs.run(SCRIPT, option)
    assert (result.returncode, stubs.called) == (code, [])
    assert ("Usage:" in result.stdout) == (code == 0)
    assert ("--gpu" in result.stderr) == (code == 2)
