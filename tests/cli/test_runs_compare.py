"""`dualtune runs` with filters, and `runs compare`: what differs, the numbers, and the curves in a terminal."""

import csv
import json
import math
import re

import pytest

from dualtune.cli.console import HEIGHT, drawn


@pytest.fixture
def made(tmp_path):
    """Write a run directory with these losses, by step, and this config."""

    def make(name, losses, config, state="done", **row):
        path = tmp_path / "runs" / name
        path.mkdir(parents=True)
        rows = [{"step": step, "loss": loss, "step_s": 1.0} | row for step, loss in enumerate(losses, start=1)]
        rows += [{"step": step, "eval_loss": losses[step - 1] + 0.5, "eval_targets": 5} for step in (1, len(losses))]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (path / "config.yaml").write_text(config)
        note = {"pid": 1, "host": "h", "boot": "", "started": "2026-01-02T03:04:05+00:00", "state": state}
        (path / "lock").write_text(json.dumps(note))
        return path

    return make


@pytest.fixture
def two(made):
    first = "{model: {name: org/Tiny}, train: {learning_rate: 1e-4, steps: 3, optimizer: adamw}, run: {dir: x}}"
    second = "{model: {name: org/other}, train: {learning_rate: 0.0003, steps: 3}, run: {dir: y}}"
    return made("a", [3.0, 2.0, 1.0], first, time="2026-01-02T03:00:00.000+00:00"), made(
        "b", [3.0, 1.5, 1.25], second, "failed"
    )


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ((), "a b"),
        (("--state", "done"), "a"),
        (("--state", "done", "--state", "failed"), "a b"),
        (("--model", "tiny"), "a"),
        (("--where", "learning_rate=1e-4"), "a"),
        (("--where", "train.learning_rate=0.0001"), "a"),
        (("--where", "learning_rate>1e-4"), "b"),
        (("--where", "learning_rate!=1e-4"), "b"),
        (("--where", "steps<=3", "--where", "learning_rate>=1e-4"), "a b"),
        (("--where", "optimizer=AdamW"), "a"),
        (("--where", "learning_rate==1e-4"), "a"),
        (("--where", "rate=1e-4"), ""),
        (("--where", "steps=3", "--model", "none"), ""),
    ],
)
def test_runs_are_filtered(two, dualtune_main, tmp_path, options, names):
    result = dualtune_main("runs", tmp_path / "runs", "--json", *options)
    assert [run["path"][-1] for run in json.loads(result.stdout)] == names.split(), result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [("x", "got 'x', allowed: KEY=VALUE"), ("=1", "allowed: KEY=VALUE"), ("a<b", "but < needs a number")],
)
def test_a_filter_that_is_none_is_refused(two, dualtune_main, tmp_path, text, message):
    result = dualtune_main("runs", tmp_path / "runs", "--where", text)
    assert (result.returncode, message in result.stderr) == (2, True)


def test_the_start_is_that_of_the_first_row(two, dualtune_main, tmp_path, wording):
    first, second = json.loads(dualtune_main("runs", tmp_path / "runs", "--json").stdout)
    assert (first["start"], second["start"]) == ("2026-01-02T03:00:00+00:00", None)
    unknown = dualtune_main("runs", tmp_path / "runs", "--where", "rate=1", "--where", "steps=3").stdout
    assert unknown == f"there is no such run in {tmp_path / 'runs'}: none has the key rate\n"
    wording(dualtune_main("runs", tmp_path / "runs", "--state", "killed").stdout)


def test_only_what_differs_is_compared(two, dualtune_main):
    table = json.loads(dualtune_main("runs", "compare", *two, "--json").stdout)
    assert table["differs"] == {
        "model.name": ["org/Tiny", "org/other"],
        "train.learning_rate": [1e-4, 3e-4], "train.optimizer": ["adamw", None],
    }  # fmt: skip
    assert [(run["loss"], run["best_eval_loss"]) for run in table["runs"]] == [(1.0, 1.5), (1.25, 1.75)]
    assert table["losses"][1] == [[1, 3.0], [2, 1.5], [3, 1.25]]
    lines = [line.split() for line in dualtune_main("runs", "compare", *two).stdout.splitlines()]
    for row in (["run", "a", "b"], ["state", "done", "failed"], ["train_loss", "1", "1.25"],
                ["best_eval_loss", "1.5", "1.75"], ["train.learning_rate", "0.0001", "0.0003"],
                ["train.optimizer", "adamw", "-"]):  # fmt: skip
        assert row in lines
    assert not any(line[:1] in (["train.steps"], ["run.dir"]) for line in lines)


def test_a_directory_of_runs_stands_for_all_of_them(two, dualtune_main, tmp_path):
    together = dualtune_main("runs", "compare", tmp_path / "runs", "--json").stdout
    assert together == dualtune_main("runs", "compare", *two, "--json").stdout


