"""The report of runs without a browser: its numbers against their definition, its limits, its command, and its end."""

import base64
import hashlib
import html
import json
import math
import re
import shlex
import shutil
from pathlib import Path

import click
import numpy as np
import pytest

from dualtune.cli.main import cli
from dualtune.config import load_config
from dualtune.data.preview import sample_row
from dualtune.data.tokens.store import Document
from dualtune.show.report import curves as curves_module
from dualtune.show.report import run_files
from dualtune.show.report.curves import curves_of
from dualtune.show.report.page import environment, make_page
from dualtune.show.report.run_files import read_run
from dualtune.show.report.run_page import run_page
from dualtune.show.report.run_sections import changed, differing, next_commands
from dualtune.train.profiler.snapshot import TIMELINE_HEADER, Snapshot, timeline_row
from dualtune.train.state.metrics import read_rows
from dualtune.train.state.records import command_line, working_directory

COMMAND = re.compile(r"<code>(.*?)</code>")
ROW = ("prompt", "completion")
UPLOT = Path(run_files.__file__).parent / "uplot"


def step(number, loss=1.0, **more):
    return {"step": number, "loss": loss, "grad_norm": 1.0, "num_tokens": 10, "step_s": 0.5, **more}


# --- the page --------------------------------------------------------------------------------------------------------


def test_a_run_writes_its_page_which_is_that_of_the_command(plain, dualtune_main, tmp_path):
    written = (plain / "report.html").read_text()
    result = dualtune_main("report", plain, "--output", tmp_path / "again.html")
    assert (result.returncode, result.stdout) == (0, f"report      {tmp_path / 'again.html'}\n")
    assert (tmp_path / "again.html").read_text() == written
    assert "The numbers are those so far" not in written


def test_the_policy_allows_the_page_s_own_scripts_by_hash_and_loads_nothing(plain):
    page = run_page([plain])
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    texts = [re.search(r"<style>(.*?)</style>", page, re.S)[1], *re.findall(r"<script>(.*?)</script>", page, re.S)]
    style, *scripts = (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts
    )
    assert len(scripts) == 2 and policy == (
        f"default-src 'none'; style-src {style}; script-src {' '.join(scripts)}; base-uri 'none'; form-action 'none'"
    )
    for name in ("src", "href", "style", "onclick", "onerror"):
        assert not re.search(rf"<[^>]*\s{name}=", page), name


@pytest.mark.parametrize("script", ["a</script", "a</SCRIPT>", "<!--", "a\r\n"])
def test_a_script_that_html_would_read_otherwise_is_refused(script):
    with pytest.raises(ValueError, match="script"):
        make_page("page.html", "t", scripts=[script], text="")


def test_data_in_a_script_cannot_end_it():
    evil = {"</script><!--": "<script>\u2028&"}
    inner = environment().from_string("{{ value|tojson }}").render(value=evil)
    assert not set("<>&\u2028") & set(inner) and json.loads(inner) == evil


def test_uplot_is_what_its_page_says():
    named = re.findall(r"\| `([\w.]+)` \| `(\w{64})` \|", (UPLOT / "README.md").read_text())
    assert len(named) == 3
    assert [hashlib.sha256((UPLOT / name).read_bytes()).hexdigest() for name, _ in named] == [d for _, d in named]


# --- curves ----------------------------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_run(plain):
    rows = [row for row in read_rows(plain / "metrics.jsonl") if "loss" in row]
    found = read_run(plain).curves.as_json()
    assert found["x"]["step"] == [*range(1, 25)]
    assert found["x"]["tokens"] == np.cumsum([row["num_tokens"] for row in rows]).tolist()
    assert found["series"]["loss"] == pytest.approx([row["loss"] for row in rows], rel=1e-6)
    assert [mark["step"] for mark in found["evals"]] == [0, 8, 16, 24]
    best = min(found["evals"][1:], key=lambda mark: mark["loss"])
    assert found["best"] == best


