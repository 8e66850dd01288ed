"""What a reader does with the report in Chromium: choices that outlive a reload, and the legend of many runs."""

import json
import re
import shutil

import pytest

from dualtune.show.report.run_page import run_page

# Choose, load the page again as `dualtune watch --serve` lets the browser do, and say what is chosen then.
CHOOSE = """
const tick = () => new Promise(done => setTimeout(done, 50));
const state = d => ({ x: d.querySelector("input[name=x]:checked").value,
  axis: d.querySelector("#plot-loss .u-legend th").innerText,
  answers: [...d.querySelectorAll(".answer:not([hidden])")].map(row => row.dataset.kind),
  open: [...d.querySelectorAll("details[open]")].map(one => one.id || one.innerText.split("\\n")[0]) });
const look = async ([frame]) => {
  const found = [], click = s => frame.contentDocument.querySelector(s).click();
  found.push(state(frame.contentDocument));
  ["input[value=tokens]", "input[value=wrong]", "#events-0 summary", "h2 + details summary"].forEach(click);
  await tick();
  const again = new Promise(done => frame.onload = done);
  frame.srcdoc += " ";
  await again;
  await tick();
  found.push(state(frame.contentDocument));
  return found };
"""
# The entries of the legend, and which lines are shown after a click on the first run's.
LEGEND = """
const look = ([frame]) => {
  const rows = () => [...frame.contentDocument.querySelectorAll("#plot-loss .u-series")];
  const shown = () => rows().filter(e => e.getClientRects().length).map(e => e.innerText.trim());
  const off = () => rows().filter(e => e.classList.contains("u-off")).map(e => e.innerText.trim());
  const found = { entries: shown(), lines: rows().length, wide: frame.contentDocument.documentElement.scrollWidth };
  rows()[1].querySelector("th").click();
  found.off = off();
  rows()[1].querySelector("th").click();
  found.on = off();
  return found };
"""

# The width of the page, and what makes it so wide.
WIDE = """
const look = ([f]) => [f.contentDocument.documentElement.scrollWidth, [...f.contentDocument.querySelectorAll("*")]
  .filter(e => e.getBoundingClientRect().right > 390).map(e => e.outerHTML.slice(0, 80))];
"""


@pytest.fixture
def many(copy, tmp_path):
    """Twenty runs."""
    return [shutil.copytree(copy, tmp_path / f"run{i:02}") for i in range(20)]


def test_what_was_chosen_is_kept_while_the_page_is_loaded_again(copy, browse):
    row = {"prompt": "p", "expected": "e", "base": None, "adapter": "a", "loss": 1}
    rows = "".join(json.dumps({**row, "right": right}) + "\n" for right in (True, False))
    (copy / "predictions.jsonl").write_text(rows)
    (copy / "samples.jsonl").write_text(json.dumps({"step": 8, "prompt": "say 2", "answer": "2"}) + "\n")
    (before, after), said = browse([(run_page([copy]), 1000)], CHOOSE)
    assert said == []
    assert before == {"x": "step", "axis": "step", "answers": ["wrong", "right"], "open": ["say 2"]}
    assert after == {"x": "tokens", "axis": "tokens", "answers": ["wrong"], "open": ["events-0"]}


def test_many_runs_have_one_entry_each_and_lines_that_differ(many, browse):
    page = run_page(many)
    found, said = browse([(page, 390)], LEGEND)
    assert said == [] and found["wide"] <= 390
    assert [re.split("[:\\s–]", entry)[0] for entry in found["entries"]] == ["step", *(path.name for path in many)]
    assert found["lines"] == 1 + 3 * 20  # smoothed, evaluations and the best one
    assert len(found["off"]) == 3 and found["on"] == []
    keys = re.findall(r'<path class="line(\d)" d="M0,4 H32" stroke-dasharray="([\d ]*)"/>', page)
    assert len({*keys}) == 20
    drawn = json.loads(re.search(r'id="numbers">(.*?)</script>', page)[1])
    assert [" ".join(map(str, run["dash"])) for run in drawn] == [dashes for _, dashes in keys]


def test_absurd_numbers_do_not_run_off_the_edge(copy, browse):
    found = json.loads((copy / "environment.json").read_text())
    found["memory"] = {"planned_bytes": 10**39}
    (copy / "environment.json").write_text(json.dumps(found))
    rows = [{"step": i, "loss": 1.0, "num_tokens": 1e299, "tokens_per_s": 1e299, "peak_bytes": 10**15} for i in (1, 2)]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (width, wide), said = browse([(run_page([copy]), 390)], WIDE)
    assert said == [] and width <= 390, wide
