"""The end of a turn is learned and stops an answer, whatever the template's generation prompt is.

The templates are small ones of the kinds in use. What they write is compared with transformers; what of it is a target
is written by hand.
"""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from dualtune.data.chat.conversations import Message
from dualtune.data.chat.examples import Example
from dualtune.data.documents import tokenize
from dualtune.data.tokens.masks import NO_END
from dualtune.data.tokens.stop_tokens import stop_tokens
from dualtune.data.tokens.tokenize import tokenize_rows

END = 4  # <|im_end|>; the eos of the byte tokenizer is </s>, 2
EOS = 2
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)


def chat(*turns, tools=()):
    messages = tuple(Message(role, content, extra=extra) for role, content, extra in turns)
    return Example(path="f", line=1, messages=messages, tools=tools)


CALL = {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]}
TWO = chat(("user", "Hi", {}), ("assistant", "Ho", {}), ("user", "Bye", {}), ("assistant", "So long", {}))
CALLED = chat(("user", "Hi", {}), ("assistant", "", CALL), ("tool", "4", {}), ("assistant", "Four", {}), tools=TOOLS)


def turns(head, body="{{ m.content }}", end="<|im_end|>\n", prompt=None):
    """A template that writes turns of one form."""
    call = "{% for c in m.tool_calls or [] %}[call {{ c.function | tojson }}]{% endfor %}"
    return (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}" + head + body + call + end + "{% endfor %}"
        "{% if add_generation_prompt %}" + (head.replace("{{ m.role }}", "assistant") if prompt is None else prompt)
        + "{% endif %}"
    )  # fmt: skip


HEAD = "<|im_start|>{{ m.role }}\n"
ASSISTANT = "<|im_start|>assistant\n"
LAST = "{% if loop.last %}<|im_end|>{% endif %}"
PROMPTS = {
    "the head": ASSISTANT,
    "none": "",
    "shorter": "<|im_start|>",
    "without its newline": "<|im_start|>assistant",
    "longer": ASSISTANT + "<think></think>",
    "longer by a newline": ASSISTANT + "\n",
    "an open thought": ASSISTANT + "<think>\n",
    "longer by a special token": ASSISTANT + "<pad>",
    "another": "<|im_start|>model\n",
}


def learned(tokenizer, example, loss_on="assistant") -> list[str]:
    """The runs of targets as text."""
    [document] = tokenize([example], tokenizer, loss_on, 4096)
    runs, before = [], False
    for id, is_target in zip(document.tokens.tolist(), document.loss_mask.tolist(), strict=True):
        if is_target:
            runs.append([*(runs.pop() if before else []), id])
        before = is_target
    return [tokenizer.decode_all(run) for run in runs]


def assert_as_transformers(tokenizer, example):
    messages = [message.as_dict() for message in example.messages]
    texts, _ = render_jinja_template(
        [messages], tools=list(example.tools) or None, chat_template=tokenizer.template.source,
        **tokenizer.special_tokens,
    )  # fmt: skip
    assert tokenizer.render(example.messages, tools=example.tools) == texts[0]


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
@pytest.mark.parametrize("example", [TWO, CALLED], ids=["answers", "a tool call"])
def test_the_end_is_learned_whatever_the_generation_prompt_is(with_template, prompt, example):
    tokenizer = with_template(turns(HEAD, prompt=prompt))
    assert_as_transformers(tokenizer, example)
    assert tokenizer.stop_ids == {END, EOS}
    found = learned(tokenizer, example)
    assert [run.endswith("<|im_end|>") for run in found] == [True, True]
    assert [run.count("<|im_end|>") for run in found] == [1, 1]
    answers = [message for message in example.messages if message.role == "assistant"]
    for run, answer in zip(found, answers, strict=True):
        assert (answer.content or '[call {"name": "add", "arguments": {"a": 2}}]') in run
    assert learned(tokenizer, example, "last") == found[1:]


