"""The workflows run what exists, a release is checked, and the packages say that they have types."""

import re
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
GITHUB = sorted((ROOT / ".github").rglob("*.yml"))
WORKFLOWS = [path for path in GITHUB if path.parent.name == "workflows"]

sys.path.append(str(ROOT / "scripts"))
from check_release import problems  # noqa: E402


@pytest.mark.parametrize("path", GITHUB, ids=lambda path: path.name)
def test_github_s_files_are_yaml_with_what_they_need(path):
    table = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path in WORKFLOWS:
        assert {"name", "permissions", "jobs"} <= table.keys()
        assert all({"runs-on", "steps", "timeout-minutes"} <= job.keys() for job in table["jobs"].values())
        needed = [job["needs"] for job in table["jobs"].values() if "needs" in job]
        assert set(needed) <= table["jobs"].keys()
    elif path.name != "config.yml":
        assert {"name", "description", "body"} <= table.keys()
        assert all({"type", "attributes"} <= field.keys() for field in table["body"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_runs_exists(path):
    steps = [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]
    for command in (step["run"] for step in steps if "run" in step):
        assert set(re.findall(r"\bmake ([\w./-]+)", command)) <= make_targets()
        for name in re.findall(r"(?:^|\s)((?:\.ci|scripts|tests)/[\w./-]+)", command):
            assert (ROOT / name).exists(), name


def test_the_workflows_know_every_python_that_is_promised():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    versions = jobs["python"]["strategy"]["matrix"]["version"]
    lowest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert versions[0] == lowest[1] and versions == [f"3.{minor}" for minor in range(11, 11 + len(versions))]


def test_only_the_job_that_publishes_may_ask_for_an_identity():
    """And it runs nothing of the repository: what it publishes was built and proved by the jobs before."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert jobs["publish"]["needs"] == "prove" and not [step for step in jobs["publish"]["steps"] if "run" in step]


@pytest.mark.parametrize(
    ("tag", "code", "changelog", "number"),
    [
        ("v1.2.3", 'VERSION = "1.2.3"\n', "# C\n\n## 1.2.3 (2026-01-02)\n", 0),
        ("v1.2.3", 'VERSION = "1.2.4"\n', "## 1.2.3 (2026-01-02)\n", 1),
        ("v1.2.3", 'VERSION = "1.2.3"\n', "## Unreleased\n", 1),
        ("v1.2.3", 'VERSION = "1.2.3"\n', "## 1x2.3 (2026-01-02)\n", 1),
        ("1.2.3", "", "", 2),
    ],
)
def test_a_release_is_checked(tag, code, changelog, number):
    assert len(problems(tag, code, changelog)) == number


def test_the_changelog_has_the_version_of_the_code():
    code, changelog = ((ROOT / name).read_text() for name in ("dualtune/base/versions.py", "CHANGELOG.md"))
    version = re.search(r'VERSION = "(.+)"', code)[1]
    assert not problems(f"v{version}", code, changelog)
    assert "## Unreleased" in changelog


def test_every_package_says_that_it_has_types():
    packages = re.search(r"packages = \[(.*)\]", (ROOT / "pyproject.toml").read_text())[1]
    for package in re.findall(r'"([^"]+)"', packages):
        assert (ROOT / package / "py.typed").is_file()


def make_targets() -> set[str]:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    return {line.partition(":")[0] for line in lines if re.match(r"[\w./-]+:( |$)", line)}
