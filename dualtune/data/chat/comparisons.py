"""Rows with two answers to a question, as pairs of a chosen and a rejected example.

A row may say which answer is better by a verdict. The same number says opposite things in different data sets, so a
number is read by the name of its column alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dualtune.data.chat.conversations import Message, RowReading, read_history, read_messages, text_of
from dualtune.data.chat.examples import (
    EQUAL_PAIR,
    Example,
    answer_in,
    are_strings,
    chat_example,
    is_string,
    not_trained_on,
    num_shared,
    pair_example,
    trained_from,
    with_conversations,
)
from dualtune.data.chat.row_values import EQUAL_SCORES, REVERSED_SCORES, as_object, needed, shown
from dualtune.data.sources.rows import RawRow, RowError, TieError

ANSWERS = ("chosen", "rejected")
_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")  # of a conversation as one text, as in HH-RLHF
A, B, TIE = "answer_a", "answer_b", ""  # what a verdict may be: the key of the better answer, or neither
_WORDS = {
    **dict.fromkeys(("a", "answer_a", "first"), A), **dict.fromkeys(("b", "answer_b", "second"), B),
    **dict.fromkeys(("tie", "equal", "both", "neither"), TIE),
}  # fmt: skip
_MODELS = {"model_a": A, "model_b": B, **dict.fromkeys(("tie", "tie (bothbad)", "tie (both bad)"), TIE)}


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout of comparisons: the column of each key, and the meaning of its verdict."""

    columns: Mapping[str, tuple[str, ...]]
    verdict: Callable[[Any], str]
    keys: tuple[str, ...] = ("prompt", A, B, "better")

    @property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        return {"prompt": ("question", "instruction"), **self.columns}


def _named(meanings: Mapping[str, str]) -> Callable[[Any], str]:
    """Return a verdict that is one of these values."""

    def verdict(value: Any) -> str:
        meaning = meanings.get(str(value).strip().lower().removesuffix(".0"))
        if meaning is None:
            raise RowError(f"better: got {shown(value)}, allowed here: {', '.join(meanings)}")
        return meaning

    return verdict


def _signed(value: Any) -> str:
    """Return the verdict of a strength: below zero the first answer is better, above it the second."""
    try:
        strength = float(value)
    except (TypeError, ValueError) as error:
        raise RowError(f"better: got {shown(value)}, a number is needed, below 0 if the first is better") from error
    if strength != strength:
        raise RowError("better: got NaN, a number is needed, below 0 if the first is better")
    return TIE if strength == 0 else A if strength < 0 else B


LAYOUTS = (
    Layout({}, _named(_WORDS)),
    Layout(  # stanfordnlp/SHP
        {"prompt": ("history",), A: ("human_ref_A",), B: ("human_ref_B",), "better": ("labels",),
         "score_a": ("score_A",), "score_b": ("score_B",)},
        _named({"1": A, "0": B}),
    ),
    Layout(  # nvidia/HelpSteer2, preference/
        {A: ("response_1",), B: ("response_2",), "better": ("preference_strength",)}, _signed
    ),
    Layout(  # nvidia/HelpSteer3
        {"prompt": ("context",), A: ("response1",), B: ("response2",), "better": ("overall_preference",)}, _signed
    ),
    Layout(  # HelpSteer3's verdict beside HelpSteer2's names
        {A: ("response_1",), B: ("response_2",), "better": ("overall_preference",)}, _signed
    ),
    Layout(  # tatsu-lab/alpaca_farm, human_preference
        {A: ("output_1",), B: ("output_2",), "better": ("preference",)}, _named({"1": A, "2": B, "1.5": TIE})
    ),
    Layout(  # PKU-Alignment/PKU-SafeRLHF
        {A: ("response_0",), B: ("response_1",), "better": ("better_response_id",)}, _named({"0": A, "1": B})
    ),
    Layout(  # lmsys/chatbot_arena_conversations: whole conversations
        {A: ("conversation_a",), B: ("conversation_b",), "better": ("winner",)}, _named(_MODELS), (A, B, "better")
    ),
)  # fmt: skip


