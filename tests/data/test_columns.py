"""Columns that hold a part of the conversation: each is read, or named. Expected by hand."""

import json
import re

import pytest
import yaml

from dualtune.base.errors import DataError
from dualtune.data.chat.examples import Example
from dualtune.data.chat.formats import to_examples
from dualtune.data.chat.row_values import suggested_columns
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


def test_a_history_of_another_form_is_refused(wording):
    wording(result(ALPACA | {"history": [["Hi."]]}).reason)


@pytest.mark.parametrize("row", [CHAT, SHAREGPT, ALPACA, PROMPT])
@pytest.mark.parametrize("key", ["system", "system_prompt", "system_message"])
def test_every_conversation_may_have_its_system_message_in_a_column(row, key):
    assert said(row | {key: "Be brief."}) == [("system", "Be brief."), *PAIR]
    assert said(row | {key: " "}) == PAIR


def test_a_system_message_may_stand_in_both_places_if_it_is_one(wording):
    row = {"messages": [{"role": "system", "content": "Be brief."}, ASK, SAY]}
    assert len(said(row | {"system": "Be brief."})) == 3
    wording(result(row | {"system": "Be long."}).reason)


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
def test_openai_s_older_functions_are_tools(row, wording):
    assert read(row | {"functions": [FUNCTION]}).tools == (TOOL,)
    assert read(row | {"tools": [TOOL], "functions": []}).tools == (TOOL,)
    wording(result(row | {"tools": [TOOL], "functions": [FUNCTION]}).reason)


@pytest.mark.parametrize(("system", "notices"), [
    ("Tools: <tools>[{'type': 'function', 'function': {'name': 'add'}}]</tools>", {"tools_twice"}),
    (f"<tools>{json.dumps(TOOL)}</tools>", {"tools_twice"}), ("You add.", frozenset()),
])  # fmt: skip
def test_tools_that_the_system_message_lists_already_are_told(system, notices):
    row = {"messages": [{"role": "system", "content": system}, ASK, SAY], "tools": [TOOL]}
    assert read(row).notices == notices
    assert read(PROMPT | {"system": system, "tools": [TOOL]}).notices == notices
    alone = read(row, columns={"tools": None})
    assert not alone.tools and not alone.notices


CALLS = [{"name": "add", "arguments": {"a": 2}}]


@pytest.mark.parametrize("answers", [json.dumps(CALLS), CALLS])
def test_calls_in_a_column_are_no_completion(answers):
    """As xLAM's data have them; as a completion they were learned as text."""
    with pytest.raises(DataError, match="no known format") as error:
        result({"query": "2+2?", "answers": answers, "tools": json.dumps([FUNCTION])})
    assert "completion: answers" not in str(error.value)
    assert "'answers' holds calls of tools: write each row as messages" in str(error.value)
    turns = [{"role": "user", "content": "2+2?"}, {"role": "tool_call", "content": answers}]
    (call,) = read({"messages": turns, "tools": [FUNCTION]}).messages[1].extra["tool_calls"]
    assert call["function"] == CALLS[0]


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
    assert [m.content for m in example.rejected.messages] == ["2+2?", "5."]


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


NAMED = [
    ("inputs", ["Hm."]),
    ("code", "def f(): …"),
    ("reasoning_prompt", "Hm."),
    ("earlier", [{"from": "human", "value": "Hm."}]),
]
REASONING = [(name, "Hm.") for name in ("thinking", "reasoning", "chain_of_thought", "assistantReasoning")]


@pytest.mark.parametrize(("row", "column", "value"), [
    *((row, *column) for row in (CHAT, SHAREGPT, {"text": "Once."}) for column in NAMED + REASONING),
    *((row, *column) for row in (ALPACA, PROMPT) for column in NAMED),
])  # fmt: skip
def test_a_column_that_seems_to_hold_content_is_named(row, column, value):
    assert read(row | {column: value}).notices == {f"unread_column: {column}"}


@pytest.mark.parametrize("value", [1, "positive", False])
@pytest.mark.parametrize("name", ["label", "sentiment", "coarse_label"])
def test_the_class_of_a_plain_text_is_not_learned_and_is_named(name, value):
    assert read({"text": "Once.", name: value}).notices == {f"unread_column: {name}"}
    assert read({"text": "Once.", name: value}, columns={"label": None}).notices == (
        frozenset() if name == "label" else {f"unread_column: {name}"}
    )


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
    assert read(row | {"document": "Ho."}, columns=columns).notices == {"unread_column: document"}
    assert said(row, columns=columns | {"context": "thinking"}) == [("user", "Hm.\n\n2+2?"), ("assistant", "4.")]


