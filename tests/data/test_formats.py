"""Rows to examples: every format, told from its keys or named, and what no row may be. Expected by hand."""

import itertools
import json
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dualtune.base.errors import DataError
from dualtune.data.chat.conversations import Message
from dualtune.data.chat.examples import Example, answers, num_shared
from dualtune.data.chat.formats import FORMATS, LABELS, to_examples
from dualtune.data.sources.rows import BadRow, RawRow

CHAT = (Message("system", "Be brief."), Message("user", "2+2?"), Message("assistant", "4."))
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)


def user(content, **extra):
    return {"role": "user", "content": content} | extra


def assistant(content, **extra):
    return {"role": "assistant", "content": content} | extra


def system(content):
    return {"role": "system", "content": content}


def tool(content):
    return {"role": "tool", "content": content}


def said(question, answer, system=None):
    head = (Message("system", system),) if system else ()
    return (*head, Message("user", question), Message("assistant", answer))


def made(messages=(), **rest):
    return Example("f", 1, messages, **rest)


def pair(prompt, completion, question=None, system=None, **rest):
    return made(said(question or prompt, completion, system), prompt=prompt, completion=completion, **rest)


def choice(chosen, rejected):
    return replace(chosen, rejected=rejected)


def convert(*rows, format="auto", columns=None):
    raw = [row if isinstance(row, BadRow) else RawRow("f", n, row) for n, row in enumerate(rows, start=1)]
    return list(to_examples(raw, format, columns or {}))


def converted(row, **options):
    (result,) = convert(row, **options)
    assert isinstance(result, Example), result
    return result


def reason(row, **options):
    (result,) = convert(row, **options)
    assert isinstance(result, BadRow), result
    assert (result.path, result.line) == ("f", 1)
    return result.reason


# --- every format ----------------------------------------------------------------------------------------------------

SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
BE_BRIEF, ASK, SAY = system("Be brief."), user("2+2?"), assistant("4.")
NOT_LEARNED = Message("assistant", "Hi.", train=False)
OPENED = (Message("user", "Hello."), NOT_LEARNED, Message("user", "2+2?"), Message("assistant", "4."))
OPENING = [user("Hello."), assistant("Hi."), ASK]
WORSE = (*OPENED[:-1], Message("assistant", "5."))
HH = "\n\nHuman: Hello.\n\nAssistant: Hi.\n\nHuman: 2+2?\n\nAssistant:"

