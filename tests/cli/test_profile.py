"""`dualtune profile`: the report of a real run, its files, and what it says where there is nothing to report."""

import csv
import json
import re
from html.parser import HTMLParser

import pytest

from dualtune.train.profiler.snapshot import MB, TIMELINE_HEADER, Snapshot, read_timeline, timeline_row


@pytest.fixture
def a_run(tmp_path):
    """A run directory with this timeline: 60 steps with an increase of 150 MB in steps 20 and 40."""

    def make(rows=None, environment=None):
        run = tmp_path / "a <run>"
        run.mkdir()
        if rows is None:
            used = [(300 + 150 * (step >= 20) + 150 * (step >= 40)) * MB for step in range(60)]
            rows = [
                Snapshot(step, phase, used_bytes, 1024 * MB, 1000 + step, used_bytes + 50 * MB)
                for step, used_bytes in enumerate(used)
                for phase in ("data", "micro-batch", "optimizer")
            ]
        (run / "memory.csv").write_text(",".join(TIMELINE_HEADER) + "\n" + "".join(map(timeline_row, rows)))
        if environment is not None:
            (run / "environment.json").write_text(json.dumps(environment))
        return run

    return make


def test_the_report_of_a_real_run(dualtune_main, open_backend, config_file, tmp_path):
    open_backend("numpy")
    assert dualtune_main("train", config_file(), "--platform", "numpy").returncode == 0
    result = dualtune_main("profile", tmp_path / "runs" / "a")
    assert result.returncode == 0, result.stderr
    for phase in ("start", "data", "micro-batch", "optimizer", "evaluation", "save"):
        assert re.search(rf"^{phase} +\d+ +[\d.]+ +[\d.]+ +[\d.]+$", result.stdout, re.M), phase
    peak = re.search(r"^peak +([\d.]+) MB at step", result.stdout, re.M)[1]
    rows = read_timeline(tmp_path / "runs" / "a" / "memory.csv")
    assert float(peak) == pytest.approx(max(row.peak_bytes for row in rows) / MB, abs=0.1)
    assert "leak: not judged: fewer than 50 steps" in result.stdout and "plan:" not in result.stdout


def test_spikes_and_leaks(dualtune_main, a_run, wording):
    run = a_run()
    text = dualtune_main("profile", run).stdout
    wording(text)
    assert "\nleak: none (" in text
    wording(dualtune_main("profile", run, "--spike", "200").stdout)


def test_json_has_the_same(dualtune_main, a_run):
    found = json.loads(dualtune_main("profile", a_run(), "--json").stdout)
    assert found["peak"] == {"bytes": 650 * MB, "step": 40, "phase": "data"}
    assert found["spikes"] == [{"step": step, "delta_mb": 150.0, "phase": "data"} for step in (20, 40)]
    assert found["phases"]["optimizer"]["max_bytes"] == 600 * MB and found["snapshots"] == 180
    assert found["leak"]["found"] is False and found["process_leak"] is None and found["planned_bytes"] is None


def test_the_plan_is_compared_with_the_peak(dualtune_main, a_run, wording):
    run = a_run(environment={"memory": {"planned_bytes": 585 * MB}})
    wording(dualtune_main("profile", run).stdout)


PLAN = {"planned_bytes": 530 * MB, "parts": [{"name": "weights", "bytes": 1}, {"name": "reserve", "bytes": 90 * MB}]}


