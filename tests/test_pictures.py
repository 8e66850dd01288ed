"""The pictures of the documentation: what their scripts draw from the files beside them, and nothing private in it."""

import importlib.util
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def recorder():
    pytest.importorskip("termios", reason="a pseudo-terminal")
    return script("record_demo")


@pytest.fixture(scope="module")
def events(recorder):
    return recorder.events_of(recorder.CAST.read_text(encoding="utf-8"))


def test_the_charts_are_those_of_the_results():
    drawing = script("draw_results")
    assert {path: path.read_text(encoding="utf-8") for path in drawing.pictures()} == drawing.pictures()
    results = drawing.result("peers")
    best = [part for part in results["parts"] if part.endswith(("/best", "/packed"))]
    assert sum(len(drawing.bars(results["parts"], group)) for group in drawing.GROUPS) == len(best) > 0


def test_a_part_of_the_memory_that_has_no_bar_is_refused():
    row = {"technique": "new", "parts": {"weights": 2**30, "sound": 1}}
    with pytest.raises(ValueError, match="PARTS has no bar for sound"):
        script("draw_results").draw_memory({"techniques": [row]})


def test_the_recording_is_drawn_as_it_was_made(recorder, events):
    assert recorder.SVG.read_text(encoding="utf-8") == recorder.draw(events)


@pytest.mark.parametrize("path", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_small_and_well_formed_and_runs_nothing(path):
    text = path.read_text(encoding="utf-8")
    tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(text).iter()}
    assert tags <= {"svg", "style", "rect", "text", "path", "g", "clipPath"}
    assert not re.search(r"\son\w+=|href|@import|url\((?!#)", text)
    assert "prefers-color-scheme:dark" in text and len(text.encode()) < 150 * 1024


@pytest.mark.parametrize("path", sorted(PICTURES.iterdir()), ids=lambda path: path.name)
def test_no_path_of_a_machine_shows(path):
    text = path.read_text(encoding="utf-8").replace("~/dualtune", "")
    assert not re.search(r"(?<![\w.])/(home|root|work|tmp|Users|mnt|opt|usr|var)\b", text)


def test_every_picture_is_shown():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"pictures/([\w.]+)", page.read_text(encoding="utf-8"))}
    assert shown == {path.name for path in PICTURES.iterdir()}


def test_the_last_screen_stays_where_nothing_moves(recorder, events):
    """Without animation: the lines that were there at the end, and no other, all of the last screen in view."""
    last = re.findall(r'<text class="k[^"]*"[^>]*>(.*)</text>', recorder.draw(events))
    assert any(re.fullmatch(r"exact match on 60 held-out rows: [\d.]+% before, [\d.]+% after", text) for text in last)
    assert not [text for text in last if text.startswith(("training ", "importing ", "evaluating "))]
    assert ".t{visibility:hidden}" in recorder.STYLE


# --- the terminal of the recorder ---


def test_a_control_code_that_is_not_known_is_no_silent_mistake(recorder):
    with pytest.raises(ValueError, match=r"ESC\[5C"):
        recorder.Screen().write("\x1b[5C")


def test_a_recording_has_the_time_of_what_was_written_and_ends_with_its_command(recorder, monkeypatch, tmp_path):
    """A real pseudo-terminal of the right size, and a failure that is not drawn."""
    (tmp_path / "said").write_text("#!/bin/sh\nstty size; printf 'ü\\n'; exit ${FAILS:-0}\n")
    (tmp_path / "said").chmod(0o755)
    monkeypatch.setattr(recorder.sys, "executable", str(tmp_path / "python"))
    found = recorder.record(("said",))
    assert "".join(text for _, text in found) == "24 80\r\nü\r\n" and found[0][0] >= 0
    assert recorder.events_of(recorder.cast_of(found)) == found
    monkeypatch.setenv("FAILS", "3")
    with pytest.raises(SystemExit, match="said ended with 3"):
        recorder.record(("said",))


@pytest.mark.long  # tests/cli/test_demo.py compares the recording with a demo that runs for another test too
def test_the_recording_says_what_a_recording_says_today(recorder, events, open_backend):
    """The words that begin its lines, in their order: a recording of an older dualtune is not shown as today's."""
    open_backend("torch")

    def labels(recorded):
        screen = recorder.Screen()
        screen.write("".join(text for _, text in recorded))
        return [line.split("  ")[0] for line in screen.lines if re.match(r"[a-zA-Z]", line)]

    def without_counts(recorded):
        return [re.sub(r"\d+", "N", label) for label in labels(recorded)]

    today = recorder.events_of(recorder.cast_of(recorder.record((*recorder.COMMAND, "--platform", "cpu"))))
    assert without_counts(today) == without_counts(events)
