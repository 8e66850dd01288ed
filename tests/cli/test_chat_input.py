"""What `dualtune chat` and `generate` are given: pasted text, whole files, an adapter's base and system message."""

import contextlib
import io
import json
import os
import subprocess
import sys

import pytest

from dualtune.cli import chat as module

NUMPY = ("--platform", "numpy")


@pytest.fixture
def talk(dualtune_main, monkeypatch, tiny_softmax):
    def run(lines, *options):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return dualtune_main("chat", tiny_softmax, "--max-tokens", 5, *options, *NUMPY)

    return run


# --- messages of several lines, and the base that an adapter names ---------------------------------------------------


def users(path):
    return [each["content"] for row in map(json.loads, path.read_text().splitlines())
            for each in row["messages"] if each["role"] == "user"]  # fmt: skip


def test_lines_between_quotation_marks_are_one_message_and_no_command(talk, tmp_path):
    saved = tmp_path / "talk.jsonl"
    lines = [
        '"""',
        "def f():",
        "",
        "    return 1",
        '"""',
        '"""/exit',
        'is no command"""',
        f"/save {saved}",
        '"""never',
        "ended",
    ]
    assert talk(lines).returncode == 0
    assert users(saved) == ["def f():\n\n    return 1", "/exit\nis no command"]


def test_what_is_pasted_is_one_message_also_without_an_editor(talk, tmp_path):
    saved = tmp_path / "talk.jsonl"
    assert talk(["\x1b[200~/one", "two", "three\x1b[201~", f"/save {saved}"]).returncode == 0
    assert users(saved) == ["/one\ntwo\nthree"]


def test_standard_input_is_one_message(talk, dualtune_main, monkeypatch, tiny_softmax, wording):
    one = talk(["/exit is text here", "", "1 plus 1?"], "--stdin")
    assert one.returncode == 0
    answer = dualtune_main(
        "generate", tiny_softmax, "--max-tokens", 5, "--prompt", "/exit is text here\n\n1 plus 1?", *NUMPY
    )
    assert one.stdout == answer.stdout
    assert talk([" "], "--stdin").returncode == 2
    monkeypatch.setattr(module, "MOST_LINE", 8)
    wording(talk(["123456789"], "--stdin").stderr)


def test_a_terminal_pastes_several_lines_as_one_message(tiny_softmax, tmp_path):
    """On a real pseudo-terminal, with the markers that a terminal sends around what is pasted."""
    saved, (leader, follower) = tmp_path / "talk.jsonl", os.openpty()
    command = [sys.executable, "-m", "dualtune.cli.main", "chat", tiny_softmax, "--max-tokens", "3", *NUMPY]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
    with subprocess.Popen([*map(str, command)], env=os.environ | {"TERM": "xterm"}, **streams) as process:
        os.close(follower)
        shown, typed = b"", [b"\x1b[200~one\n/two\nthree\x1b[201~\n", f"/save {saved}\n".encode(), b"/exit\n"]
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while block := os.read(leader, 65536):
                shown += block
                if typed and shown.count(b"> ") > 3 - len(typed) and shown.rstrip(b" ").endswith(b">"):
                    os.write(leader, typed.pop(0))
        os.close(leader)
    assert process.returncode == 0
    assert users(saved) == ["one\n/two\nthree"]


def test_the_base_is_the_one_that_the_adapter_names(
    dualtune_main, monkeypatch, config_file, tiny_softmax, tmp_path, wording):  # fmt: skip
    assert dualtune_main("train", config_file(), *NUMPY).returncode == 0
    adapter = tmp_path / "runs" / "a" / "adapter"
    monkeypatch.setattr("sys.stdin", io.StringIO("1 plus 1?\n"))
    found = dualtune_main("chat", "--adapter", adapter.parent, "--max-tokens", 5, *NUMPY)
    assert found.returncode == 0
    wording(found.stderr)
    for model in ([], [tiny_softmax]):
        answer = dualtune_main(
            "generate", *model, "--adapter", adapter, "--prompt", "1 plus 1?", "--max-tokens", 5, *NUMPY
        )
        assert (answer.returncode, answer.stdout) == (0, found.stdout)
    assert dualtune_main("verify", adapter, *NUMPY).returncode == 0
    for command in (["chat"], ["generate", "--prompt", "x"], ["serve"]):
        assert dualtune_main(*command, *NUMPY).returncode == 2
        missing = dualtune_main(*command, "--adapter", tmp_path / "nothing", *NUMPY)
        assert missing.returncode == 6 and "nothing" in missing.stderr