GOLDEN = [  # format, row, the example that it must become
    ("messages", {"messages": [BE_BRIEF, ASK, SAY]}, made(CHAT)),
    ("messages", {"messages": [BE_BRIEF, ASK, SAY], "tools": [SCHEMA], "id": 7}, made(CHAT, tools=(SCHEMA,))),
    ("sharegpt", {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "2+2?"},
                                    {"from": "gpt", "value": "4."}]}, made(CHAT)),
    ("sharegpt", {"system": "Be brief.", "tools": json.dumps([SCHEMA]),
                  "conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4."}]},
     made(CHAT, tools=(SCHEMA,))),
    ("sharegpt", {"conversations": [ASK, SAY], "system": "", "tools": ""}, made(CHAT[1:])),
    ("prompt_completion", {"prompt": "2+2=", "completion": "4", "id": 7}, pair("2+2=", "4")),
    ("prompt_completion", {"prompt": "", "completion": "4"}, pair("", "4")),
    ("prompt_completion", {"prompt": "2+2=", "completion": "4", "system": "Be brief.", "tools": [SCHEMA]},
     pair("Be brief.\n\n2+2=", "4", "2+2=", "Be brief.", tools=(SCHEMA,))),
    ("prompt_completion", {"prompt": OPENING, "completion": [SAY]}, made(OPENED)),
    ("prompt_completion", {"prompt": [ASK], "completion": [SAY], "system": "Be brief."}, made(CHAT)),
    ("alpaca", {"instruction": "Add.", "output": "4"},
     pair(f"{ALPACA}\n\n### Instruction:\nAdd.\n\n### Response:\n", "4", "Add.")),
    ("alpaca", {"instruction": "Add.", "input": "2+2", "output": "4", "system": "Be brief."},
     pair(f"Be brief.\n\n{WITH_INPUT}\n\n### Instruction:\nAdd.\n\n### Input:\n2+2\n\n### Response:\n", "4",
          "Add.\n\n2+2", "Be brief.")),
    ("preference", {"prompt": "2+2=", "chosen": "4", "rejected": "5"}, choice(pair("2+2=", "4"), pair("2+2=", "5"))),
    ("preference", {"prompt": "2+2=", "chosen": "4", "rejected": "5", "system": "Be brief.", "tools": [SCHEMA]},
     choice(pair("Be brief.\n\n2+2=", "4", "2+2=", "Be brief.", tools=(SCHEMA,)),
            pair("Be brief.\n\n2+2=", "5", "2+2=", "Be brief.", tools=(SCHEMA,)))),
    ("preference", {"chosen": [*OPENING, SAY], "rejected": [*OPENING, assistant("5.")]},
     choice(made(OPENED), made(WORSE))),
    ("preference", {"prompt": OPENING, "chosen": [SAY], "rejected": [assistant("5.")]},
     choice(made(OPENED), made(WORSE))),
    ("preference", {"prompt": "2+2?", "chosen": [ASK, SAY], "rejected": [ASK, assistant("5.")], "messages": [ASK, SAY],
                    "system": "Be brief."}, choice(made(CHAT), made((*CHAT[:-1], WORSE[-1])))),
    # LLaMA-Factory's two forms, Intel/orca_dpo_pairs, argilla's, Anthropic/hh-rlhf and Dahoas/full-hh-rlhf.
    ("preference", {"conversations": [{"from": "human", "value": "2+2?"}], "chosen": {"from": "gpt", "value": "4."},
                    "rejected": {"from": "gpt", "value": "5."}}, choice(made(CHAT[1:]), made((CHAT[1], WORSE[-1])))),
    ("preference", {"instruction": "Add.", "input": "2+2", "history": [["Hello.", "Hi."]],
                    "chosen": "4", "rejected": "5"},
     choice(*(made((*OPENED[:2], *said("Add.\n\n2+2", n))) for n in "45"))),
    ("preference", {"system": "Be brief.", "question": "2+2=", "chosen": "4", "rejected": "5"},
     choice(*(pair("Be brief.\n\n2+2=", n, "2+2=", "Be brief.") for n in "45"))),
    ("preference", {"input": "2+2=", "chosen": "4", "rejected": "5"}, choice(pair("2+2=", "4"), pair("2+2=", "5"))),
    ("preference", {"instruction": "2+2=", "chosen_response": "4", "rejected_response": "5"},
     choice(pair("2+2=", "4"), pair("2+2=", "5"))),
    # OpenAI's preference fine-tuning.
    ("preference", {"input": {"messages": OPENING, "tools": [SCHEMA], "parallel_tool_calls": True},
                    "preferred_output": [SAY], "non_preferred_output": [assistant("5.")]},
     choice(made(OPENED, tools=(SCHEMA,)), made(WORSE, tools=(SCHEMA,)))),
    ("preference", {"chosen": f"{HH} 4.", "rejected": f"{HH} 5."},
     choice(made(OPENED, prompt=HH, completion=" 4."), made(WORSE, prompt=HH, completion=" 5."))),
    ("preference", {"prompt": HH, "response": " 4.", "chosen": " 4.", "rejected": " 5."},
     choice(made(OPENED, prompt=HH, completion=" 4."), made(WORSE, prompt=HH, completion=" 5."))),
    ("comparison", {"history": "2+2=", "human_ref_A": "5", "human_ref_B": "4", "labels": 0},
     choice(pair("2+2=", "4"), pair("2+2=", "5"))),
    ("comparison", {"prompt": OPENING, "answer_a": [SAY], "answer_b": [assistant("5.")], "better": "a"},
     choice(made(OPENED), made(WORSE))),
    ("unpaired_preference", {"prompt": "2+2=", "completion": "4", "label": True}, replace(pair("2+2=", "4"), label=1)),
    ("unpaired_preference", {"prompt": OPENING, "completion": [SAY], "label": False}, made(OPENED, label=-1)),
    *(("unpaired_preference", {name: "2+2=", "completion": "4", "label": True}, replace(pair("2+2=", "4"), label=1))
      for name in ("question", "instruction")),
    ("unpaired_preference", {"messages": [*OPENING, SAY], "label": True}, made(OPENED, label=1)),
    ("unpaired_preference", {"conversations": [*OPENING, SAY], "label": False}, made(OPENED, label=-1)),
    ("unpaired_preference", {"instruction": "Add.", "response": "4", "kto_tag": True},
     replace(pair(f"{ALPACA}\n\n### Instruction:\nAdd.\n\n### Response:\n", "4", "Add."), label=1)),
    ("text", {"text": "Once."}, made(prompt="", completion="Once.", is_text=True)),
]  # fmt: skip


