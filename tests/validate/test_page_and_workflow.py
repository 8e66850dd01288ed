"""gpu_tiers.md is what its data say, and the workflow runs what exists, where and when it should."""

import json
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

from dualtune.doctor.validate.tiers import TIERS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = spec_from_file_location("gpu_tiers_page", ROOT / "scripts" / "gpu_tiers_page.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def workflow():
    found = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    return found | {"on": found[True]}  # YAML 1.1 reads the key `on` as true


def test_the_page_is_what_would_be_written(tool):
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(tool.results()), "run scripts/gpu_tiers_page.py"


def test_twins_of_all_tiers_on_both_backends_are_recorded_and_passed(tool):
    found = {(report["platform"], t["tier"]): t for report in tool.results() for t in report["tiers"] if t["twin"]}
    assert {(platform, name) for platform in ("cpu", "mlx") for name in TIERS} <= found.keys()
    assert {tier["state"] for tier in found.values()} == {"passed"}


def test_figures_of_a_gpu_stand_in_the_section_of_gpus_alone(tool):
    report = json.loads(json.dumps(next(r for r in tool.results() if r["platform"] == "cpu")))
    assert "no figures for time or memory" in tool.page([report])
    report["machine"]["gpus"] = [{"name": "Some GPU"}]
    for tier in report["tiers"]:
        tier.update(twin=False, peak_bytes=123_400_000)
    gpus, _, twins = tool.page([report]).partition("## Measured on GPUs")[2].partition("## The twins")
    assert "123.4 MB" in gpus and "Some GPU" in gpus and "None recorded yet." in twins


def test_a_real_model_on_a_cpu_stands_beside_a_gpus_column(tool):
    report = json.loads(json.dumps(next(r for r in tool.results() if r["platform"] == "cpu")))
    report |= {"on_cpu": True, "tiers": [tier for tier in report["tiers"] if tier["tier"] == "quick"]}
    [quick] = report["tiers"]
    quick["twin"] = False
    elapsed = next(row for row in quick["criteria"] if row["name"] == "elapsed")
    elapsed.update(measured=65.0, level="skipped")
    on_gpu = json.loads(json.dumps(report)) | {"on_cpu": False}
    on_gpu["tiers"][0]["criteria"] = [elapsed | {"measured": 9.0, "level": "ok"}]
    assert "| elapsed | (1 min 05 s) |  |" in tool.page([report])
    assert "| elapsed | (1 min 05 s) | 9.0 s |" in tool.page([report, on_gpu])


def test_a_tier_that_did_not_run_is_said_with_its_reason(tool):
    report = json.loads(json.dumps(tool.results()[0]))
    report["tiers"] = report["tiers"][:1]
    report["tiers"][0].update(state="not run", checks=[{"found": "10 MB free, 20 MB needed → short by 10 MB"}])
    assert "| not run | twin | 10 |  |  |  | 10 MB free, 20 MB needed → short by 10 MB |" in tool.page([report])


def test_a_tier_that_failed_says_by_how_much(tool):
    report = json.loads(json.dumps(tool.results()[0]))
    report["tiers"] = report["tiers"][:1]
    row = next(row for row in report["tiers"][0]["criteria"] if row["name"] == "elapsed")
    row.update(measured=130.0, level="fail", limit=120)
    report["tiers"][0]["state"] = "failed"
    assert "| failed: elapsed 2 min 10 s, not < 2 min 00 s |" in tool.page([report])


def test_a_recorded_report_has_its_commit(tool, tmp_path, monkeypatch):
    report = json.loads(json.dumps(tool.results()[0]))
    (tmp_path / "report.json").write_text(json.dumps(report | {"commit": "none"}))
    monkeypatch.setattr(tool, "RESULTS", tmp_path)
    tool.record("here", [tmp_path / "report.json"])
    [recorded] = tool.results()
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", recorded["commit"])
    assert f"{recorded['date']} at {recorded['commit']}, " in tool.page([recorded])


def test_every_push_runs_what_ci_runs(workflow):
    assert "push" in workflow["on"]
    job = workflow["jobs"]["cpu"]
    assert job["runs-on"] == "ubuntu-latest" and "github.event_name == 'push'" in job["if"]
    assert ".ci/run" in [step.get("run") for step in job["steps"]]


def test_our_own_machine_runs_nothing_but_what_was_labelled_or_is_on_the_main_branch(workflow):
    own = {name: job for name, job in workflow["jobs"].items() if "self-hosted" in job["runs-on"]}
    assert own.keys() == {"gpu-tiers", "nightly-full"}
    labelled = own["gpu-tiers"]["if"]
    assert "github.event.action == 'labeled'" in labelled and "github.event.label.name == 'gpu'" in labelled
    assert own["nightly-full"]["if"] == "github.event_name == 'schedule'" and "schedule" in workflow["on"]
    assert workflow["permissions"] == {"contents": "read"}


def test_the_jobs_run_commands_that_exist(workflow):
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert "scripts/gpu-test.sh full --check-vram --verbose" in commands
    makefile, script = (ROOT / "Makefile").read_text(), (ROOT / "scripts" / "gpu-test.sh").read_text()
    for command in commands:
        program, *words = command.split()
        if program == "make":
            assert all(re.search(rf"^{re.escape(word)}( .*)?:", makefile, re.M) for word in words)
        elif not program.startswith(".venv/"):  # those are held by tests/test_front_door.py
            assert (ROOT / program).is_file() and all(word in script for word in words)


def test_jobs_that_may_hang_are_ended(workflow):
    assert all(0 < int(job["timeout-minutes"]) <= 360 for job in workflow["jobs"].values())
