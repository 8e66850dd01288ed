"""Tool calls are read back from what each kind of template writes, and nothing else is taken for one."""

import pytest

from dualtune.data.chat.call_text import WrittenCall, call_notation
from dualtune.data.chat.template import ChatTemplate

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
TURNS = "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}{% elif m.tool_calls %}"
REST = "{% else %}<a>{{ m.content }}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
DEEPSEEK = (
    TOOLS + TURNS + "<a><calls>{% for c in m.tool_calls %}"
    "{{ '<call>function<sep>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```</call>' }}"
    "{% endfor %}</calls></s>" + REST
)
NEMO = (
    TOOLS + TURNS + "<a>[TOOL_CALLS][{% for c in m.tool_calls %}{{ c.function | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}]</s>" + REST
)
BARE = TOOLS + TURNS + '<a>{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}' \
    "{{ m.tool_calls[0].function.arguments | tojson }}}</s>" + REST  # fmt: skip
TAGS = (
    TOOLS + TURNS + "<a>{% for c in m.tool_calls %}<function={{ c.function.name }}>"
    "{{ c.function.arguments | tojson }}</function>{% endfor %}</s>" + REST
)
XML = TAGS.replace("c.function.arguments | tojson", "c.function.arguments.key")
ADD, SUB = WrittenCall("add", {"a": {"b": [1, "}\n"]}}), WrittenCall("sub", {})


def notation(source):
    template = ChatTemplate(source, {})
    return call_notation(template.render, template.call_form)


def written(source, *calls, content=None):
    """The answer with these calls, without the end token."""
    template, ask = ChatTemplate(source, {}), {"role": "user", "content": "?"}
    made = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    turns = template.call_form.applied([ask, {"role": "assistant", "content": content, "tool_calls": made}])
    return template.render(turns).removeprefix("<u>?<a>").removesuffix("</s>")


@pytest.mark.parametrize("source", [DEEPSEEK, NEMO, BARE, TAGS])
def test_calls_are_read_back(source):
    found = notation(source)
    assert found.read(written(source, ADD), ["add"]) == ("", [ADD])
    if source != BARE:
        assert found.read(written(source, ADD, SUB)) == ("", [ADD, SUB])
        assert found.read("Let me see [1].\n" + written(source, SUB)) == ("Let me see [1].", [SUB])


@pytest.mark.parametrize("source", [DEEPSEEK, NEMO, BARE, TAGS])
def test_what_is_not_a_whole_call_is_text(source):
    found, answer = notation(source), written(source, ADD)
    for end in range(answer.rindex("]")):
        assert found.read(answer[:end], ["add"]) == (answer[:end], [])
    assert found.read("Hi {there}", ["add"]) == ("Hi {there}", [])


def test_json_that_is_the_whole_answer_is_a_call_only_of_a_known_function():
    text = written(BARE, ADD)
    assert notation(BARE).read(text, ["sub"]) == (text, [])


def test_behind_a_broken_call_the_text_stays():
    first, broken = written(TAGS, ADD), '<function=sub>{"a": '
    assert notation(TAGS).read(first + broken) == (broken.strip(), [ADD])


@pytest.mark.parametrize(("source", "begin", "rest"), [
    (DEEPSEEK, "<calls><call>function<sep>", "\n```json\n"), (NEMO, '[TOOL_CALLS][{"name": "', '", "arguments": '),
    (BARE, '{"name": "', '", "parameters": '), (TAGS, "<function=", ">"),
])  # fmt: skip
def test_an_answer_can_be_begun_with_a_call(source, begin, rest):
    assert (notation(source).forced(None), notation(source).forced("add")) == (begin, f"{begin}add{rest}")


@pytest.mark.parametrize("source", [XML, DEEPSEEK.removeprefix(TOOLS), "{{ messages }}{{ tools }}"])
def test_a_template_that_writes_no_tools_or_no_json_has_no_notation(source):
    assert notation(source) is None
