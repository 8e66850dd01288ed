"""The report of runs whose files are damaged, foreign or large: what it costs, and what is said."""

import html
import json
import math
import re
import shutil

import pytest

from dualtune.base.errors import ConfigError, FormatError
from dualtune.show.report.answers import answers, prediction, samples
from dualtune.show.report.run_files import read_run
from dualtune.show.report.run_page import run_page
from dualtune.train.state import metrics


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.yaml", b"model: [\n", "config.yaml: "),
        ("config.yaml", b"\xff", "config.yaml: not UTF-8 text"),
        ("config.yaml", b"a: 1\n" * 100_000, "config.yaml: 500000 bytes, at most 262144 are allowed"),
        ("environment.json", b"[]", "environment.json: got a JSON list"),
        ("environment.json", b"\xff", "environment.json: not valid JSON: not UTF-8 text"),
        (
            "environment.json",
            b'{"n": 1' + b"0" * 400 + b"}",
            "environment.json: not valid JSON: an integer of 401 digits",
        ),
    ],
)
def test_a_damaged_run_is_an_error_of_one_line(copy, dualtune_main, name, content, said):
    (copy / name).write_bytes(content)
    result = dualtune_main("report", copy)
    assert result.returncode == FormatError.exit_code and said in result.stderr
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1


def notices(page):
    found = [html.unescape(text) for text in re.findall(r'<p class="notice">(.*?)</p>', page)]
    return [text for text in found if text != "The curves need JavaScript."]


@pytest.mark.parametrize(
    ("name", "good", "shown"),
    [
        (
            "predictions.jsonl",
            {"prompt": "p", "expected": "e", "base": None, "adapter": "a good one"},
            "a good one</p>",
        ),
        ("samples.jsonl", {"step": 8, "prompt": "p", "answer": "a good one"}, "<td>a good one</td>"),
        (
            "rollouts.jsonl",
            {"step": 1, "prompt": "p", "completion": "a good one", "rewards": {}, "advantage": 0, "tokens": 3},
            "a good one</td>",
        ),
    ],
)
def test_a_damaged_row_costs_itself_and_a_damaged_file_its_section(copy, name, good, shown, monkeypatch, wording):
    (copy / name).write_bytes(json.dumps(good).encode() + b"\n\n{}\n[\n\xff\n")
    page = run_page([copy])
    (said,) = notices(page)
    assert said.startswith(f"{name}:3: must have ") and shown in page
    wording(said)
    (copy / name).write_bytes(b"[\n")
    assert notices(run_page([copy]))[0].startswith(f"{name}:1: ")
    file = "rollouts" if name.startswith("rollouts") else "answers"
    limit = "MAX_SAMPLE_BYTES" if name.startswith("samples") else "MAX_BYTES"
    monkeypatch.setattr(f"dualtune.show.report.{file}.{limit}", 1)
    wording(notices(run_page([copy])))
    (copy / name).unlink()
    (copy / name).mkdir()
    page = run_page([copy])
    assert "<h2>Reproduce</h2>" in page
    wording(notices(page)[0])


def test_of_several_runs_a_damaged_one_is_left_out_and_reported(copy, dualtune_main, tmp_path, wording):
    for name in ("a", "b", "c"):
        shutil.copytree(copy, tmp_path / "sweep" / name)
    damaged = tmp_path / "sweep" / "b" / "environment.json"
    damaged.write_text("[")
    result = dualtune_main("report", tmp_path / "sweep")
    assert result.returncode == 0
    wording(result.stderr)
    assert result.stderr.count("\n") == 1
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert "<h1>2 runs</h1>" in page
    wording(notices(page)[0])
    (tmp_path / "sweep" / "a" / "environment.json").write_text("[")
    assert dualtune_main("report", tmp_path / "sweep").returncode == 0
    assert "<h1>c</h1>" in (tmp_path / "sweep" / "report.html").read_text()
    (tmp_path / "sweep" / "c" / "environment.json").write_text("[")
    result = dualtune_main("report", tmp_path / "sweep")
    assert result.returncode == FormatError.exit_code and result.stderr.count("\n") == 1


