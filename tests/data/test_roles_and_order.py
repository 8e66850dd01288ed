"""Roles in any form, turns in any order, and system messages that a template does not write. Expected by hand."""

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import load_config
from dualtune.data.chat.conversations import Message, fold_system
from dualtune.data.chat.examples import Example
from dualtune.data.chat.formats import to_examples
from dualtune.data.preview import ShownDocument, ShownToken, turns_of
from dualtune.data.sources.rows import BadRow, RawRow, RowError
from dualtune.data.tokens.masks import render_example
from dualtune.data.tokens.tokenize import tokenize_rows
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.train.generation.inference import load_tokenizer

ASK, SAY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4."}


def result(*turns, **options):
    (found,) = to_examples([RawRow("f", 1, {"messages": list(turns)})], "auto", {}, **options)
    return found


def read(*turns, **options):
    found = result(*turns, **options)
    assert isinstance(found, Example), found
    return found


def said(*turns, **options):
    return [(message.role, message.content) for message in read(*turns, **options).messages]


# --- roles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "role"), [
    ("User", "user"), ("HUMAN", "user"), (" user ", "user"), ("SYSTEM", "system"), ("GPT", "assistant"),
    ("Assistant", "assistant"), ("ai", "assistant"), ("AI", "assistant"), ("bot", "assistant"), ("Model", "assistant"),
    ("tool-response", "tool"), ("Tool Response", "tool"),
])  # fmt: skip
def test_a_role_may_have_any_case_and_any_mark_between_its_words(name, role):
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    before = {"system": [], "user": []}.get(role, [ASK, call] if role == "tool" else [ASK])
    after = [ASK, SAY] if role == "system" else [] if role == "assistant" else [SAY]
    messages = read(*before, {"role": name, "content": "x"}, *after).messages
    assert messages[len(before)] == Message(role, "x")


def test_names_of_one_s_own_are_mapped_and_come_before_the_known_ones():
    turns = [{"from": "Critic", "value": "2+2?"}, {"from": "bot", "value": "4."}]
    assert isinstance(result(*turns), BadRow)
    assert said(*turns, roles={"critic": "user"}) == [("user", "2+2?"), ("assistant", "4.")]
    assert said(*turns, roles={"Critic": "assistant", "bot": "user"}) == [("assistant", "2+2?"), ("user", "4.")]


def test_roles_have_the_roles_of_a_conversation_as_values():
    config = {"model": {"name": "m"}, "data": {"train": "t", "roles": {"critic": "usr"}}}
    with pytest.raises(ConfigError, match=r"data\.roles\.critic: got 'usr', allowed: system, user, assistant, tool"):
        load_config(config)


# --- order -----------------------------------------------------------------------------------------------------------


def test_turns_of_a_role_in_a_row_are_joined_and_noticed():
    two = [ASK, ASK | {"content": "And 3+3?"}, SAY, SAY | {"content": "6."}]
    assert said(*two) == [("user", "2+2?\n\nAnd 3+3?"), ("assistant", "4.\n\n6.")]
    assert read(*two).notices == {"joined_turns"}
    assert said(*two, consecutive="keep") == [(turn["role"], turn["content"]) for turn in two]
    assert read(*two, consecutive="keep").notices == {"kept_turns"}
    refused = result(*two, consecutive="refuse")
    assert refused.reason.startswith("message 2: the second user message in a row; set data.consecutive to join or")
    assert read(ASK, SAY, ASK, SAY).notices == frozenset()


@pytest.mark.parametrize("second", [{"weight": 0.5}, {"train": False}, {"reasoning_content": "Hm."}])
def test_turns_stay_apart_where_joining_them_would_lose_something(second):
    example = read(ASK, SAY, SAY | second)
    assert [message.role for message in example.messages] == ["user", "assistant", "assistant"]
    assert example.notices == {"kept_turns"}


def test_what_both_turns_have_is_kept_where_they_are_joined():
    call = {"name": "f", "arguments": {}}
    (_, turn) = read(
        ASK, SAY | {"weight": 0.5, "thinking": "Hm."}, SAY | {"weight": 0.5, "tool_calls": [call]}
    ).messages
    assert (turn.content, turn.weight, turn.extra["thinking"]) == ("4.\n\n4.", 0.5, "Hm.")
    assert turn.extra["tool_calls"] == [{"type": "function", "function": call}]


def test_an_answer_may_follow_calls_without_a_result_and_is_a_turn_of_its_own():
    called = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    example = read(ASK, called, SAY, consecutive="refuse")
    assert [message.content for message in example.messages] == ["2+2?", "", "4."]
    assert example.notices == frozenset()


def test_results_may_have_ids_where_the_calls_have_none():
    called = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    example = read(ASK, called, {"role": "tool", "content": "4", "tool_call_id": "a"}, SAY)
    assert example.messages[2].extra == {"tool_call_id": "a"}