@pytest.mark.parametrize("how", ["auto", "by name"])
@pytest.mark.parametrize(("format", "row", "expected"), GOLDEN)
def test_every_format(format, row, expected, how):
    assert convert(row, format=format if how == "by name" else "auto") == [expected]


@pytest.mark.parametrize("absent", [{}, {"input": ""}, {"input": None}, {"input": " ", "system": None}])
def test_null_and_blank_are_absent_where_a_key_is_optional(absent):
    row = {"instruction": "Add.", "output": "4"}
    assert converted(row | absent) == converted(row)


@pytest.mark.parametrize("row", [
    {"prompt": " ", "completion": "4."}, {"instruction": "", "output": "4."}, {"messages": [user("\n"), SAY]},
])  # fmt: skip
def test_an_answer_to_nothing_is_told(row):
    assert converted(row).notices == {"blank_question"}


def test_an_input_without_an_instruction_is_a_question():
    assert converted({"instruction": "", "input": "2+2?", "output": "4."}).notices == set()


def test_lists_and_objects_may_be_given_as_json():
    row = {"messages": [json.dumps(ASK), SAY], "tools": [json.dumps(SCHEMA)]}
    as_text = {key: json.dumps(value) for key, value in row.items()}
    assert converted(as_text) == converted(row) == made(CHAT[1:], tools=(SCHEMA,))


@pytest.mark.parametrize("row", [
    {"chosen": [*OPENING, SAY], "rejected": [*OPENING, assistant("5.")]},
    {"prompt": OPENING, "chosen": [SAY], "rejected": [assistant("5.")]},
    {"prompt": OPENING, "completion": [SAY]},
    {"prompt": OPENING, "completion": [SAY], "label": True},
])  # fmt: skip
def test_tables_hold_conversations_as_json_and_this_is_told(row):
    as_text = {key: json.dumps(value) if isinstance(value, list) else value for key, value in row.items()}
    assert converted(as_text) == converted(row)
    assert converted(as_text).notices == {"parsed_messages"}
    assert converted(row).notices == set()


def test_a_prompt_as_json_may_be_answered_by_texts():
    row = {"prompt": json.dumps(OPENING), "chosen": "4.", "rejected": "5."}
    assert converted(row) == choice(made(OPENED), made(WORSE))


def test_json_that_only_one_of_two_texts_is_stays_a_text():
    told = json.dumps([ASK, SAY])
    assert converted({"prompt": "Invent a chat.", "completion": told}) == pair("Invent a chat.", told)
    assert converted({"prompt": "Invent one.", "chosen": told, "rejected": "No."}) == choice(
        pair("Invent one.", told), pair("Invent one.", "No.")
    )
    assert converted({"prompt": "[1]", "completion": "[2]"}) == pair("[1]", "[2]")


def test_messages_that_python_printed_are_refused():
    got = reason({"chosen": str([ASK, SAY]), "rejected": str([ASK, assistant("5.")])})
    assert got == "chosen: holds messages as Python prints them; write them as JSON, with json.dumps"


def test_where_is_path_and_line():
    assert made().where == "f:1"


# --- what no row may be ----------------------------------------------------------------------------------------------


def chat(*turns, **rest):
    return {"messages": list(turns), **rest}


