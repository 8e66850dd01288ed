"""`dualtune validate` as a user meets it: lines, report, exit codes, and what happens when a tier does not pass."""

import json
import re
from dataclasses import replace

import pytest

import dualtune.doctor.validate.tiers
from dualtune.doctor.validate.tiers import TIERS, rows
from dualtune.engine.machine import Budget


@pytest.fixture
def validate(dualtune_main, tmp_path, open_backend):
    """The command with its runs in a directory of their own; on the CPU's torch, as long as nothing else is said."""
    open_backend("torch")

    def run(*args, device="cpu", name="out"):
        result = dualtune_main("validate", "--device", device, "--out", tmp_path / name, *args)
        report = tmp_path / name / "report.json"
        result.report = json.loads(report.read_text()) if report.exists() else None
        return result

    return run


@pytest.fixture
def impossible(monkeypatch):
    """Give a tier a limit that nothing meets."""

    def change(name: str, measure: str):
        criteria = tuple(replace(c, limit=-1) if c.measure == measure else c for c in TIERS[name].criteria)
        monkeypatch.setattr(
            dualtune.doctor.validate.tiers, "TIERS", {**TIERS, name: replace(TIERS[name], criteria=criteria)}
        )  # fmt: skip

    return change


@pytest.fixture
def short(monkeypatch):
    """Let there be this much memory."""
    return lambda num_bytes: monkeypatch.setattr(
        dualtune.doctor.validate.tiers, "budget", lambda machine, platform: Budget(num_bytes, f"of {platform}")
    )


def test_the_tier_before_all_others_is_the_self_test(validate, monkeypatch):
    from dualtune.base.checks import Check
    from dualtune.doctor.selftest import run

    levels = {"device": "ok", "numbers/loss": "fail"}
    monkeypatch.setattr(run, "run_checks", lambda *args: [Check(name, level, "") for name, level in levels.items()])
    result = validate("--tier", "selftest", "--json")
    assert (result.returncode, json.loads(result.stdout)) == (4, result.report)
    assert {row["name"]: row["result"] for row in result.report["checks"]} == {
        "device": "passed",
        "numbers/loss": "failed",
    }
    assert validate("--tier", "selftest", "--check-memory").returncode == 2


def test_a_tier_shows_lines_a_row_for_each_criterion_and_a_verdict(validate):
    result = validate("--tier", "quick")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "platform    cpu: as requested"
    assert "the tier's twin for a CPU" in result.stdout
    live = [
        line
        for line in lines
        if re.match(r"quick +step +\d+/10  loss [\d.]+  [\d,]+ tokens/s  memory [\d,.]+ MB", line)
    ]
    assert len(live) == 10
    assert [line for line in lines if line.startswith("ok")] and not [line for line in lines if line.startswith("fail")]
    for criterion in TIERS["quick"].criteria:
        assert f"ok  {criterion.name}" in result.stdout
    assert re.search(r"^verdict     quick passed in \d+\.\ds$", result.stdout, re.M)
    assert "\x1b" not in result.stdout and "\r" not in result.stdout


def test_json_on_standard_output_is_the_report_and_nothing_else(validate):
    result = validate("--tier", "quick", "--json")
    assert json.loads(result.stdout) == result.report and "verdict     quick passed" in result.stderr
    assert (result.report["ok"], result.report["exit_code"], result.report["platform"]) == (True, 0, "cpu")
    (tier,) = result.report["tiers"]
    assert (tier["tier"], tier["state"], tier["twin"], tier["config_file"]) == (
        "quick", "passed", True, "gpu_smollm2_quick.yaml",
    )  # fmt: skip
    assert len(tier["losses"]) == 10 and tier["config"]["train"]["steps"] == 10
    assert tier["peak_bytes"] >= 0  # loading returns memory that earlier tests held
    assert {"torch", "dualtune"} <= tier["environment"]["packages"].keys()
    names = [criterion["name"] for criterion in tier["criteria"]]
    assert names == [criterion.name for criterion in TIERS["quick"].criteria]
    assert all({"measured", "limit", "relation", "unit", "level"} <= row.keys() for row in tier["criteria"])


def test_a_report_names_no_directory_of_the_machine(validate, tmp_path):
    text = json.dumps(validate("--tier", "quick").report)
    assert str(tmp_path) not in text and "/demo/model" not in text


