"""Columns that hold a part of the conversation: each is read, or named. Expected by hand."""

import pytest

from dualtune.data.chat.formats import Example, to_examples
from dualtune.data.sources.rows import BadRow, RawRow

ASK, SAY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4."}
PAIR = [("user", "2+2?"), ("assistant", "4.")]
CHAT = {"messages": [ASK, SAY]}
SHAREGPT = {"conversations": [ASK, SAY]}
ALPACA = {"instruction": "2+2?", "output": "4."}
PROMPT = {"prompt": "2+2?", "completion": "4."}
CHOICE = {"chosen": [SAY], "rejected": [SAY | {"content": "5."}]}


def result(row, **options):
    (found,) = to_examples([RawRow("f", 1, row)], options.pop("format", "auto"), options.pop("columns", {}), **options)
    return found


def read(row, **options):
    found = result(row, **options)
    assert isinstance(found, Example), found
    return found


def said(row, **options):
    return [(message.role, message.content) for message in read(row, **options).messages]


EARLIER = [("user", "Hi."), ("assistant", "Ho."), ("user", "And?"), ("assistant", "So.")]


@pytest.mark.parametrize("history", [
    [["Hi.", "Ho."], ["And?", "So."]], '[["Hi.", "Ho."], ["And?", "So."]]',
    [{"role": role, "content": text} for role, text in EARLIER],
    {"role": [role for role, _ in EARLIER], "content": [text for _, text in EARLIER]},
])  # fmt: skip
@pytest.mark.parametrize("row", [ALPACA, PROMPT, {"prompt": [ASK], "completion": [SAY]}])
def test_history_stands_before_the_question(row, history):
    example = read(row | {"history": history, "system": "Be brief."})
    assert [(m.role, m.content) for m in example.messages] == [("system", "Be brief."), *EARLIER, *PAIR]
    assert (example.prompt, example.notices) == (None, frozenset())  # a plain text would be without it
    assert read(row | {"history": []}).messages == read(row).messages


def test_a_history_of_another_form_is_refused():
    assert result(ALPACA | {"history": [["Hi."]]}).reason == (
        "history: turn 1: got a list of 1, allowed: [question, answer], or a message"
    )


@pytest.mark.parametrize("row", [CHAT, SHAREGPT, ALPACA, PROMPT])
@pytest.mark.parametrize("key", ["system", "system_prompt", "system_message"])
def test_every_conversation_may_have_its_system_message_in_a_column(row, key):
    assert said(row | {key: "Be brief."}) == [("system", "Be brief."), *PAIR]
    assert said(row | {key: " "}) == PAIR


def test_a_system_message_may_stand_in_both_places_if_it_is_one():
    row = {"messages": [{"role": "system", "content": "Be brief."}, ASK, SAY]}
    assert len(said(row | {"system": "Be brief."})) == 3
    assert result(row | {"system": "Be long."}).reason.startswith("system: the conversation has another system message")


@pytest.mark.parametrize(("row", "question"), [
    ({"instruction": "2+2?", "context": "Sums.", "response": "4."}, "2+2?\n\nSums."),  # Dolly
    (ALPACA | {"context": "Sums."}, "2+2?\n\nSums."), (PROMPT | {"context": "Sums."}, "Sums.\n\n2+2?"),
    (PROMPT | {"context": ["Sums.", "More."]}, "Sums.\n\nMore.\n\n2+2?"), (PROMPT | {"context": []}, "2+2?"),
])  # fmt: skip
def test_context_is_read_with_the_question(row, question):
    assert said(row) == [("user", question), ("assistant", "4.")]
    assert read(row).notices == frozenset()