def test_what_an_objective_measures_has_plots_where_a_run_has_it(copy):
    """From the step on that has it; evaluations with what they have."""
    rows = [step(1), step(2, reward_margin=0.5, reward_accuracy=0.25), step(3, reward_margin=0.75), step(4, other=1.0)]
    evaluation = {"step": 4, "eval_loss": 1.0, "eval_targets": 5}
    evaluations = [evaluation | {"eval_reward_margin": 0.625}, evaluation | {"step": 5, "eval_reward_margin": None}]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*rows, *evaluations)))
    page = run_page([copy])
    assert re.findall(r'id="figure-(\w+)"', page)[:4] == ["loss", "reward_margin", "reward_accuracy", "lr"]
    (drawn,) = json.loads(re.search(r'id="numbers">(.*?)</script>', page)[1])
    assert drawn["measured"] == ["reward_margin", "reward_accuracy"]
    assert drawn["series"]["reward_margin"] == [None, 0.5, 0.75, None]
    assert drawn["series"]["reward_accuracy"] == [None, 0.25, None, None]
    assert [mark.get("reward_margin") for mark in drawn["evals"]] == [0.625, None]


def test_a_plan_stands_beside_what_it_plans_and_mapped_files_apart(copy):
    """A process of 700 MiB at its peak, of which 250 are mapped files, was planned with 440."""
    mib = 1 << 20
    environment = json.loads((copy / "environment.json").read_text()) | {"memory": {"planned_bytes": 440 * mib}}
    (copy / "environment.json").write_text(json.dumps(environment))
    snapshot = Snapshot(1, "data", 700 * mib, 1024 * mib, 1000.0, process_bytes=450 * mib)
    (copy / "memory.csv").write_text(",".join(TIMELINE_HEADER) + "\n" + timeline_row(snapshot))
    rows = [step(number, peak_bytes=700 * mib) for number in (1, 2)]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = run_page([copy])
    assert "<b>700.0 MiB</b> peak memory, 250.0 MiB of it mapped files<" in page
    assert "<b>450.0 MiB</b> peak of memory without mapped files, planned 440.0 MiB<" in page
    (drawn,) = json.loads(re.search(r'id="numbers">(.*?)</script>', page)[1])
    assert (drawn["planned_bytes"], drawn["mapped_bytes"]) == (690 * mib, 250 * mib)  # the curve is of both


def test_the_smoothed_loss_is_an_average_that_forgets():
    losses = np.random.default_rng(0).normal(size=200)
    keep = math.exp(-1 / 4)  # 200 steps: it looks back 4
    weights = keep ** np.arange(199, -1, -1)
    curves = curves_of(step(i + 1, loss) for i, loss in enumerate(losses.tolist()))
    assert curves.time_constant == 4
    assert curves.smooth()[-1] == pytest.approx((weights * losses).sum() / weights.sum())
    assert curves.smooth()[0] == losses[0]


def test_a_long_run_is_thinned_and_keeps_its_spikes():
    losses = [1 + i % 7 / 10 for i in range(30_000)]
    losses[12_345], losses[20_000] = 9.0, math.nan
    norms = {7_777: 50.0}
    rows = (step(i + 1, loss, grad_norm=norms.get(i, 1.0)) for i, loss in enumerate(losses))
    found = curves_of(rows).as_json()
    assert 50.0 in found["series"]["grad_norm"]
    assert 1000 < len(found["x"]["step"]) <= curves_module.MAX_POINTS + 2
    assert 9.0 in found["series"]["loss"] and found["x"]["step"][-1] == 30_000
    json.dumps(found, allow_nan=False)


def test_time_is_that_of_the_rows_and_of_old_rows_that_of_the_steps():
    old = curves_of([step(1), step(2), {"step": 2, "eval_loss": 1.0, "eval_targets": 1}])
    assert old.as_json()["x"]["seconds"] == [0.5, 1.0] and old.evals[0].seconds == 1.0
    times = ["2026-01-01T00:00:00.000+00:00", "2026-01-01T01:00:00.000+00:00", "2026-01-01T00:30:00.000+00:00", "x"]
    new = curves_of(step(i + 1, time=time) for i, time in enumerate(times))
    assert new.as_json()["x"]["seconds"] == [0, 3600, 3600, 3600.5]  # never back


