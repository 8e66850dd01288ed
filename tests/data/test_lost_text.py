"""What the assistant says and the template leaves out: each kind, in templates like those in use."""

import json

import pytest

from dualtune.base.errors import DataError
from dualtune.data import documents as data_documents
from dualtune.data.chat.conversations import Message
from dualtune.data.chat.examples import Example
from dualtune.data.chat.formats import to_examples
from dualtune.data.documents import Data
from dualtune.data.sources.rows import BadRow, RawRow
from dualtune.data.tokens.masks import check_lost_text, render_example
from dualtune.data.tokens.tokenize import tokenize_rows
from dualtune.data.tokens.tokenizer import Tokenizer

HEAD = "<|im_start|>{{ m.role }}\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
LAST = (
    "{% set q = namespace(at=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set q.at = loop.index0 %}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "chatml": "{% for m in messages %}" + HEAD + "{{ m.content }}" + CALLS + "<|im_end|>\n{% endfor %}" + PROMPT,
    "qwen3": LAST + "{% for m in messages %}" + HEAD + "{% set said = m.content %}{% set thought = '' %}"
    "{% if m.role == 'assistant' %}{% if m.reasoning_content %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in m.content %}{% set thought = m.content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > q.at and (loop.last or thought) %}<think>{{ '\n' }}{{ thought.strip('\n') }}{{ '\n' }}</think>"
    "{{ '\n\n' }}{% endif %}{% endif %}{{ said }}" + CALLS + "<|im_end|>\n{% endfor %}" + PROMPT,
    "r1": "{% for m in messages %}" + HEAD + "{{ m.content.split('</think>')[-1] }}" + CALLS
    + "<|im_end|>\n{% endfor %}" + PROMPT.replace("assistant\n", "assistant\n<think>{{ '\n' }}"),
    "gpt-oss": "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.last %}<|im_start|>assistant<c>analysis<m>{{ m.thinking }}<|im_end|>{% endif %}"
    "<|im_start|>assistant<c>final<m>{{ m.content }}{{ '</s>' if loop.last else '<|im_end|>' }}"
    "{% else %}<|im_start|>{{ m.role }}<m>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}",
    "gemma-4": "{% for m in messages %}" + HEAD + "{% if m.reasoning_content %}<c>thought{{ '\n' }}"
    "{{ m.reasoning_content }}<c>{% endif %}{{ m.content }}" + CALLS + "<|im_end|>\n{% endfor %}"
    + PROMPT.replace("{% endif %}", "<c>thought{{ '\n' }}<c>{% endif %}"),
    "mistral": LAST + "{% for m in messages %}{% if m.role == 'user' %}{{ 'SYS ' if loop.index0 == q.at }}[INST]"
    "{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
    "no end in between": "{% for m in messages %}" + HEAD
    + "{{ m.content }}{% if loop.last %}</s>{% endif %}{% endfor %}",
    "names only": "{% for m in messages %}" + HEAD
    + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% endfor %}<|im_end|>\n{% endfor %}" + PROMPT,
}  # fmt: skip


def asks(content="Hi"):
    return Message("user", content)


def says(content, train=True, **extra):
    return Message("assistant", content, train, extra)


