"""Messages: the ways to write one, what a chat template gets, and what no conversation may be. Expected by hand."""

import json

import pytest

from dualtune.data.chat.conversations import ROLES, Message
from dualtune.data.chat.formats import to_examples
from dualtune.data.chat.row_values import strings_in
from dualtune.data.sources.rows import BadRow, RawRow


def user(content, **extra):
    return {"role": "user", "content": content} | extra


def assistant(content, **extra):
    return {"role": "assistant", "content": content} | extra


def tool(content, **extra):
    return {"role": "tool", "content": content} | extra


def read(*turns, key="messages"):
    """The messages of a row, or why it is a bad one."""
    (result,) = to_examples([RawRow("f", 1, {key: list(turns)})], "auto", {})
    return result.reason if isinstance(result, BadRow) else result.messages


ASK, SAY = user("2+2?"), assistant("4.")


@pytest.mark.parametrize(("name", "role"), [
    ("developer", "system"), ("human", "user"), ("gpt", "assistant"), ("chatgpt", "assistant"), ("bing", "assistant"),
    ("bard", "assistant"), ("model", "assistant"),
])  # fmt: skip
@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_roles_have_many_names(name, role, key):
    before = [] if role != "assistant" else [{"from": "user", "value": "?"}]
    after = [{"from": "assistant", "value": "!"}] if role == "user" else [{"from": "user", "value": "?"}, SAY]
    turns = [*before, {"from": name, "value": "x"}, *after]
    messages = read(*turns, key=key)
    assert messages[len(before)] == Message(role, "x")


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?", "image_url": None}]
    assert read(user(parts), SAY) == (Message("user", "2+2?"), Message("assistant", "4."))


def test_other_keys_reach_the_template():
    messages = read(user("?", name="Ann", x=None), assistant("!", reasoning_content="Hm."))
    assert [m.as_dict() for m in messages] == [user("?", name="Ann"), assistant("!", reasoning_content="Hm.")]


@pytest.mark.parametrize(("marks", "is_trained"), [
    ({}, True), ({"train": True}, True), ({"train": False}, False), ({"weight": 1}, True), ({"weight": 0}, False),
    ({"weight": 0.0, "train": False}, False), ({"weight": 1, "train": True}, True), ({"train": None}, True),
])  # fmt: skip
def test_train_and_weight_decide_whether_a_turn_is_trained_on(marks, is_trained):
    messages = read(user("?", train=False, weight=0), assistant("!") | marks, ASK, SAY)
    assert [m.train for m in messages if m.role == "assistant"] == [is_trained, True]
    assert all(m.as_dict().keys() == {"role", "content"} for m in messages)


def test_a_turn_that_is_not_learned_may_be_blank():
    messages = read(ASK, {"role": "assistant", "train": False}, ASK, SAY)
    assert messages[1] == Message("assistant", "", train=False)


def test_a_conversation_without_a_learned_turn_is_fine():
    assert read(ASK, assistant("4.", train=False))[1].train is False


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
AS_TEXT = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
FLAT = {"name": "add", "arguments": '{"a": 2}'}
CALLED = Message("assistant", "", extra={"tool_calls": [CALL]})
ROUND = (Message("user", "2+2?"), CALLED, Message("tool", "4"), Message("assistant", "4."))


@pytest.mark.parametrize("turn", [
    assistant(None, tool_calls=[AS_TEXT]), assistant("", tool_calls=[CALL]),
    {"role": "assistant", "tool_calls": [FLAT]}, {"role": "assistant", "tool_calls": json.dumps([FLAT | {"id": None}])},
    assistant(None, function_call=FLAT), {"from": "function_call", "value": json.dumps(FLAT)},
    {"from": "tool_call", "value": json.dumps([FLAT])}, {"from": "function_call", "value": FLAT},
])  # fmt: skip
@pytest.mark.parametrize("answer", [
    tool("4"), tool("4") | {"role": "function"}, tool("4") | {"role": "ipython"}, {"from": "observation", "value": "4"},
    {"from": "tool_response", "value": "4"},
])  # fmt: skip
def test_every_way_to_write_a_tool_call_gives_the_template_the_same(turn, answer):
    assert read(ASK, turn, answer, SAY) == ROUND


@pytest.mark.parametrize("none", ["", None, "{}", {}])
def test_a_call_may_have_no_arguments(none):
    turn = assistant(None, tool_calls=[{"name": "now", "arguments": none}])
    (call,) = read(ASK, turn)[1].extra["tool_calls"]
    assert call == {"type": "function", "function": {"name": "now", "arguments": {}}}


def test_a_call_that_is_written_out_in_the_content_may_be_answered():
    turns = [ASK, assistant('<tool_call>\n{"name": "add"}\n</tool_call>'), tool("4"), SAY]
    assert [message.role for message in read(*turns)] == ["user", "assistant", "tool", "assistant"]