# --- the reasoning of an answer ---------------------------------------------------------------------------------------

ANSWER = {"question": "2+2?", "answer": "4."}
OF_ANSWER = {"prompt": "question", "completion": "answer"}
MESSAGES = {"prompt": [ASK], "completion": [SAY]}
DOLLY = {"instruction": "2+2?", "response": "4."}
ROWS = [(PROMPT, {}), (MESSAGES, {}), (ALPACA, {}), (DOLLY, {}), (ANSWER, OF_ANSWER)]


def reasoned(row, **options):
    """The extra keys of the answer, after a check that the rest of the row is as it is without reasoning."""
    example = read(row, **options)
    assert [(message.role, message.content) for message in example.messages] == PAIR
    assert example.completion in ("4.", None) and not example.messages[0].extra
    return dict(example.messages[1].extra), example.notices


@pytest.mark.parametrize(("row", "columns"), ROWS)
@pytest.mark.parametrize("name", [
    "reasoning", "reasoning_content", "thinking", "cot", "CoT", "Complex_CoT", "chain_of_thought", "rationale", "think",
    "thoughts", "assistantReasoning", "reasoning_steps",
])  # fmt: skip
def test_a_column_of_reasoning_is_the_reasoning_of_the_answer(row, columns, name):
    assert reasoned(row | {name: "Two and two."}, columns=columns) == ({"reasoning_content": "Two and two."}, set())
    assert reasoned(row | {name: ["Two", "and two."]}, columns=columns)[0] == {"reasoning_content": "Two\n\nand two."}
    for nothing in (None, " ", []):
        assert reasoned(row | {name: nothing}, columns=columns) == ({}, set())


@pytest.mark.parametrize(("row", "columns"), ROWS)
def test_data_columns_names_the_column_of_reasoning_or_leaves_it_out(row, columns):
    row = row | {"why": "Two and two.", "thinking": "Hm."}
    named = reasoned(row, columns=columns | {"reasoning": "why"})
    assert named == ({"reasoning_content": "Two and two."}, {"unread_column: thinking"})
    assert reasoned(row, columns=columns | {"reasoning": None}) == ({}, set())


def test_of_several_columns_of_reasoning_a_usual_name_is_read_and_the_others_are_named():
    row = PROMPT | {"gemini_reasoning": "Hm.", "qwen_reasoning": "Ho."}
    assert reasoned(row) == ({}, {"unread_column: gemini_reasoning", "unread_column: qwen_reasoning"})
    assert reasoned(row | {"cot": "Ha."})[0] == {"reasoning_content": "Ha."}
    assert reasoned(row, columns={"reasoning": "qwen_reasoning"})[0] == {"reasoning_content": "Ho."}


@pytest.mark.parametrize("column", [
    {"reasoning_effort": "high"}, {"thinking_mode": "on"}, {"enable_thinking": True}, {"reasoning_tokens": 7},
    {"reasoning_model": "r1"},
])  # fmt: skip
def test_what_is_said_about_the_reasoning_is_none(column):
    assert reasoned(PROMPT | column) == ({}, set())


def test_reasoning_stands_in_the_last_answer_behind_a_history():
    example = read(ALPACA | {"history": [["Hi.", "Ho."]], "thinking": "Hm."})
    assert [dict(message.extra) for message in example.messages] == [{}, {}, {}, {"reasoning_content": "Hm."}]


OWN = {"prompt": [ASK], "completion": [SAY | {"thinking": "Two and two."}]}
INLINE = {"prompt": "2+2?", "completion": "<think>\nTwo and two.\n</think>\n\n4."}
MANY = {"prompt": [ASK], "completion": [SAY, ASK, SAY]}


@pytest.mark.parametrize("row", [OWN, INLINE, {"prompt": "2+2?", "completion": "Two and two. 4."}])
def test_reasoning_that_the_answer_has_already_is_not_added(row):
    assert read(row | {"reasoning": "Two and two."}) == read(row)
    assert read(row | {"reasoning": "Two and two."}).notices == frozenset()


@pytest.mark.parametrize("row", [OWN, INLINE, MANY])
def test_other_reasoning_than_that_of_the_answer_is_named_or_refused_where_it_is_asked_for(row):
    row = row | {"reasoning": "Hm."}
    assert read(row).notices == {"unread_column: reasoning"}
    assert result(row, columns={"reasoning": "reasoning"}).reason.startswith("reasoning: the")
    assert read(row, columns={"reasoning": None}).notices == frozenset()


