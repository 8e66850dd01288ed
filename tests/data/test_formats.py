"""Rows to examples: every format, told from its keys or named, and what no row may be. Expected by hand."""

import json

import pytest

from dualtune.data.formats import Example, Message, to_examples
from dualtune.data.readers import RawRow
from dualtune.errors import DataError

CHAT = (Message("system", "Be brief."), Message("user", "2+2?"), Message("assistant", "4."))
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)


def pair(prompt, completion, chat_prompt=None):
    messages = (Message("user", chat_prompt or prompt), Message("assistant", completion))
    return Example("f:1", messages, prompt, completion)


# format, row, the example that it must become
FORMATS = [
    (
        "messages",
        {"messages": [{"role": message.role, "content": message.content} for message in CHAT]},
        Example("f:1", CHAT),
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "2+2?"},
                           {"from": "gpt", "value": "4."}]},
        Example("f:1", CHAT),
    ),
    ("prompt_completion", {"prompt": "2+2=", "completion": "4", "id": 7}, pair("2+2=", "4")),
    (
        "alpaca",
        {"instruction": "Add.", "output": "4"},
        pair(f"{ALPACA}\n\n### Instruction:\nAdd.\n\n### Response:\n", "4", "Add."),
    ),
    (
        "alpaca",
        {"instruction": "Add.", "input": "2+2", "output": "4"},
        pair(f"{WITH_INPUT}\n\n### Instruction:\nAdd.\n\n### Input:\n2+2\n\n### Response:\n", "4", "Add.\n\n2+2"),
    ),
    ("text", {"text": "Once."}, Example("f:1", (), "", "Once.")),
]  # fmt: skip


def convert(*rows, format="auto", columns=None):
    return to_examples([RawRow(f"f:{n}", row) for n, row in enumerate(rows, start=1)], format, columns or {})


def error_of(*rows, **options) -> list[str]:
    with pytest.raises(DataError) as caught:
        convert(*rows, **options)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("how", ["auto", "by name"])
@pytest.mark.parametrize(("format", "row", "expected"), FORMATS)
def test_every_format(format, row, expected, how):
    assert convert(row, format=format if how == "by name" else "auto") == [expected]


@pytest.mark.parametrize("empty", ["", None])
def test_an_empty_alpaca_input_is_none(empty):
    with_, without = ({"instruction": "Add.", "output": "4"} | extra for extra in ({"input": empty}, {}))
    assert convert(with_) == convert(without)


@pytest.mark.parametrize(
    ("role", "expected"), [("user", "user"), ("chatgpt", "assistant"), ("bing", "assistant"), ("bard", "assistant")]
)
def test_sharegpt_has_many_names_for_the_roles(role, expected):
    turns = [{"from": "human", "value": "?"}, {"from": role, "value": "x"}, {"from": "gpt", "value": "!"}]
    assert convert({"conversations": turns})[0].messages[1] == Message(expected, "x")


def test_columns_map_our_keys_to_the_file_s():
    row = {"question": "How many?", "answer": "Six.\n#### 6"}
    columns = {"prompt": "question", "completion": "answer"}
    expected = [pair("How many?", "Six.\n#### 6")]
    assert convert(row, columns=columns) == convert(row, columns=columns, format="prompt_completion") == expected
    assert convert({"Q": "Add.", "in": "2+2", "output": "4"}, columns={"instruction": "Q", "input": "in"}) == (
        convert({"instruction": "Add.", "input": "2+2", "output": "4"})
    )


def test_a_column_key_that_the_format_lacks_is_refused():
    message = "data.columns: got 'question', the format prompt_completion has: prompt, completion"
    columns = {"question": "prompt"}
    assert error_of({"prompt": "a", "completion": "b"}, format="prompt_completion", columns=columns) == [message]


def test_an_unknown_layout_is_answered_with_the_known_ones():
    (message,) = error_of({"question": "a", "answer": "b"})
    assert message.startswith("f:1: no known format has the keys question, answer. Known: messages (messages); ")
    assert "columns: {prompt: question, completion: answer}" in message


def test_all_bad_rows_are_counted_and_five_shown():
    good, bad = {"prompt": "a", "completion": "b"}, {"prompt": "a"}
    *shown, more, count = error_of(good, *[bad] * 6)
    assert shown == [f"f:{n}: has no 'completion'; its keys are: prompt" for n in range(2, 7)]
    assert (more, count) == ("… and 1 more", "6 of 7 rows cannot be used. Mend or remove them.")


TURN = {"role": "user", "content": "x"}
BAD_ROWS = [
    ({"messages": []}, "the conversation must be a list with at least one message"),
    ({"messages": "hi"}, "the conversation must be a list with at least one message"),
    ({"messages": [TURN, "hi"]}, "message 2: got str, an object is needed"),
    ({"messages": [{"role": "bot", "content": "x"}]},
     "message 1: 'role': got 'bot', allowed: system, user, assistant, tool"),
    ({"messages": [TURN, {"role": "assistant", "content": None}]},
     "'message 2: content': got NoneType, a string is needed"),
    ({"messages": [TURN]}, "has no assistant message, so there is nothing to learn from"),
    ({"messages": [{"role": "assistant", "content": "x"}, TURN]},
     "starts with an assistant message; a user or system message must come first"),
    ({"prompt": "a", "completion": 4}, "'completion': got int, a string is needed"),
    ({"text": ["a"]}, "'text': got list, a string is needed"),
    ({"text": "a\ud800"}, "'text': holds half a surrogate pair (\\ud800), which is no text"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_bad_rows_are_refused_with_the_reason(row, reason):
    assert error_of(row) == [f"f:1: {reason}", "1 of 1 rows cannot be used. Mend or remove them."]


# --- the material ----------------------------------------------------------------------------------------------------


def test_gsm8k_reads_whole(shared):
    from dualtune.data.readers import read_rows

    rows = read_rows(shared("data/gsm8k/train.jsonl"))
    examples = to_examples(rows, "auto", {"prompt": "question", "completion": "answer"})
    assert len(examples) == 7473
    assert all("####" in example.completion for example in examples)


def test_fastchat_s_sharegpt_file_reads_whole(shared):
    conversations = json.loads(shared("data/misc/sharegpt_conversations.json").read_text(encoding="utf-8"))
    examples = convert(*conversations)
    for conversation, example in zip(conversations, examples, strict=True):
        assert [message.content for message in example.messages] == [
            turn["value"] for turn in conversation["conversations"]
        ]
