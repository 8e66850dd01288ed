"""The pictures of losses over values: where each run lies, against its loss and its value."""

import json
import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

from dualtune.show.report.comparison import BOTTOM, HEIGHT, TOP
from dualtune.show.report.run_files import read_run
from dualtune.show.report.run_page import run_page


@pytest.fixture(scope="module")
def plain(train):
    return train("plain", train__steps=4, run__report=False)


@pytest.fixture
def runs(plain, tmp_path):
    """Make runs from (name, changed keys, evaluation losses after step 4 and later), and return their pictures."""

    def make(*wanted, unfinished=(), page=False):
        paths = []
        for name, changes, *losses in wanted:
            path = tmp_path / name
            shutil.copytree(plain, path)
            config = yaml.safe_load((path / "config.yaml").read_text())
            for key, value in changes.items():
                section, _, short = key.partition(".")
                config[section][short] = value
            (path / "config.yaml").write_text(yaml.safe_dump(config))
            rows = (path / "metrics.jsonl").read_text().splitlines()
            if not losses:
                rows = [row for row in rows if "eval_loss" not in row]
            rows += [json.dumps({"step": 4 + i, "eval_loss": loss, "eval_targets": 3}) for i, loss in enumerate(losses)]
            (path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
            if name in unfinished:
                note = json.loads((path / "lock").read_text())
                (path / "lock").write_text(json.dumps(note | {"state": "failed", "reason": "memory"}))
            paths.append(path)
        return run_page(paths) if page else pictures_of(paths)

    return make


def pictures_of(paths):
    """The section with the pictures of a page; empty if it has none."""
    found = re.search(r'<h2 id="values">.*?(?=<h2 )', run_page(paths), re.S)
    return found[0] if found else ""


def figures(text):
    return [ElementTree.fromstring(figure) for figure in re.findall(r"<figure.*?</figure>", text, re.S)]


def dots(figure):
    """name -> (x, y, class) of the marks of a picture."""
    found = {}
    for mark in figure.iter():
        title = mark.find("title")
        if mark.tag == "circle" and title is not None:
            found[title.text] = (float(mark.get("cx")), float(mark.get("cy")), mark.get("class"))
        elif title is not None:
            x, y = re.match(r"M([\d.]+),([\d.]+)", mark.get("d")).groups()
            found[title.text] = (float(x), float(y), "triangle")
    return found


def rate(value, loss, name=None):
    return (name or f"lr{value:g}", {"train.learning_rate": value}, loss)


def test_losses_lie_at_their_height_and_rates_by_their_logarithm(runs):
    (figure,) = figures(runs(rate(1e-4, 2.0), rate(1e-3, 1.0), rate(1e-2, 1.5)))
    found = dots(figure)
    (x1, y1, _), (x2, y2, _), (x3, y3, _) = (
        found[name] for name in ("lr0.0001: 2.0000", "lr0.001: 1.0000", "lr0.01: 1.5000")
    )
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2) and x1 < x2
    assert (y1, y2) == (TOP, HEIGHT - BOTTOM) and y3 == pytest.approx((y1 + y2) / 2)
    around = [mark for mark in figure.iter("circle") if mark.get("class") == "around"]
    assert [float(mark.get("cx")) for mark in around] == [x2]  # the best
    assert figure.find("figcaption").text == "train.learning_rate"
    assert "the best has 0.001 with 1.0000" in figure.find("svg").get("aria-label")
    texts = [text.text for text in figure.iter("text")]
    assert texts == ["1.0000", "1.5000", "2.0000", "0.0001", "0.001", "0.01"]


def test_near_numbers_lie_by_their_size_and_words_in_order(runs):
    changes = [{"adapter.rank": rank, "adapter.targets": targets} for rank, targets in ((2, "b"), (3, "a"), (6, "b"))]
    rank, targets = figures(runs(*((f"r{i}", change, 1.0 + i) for i, change in enumerate(changes))))
    (x1, *_), (x2, *_), (x3, *_) = dots(rank).values()
    assert (x3 - x1) == pytest.approx(4 * (x2 - x1), rel=1e-2)
    (x1, *_), (x2, *_), (x3, *_) = dots(targets).values()
    assert x1 == x3 < x2
    assert "adapter.targets, by adapter.rank: " in targets.find("figcaption").text
    assert [span[0].tail for span in targets.find("figcaption")] == ["2", "3", "6"]


def test_runs_with_the_same_value_of_the_other_key_are_joined(runs):
    wanted = [
        (f"{lr:g}-{rank}", {"train.learning_rate": lr, "adapter.rank": rank}, lr + rank) for lr in (1e-3, 1e-2)
        for rank in (2, 8)
    ]  # fmt: skip
    _, by_rank = figures(runs(*wanted))
    lines = [line.get("points") for line in by_rank.iter("polyline")]
    assert len(lines) == 2 and all(line.count(",") == 2 for line in lines)
    assert [kind for _, _, kind in dots(by_rank).values()] == ["dot0", "dot1", "dot0", "dot1"]


