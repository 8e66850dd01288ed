"""What Chromium makes of the report of runs: curves, table, answers, width, and a console without a word."""

import json
import shutil

import pytest

from dualtune.show.report.run_page import run_page

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\" ' & \u2028 \u202e"
WORST = "the worst answer"
# All that a page shows, and then what its controls do. uPlot draws in a microtask, so `await null` waits for it.
LOOK = """
const look = frames => Promise.all(frames.map(async frame => {
  const d = frame.contentDocument, w = d.defaultView, all = s => [...d.querySelectorAll(s)];
  const seen = s => all(s).filter(e => e.getClientRects().length), texts = s => seen(s).map(e => e.innerText.trim());
  const click = s => { const e = d.querySelector(s); if (e) e.click() };
  const names = () => texts("#runs tbody th");
  const found = { width: w.innerWidth, scroll: d.documentElement.scrollWidth, text: d.body.innerText,
    ground: w.getComputedStyle(d.body).backgroundColor, canvases: seen("canvas").length,
    plots: Object.fromEntries(seen(".plot").map(e => [e.id, e.getAttribute("aria-label")])),
    wide: seen("canvas").every(c => c.getBoundingClientRect().right <= w.innerWidth),
    dots: all(".scatter circle title").map(e => e.textContent),
    triangles: all(".scatter path title").map(e => e.textContent),
    narrow: all(".scatter svg").every(e => e.getBoundingClientRect().right <= w.innerWidth),
    images: all("img").length, scripts: all("script").length, copies: seen(".copy").length, order: [names()] };
  found.axes = ["tokens", "seconds", "step"].map(x => { click(`input[value=${x}]`);
    return texts("#plot-loss .u-legend th")[0] });
  await null;
  const plot = d.querySelector("#plot-loss"), keys = (...names) => names.forEach(key =>
    plot.dispatchEvent(new w.KeyboardEvent("keydown", { key, cancelable: true })));
  plot.focus();
  keys("ArrowRight", "ArrowRight", "ArrowLeft");
  found.focused = d.activeElement.id;
  found.cursor = texts("#plot-loss .u-series .u-value");
  keys(...Array(99).fill("ArrowRight"), "ArrowLeft");
  found.event = d.getElementById("event").innerText;
  found.answers = ["wrong", "right", "all"].map(kind => { click(`input[name=answers][value=${kind}]`);
    return texts(".answer .adapter p") });
  for (const head of all("#runs .sort").length ? [3, 3, 0] : []) { all("#runs .sort")[head].click();
    found.order.push(names()); found.sorted = all("#runs th[aria-sort]").map(e => e.getAttribute("aria-sort")) }
  return found }));
"""