@pytest.mark.parametrize("name", ["the head", "longer", "longer by a newline", "an open thought", "another"])
def test_only_the_answer_and_its_end_are_learned(with_template, name):
    tokenizer = with_template(turns(HEAD, prompt=PROMPTS[name]))
    assert learned(tokenizer, TWO) == ["Ho<|im_end|>", "So long<|im_end|>"]


def test_a_reasoned_turn_behind_a_prompt_with_an_empty_thought_is_learned_whole(with_template):
    body = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    tokenizer = with_template(turns(HEAD, body, prompt=ASSISTANT + "<think></think>"))
    example = chat(("user", "Hi", {}), ("assistant", "Ho", {"reasoning_content": "Hm"}))
    assert_as_transformers(tokenizer, example)
    assert learned(tokenizer, example) == ["<think>Hm</think>Ho<|im_end|>"]


def test_an_end_of_two_tokens_is_learned_whole_and_its_first_token_stops(with_template):
    tokenizer = with_template(turns(HEAD, end="<|im_end|><pad>"))
    assert learned(tokenizer, TWO) == ["Ho<|im_end|><pad>", "So long<|im_end|><pad>"]
    assert tokenizer.stop_ids == {END, EOS}


def test_an_end_behind_a_line_break_stops(with_template):
    tokenizer = with_template(turns(HEAD, end="{{ '\\n' }}<|im_end|>\n", prompt=ASSISTANT + "<think>"))
    assert learned(tokenizer, TWO) == ["Ho\n<|im_end|>", "So long\n<|im_end|>"]
    assert tokenizer.stop_ids == {END, EOS}


def test_an_end_that_only_a_following_turn_brings_is_learned_by_the_last_answer_too(with_template):
    tokenizer = with_template(turns("<|im_start|>{{ m.role }}\n", end="{% if not loop.last %}<|im_end|>{% endif %}"))
    assert tokenizer.stop_ids == {END, EOS}
    assert learned(tokenizer, TWO) == ["Ho<|im_end|>", "So long<|im_end|>"]


def test_the_head_of_the_next_turn_is_no_end(with_template):
    tokenizer = with_template(turns(HEAD, end=""))
    assert tokenizer.stop_ids == {EOS}
    assert learned(tokenizer, TWO) == ["Ho", "So long</s>"]


def test_generation_blocks_that_leave_out_the_end_are_learned_with_it(with_template):
    body = (
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}"
    )
    for end in ("<|im_end|>", " <|im_end|><pad>"):
        tokenizer = with_template(turns(HEAD, body, end=f"{end}\n", prompt=ASSISTANT + "<think></think>"))
        assert learned(tokenizer, TWO) == [f"Ho{end}", f"So long{end}"]
        assert END in tokenizer.stop_ids


def test_a_call_that_ends_with_a_token_of_its_own_stops_there(with_template):
    """As in gpt-oss (<|call|>) and Llama 3.1 (<|eom_id|>)."""
    tokenizer = with_template(turns(HEAD, end="{{ '<pad>' if m.tool_calls else '<|im_end|>' }}\n"))
    assert tokenizer.stop_ids == {0, END, EOS}
    assert learned(tokenizer, CALLED) == ['[call {"name": "add", "arguments": {"a": 2}}]<pad>', "Four<|im_end|>"]


def test_a_call_in_a_template_that_rewrites_earlier_turns_is_found_by_its_name(with_template):
    """As in Mistral: the tools stand before the last question, so every earlier turn begins elsewhere."""
    tokenizer = with_template(
        "{% set last = messages | selectattr('role', 'equalto', 'user') | list | length %}"
        "{% set seen = namespace(n=0) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set seen.n = seen.n + 1 %}"
        "{% if seen.n == last %}{{ tools | tojson }}{% endif %}[INST]{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}</s>"
        "{% else %}{{ m.content }}{{ '</s>' if m.role == 'assistant' }}{% endif %}{% endfor %}"
    )
    example = chat(
        *[(m.role, m.content, dict(m.extra)) for m in (*CALLED.messages, *TWO.messages)], tools=TOOLS
    )  # fmt: skip
    assert_as_transformers(tokenizer, example)
    assert learned(tokenizer, example) == [
        '[TOOL_CALLS]{"name": "add", "arguments": {"a": 2}}</s>', "Four</s>", "Ho</s>", "So long</s>"
    ]  # fmt: skip


