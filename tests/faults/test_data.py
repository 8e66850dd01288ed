"""Data and templates that are broken, or meant to break something: named with line and reason, nothing half done."""

import json
import time

import pytest

GOOD = b'{"prompt": "1", "completion": "2"}\n'
CHAT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}

MALFORMED = {
    "a bad line": (GOOD + b'{"prompt": \n', ":2: not JSON: Expecting value at column "),
    "a trailing comma": (b'{"prompt": "1", "completion": "2",}\n', ":1: not JSON: "),
    "UTF-16": (GOOD.decode().encode("utf-16"), "UTF-16"),
    "NUL bytes": (GOOD + bytes(100), ":2: holds NUL"),
    "a duplicate key": (
        b'{"prompt": "1", "prompt": "3", "completion": "2"}\n',
        ":1: has the key 'prompt' more than once",
    ),
    "a NaN literal": (b'{"prompt": "1", "completion": "2", "score": NaN}\n', ":1: holds NaN"),
    "a byte that is no UTF-8": (GOOD + b'{"prompt": "\xff", "completion": "2"}\n', ":2: not UTF-8 at byte 13"),
}
HARMLESS = {
    "a byte order mark": b"\xef\xbb\xbf" + GOOD,
    "CRLF": GOOD.replace(b"\n", b"\r\n"),
    "no newline at the end": GOOD.rstrip(),
    "blank lines": b"\n" + GOOD + b"\n\n",
}
CONVERSATIONS = {
    "an empty answer": ([CHAT[0], {"role": "assistant", "content": " "}], "message 2: the assistant's answer is blank"),
    "an unknown role": ([{"role": "narrator", "content": "Once"}, CHAT[1]], "message 1: role: got 'narrator', allowed"),
    "no answer": ([CHAT[0]], "has no assistant message"),
    "a tool nobody called": ([*CHAT, {"role": "tool", "content": "4"}], "message 3: a tool message must follow"),
}


def refused(box, *lines):
    """`train` ends with 3, says these things, and leaves no run behind; `check-data` says them too."""
    result = box.resume(3)
    assert "Traceback" not in result.stderr
    for line in lines:
        assert line in result.stderr
    assert not (box.dir / "metrics.jsonl").exists()
    checked = box.main("check-data", box.settings["data.train"])
    return result, checked


@pytest.mark.fault(
    row=26,
    fault="malformed JSON lines",
    injection="bad line, trailing comma, UTF-16, NUL bytes, duplicate keys, NaN literal, invalid UTF-8",
    expected="`file:line: reason`, exit 3, from `train` and `check-data`",
)
@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_file_is_named_with_line_and_reason(box, what):
    content, reason = MALFORMED[what]
    box.settings["data.train"].write_bytes(content)
    _, checked = refused(box, str(box.settings["data.train"]), reason)
    assert (checked.returncode, reason in checked.stdout) == (3, True)


@pytest.mark.fault(
    row=26,
    fault="JSON lines from another system",
    injection="byte order mark, CRLF, no newline at the end, blank lines",
    expected="read as if they were not there",
)
@pytest.mark.parametrize("what", HARMLESS)
def test_what_other_systems_write_is_read(box, what):
    box.settings |= {"data.eval": 0, "train.steps": 1}
    box.settings["data.train"].write_bytes(HARMLESS[what])
    assert "train data  1 document," in box.resume(0).stdout


@pytest.mark.fault(
    row=26,
    fault="bad rows with `data.on_bad_row: skip`",
    injection="2 of 18 rows; `data.max_bad_rows` 2 and 1",
    expected="left out and counted; exit 3 above the limit",
)
def test_bad_rows_are_left_out_up_to_the_limit(box, wording):
    path = box.settings["data.train"]
    path.write_bytes(path.read_bytes() + b"{\n[]\n")
    box.settings |= {"data.on_bad_row": "skip", "data.max_bad_rows": 2, "train.steps": 1}
    assert "; 2 bad rows left out" in box.resume(0).stdout
    box.settings |= {"data.max_bad_rows": 1, "run.dir": box.home / "other"}
    wording(box.resume(3).stderr)