def test_of_many_prompts_the_last_are_shown(copy):
    rows = [{"step": 8, "prompt": f"prompt {i}", "answer": "a"} for i in range(1000)]
    (copy / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = samples(copy)
    assert (len(found["shown"]), found["num_prompts"], found["shown"][-1][0].prompt) == (16, 1000, "prompt 999")
    assert "The last 16 of 1,000 prompts." in run_page([copy])
    (copy / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:16]))
    assert len(samples(copy)["shown"]) == 16 and "<p class=hint>The last" not in run_page([copy])


def test_metrics_that_are_no_file_or_too_long_are_refused(copy, monkeypatch):
    monkeypatch.setattr(metrics, "MAX_BYTES", 10)
    with pytest.raises(FormatError, match=r"metrics\.jsonl: \d+ bytes, at most 10"):
        read_run(copy)
    (copy / "metrics.jsonl").unlink()
    assert read_run(copy).curves.steps.tolist() == []
    assert "No step has been recorded" in run_page([copy])
    (copy / "metrics.jsonl").mkdir()
    with pytest.raises(FormatError, match="is not a regular file"):
        read_run(copy)


def test_what_is_no_run_directory_is_said(tmp_path, dualtune_main, wording):
    result = dualtune_main("report", tmp_path)
    assert result.returncode == ConfigError.exit_code
    wording(result.stderr)


def test_records_of_any_shape_make_a_page(copy):
    found = {
        key: [1, {"name": 2}, None] for key in ("data", "hardware", "packages", "fingerprints", "memory", "devices")
    }
    found["data"] = {
        "lengths": 3,
        "histogram": [{"first": 1}, 2],
        "sources": [{"path": ["<b>"]}],
        "dropped": {"<i>": "x"},
        "samples": [
            {
                "where": "f:1",
                "text": "<u>" + "x" * 40_000,
                "targets": [[1, 3], [2, 4], 5, [3, "4"], [400, 800], [900, 901]],
            },
            {},
            3,
        ],
        "left_out": {"exact": 2, "near": "<s>"},
    }
    found["memory"] = {"planned_bytes": 10**39}
    (copy / "environment.json").write_text(json.dumps(found))
    (copy / "config.yaml").write_text("model: 3\ntrain: {learning_rate: [1, {a: 2}], max_grad_norm: no}\nx: {y: z}\n")
    page = run_page([copy])
    assert "[&#39;&lt;b&gt;&#39;]" in page
    assert "dropped: &lt;i&gt;" in page
    assert (
        f"&lt;<mark>u&gt;</mark>{'x' * 397}<mark>{'x' * 400}</mark>{'x' * 100}<mark>x</mark>{'x' * 31_867}…</dd>"
        in page
    )
    assert "<dt>duplicates left out</dt><dd>2 exact, ? near</dd>" in page


def test_of_many_answers_the_worst_of_each_kind_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr("dualtune.show.report.answers.MAX_SHOWN", 2)
    row = {"prompt": "p", "expected": "e", "base": None}
    rows = [row | {"adapter": f"answer {i}", "right": i % 2 == 0, "loss": i} for i in range(8)]
    (tmp_path / "predictions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    found = answers(tmp_path)
    assert [row.adapter for row in found["shown"]] == ["answer 7", "answer 6", "answer 5", "answer 4"]
    labels = ["all (4 of 8)", "wrong (2 of 4)", "right (2 of 4)"]
    assert [label for _, label in found["choices"]] == labels


def test_predictions_are_cut():
    row = {"prompt": "p" * 5000, "expected": "", "base": None, "adapter": "", "right": None, "loss": math.inf}
    found = prediction(json.dumps(row).encode(), "p.jsonl:1")
    assert len(found.prompt) == 2001 and found.kind == "unjudged" and found.loss is None