def comparison(layout: Layout) -> Callable[[RawRow, Mapping[str, Any], RowReading], Example]:
    """Return the conversion of rows with two answers and a verdict."""

    def convert(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> Example:
        better = layout.verdict(fields["better"])
        if better == TIE:
            raise TieError("neither answer is better")
        pair = [("chosen", better), ("rejected", B if better == A else A)]
        scores = {A: "score_a", B: "score_b"}
        named = {key: value for key, value in fields.items() if key not in (A, B, "better", *scores.values())}
        for key, answer in pair[:1] if "rejected" in reading.columns else pair:  # left out, for sft
            named[key] = fields[answer]
            if scores[answer] in fields:
                named[f"score_{key}"] = fields[scores[answer]]
        return preference(row, named, reading)

    return convert


def preference(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> Example:
    fields = with_conversations(_without_request(fields), [key for key in ANSWERS if key in fields], reading)
    fields = with_conversations(fields, ("prompt",), reading)
    if texts := _transcripts(fields):
        others = {key: value for key, value in fields.items() if key != "prompt"}
        spoken = {key: _spoken(text) for key, text in texts.items()}
        examples = _with_texts(_compared(row, {**others, **spoken}, reading), texts, fields)
    else:
        examples = _compared(row, fields, reading)
    if len(examples) == 1:  # data.columns leaves out 'rejected'
        return examples[0]
    chosen, rejected = examples
    if chosen == rejected:
        raise RowError(EQUAL_PAIR)
    _compare_scores(fields, reading)
    return replace(chosen, rejected=rejected)


def _without_request(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields with the question in place of an `input` that holds it as a request, as OpenAI's rows do."""
    if not isinstance(fields.get("input"), dict):
        return fields
    if others := [key for key in ("prompt", "messages") if key in fields]:
        raise RowError(f"input: holds the messages of a prompt, and '{others[0]}' does too; keep one of them")
    request = as_object(fields["input"], "input")
    columns = {"prompt": needed(request, "messages", "input"), "tools": request.get("tools")}
    others = {key: value for key, value in fields.items() if key != "input"}
    return others | {key: value for key, value in columns.items() if value}


def _compared(row: RawRow, fields: Mapping[str, Any], reading: RowReading) -> list[Example]:
    """Return an example of each answer. Of a pair, what both begin with is not trained on."""
    keys = [key for key in ANSWERS if key in fields]
    if are_strings(fields, *keys) and "messages" not in fields and not isinstance(fields.get("prompt"), list | dict):
        if "prompt" not in fields and "input" not in fields:
            raise RowError("has no 'prompt', which is needed if 'chosen' and 'rejected' are strings")
        prompt = _question(fields, reading)
        examples = [pair_example(row, fields, prompt, prompt, key, reading) for key in keys]
        return [trained_from(len(example.messages) - 1, example) for example in examples]
    whole = {key: _whole(fields, key, reading) for key in keys}
    key, prompt = _prompt_messages(fields, reading)
    if key == "messages" and prompt[-1].role == "assistant" and prompt[-1] not in [m[-1] for m in whole.values()]:
        raise RowError("messages: ends with an answer that is neither that of 'chosen' nor of 'rejected'; remove one")
    shared = _num_both_begin_with(*whole.values()) if len(whole) == 2 else 0
    return [
        chat_example(
            row,
            fields,
            not_trained_on(messages[:shared]) + messages[shared:],
            reading,
            f"{key} with its prompt: message",
        )
        for key, messages in whole.items()
    ]


def _num_both_begin_with(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> int:
    shared = num_shared(chosen, rejected)
    if shared == len(chosen) == len(rejected):
        raise RowError(EQUAL_PAIR)
    if shared in (len(chosen), len(rejected)):
        short, long = ANSWERS if shared == len(chosen) else ANSWERS[::-1]
        raise RowError(f"{long}: continues after the whole of '{short}', so there is nothing to compare it with")
    roles = {message.role for message in chosen[:shared]}
    if "user" not in roles and "user" in (chosen[shared].role, rejected[shared].role):
        raise RowError("'chosen' and 'rejected' must answer the same question: they begin with different ones")
    return shared


def _whole(fields: Mapping[str, Any], key: str, reading: RowReading) -> tuple[Message, ...]:
    """Return the whole conversation. The value holds only what follows the prompt, or the messages before it too."""
    if is_string(fields[key]):
        messages = (Message("assistant", answer_in(fields, key, reading)),)
    else:
        messages = read_messages(fields[key], key, reading, f"{key}: message")
    if messages[-1].role != "assistant":
        raise RowError(f"{key}: must end with an assistant message, got a {messages[-1].role} message")
    prompt_key, prompt = _prompt_messages(fields, reading)
    if prompt_key == "messages" and prompt[-1].role == "assistant":  # one of the two conversations, once more
        prompt = prompt[:-1]
    contents = {(message.role, message.content.strip()) for message in messages}
    if messages[0].role in ("assistant", "tool"):
        messages = prompt + messages
    elif any((message.role, message.content.strip()) not in contents for message in prompt):
        raise RowError(f"{key}: is a whole conversation, but does not contain the messages of '{prompt_key}'")
    if "history" in fields:
        messages = read_history(fields["history"], reading) + messages
    return messages


def _prompt_messages(fields: Mapping[str, Any], reading: RowReading) -> tuple[str, tuple[Message, ...]]:
    """Return the key that holds the prompt of a preference, and its messages."""
    prompt: tuple[Message, ...] = ()
    if is_string(fields.get("prompt", "")) and ("prompt" in fields or "input" in fields):
        prompt = (Message("user", _question(fields, reading)),)
    elif "prompt" in fields:
        prompt = read_messages(fields["prompt"], "prompt", reading, "prompt: message")
    if "messages" not in fields:
        return "prompt", prompt
    messages = read_messages(fields["messages"], "messages", reading, "messages: message")
    if any(message not in messages for message in prompt):
        raise RowError("messages: does not contain the messages of 'prompt'; keep one of them")
    return "messages", messages


def _question(fields: Mapping[str, Any], reading: RowReading) -> str:
    """Return the prompt, with what it is about after it."""
    return "\n\n".join(text_of(fields[key], key, reading) for key in ("prompt", "input") if key in fields)


def _transcripts(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the conversations if each is one text, whose beginning may be in `prompt`."""
    prompt, told = fields.get("prompt", ""), {key: fields[key] for key in ANSWERS if key in fields}
    if "messages" in fields or "input" in fields or not all(isinstance(text, str) for text in (prompt, *told.values())):
        return {}
    texts = {key: f"{prompt}{text}" for key, text in told.items()}
    return texts if all(_SPEAKER.match(text) for text in texts.values()) else {}


def _with_texts(examples: list[Example], texts: Mapping[str, str], fields: Mapping[str, Any]) -> list[Example]:
    """Return the examples with the texts as their plain form, if these differ in nothing but the last answer."""
    prompts = {text[: [*_SPEAKER.finditer(text)][-1].end()] for text in texts.values()}
    if len(prompts) > 1 or "system" in fields or "history" in fields:
        return examples
    (prompt,) = prompts
    return [
        replace(example, prompt=prompt, completion=text.removeprefix(prompt))
        for example, text in zip(examples, texts.values(), strict=True)
    ]


def _spoken(text: str) -> list[dict[str, str]]:
    """Return the messages of a conversation that is one text: "Human: … Assistant: …"."""
    marks = list(_SPEAKER.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [{"role": mark[1], "content": text[mark.end() : end].strip()} for mark, end in zip(marks, ends, strict=True)]


def _compare_scores(fields: Mapping[str, Any], reading: RowReading) -> None:
    """Note if a row has scores by which the chosen answer is not the better one."""
    scores = [_score(fields[key], key) for key in ("score_chosen", "score_rejected") if key in fields]
    if len(scores) == 2 and scores[0] <= scores[1]:
        reading.notices.add(EQUAL_SCORES if scores[0] == scores[1] else REVERSED_SCORES)


def _score(value: Any, key: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise RowError(
            f"{key}: got {shown(value)}, a number is needed; data.columns: {{{key}: null}} leaves it out"
        ) from error