@pytest.fixture(scope="module")
def home(train, tmp_path_factory):
    """Three runs: a plain one, one that learns fast, and one with bad numbers, hostile texts and a hostile name."""
    plain, fast = train("plain"), train("fast", train__learning_rate=3e-2)
    evil = tmp_path_factory.mktemp("evil") / "<img src=x onerror=alert(1)> & '\""
    shutil.copytree(plain, evil)
    with (evil / "metrics.jsonl").open("a") as file:
        file.write('{"step": 25, "loss": NaN, "lr": 1e999, "grad_norm": -Infinity, "num_tokens": 9}\n')
        file.write(json.dumps({"step": 25, "event": "skipped_step", "message": EVIL}) + "\n")
        file.write('{"step": 26, "loss": 1.5}\n{"step": 26, "eval_loss": Infinity, "eval_targets": 3}\n')
    row = {"prompt": EVIL, "expected": EVIL, "base": EVIL, "adapter": WORST, "right": False, "loss": 9.5}
    rows = [{**row, "adapter": f"answer {i}", "right": i % 2 == 0, "loss": i, "base": None} for i in range(4)]
    (evil / "predictions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [*rows, row]))
    return plain, fast, evil


def test_the_losses_over_the_learning_rate_are_drawn_without_a_script(looks, home):
    for look in looks["three"]:
        assert [title.partition(": ")[0] for title in look["dots"]] == ["plain", "fast"]
        assert look["triangles"] == [f"{home[2].name}: inf"]
        assert look["narrow"] and "Loss by value" in look["text"]


@pytest.fixture(scope="module")
def looks(home, browse):
    """The pages of one run, of a hostile one, and of all three together; each at 1280 and at 390 pixels."""
    plain, _, evil = home
    pages = [run_page([plain]), run_page([evil]), run_page(home)]
    found, said = browse([(page, width) for page in pages for width in (1280, 390)], LOOK)
    return {"plain": found[:2], "evil": found[2:4], "three": found[4:], "console": said}


def test_nothing_is_said_in_the_console_and_nothing_runs_off_the_edge(looks):
    assert looks.pop("console") == []
    for pair in looks.values():
        assert [look["width"] for look in pair] == [1280, 390]
        assert all(look["scroll"] <= look["width"] and look["wide"] for look in pair)


def test_each_curve_has_every_step(looks):
    for look in looks["plain"]:
        assert look["canvases"] == len(look["plots"]) == 5
        assert look["plots"]["plot-loss"].startswith("Loss. loss: 24 points, from ")
        assert "; smoothed: 24 points, " in look["plots"]["plot-loss"]
        assert "; evaluation: 4 points, " in look["plots"]["plot-loss"]  # before, and after 8, 16 and 24 steps
        assert "; best: 1 points, " in look["plots"]["plot-loss"]
        assert "learning rate: 24 points, from 0.005 to " in look["plots"]["plot-lr"]
        assert "; clipped above: 2 points, from 0.3 to 0.3" in look["plots"]["plot-grad_norm"]
        assert look["axes"] == ["tokens", "time", "step"]


def test_the_keyboard_moves_the_cursor(looks, home):
    """Two steps to the right and one back is the first place: the evaluation before the first step."""
    first = json.loads((home[0] / "metrics.jsonl").read_text().splitlines()[0])
    for look in looks["plain"]:
        assert look["focused"] == "plot-loss"
        step, _, _, evaluation, _ = look["cursor"]
        assert step == "0" and float(evaluation) == pytest.approx(first["eval_loss"], rel=1e-4)


def test_the_page_has_its_sections_and_its_commands(looks):
    for look in looks["plain"]:
        for text in ("evaluation loss before", "Curves", "1 documents equal an earlier one", "train.learning_rate",
                     "Fingerprints", "dualtune chat", "dualtune serve", "--to gguf", "dualtune push",
                     "What is marked is a target of the loss"):  # fmt: skip
            assert text in look["text"]
        assert look["copies"] == 10
        assert look["images"] == 0 and look["scripts"] == 3  # the numbers, uPlot and ours
        assert "Answers" not in look["text"]


def test_hostile_texts_are_texts_and_bad_numbers_leave_a_gap(looks):
    for look in looks["evil"]:
        assert look["images"] == 0 and look["scripts"] == 3
        assert "<img src=x onerror=alert(1)> & '\"" in look["text"]
        assert "loss: 25 points" in look["plots"]["plot-loss"]  # of 26 steps one is NaN
        assert look["event"].startswith("step 25: skipped_step: </script><script>alert(1)</script>")


def test_a_filter_shows_right_or_wrong_answers_the_worst_first(looks):
    for look in looks["evil"]:
        wrong, right, everything = look["answers"]
        assert wrong == [WORST, "answer 3", "answer 1"]
        assert right == ["answer 2", "answer 0"]
        assert everything == [WORST, "answer 3", "answer 2", "answer 1", "answer 0"]


def test_several_runs_are_drawn_over_each_other_and_sorted_by_a_click(looks, home):
    losses = {}
    for path in home[:2]:
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        losses[path.name] = [row["loss"] for row in rows if "loss" in row][-1]
    assert losses["fast"] < losses["plain"]
    for look in looks["three"]:
        assert look["plots"]["plot-loss"].count("24 points") == 2 and "fast: 24 points" in look["plots"]["plot-loss"]
        evil = home[2].name
        given, up, down, by_name = look["order"]
        assert given == ["plain", "fast best", evil]
        assert [name for name in up if name != evil] == ["fast best", "plain"]
        assert down == up[::-1]
        assert by_name == [evil, "fast best", "plain"]
        assert look["sorted"][0] == "ascending" and set(look["sorted"][1:]) == {"none"}
        assert "train.learning_rate" in look["text"] and "train.steps" not in look["text"].split("Curves")[0]


def test_the_page_is_dark_where_the_system_is(home, browse, looks):
    (dark,), said = browse([(run_page(home[:1]), 390)], LOOK, is_dark=True)
    assert said == [] and dark["ground"] == "rgb(18, 20, 23)"
    assert looks["plain"][0]["ground"] == "rgb(246, 247, 249)"