@pytest.mark.fault(
    row=27,
    fault="conversations that cannot be",
    injection="empty answer, unknown role, no answer, a tool that nobody called",
    expected="`file:line: message n: reason`, exit 3",
)
@pytest.mark.parametrize("what", CONVERSATIONS)
def test_an_impossible_conversation_is_named_with_its_message(box, write_rows, what):
    messages, reason = CONVERSATIONS[what]
    box.settings["data.train"] = write_rows([{"messages": CHAT}, {"messages": messages}])
    _, checked = refused(box, f"train.jsonl:2: {reason}", "1 of 2 rows cannot be used")
    assert (checked.returncode, f"train.jsonl:2: {reason}" in checked.stdout) == (3, True)


@pytest.mark.fault(
    row=27,
    fault="formats mixed in one file",
    injection="chat messages, then an Alpaca row and a ShareGPT row",
    expected="both rows named with what they look like, exit 3",
)
def test_mixed_formats_are_named(box, write_rows):
    alpaca = {"instruction": "Hi", "input": "", "output": "Ho"}
    sharegpt = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}
    box.settings["data.train"] = write_rows([{"messages": CHAT}, alpaca, sharegpt])
    refused(box, "train.jsonl:2: has no 'messages'", "looks like alpaca", "train.jsonl:3: ", "looks like sharegpt")


@pytest.mark.fault(
    row=28,
    fault="nothing to train",
    injection="every prompt longer than `max_length`; every answer `train: false`",
    expected="exit 3 with the counts",
)
@pytest.mark.parametrize("what", ["too long", "unlearned"])
def test_data_without_a_trainable_token_is_refused(box, write_rows, what, wording):
    unlearned = [{"messages": [CHAT[0], CHAT[1] | {"train": False}]}] * 3
    too_long = [{"prompt": "x" * 99, "completion": "y"}] * 3
    box.settings |= {"data.eval": 0, "data.train": write_rows(too_long if what == "too long" else unlearned)}
    result = box.resume(3)
    wording(result.stderr)


TEMPLATES = {
    "a syntax error": ("{% for m in messages %}", 2, "data.template"),
    "a template that reaches for the interpreter": (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}", 3, "the chat template refuses this conversation",
    ),
    "an endless loop": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
        "{% endfor %}", 3, "data.template",
    ),
    "a gigabyte of text": ("{% for a in range(9999) %}{{ 'x' * 99999 }}{% endfor %}", 3, "data.template"),
    "text that doubles in a loop": (
        "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        3, "data.template",
    ),
}  # fmt: skip


@pytest.mark.fault(
    row=30,
    fault="a chat template that is broken or malicious",
    injection="syntax error, access to Python's insides, endless loops, a gigabyte of text, text that doubles",
    expected="exit 2 or 3 with the reason, within seconds and without the memory",
)
@pytest.mark.parametrize("what", TEMPLATES)
def test_a_hostile_template_does_no_harm(box, what):
    source, code, reason = TEMPLATES[what]
    path = box.home / "template.jinja"
    path.write_text(source)
    box.settings["data.template"] = path
    before = time.process_time()
    result = box.resume(code)
    assert time.process_time() - before < 60  # endless otherwise; the limit of a template is 1
    assert reason in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.fault(
    row=29,
    fault="a template that hides where turns are",
    injection="it drops earlier answers; it marks one turn of two",
    expected="`file:line: message n: reason` with what to do, exit 3",
)
@pytest.mark.parametrize("marked", [False, True])
def test_a_template_that_hides_turns_is_refused(box, write_rows, marked):
    turn = "{{ m.content }}<|im_end|>"
    shown = "{% generation %}" + turn + "{% endgeneration %}" if marked else turn
    path = box.home / "template.jinja"
    path.write_text("{% for m in messages %}{% if m.role == 'user' or loop.last %}" + shown + "{% endif %}{% endfor %}"
                    "{% if add_generation_prompt %}>{% endif %}")  # fmt: skip
    rows = [{"messages": [*CHAT, *CHAT]}]
    box.settings |= {"data.template": path, "data.eval": 0, "data.train": write_rows(rows)}
    reason = "the chat template marks 3 turns as generated" if marked else "message 2: the chat template writes this"
    assert f"train.jsonl:1: {reason}" in box.resume(3).stderr
    assert json.loads(box.settings["data.train"].read_text()) == rows[0]