@pytest.mark.parametrize("mark", [{"weight": 1}, {"weight": 1.0}, {"train": True}, {"weight": 0}, {"weight": None}])
def test_any_message_may_have_the_weight_that_is_the_default(mark):
    assert said(ASK | mark, SAY) == [("user", "2+2?"), ("assistant", "4.")]


def test_a_conversation_may_begin_with_the_assistant_where_the_template_renders_it(with_template):
    example = read(SAY, ASK, SAY)
    tokenizer = with_template("{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
                              "{% if add_generation_prompt %}[assistant]{% endif %}")  # fmt: skip
    rendered = render_example(example, tokenizer, "assistant")
    assert [rendered.text[start:end] for start, end in rendered.ranges] == ["4.</s>", "4.</s>"]
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}x"
    (bad,) = tokenize_rows([example], with_template(strict), "assistant", 100)
    assert bad.reason == "the chat template refuses this conversation: user first"


# --- system ----------------------------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be brief."}
BODY = (
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + BODY
WRITES = "{% if messages[0].role == 'system' %}{{ messages[0].content | upper }}{% endif %}" + BODY
FOLDED = "<user>Be brief.\n\n2+2?</s><assistant>4.</s>"


@pytest.mark.parametrize("template", [BODY, REFUSES], ids=["drops", "refuses"])
def test_a_system_message_that_the_template_does_not_write_stands_before_the_question(with_template, template):
    tokenizer = with_template(template)
    example = read(SYSTEM, ASK, SAY)
    rendered = render_example(example, tokenizer, "assistant")
    assert rendered.text == FOLDED
    assert [rendered.text[start:end] for start, end in rendered.ranges] == ["4.</s>"]
    assert rendered.notices == {"folded_system"}
    (row,) = tokenize_rows([example], tokenizer, "assistant", 100)
    prompt = tokenizer.encode_chat(example.messages[:-1])  # an answer is asked for as it is learned
    assert np.array_equal(prompt, row.documents[0][0][: len(prompt)])
    assert tokenizer.decode_all(prompt.tolist()).endswith("<user>Be brief.\n\n2+2?</s><assistant>")


def test_the_page_of_a_preview_shows_such_a_message_in_the_question(with_template):
    tokenizer, example = with_template(REFUSES), read(SYSTEM, ASK, SAY)
    (row,) = tokenize_rows([example], tokenizer, "assistant", 100)
    tokens = [ShownToken(id, tokenizer.decode_all([id]), False) for id in row.documents[0][0].tolist()]
    shown = ShownDocument("f:1", tokens)
    assert [turn.role for turn in turns_of(shown, example, tokenizer)] == ["user", "assistant"]


@pytest.mark.parametrize(("template", "reason"), [
    (BODY, "the chat template leaves out a system message. data.system: fold"),
    (REFUSES, "the chat template refuses this conversation: no system role. data.system: fold"),
])  # fmt: skip
def test_such_a_message_may_be_refused(tiny_llama, tmp_path, template, reason):
    (tmp_path / "t.jinja").write_text(template)
    tokenizer = Tokenizer(tiny_llama, str(tmp_path / "t.jinja"), system="refuse")
    (bad,) = tokenize_rows([read(SYSTEM, ASK, SAY)], tokenizer, "assistant", 100)
    assert bad.reason.startswith(reason)


def test_an_evaluation_has_the_tokenizer_that_its_config_asks_for(tiny_llama, tmp_path):
    (tmp_path / "t.jinja").write_text(REFUSES)
    messages = read(SYSTEM, ASK, SAY).messages[:-1]
    for system in ("fold", "refuse"):
        tokenizer, _ = load_tokenizer(tiny_llama, None, None, str(tmp_path / "t.jinja"), system=system)
        if system == "fold":
            assert len(tokenizer.encode_chat(messages))
        else:
            with pytest.raises(RowError, match=r"data\.system: fold"):
                tokenizer.encode_chat(messages)


def test_a_system_message_that_the_template_writes_in_any_form_stays(with_template):
    rendered = render_example(read(SYSTEM, ASK, SAY), with_template(WRITES), "assistant")
    assert rendered.text == "BE BRIEF.<user>2+2?</s><assistant>4.</s>"
    assert rendered.notices == frozenset()


def test_every_system_message_goes_to_the_question_after_it():
    turns = [("system", "a"), ("user", "b"), ("assistant", "c"), ("system", "d"), ("system", "e"), ("user", "f")]
    folded = fold_system([Message(*turn) for turn in turns])
    assert [(m.role, m.content) for m in folded] == [("user", "a\n\nb"), ("assistant", "c"), ("user", "d\n\ne\n\nf")]
    without_question = [Message("system", "a"), Message("assistant", "b")]
    assert fold_system(without_question) is without_question