def test_a_word_that_answer_and_reasoning_share_is_no_repetition():
    example = read({"prompt": "2+2?", "completion": "It is four.", "reasoning": "four"})
    assert example.messages[1].extra == {"reasoning_content": "four"}


def test_null_leaves_out_a_key_of_any_format_but_not_one_that_its_rows_need():
    assert said(ALPACA | {"input": "Sums.", "system": "Be brief."}, columns={"input": None, "system": None}) == PAIR
    assert said(CHAT | {"chosen": "4.", "rejected": "5."}, columns={"rejected": None}) == PAIR
    with pytest.raises(DataError, match="got null for 'prompt', which the format prompt_completion needs"):
        result(PROMPT, format="prompt_completion", columns={"prompt": None})
    with pytest.raises(DataError, match="no known format"):
        result(PROMPT, columns={"prompt": None})


# --- names that no format has -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "columns"), [
    ({"prompt": "2+2?", "response": "4."}, {"completion": "response"}),
    ({"system_prompt": "", "question": "2+2?", "response": "4."}, {"prompt": "question", "completion": "response"}),
    ({"Question": "2+2?", "Answer": "4."}, {"prompt": "Question", "completion": "Answer"}),
    ({"input": "2+2?", "output": "4."}, {"prompt": "input", "completion": "output"}),
    ({"question": "2+2?", "answer": "4.", "passage": ""},
     {"prompt": "question", "completion": "answer", "context": "passage"}),
    ({"answer": "no", "problem": "2+2?", "solution": "4.", "response": {"a": 1}},
     {"prompt": "problem", "completion": "answer"}),
    ({"content": "Once.", "path": "a.txt"}, {"text": "content"}),
    ({"Question": "2+2?", " Answer ": "4."}, {"prompt": "Question", "completion": " Answer "}),
])  # fmt: skip
def test_the_columns_that_are_likely_meant_are_said_and_can_be_read(row, columns):
    with pytest.raises(DataError) as error:
        result(row)
    (said_,) = re.findall(r"data\.columns, here likely (\{[^}]*\})\.", str(error.value))
    assert yaml.safe_load(said_) == suggested_columns(row) == columns
    read(row, columns=columns)


@pytest.mark.parametrize("row", [{"prompt": "2+2?"}, {"prompt": [ASK], "ground_truth": "4", "reward_model": {"a": 1}}])
def test_a_prompt_is_one_alone_unless_another_column_may_be_its_answer(row):
    example = read(row)
    assert (example.is_prompt, said(row)) == (True, PAIR[:1])
    assert read(row | {"answer": None}) == example
    with pytest.raises(DataError, match=r"data\.format: prompt reads the prompt alone\.$"):
        result(row | {"answer": "4"})
    assert read(row | {"answer": "4"}, format="prompt").is_prompt


@pytest.mark.parametrize("row", [
    {"question": "2+2?", "answers": {"text": ["4."], "answer_start": [0]}}, {"chat": "USER: 2+2? ASSISTANT: 4."},
    {"en": "one", "fr": "un"}, {"question": "2+2?"},
])  # fmt: skip
def test_of_other_names_none_is_suggested(row):
    assert suggested_columns(row) == {}
    with pytest.raises(DataError, match="must first be written as a text of its own"):
        result(row)


@pytest.mark.parametrize("texts", [["2+2?", "4."], '["2+2?", "4."]'])
def test_texts_without_a_role_are_those_of_user_and_assistant_in_turn(texts):
    for row, columns in (({"conversations": texts}, {}), ({"data": texts}, {"messages": "data"})):
        assert said(row, columns=columns) == PAIR
        assert read(row, columns=columns).notices == {"alternating_texts"}


def test_a_message_as_json_beside_texts_is_not_taken_for_one():
    assert "is not JSON" in result({"conversations": ["2+2?", '{"role": ']}).reason


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
def test_an_object_of_lists_is_a_list_of_messages(key, role, content, wording):
    turns = {role: ["user", "assistant"], content: ["2+2?", "4."], "weight": [None, 0.5]}
    (_, answer) = read({key: turns}).messages
    assert said({key: turns}) == PAIR and answer.weight == 0.5
    wording(result({key: turns | {content: ["2+2?"]}}).reason)