@pytest.mark.parametrize(
    ("counters", "planned", "measured", "what", "mapped"),
    [
        # A process of 700 MB, at most 750, of which 250 are mapped files: a plan of 530 is 6 % too high.
        ({"process_bytes": 450 * MB}, 530, 500, "memory without mapped files", 250),
        # An allocator of arrays, which counts none of the reserve.
        ({"process_bytes": 9000 * MB, "cached_bytes": 0}, 440, 750, "arrays", 0),
    ],
)
def test_a_plan_is_compared_with_what_it_plans(dualtune_main, a_run, counters, planned, measured, what, mapped):
    rows = [Snapshot(step, "data", used * MB, 1024 * MB, 1000 + step, (used + 50) * MB, **counters)
            for step, used in enumerate((300, 700, 400))]  # fmt: skip
    run = a_run(rows, {"memory": PLAN})
    found = json.loads(dualtune_main("profile", run, "--json").stdout)
    expected = {"planned_bytes": planned, "measured_bytes": measured, "mapped_bytes": mapped}
    assert found["plan"] == {name: size * MB for name, size in expected.items()} | {"what": what}
    assert found["planned_bytes"] == 530 * MB and found["peak"]["bytes"] == 750 * MB
    text = dualtune_main("profile", run).stdout
    assert f"plan {100 * (planned / measured - 1):+.1f} %" in text
    assert (f"mapped files: {mapped:.1f} MiB" in text) == bool(mapped)


@pytest.mark.parametrize("environment", [{}, [], {"memory": None}, {"memory": {"planned_bytes": "9"}}])
def test_without_a_plan_nothing_is_said_of_it(dualtune_main, a_run, environment):
    result = dualtune_main("profile", a_run(environment=environment))
    assert result.returncode == 0 and "plan" not in result.stdout


def test_the_csv_file(dualtune_main, a_run, tmp_path):
    assert dualtune_main("profile", a_run(), "--csv", tmp_path / "out.csv").returncode == 0
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert lines[:2] == ["step,phase,used_mb,total_mb,utilization_percent", "0,data,300.00,1024.00,29.30"]
    assert len([*csv.DictReader(lines)]) == 180


class Elements(HTMLParser):
    def __init__(self, text) -> None:
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_the_page_loads_nothing_and_draws_the_lines(dualtune_main, a_run, tmp_path):
    assert dualtune_main("profile", a_run(), "--html", tmp_path / "out.html").returncode == 0
    page = (tmp_path / "out.html").read_text()
    elements = Elements(page).found
    assert not [tag for tag, attrs in elements if tag in ("script", "link", "img") or "src" in attrs or "href" in attrs]
    assert "default-src 'none'" in page and "Memory of a &lt;run&gt;" in page and "spikes over 100 MB: 2" in page
    lines = {attrs["class"]: attrs["points"].split() for tag, attrs in elements if tag == "polyline"}
    assert lines.keys() == {"used", "peak"} and len(lines["used"]) == 180
    highest = min(lines["peak"], key=lambda point: float(point.split(",")[1]))
    assert highest.endswith(",10.0")  # the peak reaches the top


def test_a_long_run_is_drawn_in_groups_that_keep_the_peak(dualtune_main, a_run, tmp_path):
    used = [100 * MB + (777 * MB if step == 4321 else 0) for step in range(9000)]
    rows = [Snapshot(step, "data", number, 1024 * MB, 0.0) for step, number in enumerate(used)]
    assert dualtune_main("profile", a_run(rows), "--html", tmp_path / "out.html").returncode == 0
    (points,) = [
        attrs["points"].split()
        for tag, attrs in Elements((tmp_path / "out.html").read_text()).found
        if tag == "polyline"
    ]
    assert len(points) < 700 and sum(point.endswith(",10.0") for point in points) == 1


def test_a_run_without_snapshots(dualtune_main, a_run, tmp_path, wording):
    result = dualtune_main("profile", a_run(rows=[]), "--html", tmp_path / "out.html")
    assert result.returncode == 0
    wording(result.stdout)
    assert "No memory snapshots recorded" in (tmp_path / "out.html").read_text()
    assert json.loads(dualtune_main("profile", tmp_path / "a <run>", "--json").stdout)["peak"] is None


def test_what_is_no_run_is_refused(dualtune_main, tmp_path, wording):
    result = dualtune_main("profile", tmp_path)
    assert result.returncode == 6
    wording(result.stderr)
