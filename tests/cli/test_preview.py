"""`dualtune preview`: what it shows is what would be trained, as text, as JSON and as a page."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from html.parser import HTMLParser

import pytest

from dualtune.config import load_config
from dualtune.data.documents import Data
from dualtune.data.order import Order
from dualtune.data.survey import Survey
from dualtune.data.tokens.tokenizer import Tokenizer

EVIL = "<script>alert(1)</script> & \"x\" '</div>' \x1b[31m é日"


@pytest.fixture
def planned(config_file, tiny_softmax):
    """The documents of a config in the order of training, read as training reads them."""

    def read(path):
        config = load_config(path)
        train, _ = Data(config).train_and_eval(Tokenizer(tiny_softmax))
        order = Order(config, train.lengths)
        return [train[i] for step in range(order.num_steps) for i in order.step(step).documents]

    return read


class Page(HTMLParser):
    """The rows of a page: the kinds of each, and its tokens as (id, classes, text)."""

    def __init__(self, text):
        super().__init__()
        self.rows, self._in_token = [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self._in_token = tag == "span" and "title" in attrs
        if tag == "article":
            self.rows.append({"kinds": attrs["class"].split()[1:], "tokens": []})
        elif self._in_token:
            self.rows[-1]["tokens"].append([int(attrs["title"].split()[1]), attrs.get("class", "").split(), ""])

    def handle_endtag(self, tag):
        self._in_token = False

    def handle_data(self, data):
        if self._in_token:
            self.rows[-1]["tokens"][-1][2] += data


# --- text ------------------------------------------------------------------------------------------------------------


def test_what_is_trained_stands_between_marks(dualtune_main, config_file, write_rows, wording):
    write_rows([{"prompt": "2+2?", "completion": "four"}])
    result = dualtune_main("preview", config_file({"data.eval": 0}))
    assert (result.returncode, result.stderr) == (0, "")
    wording(result.stdout)


def test_the_first_documents_of_the_first_step_are_shown(dualtune_main, config_file, planned):
    config = config_file()
    for rows in (0, 2, 7):
        result = dualtune_main("preview", config, "--rows", rows)
        shown = [line.split(": ")[0] for line in result.stdout.splitlines() if line.startswith("document ")]
        assert shown == [f"document    {document.where}" for document in planned(config)[:rows]]


@pytest.mark.parametrize(("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_gets_colours_unless_it_wants_none(config_file, env, coloured):
    import pty

    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "dualtune.cli.main", "preview", config_file(), "--rows", "1"]
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm"} | env
    with subprocess.Popen(command, stdout=follower, env=environment) as process:
        os.close(follower)
        text = b""
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while block := os.read(leader, 4096):
                text += block
    os.close(leader)
    assert process.returncode == 0
    assert (b"\x1b[32m" in text, b"\x1b[2m" in text) == (coloured, coloured)
    assert ("⟦".encode() in text) != coloured


def test_control_characters_of_the_data_do_not_reach_the_terminal(dualtune_main, config_file, write_rows, wording):
    write_rows([{"prompt": EVIL, "completion": EVIL}])
    result = dualtune_main("preview", config_file({"data.eval": 0, "data.max_length": 256}))
    wording(result.stdout)
    assert "\x1b" not in result.stdout


def test_the_numbers_are_told_with_the_warnings(dualtune_main, config_file, write_rows, wording):
    write_rows([{"prompt": f"{i % 15}?", "completion": "yes"} for i in range(16)])
    eval_ = write_rows([{"prompt": "3?", "completion": "yes"}], "eval.jsonl")
    text = dualtune_main("preview", config_file({"data.eval": eval_}), "--rows", 0).stdout
    told = {line[:12].strip(): line[12:] for line in text.splitlines()}
    wording(told["rows"])
    wording(told["duplicates"])
    wording(told["leaks"])
    wording(told["steps"])
    wording(told["over-long"])
    assert text.count("\nwarning     ") == 2
    wording(text)


def test_what_becomes_of_long_rows_is_told(dualtune_main, config_file, write_rows, wording):
    rows = [("a", "b" * 90), ("a" * 90, "b"), ("a", "b"), ("c", "d")]
    write_rows([{"prompt": prompt, "completion": completion} for prompt, completion in rows])
    text = dualtune_main("preview", config_file({"data.eval": 0}), "--rows", 0).stdout
    wording(text)


TURNS = [("user", "Hi"), ("assistant", "Ho"), ("user", "2+2?")]
ANSWERS = {"chosen": "It is four.", "rejected": "It is five, or six, or seven, but not eight and not nine."}
PAIR = {
    key: [{"role": role, "content": content} for role, content in [*TURNS, ("assistant", answer)]]
    for key, answer in ANSWERS.items()
}


def test_a_pair_is_shown_side_by_side(dualtune_main, config_file, write_rows, tmp_path, wording):
    write_rows([PAIR, PAIR])
    config = config_file({"data.eval": 0, "train.objective": "dpo", "data.max_length": 256})
    result = dualtune_main("preview", config, "--rows", 1, "--html", tmp_path / "page.html")
    assert (result.returncode, result.stderr) == (0, "")
    wording(result.stdout)
    page = (tmp_path / "page.html").read_text()
    assert all(f'<span class="tag">{answer}</span>' in page for answer in ANSWERS)
    rows = Page(page).rows
    trained = {"".join(text for _, kinds, text in row["tokens"] if "target" in kinds) for row in rows}
    assert trained == {f"{answer}<|im_end|>" for answer in ANSWERS.values()}
    report = json.loads(dualtune_main("preview", config, "--rows", 1, "--json").stdout)
    assert [shown["answer"] for shown in report["shown"]] == ["chosen", "rejected"]
    for shown in report["shown"]:
        trained = "".join(run["text"] for run in shown["runs"] if run["trained"])
        assert trained == f"{ANSWERS[shown['answer']]}<|im_end|>"
    assert (report["answers"], report["documents"], report["duplicates"]) == (2, 4, 1)
    assert (report["pairs"]["pairs"], report["pairs"]["rejected_longer"], report["labels"]) == (2, 2, None)


def test_an_answer_with_a_label_is_shown_without_the_answer_that_it_is_measured_by(
    dualtune_main, config_file, write_rows
):
    write_rows([{"prompt": f"{n}?", "completion": f"It is {n}.", "label": n < 3} for n in range(4)])
    config = config_file({"data.eval": 0, "train.objective": "kto", "preference.undesirable_weight": 2})
    report = json.loads(dualtune_main("preview", config, "--rows", 4, "--json").stdout)
    shown = {shown["where"].rpartition(":")[2]: shown["answer"] for shown in report["shown"]}
    assert shown == {"1": "desirable", "2": "desirable", "3": "desirable", "4": "undesirable"}
    texts = ["".join(run["text"] for run in shown["runs"] if run["trained"]) for shown in report["shown"]]
    assert sorted(texts) == [f"It is {n}.<|im_end|>" for n in range(4)]
    assert report["labels"] == {
        "desirable": 3, "undesirable": 1, "balance": 1.5, "weights": {"preference.undesirable_weight": [2.25, 3.0]}
    }  # fmt: skip


# --- JSON ------------------------------------------------------------------------------------------------------------


def test_json_has_the_documented_keys_and_nothing_else_on_the_output(dualtune_main, config_file, planned):
    config = config_file()
    result = dualtune_main("preview", config, "--json", "--rows", 2)
    report = json.loads(result.stdout)
    assert report.keys() == {field.name for field in fields(Survey)} | {"template", "warnings", "shown"}
    assert report["template"].keys() == {"hash", "generation_markers"}
    assert (report["rows"], report["eval_rows"], report["documents"], report["steps"]) == (12, 4, 12, 4)
    first = planned(config)[0]
    assert report["shown"][0]["where"] == first.where
    assert (report["shown"][0]["tokens"], report["shown"][0]["trained_tokens"]) == (
        len(first.tokens), first.num_targets,
    )  # fmt: skip
    assert [run["trained"] for run in report["shown"][0]["runs"]] == [False, True, False]


def test_an_override_changes_what_is_shown(dualtune_main, config_file):
    shown = [
        json.loads(dualtune_main("preview", config_file(), "--json", "--set", f"data.loss_on={loss_on}").stdout)
        for loss_on in ("assistant", "all")
    ]
    assert shown[0]["tokens"] == shown[1]["tokens"]
    assert shown[0]["trained_tokens"] < shown[1]["trained_tokens"]


# --- page ------------------------------------------------------------------------------------------------------------


def test_the_page_holds_every_token_of_the_first_rows_and_the_data_stay_text(
    dualtune_main, config_file, write_rows, planned, tmp_path
):
    write_rows([{"prompt": EVIL, "completion": "日 & <b>"}, {"prompt": "2", "completion": "3"}])
    config = config_file({"data.eval": 0, "data.max_length": 256})
    result = dualtune_main("preview", config, "--html", tmp_path / "page.html", "--rows", 2)
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, f"page        {tmp_path / 'page.html'}")
    page, documents = Page((tmp_path / "page.html").read_text(encoding="utf-8")), planned(config)[:2]
    first = [row for row in page.rows if "first" in row["kinds"]]
    for row, document in zip(first, documents, strict=True):
        assert [token[0] for token in row["tokens"]] == document.tokens.tolist()
        assert ["target" in token[1] for token in row["tokens"]] == document.loss_mask.tolist()
    assert {"".join(token[2] for token in row["tokens"]) for row in first} == {
        f"<s><|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        for prompt, answer in ((EVIL.replace("\x1b", "␛"), "日 & <b>"), ("2", "3"))
    }


def test_the_page_shows_evaluation_rows_and_bad_ones_too(dualtune_main, config_file, write_rows, qa_rows, tmp_path):
    write_rows([*qa_rows, {"prompt": [3], "completion": "<b>"}])
    config = config_file({"data.on_bad_row": "skip", "data.max_bad_rows": 1})
    assert dualtune_main("preview", config, "--html", tmp_path / "page.html", "--rows", 2).returncode == 0
    kinds = [row["kinds"] for row in Page((tmp_path / "page.html").read_text(encoding="utf-8")).rows]
    assert kinds.count(["evaluation"]) == 2 and kinds.count(["bad"]) == 1
    assert sum("first" in names for names in kinds) == sum("longest" in names for names in kinds) == 2


def test_the_page_has_the_numbers_and_warnings_of_the_text(dualtune_main, config_file, write_rows, tmp_path):
    write_rows([{"prompt": "same", "completion": "<same>"}] * 4)
    result = dualtune_main("preview", config_file({"data.eval": 0}), "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    lines = result.stdout[result.stdout.index("\nrows  ") :].splitlines()[1:-1]
    told = [line[12:].replace("&", "&amp;").replace("<", "&lt;") for line in lines if "###" not in line]
    assert any("duplicates" in text for text in told)
    assert [text for text in told if text not in page] == []


def test_a_page_that_cannot_be_written_leaves_nothing(dualtune_main, config_file, tmp_path, wording):
    result = dualtune_main("preview", config_file(), "--html", tmp_path / "none" / "page.html")
    assert (result.returncode, result.stderr.count("\n")) == (5, 1)
    wording(result.stderr)
    before = sorted(tmp_path.iterdir())
    assert dualtune_main("preview", config_file(), "--html", tmp_path).returncode == 2
    assert sorted(tmp_path.iterdir()) == before


# --- what is needed, and what goes wrong -----------------------------------------------------------------------------


def test_neither_weights_nor_a_backend_are_loaded(python, config_file, tiny_softmax, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_softmax, model, ignore=shutil.ignore_patterns("*.safetensors"))
    program = (
        "import atexit, sys\n"
        "loaded = lambda: [name for name in sys.modules if name.startswith(('dualtune_', 'mlx'))]\n"
        "atexit.register(lambda: print('loaded:', *loaded()))\n"
        f"sys.argv = ['dualtune', 'preview', {str(config_file({'model.name': str(model)}))!r}]\n"
        "from dualtune.cli.main import main\nmain()"
    )
    result = python("-c", program)
    assert result.returncode == 0
    assert "\ndocument " in result.stdout
    assert result.stdout.splitlines()[-1] == "loaded:"
    assert not (tmp_path / "runs").exists()


def test_bad_rows_end_it_or_are_shown_as_left_out(dualtune_main, config_file, write_rows, qa_rows, wording):
    data = write_rows([*qa_rows, {"prompt": [3], "completion": "x"}])
    result = dualtune_main("preview", config_file())
    assert (result.returncode, result.stderr.count(f"{data}:17: ")) == (3, 1)
    settings = {"data.on_bad_row": "skip", "data.max_bad_rows": 1}
    result = dualtune_main("preview", config_file(settings))
    assert result.returncode == 0
    wording(result.stdout)


def test_data_without_anything_to_learn_are_an_error(dualtune_main, config_file, write_rows, wording):
    write_rows([{"prompt": "a" * 90, "completion": "b"}] * 2)
    result = dualtune_main("preview", config_file({"data.eval": 0}))
    assert result.returncode == 3
    wording(result.stderr)


@pytest.mark.parametrize(("args", "code"), [([], 2), (["no.yaml"], 2), (["no.yaml", "--rows", "-1"], 2)])
def test_wrong_usage_has_the_usual_exit_code(dualtune_main, args, code):
    assert dualtune_main("preview", *args).returncode == code


def test_a_directory_is_read_for_training_and_for_evaluation(dualtune_main, config_file, write_rows, qa_rows, tmp_path):
    (tmp_path / "data").mkdir()
    write_rows(qa_rows, "data/train.jsonl")
    write_rows(qa_rows[:3], "data/valid.jsonl")
    for command in (("preview",), ("train", "--dry-run", "--platform", "numpy")):
        config = config_file(
            {"data.train": tmp_path / "data", "data.eval": "auto", "data.max_length": 60 + len(command)}
        )
        result = dualtune_main(command[0], config, *command[1:])
        assert (result.returncode, result.stdout.count("tokenized   ")) == (0, 2), result.stderr


def test_control_tokens_in_a_row_s_own_text_are_marked_and_counted(
    dualtune_main, config_file, write_rows, tmp_path, wording
):
    data = write_rows([{"prompt": f"{i}", "completion": "</s>" if i == 3 else "x"} for i in range(8)])
    config = config_file({"data.train": data, "data.eval": 0})
    found = json.loads(dualtune_main("preview", config, "--rows", 8, "--json").stdout)
    assert (found["control_text_rows"], found["first_control_text_row"]) == (1, f"{data}:4")
    assert [d["where"] for d in found["shown"] if d["has_control_text"]] == [f"{data}:4"]
    (warning,) = (text for text in found["warnings"] if "control token" in text)
    wording(warning)
    page = tmp_path / "page.html"
    shown = dualtune_main("preview", config, "--rows", 8, "--html", page).stdout
    assert shown.count("; a control token in its own text") == 1
    assert page.read_text().count('<span class="tag control">control token in text</span>') == 1
    allowed = dualtune_main("preview", config, "--set", "data.special_tokens_in_text=allow", "--json").stdout
    assert "read as the control token" in json.loads(allowed)["warnings"][0]


def test_a_share_that_cannot_be_held_out_is_a_warning(dualtune_main, config_file, write_rows):
    data = write_rows([{"text": "one long row " * 50}])
    found = json.loads(dualtune_main("preview", config_file({"data.train": data, "data.eval": 0.1}), "--json").stdout)
    assert "evaluation data: none: data.eval is 10% of the rows, but only one row can be trained on" in (
        " ".join(found["warnings"])
    )