def test_another_program_gets_ascii(two, dualtune_main):
    said = dualtune_main("runs", "compare", *two).stdout
    assert said.isascii() and max(map(len, said.splitlines())) <= 80
    plot = said.splitlines()[-HEIGHT:]
    assert any("AA" in line for line in plot) and any("BB" in line for line in plot)


@pytest.mark.parametrize(("no_color", "colored"), [(None, True), ("", False), ("1", False)])
def test_a_terminal_gets_colours_unless_they_are_unwanted(two, dualtune, no_color, colored):
    import os
    import pty
    import subprocess
    import sys

    environment = os.environ | {"COLUMNS": "60", "TERM": "xterm-256color"}
    environment |= {} if no_color is None else {"NO_COLOR": no_color}
    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "dualtune.cli.main", "runs", "compare", *map(str, two)]
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        said = b""
        while True:
            try:
                data = os.read(main, 1 << 16)
            except OSError:
                break
            if not data:
                break
            said += data
    os.close(main)
    text = said.decode()
    assert process.returncode == 0 and re.search("[\u2801-\u28ff]", text), text
    assert ("\x1b[38;5;" in text) is colored
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert "\x1b" not in plain and max(map(len, plain.split("\r\n")[-HEIGHT - 1 :])) <= 60


def test_curves_of_long_files_are_whole(two, dualtune_main, monkeypatch):
    from dualtune.train.state import listing

    monkeypatch.setattr(listing, "MAX_METRICS_BYTES", 10)
    found = json.loads(dualtune_main("runs", "compare", *two, "--json").stdout)
    assert [len(curve) for curve in found["losses"]] == [3, 3]


def test_what_is_no_pair_of_runs_is_refused(two, dualtune_main, tmp_path, wording):
    one = dualtune_main("runs", "compare", two[0])
    assert one.returncode == 2
    wording(one.stderr)
    (tmp_path / "empty").mkdir()
    foreign = dualtune_main("runs", "compare", two[0], tmp_path / "empty")
    assert foreign.returncode == 2
    wording(foreign.stderr)
    (two[0].parent / "report.html").touch()  # as a sweep writes it beside its runs, where `*` finds it
    file = dualtune_main("runs", "compare", *two[0].parent.iterdir())
    assert file.returncode == 2
    wording(file.stderr)


def test_values_that_are_not_finite_and_names_that_steer_are_drawn_without_harm():
    lines = drawn({"A: \x1b[2Kx": [(1, math.nan), (2, 1.0), (3, math.inf)], "B: y": []}, 50, plain=True)
    text = "\n".join(part for line in lines for part, _ in line)
    assert "\x1b" not in text and "\\x1b[2Kx" in text and text.isascii()
    assert drawn({"A": [(1, math.nan)]}, 50, plain=True) == [[("there is no loss to draw", {})]]


def test_a_long_curve_keeps_its_mean():
    """100 000 points around 2 on 60 columns: the lowest and highest labels stay close to 2."""
    points = [(step, 2 + (0.5 if step % 2 else -0.5)) for step in range(100_000)]
    labels = [float(line[0][0].split("+")[0]) for line in drawn({"A": points}, 60, plain=True) if "+" in line[0][0][:8]
              and line[0][0][:4].strip(" +-")]  # fmt: skip
    assert labels and max(labels) <= 2.51 and min(labels) >= 1.49


def test_a_run_is_exported_with_perplexities_and_the_memory_of_each_step(made, dualtune_main, tmp_path):
    run = made("a", [3.0, 2.0, math.nan], "{}", lr=0.1)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "event": "verdict", "message": "not a step"}) + "\n")
    (run / "memory.csv").write_text(
        "step,phase,used_bytes,peak_bytes,cached_bytes,process_bytes,device_bytes,total_bytes,time\n"
        "1,data,10,10,,70,,100,1.0\n1,micro-batch,30,40,,50,,100,2.0\n2,micro-batch,20,40,5,60,90,100,3.0\n"
    )
    result = dualtune_main("runs", "export", run)
    rows = list(csv.DictReader(result.stdout.splitlines()))
    assert [row["step"] for row in rows] == ["1", "2", "3", "1", "3"]  # `made` writes the evaluations at the end
    assert [rows[0][name] for name in ("loss", "lr", "used_bytes", "process_bytes", "device_bytes")] == [
        "3.0",
        "0.1",
        "30",
        "70",
        "",
    ]
    assert float(rows[0]["perplexity"]) == pytest.approx(math.exp(3)) and rows[0]["eval_loss"] == ""
    assert rows[1]["device_bytes"] == "90" and math.isnan(float(rows[2]["perplexity"]))
    assert float(rows[3]["eval_perplexity"]) == pytest.approx(math.exp(3.5)) and rows[3]["loss"] == ""

    target = tmp_path / "out.csv"
    assert dualtune_main("runs", "export", run, "--to", target).returncode == 0
    assert target.read_text() == result.stdout
    assert dualtune_main("runs", "export", run, "--to", target).returncode == 2
    assert dualtune_main("runs", "export", tmp_path).returncode == 2
