"""`dualtune eval` row by row: predictions, the base against the adapter, held-out rows in the training data."""

import json

import pytest

NUMPY = ("--platform", "numpy")
KEYS = ["prompt", "expected", "base", "adapter", "right", "loss"]


@pytest.fixture
def rows():
    """Every fourth answer is another one, which a model that sees only the last token cannot know."""
    return [{"prompt": f"{i}?", "completion": '{"a": 1}' if i % 4 else '{"a": 2}'} for i in range(16)]


@pytest.fixture
def trained(dualtune_main, config_file, write_rows, rows):
    """A config whose run has learned the more frequent answer."""
    config = config_file({
        "data.train": write_rows(rows, "train.jsonl"), "data.eval": str(write_rows(rows[:8], "eval.jsonl")),
        "train.steps": 120, "train.learning_rate": 0.1, "train.documents_per_step": 16, "adapter.rank": 8,
    })  # fmt: skip
    assert dualtune_main("train", config, *NUMPY).returncode == 0
    return config


@pytest.fixture
def evaluated(dualtune_main, trained):
    def run(*args):
        short = ("--max-tokens", 12) if {"--json-field", "--metric", "--answer-pattern"} & {*args} else ()
        result = dualtune_main("eval", trained, *short, "--json", *args, *NUMPY)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return run


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_predictions_hold_each_row_and_agree_with_the_loss(evaluated, tmp_path, rows):
    kept = tmp_path / "runs" / "a" / "predictions.jsonl"
    assert "predictions" not in evaluated() and not kept.exists()
    report = evaluated("--json-field", "a", "--compare", "--exact-match")
    found = read(kept)
    assert report["predictions"] == str(kept) and [list(row) for row in found] == [KEYS] * 8
    assert [row["prompt"] for row in found] == [row["prompt"] for row in rows[:8]]
    assert [row["expected"] for row in found] == [row["completion"] for row in rows[:8]]
    assert sum(row["right"] for row in found) / 8 == report["metrics"]["json:a"] == report["exact_match"]
    # All rows have equally many targets, so the mean of the rows is the mean of all.
    assert sum(row["loss"] for row in found) / 8 == pytest.approx(report["loss"], abs=1e-6)
    assert all(row["base"] != row["adapter"] for row in found)
    assert len({row["adapter"] for row in found}) == 1


def test_predictions_of_something_else_are_kept_only_where_asked(evaluated, tmp_path):
    kept, file = tmp_path / "runs" / "a" / "predictions.jsonl", tmp_path / "own.jsonl"
    assert "predictions" not in evaluated("--base", "--json-field", "a")
    assert "predictions" not in evaluated("--data", tmp_path / "train.jsonl", "--json-field", "a")
    assert not kept.exists()
    evaluated("--base", "--predictions", file, "--limit", 3)
    found = read(file)
    assert [(row["adapter"], row["right"]) for row in found] == [(None, None)] * 3
    assert all(isinstance(row["base"], str) and row["loss"] > 0 for row in found)
    evaluated("--predictions", file)
    assert [row["base"] for row in read(file)] == [None] * 8 and not kept.exists()


def test_the_base_beside_its_adapter(evaluated, dualtune_main, trained):
    base, tuned = evaluated("--base", "--exact-match"), evaluated("--compare", "--exact-match", "--json-field", "a")
    loss, exact, field = tuned["compare"]
    assert [row["metric"] for row in tuned["compare"]] == ["loss", "exact_match", "json:a"]
    assert loss["base"] == pytest.approx(base["loss"], abs=1e-6)
    assert loss["adapter"] == pytest.approx(tuned["loss"], abs=1e-6)
    assert loss["low"] <= loss["difference"] <= loss["high"] < 0 and loss["verdict"] == "adapter lower"
    assert (exact["base"], exact["adapter"]) == (base["exact_match"], tuned["exact_match"])
    assert (field["rows"], field["method"], loss["method"]) == (8, "newcombe", "bootstrap")
    plain = dualtune_main("eval", trained, "--compare", *NUMPY).stdout.splitlines()
    assert plain[-3].split() == ["base", "adapter", "difference", "95", "%", "interval"]
    assert plain[-2].split()[0] == "loss" and plain[-2].endswith("adapter lower")