FUNCTION = {"name": "add", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize("row", [CHAT, SHAREGPT, ALPACA, PROMPT])
def test_openai_s_older_functions_are_tools(row):
    assert read(row | {"functions": [FUNCTION]}).tools == (TOOL,)
    assert read(row | {"tools": [TOOL], "functions": []}).tools == (TOOL,)
    assert result(row | {"tools": [TOOL], "functions": [FUNCTION]}).reason.startswith("functions: the row has tools")


def test_a_call_in_a_message_may_be_openai_s_older_one():
    call = {"name": "add", "arguments": '{"a": 2}'}
    row = {"functions": [FUNCTION], "messages": [ASK, {"role": "assistant", "content": None, "function_call": call},
                                                 {"role": "function", "name": "add", "content": "4"}, SAY]}  # fmt: skip
    example = read(row)
    assert [m.role for m in example.messages] == ["user", "assistant", "tool", "assistant"]
    assert example.messages[1].extra["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}


# --- messages beside chosen and rejected ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answers",
    [CHOICE, {"chosen": "4.", "rejected": "5."}, {"chosen": [ASK, SAY], "rejected": [ASK, SAY | {"content": "5."}]}],
)
@pytest.mark.parametrize("messages", [[ASK], [ASK, SAY]], ids=["the prompt", "the chosen conversation"])
def test_messages_beside_a_choice_are_its_prompt(answers, messages):
    example = read(answers | {"messages": messages})
    assert [(m.role, m.content) for m in example.messages] == PAIR
    assert [m.content for m in example.rejected] == ["5."]


@pytest.mark.parametrize(("row", "reason"), [
    (CHOICE | {"messages": [ASK, SAY | {"content": "6."}]}, "messages: ends with an answer that is neither"),
    (CHOICE | {"messages": [ASK], "prompt": "3+3?"}, "messages: does not contain the messages of 'prompt'"),
    ({"chosen": [ASK, SAY], "rejected": [ASK, SAY | {"content": "5."}], "messages": [ASK | {"content": "x"}]},
     "chosen: is a whole conversation, but does not contain the messages of 'messages'"),
])  # fmt: skip
def test_messages_that_contradict_the_choice_are_refused(row, reason):
    assert result(row).reason.startswith(reason)


def test_a_choice_beside_messages_is_named_where_the_messages_are_asked_for():
    assert read(CHAT | {"chosen": [SAY], "rejected": [SAY | {"content": "5."}]}, format="messages").notices == {
        "unread_column: rejected"  # what was chosen is in the messages
    }


# --- columns that are not read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [CHAT, SHAREGPT, ALPACA, PROMPT, {"text": "Once."}])
@pytest.mark.parametrize(("column", "value"), [
    ("thinking", "Hm."), ("reasoning", "Hm."), ("chain_of_thought", "Hm."), ("inputs", ["Hm."]),
    ("assistantReasoning", "Hm."), ("earlier", [{"from": "human", "value": "Hm."}]),
])  # fmt: skip
def test_a_column_that_seems_to_hold_content_is_named(row, column, value):
    assert read(row | {column: value}).notices == {f"unread_column: {column}"}


@pytest.mark.parametrize("more", [
    {"prompt_id": "abc"}, {"id": 7, "source": "web", "score": 0.5}, {"thinking": None, "history_": []},
    {"thinking": " "},
    {"question": "2+2?"},  # said in the messages
    {"full_prompt": "### Question: 2+2? ### Answer: 4."},  # the row with a frame, as Alpaca has it in text
    {"metadata": {"note": "x"}}, {"context": 7, "language": "en"},
])  # fmt: skip
def test_other_columns_are_not(more):
    assert read(CHAT | more).notices == frozenset()


def test_a_column_that_is_mapped_is_read():
    row = {"question": "2+2?", "answer": "4.", "thinking": "Hm."}
    columns = {"prompt": "question", "completion": "answer"}
    assert read(row, columns=columns).notices == {"unread_column: thinking"}
    assert said(row, columns=columns | {"context": "thinking"}) == [("user", "Hm.\n\n2+2?"), ("assistant", "4.")]


# --- values of other kinds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "text"), [(4, "4"), (0.5, "0.5"), (True, "true"), (False, "false"), (0, "0")])
@pytest.mark.parametrize("row", [
    lambda v: {"prompt": "2+2?", "completion": v}, lambda v: {"instruction": "2+2?", "output": v},
    lambda v: {"messages": [ASK, {"role": "assistant", "content": v}]}, lambda v: {"text": v},
])  # fmt: skip
def test_a_scalar_as_an_answer_is_its_json_text(row, value, text):
    example = read(row(value))
    assert (example.messages[-1].content if example.messages else example.completion) == text
    assert example.notices == {"scalar_text"}


def test_a_number_that_json_does_not_have_is_no_text():
    assert isinstance(result({"instruction": "2+2?", "output": float("nan")}), BadRow)


@pytest.mark.parametrize("key", ["messages", "conversations"])
@pytest.mark.parametrize(("role", "content"), [("role", "content"), ("from", "value")])
def test_an_object_of_lists_is_a_list_of_messages(key, role, content):
    turns = {role: ["user", "assistant"], content: ["2+2?", "4."], "weight": [None, 0.5]}
    (_, answer) = read({key: turns}).messages
    assert said({key: turns}) == PAIR and answer.weight == 0.5
    assert result({key: turns | {content: ["2+2?"]}}).reason.startswith(f"{key}: is an object of lists with different")