def test_rows_begin_with_their_time(plain):
    lines = (plain / "metrics.jsonl").read_text().splitlines()
    assert all(re.match(r'\{"time": "\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", "step": ', line) for line in lines)


def test_a_row_of_a_foreign_size_does_not_break_the_page():
    rows = [step(10**30), step(-1), step(1, 1.0, grad_norm=10**400, lr=True), {"step": 1, "event": {"a": 1}}]
    found = curves_of(rows).as_json()
    assert found["x"]["step"] == [1] and found["series"]["grad_norm"] == [None]
    events = curves_of({"step": 1, "event": "e", "message": "x" * 10_000} for _ in range(2000))
    assert (len(events.events), events.num_events) == (curves_module.MAX_EVENTS, 2000)
    assert max(len(mark.text) for mark in events.events) == curves_module.MAX_MESSAGE


# --- what is recorded ------------------------------------------------------------------------------------------------


def test_the_config_is_shown_where_it_is_not_the_default(plain):
    found = {key: (value, default) for key, value, default in changed(read_run(plain).config)}
    assert found["train.learning_rate"] == ("0.01", "0.0002") and found["data.eval"] == ("0.25", "auto")
    assert "train.optimizer" not in found and "adapter.alpha" not in found  # 32 is 32.0
    assert found["model.name"][1] == ""


def test_only_keys_that_differ_are_compared():
    a, b = {"train": {"steps": 1, "epochs": 3}, "run": {"dir": "a"}}, {"train": {"steps": 2, "epochs": 3}}
    assert differing([a, b]) == [("train.steps", ["1", "2"])]
    assert differing([a, {"train": {"epochs": 3}}]) == [("train.steps", ["1", "–"])]


def test_the_environment_has_the_command_the_start_the_hardware_and_the_data(plain):
    found = json.loads((plain / "environment.json").read_text())
    assert found["command"] and re.fullmatch(r"\d{4}-.*\+00:00", found["started"]) and found["hardware"]["cores"] >= 1
    assert found["fingerprints"]["train documents"].startswith(f"{found['data']['documents']} documents, ")
    data = found["data"]
    assert len(data["samples"]) == 3 and data["samples"][0]["text"][:10] in html.unescape(run_page([plain]))
    assert (data["rows"], data["duplicates"], data["eval_documents"], data["eval_in_training"]) == (13, 1, 4, 0)
    assert data["sources"] == [{
        "path": load_config(plain / "config.yaml").data.train, "documents": data["documents"],
        "tokens": data["tokens"], "trained_tokens": data["trained_tokens"],
    }]  # fmt: skip
    assert sum(bar["documents"] for bar in data["histogram"]) == data["documents"]


def test_sample_rows_mark_the_targets(plain):
    row = json.loads((plain / "environment.json").read_text())["data"]["samples"][0]
    prompt, completion = (json.loads((plain.parent / "train.jsonl").read_text().splitlines()[0])[k] for k in ROW)
    (span,) = row["targets"]
    answer = row["text"][slice(*span)]
    assert prompt in row["text"][: span[0]] and answer == f"{completion}<|im_end|>"
    assert f"<mark>{html.escape(answer)}</mark>" in run_page([plain])


def test_a_sample_row_shows_its_targets_whole_behind_long_context():
    words = ["c" * 3000, "the answer, ", "all of it", "d" * 3000, "and the next"]
    document = Document(np.arange(5), np.array([False, True, True, False, True]), "f:1")
    row = sample_row([document], 0, lambda ids: "".join(words[i] for i in ids))
    assert [row["text"][slice(*span)] for span in row["targets"]] == ["the answer, all of it", "and the next"]
    assert row["text"].startswith(f"{'c' * 200} … {'c' * 200}the answer") and len(row["text"]) < 1000