def call(**arguments):
    return says("", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": arguments}}])


ROWS = {
    "plain": (asks(), says("Ho"), asks("Bye"), says("So long")),
    "reasoned": (asks(), says("Ho", reasoning_content="Because"), asks("Bye"), says("So long", reasoning_content="Hm")),
    "reasoned in the last": (asks(), says("Ho", reasoning_content="Because Ho is short")),
    "other key": (asks(), says("Ho", thinking="Because")),
    "inline": (asks(), says("<think>\nBecause\n</think>\n\nHo"), asks("Bye"), says("<think>Hm</think>So long")),
    "inline in the last": (asks(), says("<think>\nBecause\n</think>\n\nHo")),
    "call": (asks(), call(a=2.5, b=["é \"x\"\n", None, True], c={"k": "v"}), Message("tool", "4"), says("Four")),
    "untrained": (asks(), says("Ho", train=False, reasoning_content="Because"), asks("Bye"), says("So long")),
}  # fmt: skip
NONE = set()
EXPECTED = {
    "chatml": {
        "plain": NONE, "reasoned": {"reasoning_content", "earlier_reasoning"},
        "reasoned in the last": {"reasoning_content"}, "other key": {"thinking"},
        "inline": NONE, "call": NONE, "untrained": NONE,
    },
    "qwen3": {
        "plain": {"uneven_start"}, "reasoned": {"earlier_reasoning"}, "reasoned in the last": NONE, "other key": NONE,
        "inline": {"earlier_reasoning"}, "inline in the last": NONE, "call": NONE, "untrained": NONE,
    },
    "r1": {
        "plain": {"generation_prompt"}, "inline in the last": {"content_thought", "generation_prompt"},
        "inline": {"content_thought", "earlier_reasoning", "generation_prompt"},
        "reasoned in the last": {"reasoning_content", "generation_prompt"},
    },
    "gpt-oss": {
        "plain": {"no_end_token"}, "reasoned": {"earlier_reasoning", "no_end_token"}, "other key": NONE,
        "reasoned in the last": NONE,
    },
    "gemma-4": {"plain": {"generation_prompt"}, "reasoned": {"generation_prompt"}, "call": {"generation_prompt"}},
    "mistral": {"plain": NONE, "reasoned": {"reasoning_content", "earlier_reasoning"}, "inline": NONE},
    "no end in between": {"plain": {"no_end_token"}, "inline in the last": NONE},
    "names only": {"plain": NONE, "call": {"tool_calls"}},
}  # fmt: skip
CASES = [(name, row) for name, rows in EXPECTED.items() for row in rows]


def notices(tokenizer, messages, loss_on="assistant"):
    (row,) = tokenize_rows([Example("f", 1, messages)], tokenizer, loss_on, 4096)
    assert not isinstance(row, BadRow), row.reason
    return set(row.notices)


@pytest.mark.parametrize(("name", "row"), CASES)
def test_each_kind_of_lost_text_is_noticed_and_no_other(with_template, name, row):
    assert notices(with_template(TEMPLATES[name]), ROWS[row]) == EXPECTED[name][row]


def test_only_trained_turns_count(with_template):
    for name in ("chatml", "qwen3"):
        tokenizer = with_template(TEMPLATES[name])
        assert notices(tokenizer, ROWS["untrained"], "last") == set()
        assert notices(tokenizer, ROWS["plain"], "last") == set()
    tokenizer = with_template(TEMPLATES["chatml"])
    assert notices(tokenizer, ROWS["reasoned"], "all") == {"reasoning_content", "earlier_reasoning"}
    hides = "{% for m in messages %}{{ m.content if loop.index > 2 else m.role }}</s>{% endfor %}"
    assert notices(with_template(hides), ROWS["untrained"], "last") == {"untrained_content"}


def test_short_reasoning_is_not_taken_for_a_part_of_the_content(with_template):
    tokenizer = with_template(TEMPLATES["chatml"])
    assert notices(tokenizer, (asks(), says("It is four.", reasoning_content="four"))) == {"reasoning_content"}


@pytest.mark.parametrize(("template", "kinds", "text"), [
    (TEMPLATES["qwen3"], NONE, "<think>\nTwo and two.\n</think>\n\n4.<|im_end|>"),
    (TEMPLATES["chatml"], {"reasoning_content"}, "4.<|im_end|>"),
    (None, {"reasoning_content"}, "4."),  # plain text: without it
])  # fmt: skip
@pytest.mark.parametrize("row", [{"prompt": "2+2?", "completion": "4."}, {"instruction": "2+2?", "output": "4."}])
def test_a_column_of_reasoning_is_a_target_or_lost(with_template, tiny_llama, row, template, kinds, text):
    (example,) = to_examples([RawRow("f", 1, row | {"thinking": "Two and two."})], "auto", {})
    tokenizer = with_template(template) if template else Tokenizer(tiny_llama, "none")
    rendered = render_example(example, tokenizer, "assistant")
    assert [rendered.text[slice(*place)] for place in rendered.ranges] == [text]
    assert rendered.notices == kinds


# --- a data set ------------------------------------------------------------------------------------------------------


def as_row(*messages):
    return {"messages": [message.as_dict() for message in messages]}


@pytest.fixture
def with_lost(make_config, write_rows, tmp_path):
    """A config on a chatml-like template, with this many rows of a hundred that lose their reasoning."""

    def make(number, **settings):
        rows = [as_row(asks(f"q{i}"), says("Ho", **({"reasoning": "Hm"} if i < number else {}))) for i in range(100)]
        (tmp_path / "t.jinja").write_text(TEMPLATES["chatml"])
        data = write_rows(rows)
        return make_config(data, {"data.template": tmp_path / "t.jinja"} | settings)

    return make


def documents(config, tiny_llama):
    return Data(config).train_and_eval(Tokenizer(tiny_llama, config.data.template))


def test_lost_text_is_counted_over_the_whole_source_and_an_error_above_its_share(with_lost, tiny_llama):
    told = ["5 of 100 rows: reasoning is not in the text of a trained turn"]
    for _ in range(2):  # the second time from the cache
        assert data_documents.notices(*documents(with_lost(5), tiny_llama)) == told
    for _ in range(2):
        with pytest.raises(DataError, match=r"6 of 100 rows: reasoning is not .*data\.on_lost_text: accept"):
            documents(with_lost(6), tiny_llama)
    accepting = with_lost(6, **{"data.on_lost_text": "accept"})
    for _ in range(2):
        assert data_documents.notices(*documents(accepting, tiny_llama))[0].startswith("6 of 100 rows")
    with pytest.raises(DataError):  # the accepted store is in the cache
        documents(with_lost(6), tiny_llama)


def test_a_column_of_reasoning_that_the_template_drops_is_an_error_until_it_is_left_out(
    make_config, write_rows, tmp_path, tiny_llama, dualtune_main
):
    (tmp_path / "t.jinja").write_text(TEMPLATES["chatml"])
    data = write_rows([{"question": f"q{i}", "answer": "Ho", "thinking": "Hm"} for i in range(100)])
    columns = {"prompt": "question", "completion": "answer"}

    def config(columns):
        return make_config(data, {"data.template": tmp_path / "t.jinja", "data.columns": columns})

    with pytest.raises(DataError, match=r"100 of 100 rows: reasoning_content is not .*columns: {reasoning: null}"):
        documents(config(columns), tiny_llama)
    assert data_documents.notices(*documents(config(columns | {"reasoning": None}), tiny_llama)) == []
    names = ("--column", "prompt=question", "--column", "completion=answer", "--column", "reasoning=")
    found = dualtune_main("check-data", data, "--json", *names)
    assert (found.returncode, json.loads(found.stdout)["sources"][0]["notices"]) == (0, {})


def test_what_a_template_leaves_out_by_design_is_no_error():
    check_lost_text({"earlier_reasoning": 9, "uneven_start": 9, "generation_prompt": 9}, 9, "f", accept=False)
    for kind in ("content", "content_thought", "reasoning_content", "thinking", "reasoning", "tool_calls"):
        with pytest.raises(DataError):
            check_lost_text({kind: 9}, 9, "f", accept=False)


def test_check_data_and_preview_count_it(with_lost, dualtune_main, tmp_path):
    from dualtune.config import to_yaml

    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(with_lost(5)))
    found = dualtune_main("check-data", path, "--json")
    assert (found.returncode, json.loads(found.stdout)["sources"][0]["lost_text"]) == (0, {"reasoning": 5})
    shown = json.loads(dualtune_main("preview", path, "--json").stdout)
    assert any(text.startswith("5 of 100 rows: reasoning") for text in shown["warnings"])
    path.write_text(to_yaml(with_lost(6)))
    found = dualtune_main("check-data", path, "--json")
    assert (found.returncode, json.loads(found.stdout)["sources"][0]["lost_text"]) == (3, {"reasoning": 6})