BAD_ROWS = [
    ({"messages": "hi"}, "messages: got a string that is not JSON: Expecting value at character 1"),
    ({"messages": "9" * 5000}, "messages: got a string that is not usable JSON: Exceeds the limit"),
    ({"messages": "[" * 10**5}, "is nested too deeply"),
    ({"messages": "{}"}, "messages: got dict, a list is needed"),
    (chat(ASK, ASK), "has no assistant message, so there is nothing to train on"),
    (chat(ASK, SAY, tools={}), "tools: got dict, a list is needed"),
    (chat(ASK, SAY, tools=[SCHEMA, 7]), "tool 2: got int, an object is needed"),
    ({"conversations": [BE_BRIEF, ASK, SAY], "system": "x"}, "system: the conversation has another system message"),
    ({"conversations": [ASK, tool("x"), SAY], "system": "x"}, "message 2: a tool message must follow"),
    ({"prompt": "a", "completion": {"x": 4}}, "'prompt' and 'completion' must both be strings or both lists of "
     "messages: got str and dict"),
    ({"prompt": "a", "completion": float("nan")}, "'prompt' and 'completion' must both be strings or both lists"),
    ({"prompt": "a", "completion": " "}, "completion: is blank, so there is nothing to train on"),
    ({"prompt": [ASK], "completion": [user("x")]}, "completion: has no assistant message, so there is "),
    ({"prompt": [ASK], "completion": [tool("x"), SAY]}, "prompt and completion: message 2: a tool message must follow"),
    ({"prompt": [ASK, 7], "completion": [SAY]}, "prompt: message 2: got int, an object is needed"),
    ({"instruction": "a", "input": "b", "output": None}, "output: is null"),
    ({"instruction": "a", "output": ""}, "output: is blank, so there is nothing to train on"),
    ({"instruction": "a", "input": {"x": 1}, "output": "b"}, "input: got dict, a string is needed"),
    ({"prompt": "a", "context": {"x": 1}, "completion": "b"}, "context: got dict, a string is needed"),
    ({"text": ["a"]}, "text: got list, a string is needed"),
    ({"text": "\n"}, "text: is blank, so there is nothing to train on"),
    ({"chosen": "a", "rejected": "b"}, "has no 'prompt', which is needed if 'chosen' and 'rejected' are strings"),
    ({"prompt": "p", "chosen": "a", "rejected": "a"}, "'chosen' and 'rejected' are the same"),
    ({"prompt": "p", "chosen": "a", "rejected": ""}, "rejected: is blank, so there is nothing to train on"),
    ({"prompt": "p", "chosen": "a", "rejected": [SAY]}, "'chosen' and 'rejected' must both be strings or both lists"),
    ({"chosen": [ASK, SAY], "rejected": [ASK, SAY]}, "'chosen' and 'rejected' are the same"),
    ({"chosen": [ASK, SAY], "rejected": [user("3+3?"), SAY]},
     "'chosen' and 'rejected' must answer the same question: they begin with different ones"),
    ({"chosen": [ASK, SAY], "rejected": [ASK, SAY, ASK, SAY]}, "rejected: continues after the whole of 'chosen', so "),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": "high", "score_rejected": 2},
     "score_chosen: got 'high', a number is needed; data.columns: {score_chosen: null} leaves it out"),
    ({"chosen": f"{HH} 4.", "rejected": HH}, "rejected with its prompt: message 4: the assistant's answer is blank"),
    ({"chosen": [ASK, SAY], "rejected": [ASK]}, "rejected: must end with an assistant message, got a user message"),
    ({"prompt": "3+3?", "chosen": [ASK, SAY], "rejected": [ASK, assistant("5.")]},
     "chosen: is a whole conversation, but does not contain the messages of 'prompt'"),
    ({"chosen": [SAY], "rejected": [SAY]}, "'chosen' and 'rejected' are the same"),
    ({"input": {"messages": [ASK]}, "prompt": "2+2?", "chosen": [SAY], "rejected": [assistant("5.")]},
     "input: holds the messages of a prompt, and 'prompt' does too; keep one of them"),
    ({"input": {"tools": []}, "chosen": [SAY], "rejected": [assistant("5.")]}, "input: has no 'messages'; its keys "),
]  # fmt: skip


@pytest.mark.parametrize(("row", "start"), BAD_ROWS)
def test_bad_rows_are_refused_with_the_reason(row, start):
    got = reason(row)
    assert got.startswith(start)
    assert "\n" not in got and got.isprintable()


HALF = "a\ud800"


@pytest.mark.parametrize(("row", "at"), [
    ({"text": HALF}, "text"), ({"prompt": HALF, "completion": "b"}, "prompt"),
    (chat(user(HALF), SAY), "message 1: content"),
    (chat(ASK, assistant("!", thinking=[{"x": HALF}])), "message 2: 'thinking'"),
    (chat(ASK, assistant("", tool_calls=[{"name": "f", "arguments": '{"a": "\\ud800"}'}])), "message 2: tool call 1"),
    (chat(ASK, SAY, tools=[{HALF: 1}]), "tools"), ({"conversations": [ASK, SAY], "system": HALF}, "system"),
    ({"prompt": "p", "chosen": "a", "rejected": HALF}, "rejected"),
])  # fmt: skip
def test_half_a_surrogate_pair_is_refused_wherever_a_text_is(row, at):
    assert reason(row) == f"{at}: contains an unpaired surrogate (\\ud800), which is not valid text"


