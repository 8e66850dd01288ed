"""`dualtune eval --task`: GSM8K from tuning to right answers, and answers of any other kind."""

import json

import pytest

CPU = ("--platform", "cpu")


@pytest.fixture
def trained(config_file, tiny_llama, dualtune_main, open_backend):
    """Train the tiny Llama on rows until it knows them by heart; its config."""
    open_backend("torch")

    def train(data, **changes):
        config = config_file({
            "model.name": str(tiny_llama), "adapter.rank": 16, "adapter.alpha": 32, "data.train": str(data),
            "data.eval": 0, "data.max_length": 512, "data.template": "none", "train.steps": 150,
            "train.documents_per_step": 2, "train.schedule": "constant", "train.warmup": 0,
            "train.weight_decay": 0, "train.max_grad_norm": 1.0,
        } | changes)  # fmt: skip
        result = dualtune_main("train", config, *CPU)
        assert result.returncode == 0, result.stderr
        return config

    return train


def test_gsm8k_from_tuning_to_right_answers(shared, trained, write_rows, dualtune_main):
    """A random model knows nothing of two real problems; after it has learned them by heart, it answers both."""
    lines = shared("data/gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()
    data = write_rows(sorted(map(json.loads, lines), key=lambda row: len(str(row)))[:2])
    config = trained(data, **{"data.columns": {"prompt": "question", "completion": "answer"}})

    def report(*options):
        args = ("eval", config, "--data", data, "--task", "gsm8k", "--max-tokens", "150", "--json", *options, *CPU)
        result = dualtune_main(*args)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    before, after = report("--base"), report()
    assert (before["answers"], before["right"], before["right_lenient"]) == (2, 0, 0)
    assert (after["answers"], after["right"], after["right_lenient"]) == (2, 1, 1)
    assert report("--limit", "1")["answers"] == 1


def test_an_answer_pattern_works_on_any_data(trained, write_rows, dualtune_main):
    rows = [{"prompt": "Sky?", "completion": "I say: blue."}, {"prompt": "Grass?", "completion": "I say: green."}]
    data = write_rows(rows)
    config = trained(data)
    swapped = write_rows([rows[0], rows[1] | {"completion": "I say: red."}], "other.jsonl")
    shares = {}
    for path in (data, swapped):
        args = ("--data", path, "--answer-pattern", r"I say: (\w+)", "--max-tokens", "20", "--json")
        shares[path] = json.loads(dualtune_main("eval", config, *args, *CPU).stdout)["right"]
    assert shares == {data: 1, swapped: 0.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--task", "gsm8k", "--answer-pattern", "x"), "Give --task or --answer-pattern, not both"),
        (("--answer-pattern", "("), "which is not a regular expression"),
        (("--limit", "3"), "--limit is for generated answers and --harness"),
        (("--base", "--compare"), "Give --base or --compare, not both"),
        (("--harness", "arc_easy", "--exact-match"), "--harness measures the tasks alone"),
        (("--harness", ""), "--harness: got '', which names no task"),
        (("--harness", " ,"), "--harness: got ' ,', which names no task"),
        (("--answer-pattern", ""), "--answer-pattern: got '', which matches everything"),
        (("--max-tokens", "9"), "--max-tokens is for generated answers"),
        (("--task", "mmlu"), "'mmlu' is not 'gsm8k'"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(config_file, dualtune_main, options, message):
    result = dualtune_main("eval", config_file(), *options)
    assert result.returncode == 2
    assert message in result.stderr