def test_a_criterion_that_is_not_met_ends_with_1(validate, impossible):
    impossible("quick", "elapsed")
    result = validate("--tier", "quick")
    assert result.returncode == 1
    assert re.search(r"^verdict     quick failed in .*: elapsed$", result.stdout, re.M)
    assert re.search(r"^fail +elapsed +.* must be < -1\.0 s$", result.stdout, re.M)
    assert (result.report["ok"], result.report["exit_code"]) == (False, 1)


def test_memory_is_compared_before_a_run_and_too_little_ends_with_4(validate, short):
    short(10_000_000)
    result = validate("--tier", "quick", "--check-memory")
    assert result.returncode == 4
    assert re.search(r"^memory      10 MB free, \d+ MB needed → short by \d+ MB \(of cpu\)$", result.stdout, re.M)
    assert "verdict     quick was not run" in result.stdout and "step" not in result.stdout.split("verdict")[1]
    assert result.report["tiers"][0]["state"] == "not run" and "losses" not in result.report["tiers"][0]


def test_enough_memory_leaves_a_buffer(validate, short):
    short(50_000_000_000)
    result = validate("--tier", "quick", "--check-memory")
    free, needed, buffer = map(
        int, re.search(r"(\d+) MB free, (\d+) MB needed → (\d+) MB buffer", result.stdout).groups()
    )
    assert result.returncode == 0 and free - needed == buffer > 0 and free == 50_000


def test_a_model_that_is_not_there_ends_with_4(validate, monkeypatch, tmp_path):
    monkeypatch.setattr(dualtune.doctor.validate.tiers, "DEMO_MODEL", tmp_path / "nowhere")
    result = validate("--tier", "quick")
    assert result.returncode == 4 and "verdict     quick was not run: model.name: there is no model" in result.stdout


def test_all_stops_at_the_first_failure_unless_told_to_go_on(validate, impossible):
    impossible("quick", "elapsed")
    result = validate("--tier", "all")
    assert result.returncode == 1 and [t["tier"] for t in result.report["tiers"]] == ["quick"]
    assert "left out    convergence, memory, extended: quick did not pass" in result.stdout


def test_keep_going_runs_the_others_and_still_fails(validate, short):
    short(10_000_000)
    result = validate("--tier", "all", "--check-memory", "--keep-going")
    assert result.returncode == 4
    assert [tier["tier"] for tier in result.report["tiers"]] == ["quick", "convergence", "memory", "extended"]


def test_a_device_that_is_not_there_ends_with_4(validate):
    import torch

    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    result = validate("--tier", "quick", device="cuda")
    assert result.returncode == 4 and "sees no NVIDIA GPU" in result.stderr


def test_the_device_may_come_from_the_environment(dualtune_main, monkeypatch):
    monkeypatch.setenv("DUALTUNE_DEVICE", "toaster")
    result = dualtune_main("validate", "--tier", "quick")
    assert result.returncode == 2 and "--platform: got 'toaster', allowed: auto, mlx, cuda, cpu" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [([], "Say which tier to run"), (["--tier", "fast"], "--tier: got 'fast', allowed: selftest, quick")],
)
def test_a_wrong_command_line_ends_with_2(validate, args, message):
    result = validate(*args)
    assert result.returncode == 2 and message in result.stderr and result.report is None


def test_the_data_can_be_had_without_a_run(dualtune_main, tmp_path):
    path = tmp_path / "data" / "explain_concepts.jsonl"
    result = dualtune_main("validate", "--write-data", path)
    assert result.returncode == 0 and "made-up rows" in result.stdout
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows()


def test_a_directory_that_exists_is_left_as_it_is(validate, tmp_path):
    (tmp_path / "out").mkdir()
    result = validate("--tier", "quick")
    assert result.returncode == 0 and result.report is None and (tmp_path / "out-2" / "report.json").exists()


def test_where_losses_are_many_enough_the_decrease_is_said(validate, open_backend):
    open_backend("mlx")
    result = validate("--tier", "convergence", device="mlx")
    assert result.returncode == 0
    assert re.search(r"^Loss convergence: \d+\.\d{4} → \d+\.\d{4} \(\d+\.\d% decrease\)$", result.stdout, re.M)
    assert "affine4 in place of nf4" in result.stdout