# --- preferences -----------------------------------------------------------------------------------------------------


def test_a_pair_may_differ_from_any_message_on_and_all_that_follows_is_trained_on():
    chosen = [*OPENING, assistant("4.", weight=2), user("Sure?"), assistant("Yes.")]
    rejected = [*OPENING, assistant("5."), user("Why?"), assistant("So.", train=False), user("?"), assistant("Oh.")]
    better, worse = answers(converted({"chosen": chosen, "rejected": rejected}))
    assert [m.train for m in better.messages] == [True, False, True, True, True, True]
    assert [m.train for m in worse.messages] == [True, False, True, True, True, False, True, True]
    assert [m.weight for m in better.messages] == [1, 1, 1, 2, 1, 1]
    assert num_shared(better.messages, worse.messages) == 3
    assert (better.rejected, worse.rejected) == (None, None)
    # A weight in what both begin with is no difference: it is not trained on.
    heavy = [user("Hello."), assistant("Hi.", weight=3), *chosen[2:]]
    assert num_shared(*(e.messages for e in answers(converted({"chosen": heavy, "rejected": rejected})))) == 3


def test_a_pair_of_calls_is_compared_by_the_calls():
    calls = [assistant(None, tool_calls=[{"name": "add", "arguments": {"a": a}}]) for a in (2, 3)]
    pair = {"prompt": [ASK], "chosen": [calls[0], tool("4"), SAY], "rejected": [calls[1], tool("5"), SAY]}
    better, worse = answers(converted(pair))
    assert [[m.role for m in e.messages] for e in (better, worse)] == [["user", "assistant", "tool", "assistant"]] * 2
    assert num_shared(better.messages, worse.messages) == 1
    later = {"prompt": [ASK, calls[0]], "chosen": [tool("4"), SAY], "rejected": [tool("4"), assistant("5.")]}
    better, worse = answers(converted(later))
    assert [m.train for m in better.messages] == [True, False, True, True]


def test_an_example_that_is_no_pair_is_its_own_answer():
    example = converted(chat(ASK, SAY))
    assert answers(example) == (example,)


def test_without_the_rejected_answers_a_pair_is_an_example_for_sft():
    """As the error of `train.objective: sft` advises, for each layout of a pair."""
    for format, row, expected in GOLDEN:
        if format != "preference":
            continue
        got = converted(row, columns={"rejected": None})
        assert [(m.role, m.content) for m in got.messages] == [(m.role, m.content) for m in expected.messages]
        assert (got.prompt, got.completion, got.rejected) == (expected.prompt, expected.completion, None)
        assert got.messages[-1].train and not got.notices
    with pytest.raises(DataError, match="got null for 'chosen', which the format preference needs"):
        convert({"prompt": "p", "chosen": "a", "rejected": "b"}, format="preference", columns={"chosen": None})


@pytest.mark.parametrize(("scores", "notice"), [
    ((8.5, 7), None), ((7, 7.0), "equal_scores"), (("6", "7"), "reversed_scores"), ((None, 7), None),
])  # fmt: skip
@pytest.mark.parametrize("names", [("score_chosen", "score_rejected"), ("chosen-rating", "rejected-rating")])
def test_scores_that_do_not_prefer_the_chosen_answer_are_told(scores, notice, names):
    row = {"prompt": "2+2=", "chosen": "4", "rejected": "5"} | dict(zip(names, scores, strict=True))
    assert converted(row).notices == ({notice} if notice else set())


@pytest.mark.parametrize(("label", "expected"), [
    (True, 1), (1, 1), (1.0, 1), ("True", 1), (" desirable ", 1), (False, -1), (0, -1), (-1, -1), ("no", -1),
])  # fmt: skip
def test_a_label_may_be_spelled_in_many_ways_if_the_format_is_named(label, expected):
    row = {"prompt": "2+2=", "completion": "4", "label": label}
    assert converted(row, format="unpaired_preference").label == expected


@pytest.mark.parametrize("label", [1, 0, "true", "spam", 0.7])
def test_only_true_and_false_make_a_label_of_a_column_of_that_name(label):
    assert converted({"prompt": "2+2=", "completion": "4", "label": label}) == pair("2+2=", "4")
    assert converted({"prompt": "2+2=", "completion": "4", "label": True}, columns={"label": None}).label == 0


