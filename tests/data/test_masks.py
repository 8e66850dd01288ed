"""Which characters are targets. The oracle is text: written by hand, or built by a few lines of Python a template."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualtune.data.chat.conversations import Message
from dualtune.data.chat.examples import Example
from dualtune.data.sources.rows import RowError
from dualtune.data.tokens.masks import render_example
from dualtune.data.tokens.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "templates"
THOUGHTS = "<think>\n\n</think>\n\n"
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)


@pytest.fixture(scope="session")
def tokenizers(tiny_llama):
    """A tokenizer for each golden template; its bos and eos are <s> and </s>."""
    return {path.stem: Tokenizer(tiny_llama, str(path)) for path in GOLDEN.glob("*.jinja")}


def turn(role, content, train=True, **extra):
    return Message(role=role, content=content, train=train, extra=extra)


def chat(*turns, tools=()):
    return Example(path="f", line=1, messages=turns, tools=tools)


def called(name, content="", **arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return turn("assistant", content, tool_calls=[call])


def targets(example, tokenizer, loss_on="assistant") -> list[str]:
    rendered = render_example(example, tokenizer, loss_on)
    edges = [edge for target in rendered.ranges for edge in target]
    assert edges == sorted(edges) and all(start < end for start, end in rendered.ranges)
    assert (rendered.path, rendered.line) == (example.path, example.line)
    return [rendered.text[start:end] for start, end in rendered.ranges]


SUMS = chat(turn("system", "Be brief."), turn("user", "What is 2+2?"), turn("assistant", "It is 4."),
            turn("user", "And 3+3?"), turn("assistant", "6, of course."))  # fmt: skip

# --- golden cases: template, its whole text, what of it is a target ---------------------------------------------------

CHATML = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n"
    "<|im_start|>assistant\nIt is 4.<|im_end|>\n<|im_start|>user\nAnd 3+3?<|im_end|>\n"
    "<|im_start|>assistant\n6, of course.<|im_end|>\n"
)
TEXTS = {
    "chatml": (CHATML, ["It is 4.<|im_end|>", "6, of course.<|im_end|>"]),
    "chatml_with_markers": (CHATML, ["It is 4.<|im_end|>", "6, of course.<|im_end|>"]),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhat is 2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nIt is 4.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd 3+3?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n6, of course.<|eot_id|>",
        ["It is 4.<|eot_id|>", "6, of course.<|eot_id|>"],
    ),
    "mistral_v03": (
        "<s>[INST] What is 2+2?[/INST] It is 4.</s>[INST] Be brief.\n\nAnd 3+3?[/INST] 6, of course.</s>",
        ["It is 4.</s>", " 6, of course.</s>"],  # the first by its sentinel, so without the space before it
    ),
    "no_end_token": (
        "System: Be brief.\nUser: What is 2+2?\nAssistant: It is 4.\nUser: And 3+3?\nAssistant: 6, of course.\n",
        ["It is 4.", "6, of course."],
    ),
    "qwen3_like": (
        CHATML.replace("6, of", "<think>\n\n</think>\n\n6, of"),
        ["It is 4.<|im_end|>", "<think>\n\n</think>\n\n6, of course.<|im_end|>"],
    ),
    "zephyr_like": (
        "<|system|>\nBe brief.</s>\n<|user|>\nWhat is 2+2?</s>\n<|assistant|>\nIt is 4.</s>\n"
        "<|user|>\nAnd 3+3?</s>\n<|assistant|>\n6, of course.</s>\n",
        ["It is 4.</s>", "6, of course.</s>"],
    ),
}  # fmt: skip


def test_every_golden_template_has_its_case():
    assert TEXTS.keys() == {path.stem for path in GOLDEN.glob("*.jinja")}


@pytest.mark.parametrize("name", TEXTS)
def test_the_answers_and_their_ends_are_learned(tokenizers, name):
    text, answers = TEXTS[name]
    rendered = render_example(SUMS, tokenizers[name], "assistant")
    assert rendered.text == text and rendered.is_chat
    assert targets(SUMS, tokenizers[name]) == answers
    assert targets(SUMS, tokenizers[name], "last") == answers[1:]
    assert targets(SUMS, tokenizers[name], "all") == [text.rstrip("\n")]


def test_smollm2_s_answers_and_their_ends_are_learned(shared):
    tokenizer = Tokenizer(shared("tokenizers/smollm2"))
    assert render_example(SUMS, tokenizer, "assistant").text == CHATML
    assert targets(SUMS, tokenizer) == TEXTS["chatml"][1]


@pytest.mark.parametrize("name", TEXTS)
def test_a_turn_that_shall_not_be_learned_is_left_out(tokenizers, name):
    text, answers = TEXTS[name]
    example = chat(*SUMS.messages[:2], turn("assistant", "It is 4.", train=False), *SUMS.messages[3:])
    assert targets(example, tokenizers[name]) == answers[1:]
    assert targets(example, tokenizers[name], "last") == answers[1:]
    before, behind = text.rstrip("\n").split(answers[0], 1)
    assert targets(example, tokenizers[name], "all") == [before, behind]


@pytest.mark.parametrize("name", TEXTS)
def test_an_unlearned_last_turn_leaves_nothing_to_last(tokenizers, name):
    text, answers = TEXTS[name]
    example = chat(*SUMS.messages[:4], turn("assistant", "6, of course.", train=False))
    assert targets(example, tokenizers[name], "last") == []
    assert targets(example, tokenizers[name]) == answers[:1]
    whole = targets(example, tokenizers[name], "all")
    assert whole[0] + answers[1] == text.rstrip("\n") and not "".join(whole[1:]).strip()


# --- tools -----------------------------------------------------------------------------------------------------------

ADDED = chat(turn("user", "2+2?"), called("add", a=2, b=2), turn("tool", "4"), turn("assistant", "It is 4."),
             turn("user", "3+3?"), called("add", "Let me see.", a=3, b=3), turn("tool", "6"),
             turn("assistant", "6.", reasoning_content="So it is six."), tools=TOOLS)  # fmt: skip


def test_tool_calls_are_learned_and_their_answers_are_not(tokenizers):
    """Both calls stand in the text without the empty thoughts that they have where they come last."""
    assert targets(ADDED, tokenizers["qwen3_like"]) == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>',
        "It is 4.<|im_end|>",
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 3}}\n</tool_call><|im_end|>',
        "<think>\nSo it is six.\n</think>\n\n6.<|im_end|>",
    ]


def test_a_template_that_knows_no_tools_is_refused(tokenizers):
    with pytest.raises(RowError, match="does not write the tools \\('add' is missing\\)"):
        targets(ADDED, tokenizers["chatml"])
    for loss_on in ("assistant", "all"):
        with pytest.raises(RowError, match="does not write the tool calls \\('add' is missing\\)"):
            targets(chat(*ADDED.messages), tokenizers["chatml"], loss_on)


# --- turns that are hard to find -------------------------------------------------------------------------------------


def test_a_turn_that_no_method_finds_is_refused_with_what_to_do(with_template):
    tokenizer = with_template(
        "{% for m in messages %}{{ m.role }}: {{ m.content if loop.last else m.content[:4] }}\n{% endfor %}"
    )
    with pytest.raises(RowError, match=r"message 3: .*loss_on to last or all, use another data.template, or add"):
        targets(SUMS, tokenizer)
    assert targets(SUMS, tokenizer, "last") == ["6, of course."]
    assert len(targets(SUMS, tokenizer, "all")) == 1


def test_a_part_of_an_answer_is_not_the_answer(with_template):
    tokenizer = with_template(
        "{% for m in messages %}<|im_start|>{{ m.content if loop.last else m.content[-4:] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    with pytest.raises(RowError, match="message 2"):
        targets(chat(turn("user", "Hi"), turn("assistant", "6, of course."), turn("user", "Bye")), tokenizer)


def test_whitespace_that_the_template_trims_does_not_move_the_end(tokenizers):
    spaced = chat(turn("user", "Hi"), turn("assistant", "Ho" + " " * 100), turn("user", "Bye"))
    assert targets(spaced, tokenizers["llama3"]) == ["Ho<|eot_id|>"]


def test_a_sentinel_is_found_where_the_template_trims_and_rewrites(with_template):
    tokenizer = with_template(
        "{{ messages | length }} messages\n{% for m in messages %}[{{ m.content | trim }}]\n{% endfor %}"
    )
    example = chat(turn("user", "Hi"), turn("assistant", " \ue0000\ue001 "), turn("user", "Bye"))
    assert targets(example, tokenizer) == ["\ue0000\ue001"]


def test_a_turn_is_not_found_by_content_that_stands_twice(with_template):
    tokenizer = with_template(
        "{{ messages | length }}{% for m in messages %}[{{ m.content }}{{ m.content }}]{% endfor %}"
    )
    with pytest.raises(RowError, match="message 2"):
        targets(chat(turn("user", "Hi"), turn("assistant", "Ho"), turn("user", "Bye")), tokenizer)


def test_a_template_may_refuse_the_beginning_of_a_conversation(with_template):
    tokenizer = with_template(
        "{% if messages | length < 4 %}{{ raise_exception('too short') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    )
    assert targets(chat(*SUMS.messages[:4]), tokenizer) == ["It is 4."]


def test_a_template_that_refuses_the_whole_conversation_is_the_row_s_error(tokenizers):
    with pytest.raises(RowError, match="refuses this conversation: After the optional system message"):
        targets(chat(turn("user", "a"), turn("user", "b"), turn("assistant", "c")), tokenizers["mistral_v03"])


def test_markers_that_are_not_as_many_as_the_answers_are_refused(with_template):
    tokenizer = with_template("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
    with pytest.raises(RowError, match="marks 5 turns as generated, but the conversation has 2 assistant messages"):
        targets(SUMS, tokenizer)


# --- plain texts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss_on", "expected"), [("assistant", "four"), ("last", "four"), ("all", "2+2 is four")])
def test_without_a_template_the_completion_is_learned(tiny_llama, loss_on, expected):
    example = Example(path="f", line=1, messages=SUMS.messages, prompt="2+2 is ", completion="four")
    bare = Tokenizer(tiny_llama, "none")
    assert targets(example, bare, loss_on) == [expected]
    assert not render_example(example, bare, loss_on).is_chat


def test_a_plain_text_is_learned_whole_with_a_template_too(tokenizers):
    example = Example(path="f", line=1, prompt="", completion=" a text\n", is_text=True)
    assert targets(example, tokenizers["chatml"]) == [" a text\n"]


def test_a_conversation_needs_a_template(tiny_llama):
    with pytest.raises(RowError, match=r"no chat template, and a conversation needs one. Set data.template"):
        targets(SUMS, Tokenizer(tiny_llama, "none"))


# --- any conversation ------------------------------------------------------------------------------------------------

MARKS = ("<|", "|>", "[INST]", "[/INST]", "</s>", "<s>")
PIECES = ["\n", " ", "\n\n", "\t", "\u2028", '"', "'", "<b>", "{{ x }}", "{% if %}", "assistant\n", "User: ",
          "</think>", "<think>\n", "\ue0000\ue001", "é", "語", "\N{FAMILY}", "[INST", "a"]  # fmt: skip
contents = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=6).map("".join).filter(
    lambda content: not any(mark in content for mark in MARKS)
)  # fmt: skip


@st.composite
def conversations(draw):
    """An optional system message, then user and assistant by turns; the end may be a question."""
    system = [("system", draw(contents))] if draw(st.booleans()) else []
    number = draw(st.integers(2, 6))
    return system + [("assistant" if i % 2 else "user", draw(contents)) for i in range(number)]


def chatml(turns):
    return [(f"<|im_start|>{role}\n", f"{content}<|im_end|>", "\n") for role, content in turns]


def llama3(turns):
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    pieces = [(head.format(role), f"{content.strip()}<|eot_id|>", "") for role, content in turns]
    return [("<s>" + pieces[0][0], *pieces[0][1:]), *pieces[1:]]


def no_end_token(turns):
    return [(f"{role.capitalize()}: ", content, "\n") for role, content in turns]


def zephyr_like(turns):
    return [(f"<|{role}|>\n", f"{content}</s>", "\n") for role, content in turns]


def qwen3_like(turns):
    pieces = chatml(turns)
    if turns[-1][0] == "assistant":
        pieces[-1] = (pieces[-1][0], THOUGHTS + pieces[-1][1], "\n")
    return pieces


def mistral_v03(turns):
    system = turns[0][1] + "\n\n" if turns[0][0] == "system" else ""
    last_question = max(i for i, (role, _) in enumerate(turns) if role == "user")
    pieces = []
    for i, (role, content) in enumerate(turns):
        if role == "system":
            pieces.append(("", "", ""))
        elif role == "user":
            pieces.append((f"[INST] {system if i == last_question else ''}{content}[/INST]", "", ""))
        elif system and i < last_question:  # by its sentinel: without the space
            pieces.append((" ", f"{content}</s>", ""))
        else:
            pieces.append(("", f" {content}</s>", ""))
    return [("<s>" + pieces[0][0], *pieces[0][1:]), *pieces[1:]]


# For each message: what stands before it, what of it is a target if it is an answer, what stands behind it.
ORACLES = {
    "chatml": chatml, "chatml_with_markers": chatml, "llama3": llama3, "mistral_v03": mistral_v03,
    "no_end_token": no_end_token, "qwen3_like": qwen3_like, "zephyr_like": zephyr_like,
}  # fmt: skip


@given(turns=conversations())
@pytest.mark.parametrize("name", ORACLES)
def test_exactly_the_answers_of_any_conversation_are_learned(tokenizers, name, turns):
    pieces = ORACLES[name](turns)
    answers = [said for (_, said, _), (role, _) in zip(pieces, turns, strict=True) if role == "assistant"]
    example = chat(*(turn(role, content) for role, content in turns))
    assert render_example(example, tokenizers[name], "assistant").text == "".join(map("".join, pieces))
    assert targets(example, tokenizers[name]) == [answer for answer in answers if answer]
    assert "".join(targets(example, tokenizers[name], "last")) == answers[-1]
