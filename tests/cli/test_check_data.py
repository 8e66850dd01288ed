"""`dualtune check-data`: every bad row of every source, and an exit code that says whether there was one."""

import json
import tracemalloc

import pytest

CONTROL = "with a control token in their own text (data.special_tokens_in_text)"
GOOD = {"prompt": "2+2?", "completion": "4"}
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refused' %}{{ raise_exception('not this') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def write_lines(tmp_path):
    def write(lines, name="train.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        return path

    return write


# --- data ------------------------------------------------------------------------------------------------------------


def test_every_bad_row_is_a_line_with_file_and_number(dualtune_main, write_lines, wording):
    bad = {i for i in range(1, 41) if i % 3 == 0}
    path = write_lines([{"prompt": [1], "completion": "x"} if i in bad else GOOD for i in range(1, 41)])
    result = dualtune_main("check-data", path)
    *problems, summary = result.stdout.splitlines()
    assert [line.partition(": ")[0] for line in problems] == [f"{path}:{i}" for i in sorted(bad)]
    assert all(len(line) > len(f"{path}:99: ") for line in problems)
    wording(summary)
    assert (result.returncode, result.stderr) == (3, "")


def test_good_data_have_exit_code_0(dualtune_main, write_lines, wording):
    path = write_lines([GOOD] * 3)
    result = dualtune_main("check-data", path)
    assert result.returncode == 0
    wording(result.stdout)


def test_lines_that_are_no_json_are_among_them(dualtune_main, write_lines):
    path = write_lines([GOOD, "{", "", "[1]", GOOD])
    result = dualtune_main("check-data", path)
    wheres = {line.rpartition(": ")[0].split(": ")[0] for line in result.stdout.splitlines()[:-1]}
    assert {f"{path}:2", f"{path}:4"} <= wheres
    assert not {f"{path}:1", f"{path}:5"} & wheres


def test_columns_and_format_are_those_of_a_config(dualtune_main, write_lines):
    path = write_lines([{"question": "2+2?", "answer": "4", "text": "x"}] * 2)
    assert dualtune_main("check-data", path, "--format", "alpaca").returncode == 3
    assert dualtune_main("check-data", path, "--format", "text").returncode == 0
    renamed = dualtune_main("check-data", path, "--column", "prompt=question", "--column", "completion=answer")
    assert renamed.returncode == 0


def test_preference_pairs_are_checked(dualtune_main, write_lines, wording):
    pair = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
    path = write_lines([pair, pair | {"rejected": "4"}, pair])
    result = dualtune_main("check-data", path)
    assert result.returncode == 3
    wording(result.stdout)
    labelled = write_lines([{"prompt": f"{n}?", "completion": f"{n}.", "label": n > 2} for n in range(9)], "kto.jsonl")
    wording(dualtune_main("check-data", labelled).stdout)


def test_pairs_are_measured_in_tokens_where_there_is_a_tokenizer(dualtune_main, config_file, write_lines):
    path = write_lines([{"prompt": "?", "chosen": "a" * 10 * n, "rejected": "b" * 20} for n in range(1, 5)])
    config = config_file({"train.objective": "dpo", "data.eval": 0, "data.max_length": 56})
    measured = []
    for target in (config, path):
        (source,) = json.loads(dualtune_main("check-data", target, "--json").stdout)["sources"]
        measured.append(source["preferences"]["pairs"])
    tokens, characters = measured
    frame = tokens["rejected"]["min"] - 20  # both turns around the answer; a letter is a token
    assert tokens["chosen"] == {
        "min": frame + 10, "median": frame + 25, "mean": frame + 25, "max": frame + 40, "cut": 1
    }  # fmt: skip
    assert (tokens["unit"], characters["unit"], tokens["rejected"]["cut"]) == ("tokens", "characters", 0)
    assert characters["chosen"] == {"min": 10, "median": 25, "mean": 25, "max": 40, "cut": None}
    assert {(report["chosen_longer"], report["rejected_longer"]) for report in measured} == {(2, 1)}


def test_all_parts_of_a_directory_are_checked(dualtune_main, write_lines, tmp_path):
    write_lines([GOOD] * 4, "set/train.jsonl")
    bad = write_lines([GOOD, {"prompt": "x"}], "set/valid.jsonl")
    result = dualtune_main("check-data", tmp_path / "set")
    assert result.stdout.splitlines()[0] == f"{tmp_path / 'set'} (train): 4 rows, 0 cannot be used"
    assert result.stdout.splitlines()[1].startswith(f"{bad}:2: ")
    assert result.stdout.splitlines()[2:] == [f"{tmp_path / 'set'} (valid): 2 rows, 1 cannot be used"]
    assert result.returncode == 3


def test_what_cannot_be_read_hides_nothing_else(dualtune_main, write_lines, tmp_path, wording):
    unknown, good, bad = (
        write_lines([{"a": 1}], "unknown.jsonl"), write_lines([GOOD]), write_lines(["{"], "bad.jsonl"),
    )  # fmt: skip
    result = dualtune_main("check-data", tmp_path / "none.jsonl", unknown, good, bad)
    lines = result.stdout.splitlines()
    wording(lines[0])
    wording(lines[1])
    wording(lines[2])
    wording(lines[3:5])
    wording(lines[-1])
    assert result.returncode == 3


def test_secrets_in_bad_rows_are_not_shown(dualtune_main, write_lines, wording):
    role = "hf_" + "abcdefghijklmnopqrstuvwxyz"
    path = write_lines([{"messages": [{"role": role, "content": "x"}]}])
    for args in ([], ["--json"]):
        result = dualtune_main("check-data", path, *args)
        assert result.returncode == 3
        wording(result.stdout)


def test_many_bad_rows_are_grouped_and_listed_in_a_file(dualtune_main, write_lines, tmp_path, wording):
    lines = [{"prompt": [i], "completion": "x"} for i in range(3000)] + ["{"] * 30 + [{"prompt": "no answer"}]
    path = write_lines([GOOD, *lines])
    result = dualtune_main("check-data", path, "--list", tmp_path / "bad.txt")
    shown = result.stdout.splitlines()
    assert len(shown) == 20 + 20 + 1 + 2 + 1 and result.returncode == 3
    assert next(line for line in shown if line.startswith("… and ")).startswith(
        "… and 2980 more rows: … and … must both be strings"
    )
    wording(shown[-1])
    listed = (tmp_path / "bad.txt").read_text().splitlines()
    assert [line.partition(": ")[0] for line in listed] == [f"{path}:{i}" for i in range(2, 3033)]
    wording(dualtune_main("check-data", path).stdout)


def test_control_characters_of_data_are_written_out(dualtune_main, write_lines):
    path = write_lines([{"messages": [{"role": "\x1b[2Jevil\u202e", "content": "x"}]}])
    out = dualtune_main("check-data", path).stdout
    assert "\\x1b[2Jevil\\u202e" in out and all(line.isprintable() for line in out.splitlines())


def test_latin_1_and_other_separators_get_a_remedy(dualtune_main, tmp_path, wording):
    (tmp_path / "a.jsonl").write_bytes('{"text": "caf\u00e9"}\n'.encode("latin-1"))
    wording(dualtune_main("check-data", tmp_path / "a.jsonl").stdout)
    (tmp_path / "a.csv").write_text("prompt;completion\na;b\n")
    out = dualtune_main("check-data", tmp_path / "a.csv").stdout
    wording(out)
    (tmp_path / "b.csv").write_text("prompt\tcompletion\na\tb\n")
    wording(dualtune_main("check-data", tmp_path / "b.csv").stdout)


# --- configs ---------------------------------------------------------------------------------------------------------


def test_a_config_s_template_and_length_are_applied(dualtune_main, config_file, write_lines, tmp_path):
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    data = write_lines([
        GOOD, {"prompt": "refused", "completion": "x"}, {"prompt": "a", "completion": "b" * 90},
        {"prompt": "a" * 90, "completion": "b"}, {"prompt": "no answer"}, GOOD,
    ])  # fmt: skip
    eval_ = write_lines([GOOD] * 2, "eval.jsonl")
    config = config_file({"data.eval": eval_, "data.template": tmp_path / "template.jinja"})
    result = dualtune_main("check-data", config)
    assert result.stdout.splitlines() == [
        f"{data}:2: the chat template refuses this conversation: not this",
        f"{data}:5: has no 'completion'; its keys are: prompt",
        f"{data}: 6 rows, 2 cannot be used; 1 cut at max_length; 1 dropped: no trainable token within max_length",
        f"{eval_}: 2 rows, 0 cannot be used",
    ]
    assert result.returncode == 3


def test_what_a_run_would_refuse_is_what_is_listed(dualtune_main, config_file, write_lines):
    """The same rows as `dualtune train`, which shows the first."""
    bad = [{"prompt": i} for i in range(3)]
    write_lines([GOOD, *bad])
    listed = dualtune_main("check-data", config_file()).stdout.splitlines()[:3]
    assert dualtune_main("preview", config_file()).stderr.removeprefix("Error: ").splitlines()[:3] == listed


def test_the_valid_file_of_a_directory_counts_for_a_config_too(dualtune_main, config_file, write_lines, tmp_path):
    write_lines([GOOD], "set/train.jsonl")
    write_lines(["{"], "set/valid.jsonl")
    given = {"data.train": tmp_path / "set", "data.eval": "auto"}
    assert dualtune_main("check-data", config_file(given)).returncode == 3
    assert dualtune_main("check-data", config_file(given | {"data.eval": 0})).returncode == 0


def test_preference_pairs_of_a_config_are_checked(dualtune_main, config_file, write_lines):
    pair = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
    path = write_lines([pair, pair | {"chosen": [3]}])
    settings = {"data.format": "preference", "data.eval": 0}
    result = dualtune_main("check-data", config_file(settings | {"train.objective": "dpo"}))
    assert result.returncode == 3
    assert result.stdout.splitlines()[0].startswith(f"{path}:2: ")
    refused = dualtune_main("check-data", config_file(settings))
    assert refused.returncode == 3
    assert refused.stdout.startswith("train.objective: sft needs prompts with answers")
    assert result.stdout.splitlines()[1] == f"{path}: 2 rows, 1 cannot be used"


# --- JSON ------------------------------------------------------------------------------------------------------------


def test_json_says_the_same(dualtune_main, write_lines):
    bad, good = write_lines([GOOD, "{"]), write_lines([GOOD], "good.jsonl")
    result = dualtune_main("check-data", bad, good, "--json")
    first, second = json.loads(result.stdout)["sources"]
    (problem,) = first.pop("problems")
    assert (problem["path"], problem["line"]) == (str(bad), 2)
    assert dualtune_main("check-data", bad).stdout.startswith(f"{bad}:2: {problem['reason']}\n")
    nothing = {"error": None, "cut": 0, "split": 0, "dropped": {}, "control_text": {"rows": 0, "first": []}}
    nothing |= {"lost_text": {}, "notices": {}, "refused": None, "preferences": None}
    assert first == {"path": str(bad), "role": "train", "rows": 2, "bad": 1} | nothing
    assert second == {"path": str(good), "role": "train", "rows": 1, "bad": 0, "problems": []} | nothing
    assert result.returncode == 3
    assert dualtune_main("check-data", good, "--json").returncode == 0


def test_rows_with_a_control_token_in_their_own_text_are_listed_and_counted(
    dualtune_main, write_lines, config_file, wording
):
    path = write_lines([GOOD, {"prompt": "a</s>", "completion": "b"}, *[{"prompt": "<s>", "completion": "c"}] * 30])
    result = dualtune_main("check-data", config_file({"data.train": path}))
    *listed, summary = result.stdout.splitlines()
    assert len(listed) == 20 and result.returncode == 0
    wording(listed[0])
    wording(summary)
    config = config_file({"data.train": path, "data.special_tokens_in_text": "error"})
    result = dualtune_main("check-data", config)
    assert result.returncode == 3
    wording(result.stdout)


def test_json_lists_a_thousand_problems_and_counts_all(dualtune_main, write_lines):
    path = write_lines(["{"] * 1200)
    (source,) = json.loads(dualtune_main("check-data", path, "--json").stdout)["sources"]
    assert (source["rows"], source["bad"], len(source["problems"])) == (1200, 1200, 1000)


def test_json_tells_what_cannot_be_read(dualtune_main, tmp_path, wording):
    result = dualtune_main("check-data", tmp_path / "none.jsonl", "--json")
    (source,) = json.loads(result.stdout)["sources"]
    assert (result.returncode, source["rows"]) == (3, 0)
    wording(source["error"])


# --- memory and usage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("as_config", "rows"), [(False, 4000), (True, 500)])
def test_memory_does_not_grow_with_the_rows(dualtune_main, write_lines, config_file, as_config, rows):
    def peak(number) -> int:
        path = write_lines([GOOD] * number)
        target = config_file({"data.eval": 0}) if as_config else path
        tracemalloc.start()
        try:
            assert dualtune_main("check-data", target).stdout == f"{path}: {number} rows, 0 cannot be used\n"
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(10)  # imports
    few, many = peak(rows), peak(3 * rows)
    assert many - few < min(0.2 * few, 64 * rows)  # a config has a tokenizer, beside which rows are small


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Missing argument 'TARGET...'"),
        (
            ["a.jsonl", "--format", "csv"],
            "--format: got 'csv', allowed: auto, preference, comparison, unpaired_preference",
        ),
        (["a.jsonl", "--column", "question"], "--column: got 'question', allowed: OURS=YOURS"),
        (["a.yaml", "--format", "text"], "--format and --column are for data; a.yaml sets its own."),
        (["none.yaml"], "none.yaml"),
    ],
)
def test_wrong_usage_is_exit_code_2(dualtune_main, args, message):
    result = dualtune_main("check-data", *args)
    assert result.returncode == 2
    assert message in result.stderr