@pytest.mark.parametrize(("label", "notice"), [
    (1, {"unread_label: label"}), ("False", {"unread_label: label"}), ("undesirable", {"unread_label: label"}),
    ("spam", set()), (0.7, set()), (None, set()),
])  # fmt: skip
def test_a_label_that_is_not_read_is_told(label, notice):
    row = {"prompt": "2+2=", "completion": "4", "label": label}
    assert converted(row).notices == notice
    assert converted(row, columns={"label": None}).notices == set()
    assert converted({"prompt": "2+2=", "chosen": "4", "rejected": "5", "label": label}).notices == set()


def test_a_column_that_is_named_as_the_label_is_one():
    row = {"prompt": "2+2=", "completion": "4", "thumb": 0}
    assert converted(row, columns={"label": "thumb"}) == replace(pair("2+2=", "4"), label=-1)


def test_a_label_that_judges_nothing_is_refused():
    for label in (0.7, "spam", 2):
        got = reason({"prompt": "2+2=", "completion": "4", "label": label}, format="unpaired_preference")
        assert got == f"label: got {label!r}, allowed: {', '.join(LABELS)}"
    assert reason({"label": True, "x": 1}, format="unpaired_preference") == (
        "has a label, and needs beside it 'messages' or 'conversations' or 'prompt' and 'completion' or "
        "'instruction' and 'output'; its keys are: label, x"
    )


# --- the stream ------------------------------------------------------------------------------------------------------


def test_bad_rows_flow_on_between_the_examples():
    malformed = BadRow("f", 1, "not JSON")
    rows = [malformed, {"text": "a"}, {"txt": "b"}, {"text": "c"}]
    first, *rest = convert(*rows)
    assert first is malformed
    assert rest == [
        Example("f", 2, prompt="", completion="a", is_text=True),
        BadRow("f", 3, "has no 'text'; its keys are: txt"),
        Example("f", 4, prompt="", completion="c", is_text=True),
    ]


def test_rows_are_taken_one_at_a_time_and_not_kept():
    endless = (RawRow("f", n, {"text": "x" * 1000}) for n in itertools.count(1))
    tracemalloc.start()
    try:
        examples = to_examples(endless, "auto", {})
        assert sum(1 for _ in itertools.islice(examples, 20_000)) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_a_row_of_another_format_is_a_bad_row(wording):
    _, other, neither = convert(chat(ASK, SAY), {"instruction": "a", "output": "b"}, {str(n): n for n in range(12)})
    wording(other.reason)
    wording(neither.reason)


def test_a_row_without_a_column_of_the_named_format_is_told_which_one_may_be_meant():
    got = reason({"question": "How many?", "answer": "6"}, format="prompt")
    assert got.endswith("if 'question' is meant, set data.columns: {prompt: question}")


def test_columns_map_our_keys_to_the_file_s():
    row = {"question": "How many?", "answer": "Six.\n#### 6"}
    columns = {"prompt": "question", "completion": "answer"}
    expected = pair("How many?", "Six.\n#### 6")
    assert converted(row, columns=columns) == expected
    assert converted(row, columns=columns, format="prompt_completion") == expected
    assert converted(row | {"text": "x", "messages": []}, columns=columns) == expected
    assert converted({"Q": "Add.", "in": "2+2", "output": "4"}, columns={"instruction": "Q", "input": "in"}) == (
        converted({"instruction": "Add.", "input": "2+2", "output": "4"})
    )


@pytest.mark.parametrize(("format", "key", "message"), [
    ("prompt_completion", "question",
     "data.columns: got 'question', the format prompt_completion has: prompt, completion, "
     "system, tools, functions, context, history, reasoning"),
    ("auto", "input", "data.columns: got 'input', the format prompt_completion has: prompt, completion, "
     "system, tools, functions, context, history, reasoning"),
    ("text", "prompt", "data.columns: got 'prompt', the format text has: text"),
])  # fmt: skip
def test_a_column_key_that_the_format_lacks_is_refused(format, key, message):
    with pytest.raises(DataError) as caught:
        convert(
            {"prompt": "a", "completion": "b"},
            format=format,
            columns={key: "prompt"},
        )
    assert str(caught.value) == message