def test_a_model_trained_whole_is_compared_with_its_base(dualtune_main, config_file, open_backend, tiny_llama):
    open_backend("torch")
    config = config_file({"model.name": tiny_llama, "train.steps": 2})
    lines = config.read_text().splitlines()
    config.write_text("\n".join("adapter: {method: full}" if x.startswith("adapter:") else x for x in lines))
    cpu = ("--platform", "cpu")
    assert dualtune_main("train", config, *cpu).returncode == 0
    (loss,) = json.loads(dualtune_main("eval", config, "--compare", "--json", *cpu).stdout)["compare"]
    base = json.loads(dualtune_main("eval", config, "--base", "--json", *cpu).stdout)
    assert loss["base"] == pytest.approx(base["loss"], abs=1e-6) and loss["adapter"] < loss["base"]


def test_a_metric_that_raises_is_one_line_with_the_row(dualtune_main, trained, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def f(expected, got): return 0.5 - expected.count('2')")
    monkeypatch.chdir(tmp_path)
    result = dualtune_main("eval", trained, "--metric", "mine:f", "--limit", 2, *NUMPY)
    assert result.returncode == 0 and "\nmine:f        0.0000\n" in result.stdout
    (tmp_path / "mine2.py").write_text("def f(expected, got): return 1 / (expected.count('2'))")
    result = dualtune_main("eval", trained, "--metric", "mine2:f", "--limit", 2, *NUMPY)
    said = "eval.jsonl:2: the metric mine2:f raised ZeroDivisionError: division by zero\n"
    assert result.returncode == 3 and result.stderr.endswith(said) and result.stderr.count("\n") == 1


def test_held_out_rows_in_the_training_data_are_counted(
    evaluated, dualtune_main, config_file, write_rows, qa_rows, tmp_path
):
    """In `trained` all eight are; a share held out of the same rows is not in the rest of them."""
    report = evaluated()
    pair = [str(tmp_path / "eval.jsonl") + ":1", str(tmp_path / "train.jsonl") + ":1"]
    assert report["leaks"] == {"rows": 8, "exact": 8, "near": 0, "first": pair}
    assert "leaks" not in evaluated("--no-leaks")
    other = config_file({"data.train": write_rows(qa_rows, "qa.jsonl")}, name="other.yaml")
    result = dualtune_main("eval", other, "--base", *NUMPY)
    assert "\nleaks         0 exactly and 0 nearly of 4 held-out rows are in the training data\n" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--json-field", "b"), "eval.jsonl:1: the expected answer: JSON object: there is no field 'b'"),
        (
            ("--answer-pattern", "= ([0-9]+)"),
            "eval.jsonl:1: the expected answer does not match the pattern '= ([0-9]+)'",
        ),
    ],
)
def test_what_no_expected_answer_has_is_said_before_anything_is_measured(dualtune_main, trained, options, message):
    result = dualtune_main("eval", trained, "--compare", "--exact-match", *options, *NUMPY)
    assert result.returncode == 3 and result.stderr.endswith(message + "\n"), result.stderr
    assert "evaluated" not in result.stdout


def test_a_stopped_evaluation_continues_with_the_same_answers(dualtune_main, trained, tmp_path, monkeypatch):
    """Stopped by a metric after some answers; the same command then generates the others alone."""
    monkeypatch.syspath_prepend(tmp_path)
    metric = tmp_path / "stops.py"
    metric.write_text("calls = []\ndef f(expected, got):\n    calls.append(0)\n    return 1 / (len(calls) != 3)\n")
    command = ("eval", trained, "--metric", "stops:f", "--max-tokens", 12, "--json", *NUMPY)
    kept = tmp_path / "runs" / "a" / "predictions.jsonl"
    straight = tmp_path / "straight.jsonl"
    assert (
        dualtune_main(
            "eval", trained, "--json-field", "a", "--max-tokens", 12, "--predictions", straight, *NUMPY
        ).returncode
        == 0
    )
    assert dualtune_main(*command).returncode == 3
    part = kept.with_name("predictions.jsonl.part")
    assert len(part.read_text().splitlines()) == 4 and not kept.exists()  # a head and three answers
    result = dualtune_main(*command)
    assert result.returncode == 0 and json.loads(result.stdout)["answers"] == 8
    assert "3 of 8 answers were generated before" in result.stderr
    assert [row["adapter"] for row in read(kept)] == [row["adapter"] for row in read(straight)]
    assert not part.exists()