# --- an end that is several tokens -----------------------------------------------------------------------------------

LINES = turns("### {{ m.role }}:\n", end="{{ '\n### End' }}\n")
MARKED = (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
)
GENERATED = LINES.replace("{{ m.content }}", MARKED)


@pytest.mark.parametrize("source", [LINES, GENERATED, LINES.replace("m.content", "(m.content | trim)")])
@pytest.mark.parametrize("example", [TWO, CALLED], ids=["answers", "a tool call"])
def test_an_end_that_is_a_text_is_learned_and_stops(with_template, source, example):
    tokenizer = with_template(source)
    assert (tokenizer.stop_text, tokenizer.stop_ids) == ("\n### End", {EOS})
    if source == GENERATED:  # what it marks of a turn with a call is its empty content
        example = TWO
    first, last = learned(tokenizer, example)
    assert first.endswith("\n### End") and last.endswith("\n### End</s>")
    (row,) = tokenize_rows([example], tokenizer, "assistant", 4096)
    assert NO_END not in row.notices


@pytest.mark.parametrize("end", ["<|im_end|>\n", "\n### End<|im_end|>", "{{ eos_token }}", "", "\n\n", "\n]]"])
def test_a_turn_that_ends_with_a_token_or_with_nothing_has_no_stop_text(with_template, end):
    assert with_template(turns("### {{ m.role }}:\n", end=end)).stop_text == ""


# --- as gpt-oss: the last answer ends with another token than earlier ones, a call with a third ----------------------

RETURN, EARLIER, CALLING = "</s>", "<|im_end|>", "<pad>"
HARMONY = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}"
    "{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>"
    "{% elif m.tool_calls %}<|im_start|>assistant to={{ m.tool_calls[0].function.name }} "
    "{{ m.tool_calls[0].function.arguments | tojson }}<pad>"
    "{% else %}THOUGHT<|im_start|>assistant: {{ m.content }}{{ '</s>' if loop.last else '<|im_end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
PLAIN = HARMONY.replace("THOUGHT", "")
THINKING = HARMONY.replace(
    "THOUGHT", "{% if m.thinking %}<|im_start|>assistant analysis: {{ m.thinking }}<|im_end|>{% endif %}"
)
LONG = chat(
    ("user", "Hi", {}), ("assistant", "Ho", {}), ("user", "Add", {}), ("assistant", "", CALL), ("tool", "4", {}),
    ("assistant", "Four", {}), tools=TOOLS,
)  # fmt: skip


@pytest.mark.parametrize(("source", "stops"), [(PLAIN, {EOS, END, 0}), (THINKING, {EOS, 0})], ids=["plain", "thinking"])
def test_every_token_that_ends_a_turn_stops_but_not_one_behind_a_thought(with_template, source, stops):
    tokenizer = with_template(source)
    assert tokenizer.decode_all([0, END]) == CALLING + EARLIER
    assert tokenizer.stop_ids == stops
    assert_as_transformers(tokenizer, LONG)
    assert [run.rpartition("<")[2] for run in learned(tokenizer, LONG)] == [
        end.removeprefix("<") for end in (EARLIER, CALLING, RETURN)
    ]
    (row,) = tokenize_rows([LONG], tokenizer, "assistant", 4096)
    assert (NO_END in row.notices) == (source == THINKING)  # told: the earlier answer ends with what does not stop
    assert (stop_tokens(tokenizer).ids[0], {*stop_tokens(tokenizer).ids}) == (EOS, stops)


def test_a_thought_before_the_last_answer_is_learned_with_it(with_template):
    thoughtful = chat(("user", "Hi", {}), ("assistant", "Ho", {"reasoning_content": "Hm"}))
    assert learned(with_template(THINKING), thoughtful) == [" analysis: Hm<|im_end|><|im_start|>assistant: Ho</s>"]