def test_a_column_key_that_no_format_has_is_refused():
    with pytest.raises(DataError, match=r"^data.columns: got 'promt', the formats have: chosen, rejected, prompt, "):
        convert({"question": "a"}, columns={"promt": "question"})


def test_an_unknown_layout_is_answered_with_the_known_ones(wording):
    with pytest.raises(DataError) as caught:
        convert({"question": "a", "answer": "b", "text": None})
    message = str(caught.value)
    wording(message)
    assert all(f"{name} (" in message for name in FORMATS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([HALF, "[]", "{}", '[{"a":']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
KEYS = sorted({key for format in FORMATS.values() for key in format.all_keys})
CALLS = [{"id": "a", "name": "add", "arguments": '{"a": 2}'}, {"function": {"name": "now", "arguments": None}}]
TOOLS = chat(ASK, assistant(None, tool_calls=CALLS), {"role": "tool", "content": [], "tool_call_id": "a"}, SAY)


@st.composite
def spoilt_rows(draw, format):
    """A good row in which one thing, somewhere, is anything."""
    more = [("messages", TOOLS, None), ("prompt", {"prompt": OPENING}, None), ("prompt", {"prompt": "2+2="}, None)]
    good = [row for name, row, _ in [*GOLDEN, *more] if name == format]
    place = row = json.loads(json.dumps(draw(st.sampled_from(good))))
    while True:
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or draw(st.integers(0, 3)) == 0:
            place[key] = draw(JSON)
            return row
        place = place[key]


def test_a_prompt_alone_is_a_format_only_by_its_name():
    text = {"system": "Be brief.", "prompt": "2+2=", "answer": 4}
    chat = {"prompt": [user("2+2=")], "system": "Be brief."}
    asked, spoken = convert(text, chat, format="prompt")
    assert [(m.role, m.content) for m in asked.messages] == [("system", "Be brief."), ("user", "2+2=")]
    assert asked.messages == spoken.messages and asked.is_prompt and spoken.is_prompt
    assert (asked.prompt, asked.completion, spoken.prompt) == ("Be brief.\n\n2+2=", "", None)
    (answered,) = convert({"prompt": [user("2+2="), assistant("4")]}, format="prompt")
    assert "ends with an assistant message" in answered.reason
    with pytest.raises(DataError):
        convert({"prompt": "2+2=", "answer": 4})


@st.composite
def tables(draw):
    format = draw(st.sampled_from(sorted(FORMATS)))
    return format, draw(st.lists(spoilt_rows(format) | st.dictionaries(st.sampled_from(KEYS), JSON), max_size=4))


@given(tables())
@example(("messages", [{None: ["a column too many"]}]))
@example(("prompt_completion", [{"prompt": "2+2=", "completion": "4", "id": []}]))
def test_any_row_gives_one_example_or_one_reason(table):
    format, rows = table
    results = convert(*rows, format=format)
    assert [result.line for result in results] == list(range(1, len(rows) + 1))
    assert all(isinstance(result, Example) or result.reason.isprintable() for result in results)


# --- the material ----------------------------------------------------------------------------------------------------


def material(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_gsm8k_reads_whole(shared):
    rows = material(shared("data/gsm8k/train.jsonl"))
    examples = convert(*rows, columns={"prompt": "question", "completion": "answer"})
    assert len(examples) == 7473
    assert [(e.prompt, e.completion, len(e.messages)) for e in examples] == [
        (r["question"], r["answer"], 2) for r in rows
    ]


@pytest.mark.parametrize(("name", "count"), [("train", 1000), ("valid", 100), ("test", 100)])
def test_wikisql_reads_whole(shared, name, count):
    rows = material(shared(f"data/wikisql/{name}.jsonl"))
    examples = convert(*rows)
    assert len(examples) == count
    assert [(e.is_text, e.completion) for e in examples] == [(True, row["text"]) for row in rows]


def test_fastchat_s_sharegpt_file_reads_whole(shared):
    rows = json.loads(shared("data/misc/sharegpt_conversations.json").read_text(encoding="utf-8"))
    roles = {"human": "user", "gpt": "assistant"}
    examples = convert(*rows)
    assert len(examples) == 500
    for row, got in zip(rows, examples, strict=True):
        expected = [(roles[turn["from"]], turn["value"], True) for turn in row["conversations"]]
        assert [(m.role, m.content, m.train) for m in got.messages] == expected