# --- the system message of the training ------------------------------------------------------------------------------

SYSTEM = "You add numbers."


def with_system(rows, system=SYSTEM):
    roles = ("user", "prompt"), ("assistant", "completion")
    return [
        {"messages": [{"role": "system", "content": system}] * (system is not None)
         + [{"role": role, "content": row[key]} for role, key in roles]} for row in rows
    ]  # fmt: skip


@pytest.fixture
def asked(dualtune_main, config_file, write_rows, qa_rows, tmp_path, monkeypatch):
    """Train on rows with this system message, and return the messages that a command lets the template render."""
    from dualtune.data.tokens.tokenizer import Tokenizer

    def ask(rows, command, *options, lines="1 plus 1?\n"):
        if not (tmp_path / "runs" / "a" / "adapter").exists():
            config = config_file({"data.train": write_rows(rows), "data.eval": 0})
            assert dualtune_main("train", config, *NUMPY).returncode == 0
        rendered, whole = [], Tokenizer.encode_chat

        def encode(self, messages, **rest):
            rendered.append([(message.role, message.content) for message in messages])
            return whole(self, messages, **rest)

        with monkeypatch.context() as patch:
            patch.setattr(Tokenizer, "encode_chat", encode)
            patch.setattr("sys.stdin", io.StringIO(lines))
            result = dualtune_main(command, "--adapter", tmp_path / "runs" / "a", "--max-tokens", 3, *options, *NUMPY)
        assert result.returncode == 0, result.stderr
        return rendered[0], result.stderr

    return ask


@pytest.mark.parametrize("command", [("chat",), ("generate", "--prompt", "1 plus 1?")])
def test_a_model_is_asked_with_the_system_message_of_its_training(asked, qa_rows, command):
    rows, user = with_system(qa_rows), ("user", "1 plus 1?")
    messages, said = asked(rows, *command)
    assert messages == [("system", SYSTEM), user] and SYSTEM in said
    assert asked(rows, *command, "--system", "Be brief.")[0] == [("system", "Be brief."), user]
    messages, said = asked(rows, *command, "--no-system")
    assert messages == [user] and SYSTEM not in said


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (0, SYSTEM),
        (1, SYSTEM),  # of 20: nearly all share it
        (2, None),
    ],
)
def test_the_system_message_is_the_one_that_nearly_all_rows_share(write_rows, make_config, qa_rows, others, expected):
    from dualtune.data.documents import Data
    from dualtune.data.system_message import shared_system_message

    rows = (qa_rows * 2)[:20]
    data = write_rows(with_system(rows[others:]) + with_system(rows[:others], None))
    assert shared_system_message(Data(make_config(data)).train) == expected


def test_rows_without_a_system_message_record_none(asked, qa_rows, tmp_path):
    assert asked(qa_rows, "chat")[0] == [("user", "1 plus 1?")]
    manifest = json.loads((tmp_path / "runs" / "a" / "adapter" / "dualtune.json").read_text())
    assert manifest["training"]["system_message"] is None


@pytest.mark.parametrize("training", [None, 3, [], {"system_message": 3}, {"system_message": ""}])
def test_a_manifest_that_records_something_else_has_no_system_message(training):
    from dualtune.data.system_message import recorded_system_message

    assert recorded_system_message({"training": training}) is None


def test_a_system_message_needs_a_template_and_one_meaning(dualtune_main, tiny_softmax):
    both = dualtune_main("chat", tiny_softmax, "--system", "S", "--no-system", *NUMPY)
    assert both.returncode == 2 and "not both" in both.stderr
    for options in (["--raw"], ["--template", "none"]):
        asked = dualtune_main("generate", tiny_softmax, "--prompt", "x", "--system", "S", *options, *NUMPY)
        assert asked.returncode == 2 and "--system" in asked.stderr