def test_tool_messages_answer_the_calls_of_their_round():
    def calls(*ids):
        return assistant(None, tool_calls=[CALL | {"id": id} for id in ids])

    first = [ASK, calls("a", "b"), tool("4", tool_call_id="b"), tool("4", tool_call_id="a"), SAY]
    second = [ASK, calls("c"), tool("4", tool_call_id="c"), SAY]
    messages = read(*first, *second)
    assert [m.extra["tool_call_id"] for m in messages if m.role == "tool"] == ["b", "a", "c"]
    assert [call["id"] for call in messages[1].extra["tool_calls"]] == ["a", "b"]
    second[2] = tool("4", tool_call_id="a")
    assert read(*first, *second) == "message 8: tool_call_id: got 'a', the calls before it have: c"


# --- what no conversation may be -------------------------------------------------------------------------------------


BLANK = "the assistant's answer is blank; fill it in, or set train: false"
BAD = [
    ([], "messages: is empty, at least one message is needed"),
    ([ASK, 7], "message 2: got int, an object is needed"),
    ([ASK, {"content": "x"}], "message 2: has no 'role'; its keys are: content"),
    ([ASK, {"from": "gpt"}], "message 2: has no 'value'; its keys are: from"),
    ([user("x") | {"role": "critic"}], f"message 1: role: got 'critic', allowed: {', '.join(ROLES)}. data.roles: "),
    ([user("x") | {"role": ["user"]}], "message 1: role: got ['user'], allowed: "),
    ([{"from": "b\ud800\n", "value": "x"}], "message 1: from: got 'b\\ud800\\n', allowed: "),
    ([user(None), SAY], "message 1: has no 'content'; its keys are: role"),
    ([user({"x": 4}), SAY], "message 1: content: got dict, a string is needed"),
    ([user([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": "x"}]), SAY],
     "message 1: content: part 2: got the type 'image_url', allowed: 'text'"),
    ([ASK, assistant([{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 2}}])],
     "message 2: content: part 1: got the type 'tool_use', allowed: 'text'; write it into the tool_calls of the"),
    ([user([{"type": "tool_result", "tool_use_id": "c1", "content": "4"}]), SAY],
     "message 1: content: part 1: got the type 'tool_result', allowed: 'text'; write it as a message of its own, with "
     "role: tool"),
    ([user([{"type": "text"}]), SAY], "message 1: content: part 1: got NoneType, a string is needed"),
    ([ASK, assistant(" \n")], f"message 2: {BLANK}"),
    ([ASK, assistant([])], f"message 2: {BLANK}"),
    ([ASK, {"role": "assistant"}], "message 2: has no 'content'; its keys are: role"),
    ([ASK], "has no assistant message, so there is nothing to train on"),
    ([ASK, assistant("!", train=1)], "message 2: train: got 1, allowed: true or false"),
    ([ASK, assistant("!", weight=-0.5)], "message 2: weight: got -0.5, allowed: a number from 0 to 1000"),
    ([ASK, assistant("!", weight=1e300)], "message 2: weight: got 1e+300, allowed: a number from 0 to 1000"),
    ([ASK, assistant("!", weight=float("nan"))], "message 2: weight: got nan, allowed: a number from 0 to 1000"),
    ([ASK, assistant("!", weight="0.5")], "message 2: weight: got '0.5', allowed: a number from 0 to 1000"),
    ([ASK, assistant("!", weight=True)], "message 2: weight: got True, allowed: a number from 0 to 1000"),
    ([ASK, assistant("!", weight=0.5, train=False)], "message 2: train and weight contradict each other; keep one"),
    ([ASK, assistant("!", weight=1, train=False)], "message 2: train and weight contradict each other; keep one"),
    ([user("?", weight=0.5), SAY], "message 1: weight: got 0.5, allowed in a user message: 0 or 1"),
    ([ASK, SAY, tool("x")],
     "message 3: a tool message must follow an assistant message with tool_calls or another tool message"),
    ([ASK, assistant("", tool_calls=[CALL]), ASK, tool("x")], "message 4: a tool message must follow"),
    ([user("?", tool_calls=[CALL]), SAY],
     "message 1: tool_calls: allowed only in an assistant message, this is a user message"),
    ([ASK, assistant("", tool_calls=CALL)], "message 2: tool_calls: got dict, a list is needed"),
    ([ASK, assistant("", tool_calls=[CALL, {"type": "web"}])],
     "message 2: tool call 2: got the type 'web', allowed: 'function'"),
    ([ASK, assistant("", tool_calls=[{"arguments": {}}])], "message 2: tool call 1: has no 'name'; its keys are: "),
    ([ASK, assistant("", tool_calls=[{"name": "add", "parameters": {}}])],
     "message 2: tool call 1: has no 'arguments'; its keys are: name, parameters"),
    ([ASK, assistant("", tool_calls=[{"name": "add", "arguments": "[2]"}])],
     "message 2: tool call 1: arguments: got list, an object is needed"),
    ([ASK, {"from": "function_call", "value": "add(2)"}], "message 2: value: got a string that is not JSON: "),
]  # fmt: skip


@pytest.mark.parametrize(("turns", "start"), BAD)
def test_bad_conversations_are_refused_with_the_reason(turns, start):
    got = read(*turns)
    assert isinstance(got, str) and got.startswith(start)
    assert got.isprintable()


def test_the_strings_of_a_value_are_its_keys_too():
    """A control token or a lone surrogate in the name of an argument is in the text of the row as well."""
    assert [*strings_in({"a": ["b", {"c": 1}], "d": ("e", None)})] == ["a", "b", "c", "d", "e"]
