"""`dualtune selftest` as a user meets it."""

import json

import pytest

from dualtune.doctor.selftest.report import read_report

# Without what is compiled, which takes half a minute, and in one process.
ONLY = ["numbers/loss", "kernels/loss", "waits/none", "recorded"]


@pytest.fixture(scope="module")
def tested(open_backend, forked, tmp_path_factory):
    """The command on the CPU, its report and its directory."""
    open_backend("torch")
    place = tmp_path_factory.mktemp("selftest")
    only = [word for name in ONLY for word in ("--only", name)]
    result = forked("dualtune", "selftest", "--platform", "cpu", "--json", "out.json", *only, cwd=place)
    return result, place


def test_the_command_runs_on_a_cpu_and_leaves_an_archive(tested):
    result, place = tested
    assert result.returncode == 0, result.stdout + result.stderr
    (archive,) = place.glob("dualtune-selftest-*.tar.gz")
    found = read_report(archive)
    assert found == json.loads((place / "out.json").read_text())
    results = {row["name"]: row["result"] for row in found["checks"]}
    assert results.pop("waits/none") == "skipped"
    assert {name.partition("/")[0] for name in results} == {name.partition("/")[0] for name in ONLY} - {"waits"}
    assert set(results.values()) == {"passed"}
    assert str(place) not in json.dumps(found)
    for row in found["checks"]:
        assert f"{row['name']}: " in result.stdout
    assert "works       3 of 3 checks" in result.stdout and f"archive     {archive.name}" in result.stdout


def test_an_archive_is_shown_and_compared(tested, dualtune_main):
    _, place = tested
    (archive,) = place.glob("*.tar.gz")
    shown = dualtune_main("selftest", "--show", archive)
    assert (shown.returncode, "passed   recorded/float32" in shown.stdout) == (0, True)
    compared = dualtune_main("selftest", "--compare", archive, place / "out.json")
    assert compared.returncode == 0
    assert "losses      recorded/float32: up to 0.0e+00 nats apart" in compared.stdout


def test_wrong_usage_is_refused(dualtune_main, tmp_path):
    (tmp_path / "x").write_text("{}")
    assert dualtune_main("selftest", "--show", "a", "--compare", "a", "b").returncode == 2
    assert dualtune_main("selftest", "--platform", "cpu", "--only", "nothing").returncode == 2
    assert dualtune_main("selftest", "--show", tmp_path / "x").returncode == 6
    assert dualtune_main("selftest", "--platform", "tpu").returncode == 2