def test_a_run_that_diverged_is_a_triangle_and_hides_no_difference(runs):
    text = runs(rate(1e-4, 1.2), rate(1e-3, 1.0), rate(1e-2, 1.1), rate(1.0, 5e4), unfinished=["lr1"])
    found = dots(figures(text)[0])
    assert found["lr1: 50000.0000"][2] == "triangle"
    assert found["lr0.0001: 1.2000"][1] - TOP < 0.7 * (HEIGHT - TOP - BOTTOM)  # not all at the bottom
    assert "A triangle is a loss above the picture." in text and "A ring is a run" in text
    assert "A ring" not in runs(*(rate(value, value, f"again{value}") for value in (1, 2, 3)))


def test_a_run_that_was_given_up_is_a_ring_and_never_the_best(runs):
    (figure,) = figures(runs(rate(1e-4, 1.5), rate(1e-3, 1.0), rate(1e-2, 1.2), unfinished=["lr0.001"]))
    found = dots(figure)
    assert found["lr0.001: 1.0000"][2] == "dot0 ring" and found["lr0.01: 1.2000"][2] == "dot0"
    assert "the best has 0.01" in figure.find("svg").get("aria-label")


def winners(page):
    """The run that the table marks, and those that the pictures do."""
    marked = re.findall(r'</svg>([^<]*) <span class="mark">best<', page)
    return marked, re.findall(r'aria-label="train.learning_rate: \d runs(?:, the best has ([\d.]+))?', page)


def test_the_table_and_the_pictures_name_one_winner(runs):
    """A run may have had a lower evaluation before; what counts is the loss of the weights that it writes."""
    given = [(*rate(1, 0.5, "a"), 3.0), (*rate(2, 2.0, "b"), 1.0), (*rate(3, 0.1, "c"), 0.1)]
    assert winners(runs(*given, unfinished="c", page=True)) == (["b"], ["2"])
    best = {"guards.restore_best": True}
    given = [(f"{name}, best", changes | best, *losses) for name, changes, *losses in given]
    assert winners(runs(*given, unfinished=["c, best"], page=True)) == (["a, best"], ["1"])
    given = [(f"{name}, unfinished", *rest) for name, *rest in given]
    assert winners(runs(*given, unfinished=[name for name, *_ in given], page=True)) == ([], [""])


def test_a_training_loss_is_not_compared_with_an_evaluation(runs):
    page = runs(rate(1, 99.0), rate(2, 98.0), ("training", {"train.learning_rate": 3}), page=True)
    assert winners(page) == ([], [""]) and "so none is called the best" in page
    trained = runs(*((f"t{value}", {"train.learning_rate": value}) for value in (1, 2, 3)), page=True)
    assert len(winners(trained)[0]) == 1 and "the best has the lowest training loss at the end." in trained


def test_there_is_no_picture_for_two_runs_for_equal_ones_or_without_a_loss(runs):
    assert runs(rate(1e-4, 2.0, "a"), rate(1e-3, 1.0, "b")) == ""
    assert runs(*(("same" + name, {}, 1.0) for name in "abc")) == ""
    assert runs(*(rate(value, math.nan, f"nan{value}") for value in (1, 2, 3))) == ""


def test_equal_values_of_other_types_lie_in_the_middle(runs):
    given = zip("abc", (1 << 60, (1 << 60) + 1, float(1 << 60)), strict=True)
    (figure,) = figures(runs(*((name, {"train.learning_rate": value}, 1.0) for name, value in given)))
    assert len({x for x, _, _ in dots(figure).values()}) == 1


def test_a_last_loss_that_is_not_finite_is_not_smoothed_away(plain, tmp_path):
    paths = []
    for name, losses in {"good": (2.0, 1.5), "bad": (0.1, math.nan), "more": (2.0, 1.6)}.items():
        path = Path(shutil.copytree(plain, tmp_path / name))
        rows = [{"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in enumerate(losses, start=1)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = yaml.safe_load((path / "config.yaml").read_text())
        config["train"]["learning_rate"] = len(paths) + 1
        (path / "config.yaml").write_text(yaml.safe_dump(config))
        paths.append(path)
    page = run_page(paths)
    (figure,) = figures(pictures_of(paths))
    assert "the best has 1" in figure.find("svg").get("aria-label")
    assert math.isnan(read_run(paths[1]).curves.end_loss)
    assert re.search(r"<td[^>]*>nan</td>", page) and "<b>nan</b>" in run_page([paths[1]])


def test_one_loss_for_all_and_hostile_values(runs):
    hostile = [1e999, "<script>", None, -1, 0, True, [1, "<b>"], {"x": "</svg>"}]
    text = runs(*((f"run{i}", {"train.learning_rate": value}, 1.0) for i, value in enumerate(hostile)))
    (figure,) = figures(text)
    assert len(dots(figure)) == 8 and "<script" not in text and "<b>" not in text
    assert all(0 <= x <= 440 and 0 <= y <= 260 for x, y, _ in dots(figure).values())