def test_a_sample_row_with_a_secret_has_no_marks():
    texts = dict(enumerate(["key: ", f"hf_{'a' * 34}", "!"]))
    document = Document(np.arange(3), np.array([False, True, True]), "f:1")
    found = sample_row([document], 0, lambda ids: "".join(texts[i] for i in ids))
    assert "aaa" not in found["text"] and found["text"].startswith("key: ") and found["targets"] == []


def test_the_commands_of_a_report_are_commands(train):
    for name, held_out in (("judged", 0.25), ("not judged", 0)):
        run = read_run(train(name, train__steps=1, data__eval=held_out))
        lines = [command for _, command in next_commands(run)]
        shown = [html.unescape(command) for command in COMMAND.findall(run_page([run.path]).split("<h2>Next</h2>")[1])]
        assert shown == lines
        assert len(lines) == 9 - (not held_out)
        assert any(" --exact-match " in line for line in lines) == (held_out > 0)  # else no row is judged
        for line in lines:
            for text in line.split(" && "):
                program, command, *words = shlex.split(text)
                assert program == "dualtune"
                cli.get_command(click.Context(cli), command).make_context(command, words)


def test_the_directory_of_the_command_is_recorded_without_the_user_s_name(tmp_path, monkeypatch, plain):
    found = json.loads((plain / "environment.json").read_text())
    assert f"the command, in {html.escape(found['directory'])}</p>" in run_page([plain])
    token = "hf_" + "aB3" * 12
    (tmp_path / "home" / "work" / token).mkdir(parents=True)
    (tmp_path / "gone").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for given, shown in (("home", "~"), ("home/work", "~/work"), (f"home/work/{token}", "~/work/hf_***")):
        monkeypatch.chdir(tmp_path / given)
        assert working_directory() == shown
    monkeypatch.chdir(tmp_path)
    assert working_directory() == str(tmp_path)
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert working_directory() == ""


def test_a_held_out_row_that_is_a_training_row_is_a_leak(train, plain):
    other = shutil.copy(plain.parent / "train.jsonl", plain.parent / "other.jsonl")
    leaky = train("leaky", data__eval=str(other), train__steps=1)
    found = json.loads((leaky / "environment.json").read_text())["data"]
    assert (found["eval_documents"], found["eval_in_training"], found["duplicates"]) == (17, 17, 1)


def test_a_command_line_has_no_secret():
    token = "hf_" + "aB3" * 12
    assert command_line(["/x/dualtune/cli/main.py", "train", "a b.yaml", token]) == "dualtune train 'a b.yaml' hf_***"
    assert command_line(["/home/somebody/bin/dualtune", "train"]) == "dualtune train"
    assert command_line(["/home/somebody/main.py"]) == "main.py"


# --- a run's end -----------------------------------------------------------------------------------------------------


def test_a_run_without_report_writes_none_and_a_failure_is_an_event(train, monkeypatch):
    assert not (train("quiet", train__steps=2, run__report=False) / "report.html").exists()

    def fail(paths):
        raise RecursionError("too deep")

    monkeypatch.setattr("dualtune.show.run.run_page", fail)
    run_dir = train("failing", train__steps=2)
    assert not (run_dir / "report.html").exists() and (run_dir / "adapter").is_dir()
    assert (
        read_rows(run_dir / "metrics.jsonl")[-1]["message"] == "report.html was not written: RecursionError: too deep"
    )


def test_a_run_that_was_stopped_says_so_and_how_to_go_on(copy):
    lock = json.loads((copy / "lock").read_text())
    (copy / "lock").write_text(json.dumps(lock | {"state": "preempted", "reason": "stopped <b>"}))
    shutil.rmtree(copy / "adapter")
    page = run_page([copy])
    assert "<b>preempted</b>: stopped &lt;b&gt;. The numbers are those so far." in page
    assert f"dualtune train {copy}/config.yaml --set run.dir={copy}</code>" in page and "adapter merge" not in page
