"""Tool calls are read back from what each kind of template writes, as it comes; nothing else is taken for one."""

import json

import pytest

from dualtune.data.chat.call_notations import WrittenCall, typed
from dualtune.data.chat.call_reader import CallReader, read_answer, template_calls
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
XML = TAGS.replace("c.function.arguments | tojson", "c.function.arguments.key")  # without keys


def by_argument(before, each, after, *, begin="", end="", between=""):
    """A template that writes each argument of a call alone, with k for its key and v for its value."""
    comma = f"{{{{ '{between}' if not loop.last }}}}" if between else ""
    call = f"{before}{{% for k, v in c.function.arguments.items() %}}{each}{comma}{{% endfor %}}{after}"
    calls = f"{{% for c in m.tool_calls %}}{call}{comma}{{% endfor %}}"
    return f"{TOOLS}{TURNS}<a>{begin}{calls}{end}</s>{REST}"


NAME, RAW = "{{ c.function.name }}", "{{ v if v is string else v | tojson }}"
GLM = by_argument(
    f"\n<tool_call>{NAME}\n", "<arg_key>{{ k }}</arg_key>\n<arg_value>" + RAW + "</arg_value>\n", "</tool_call>"
)
CODER = by_argument(
    f"\n<tool_call>\n<function={NAME}>\n", "<parameter={{ k }}>\n{{ v | string if v is boolean else "
    "(v if v is string else v | tojson) }}\n</parameter>\n", "</function>\n</tool_call>",
)  # fmt: skip
INVOKE = by_argument(
    f'<invoke name="{NAME}">\n', '<parameter name="{{ k }}">' + RAW + "</parameter>\n", "</invoke>\n",
    begin="<calls>\n", end="</calls>",
)  # fmt: skip
TYPED = INVOKE.replace('{{ k }}"', "{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\"")
PYTHON = by_argument(f"{NAME}(", "{{ k }}={{ v | tojson }}", ")", begin="[", end="]", between=", ")
MARKED = PYTHON.replace("<a>[", "<a><|tool_call_start|>[").replace("]</s>", "]<|tool_call_end|></s>")
WITH_JSON, BY_ARGUMENT = [DEEPSEEK, NEMO, BARE, TAGS], [GLM, CODER, INVOKE, TYPED, PYTHON, MARKED]
ADD, SUB = WrittenCall("add", {"a": {"b": [1, "}\n"]}}), WrittenCall("sub", {})
TYPES = {
    "text": {"type": "string"}, "count": {"type": "integer"}, "share": {"type": "number"}, "on": {"type": "boolean"},
    "all": {"type": "array", "items": {"type": "integer"}}, "more": {"type": "object"},
    "maybe": {"type": ["string", "null"]},
    "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "some": {"enum": [1, 2]}, "any": {},
}  # fmt: skip
MANY = WrittenCall("many", {
    "text": "5", "count": -7, "share": 2, "on": True, "all": [1, 2], "more": {"a": [None, "<b>"]}, "maybe": None,
    "either": 3, "some": 2, "any": [False],
})  # fmt: skip
MULTILINE = WrittenCall("many", {"text": "\n  if a < b:\n    return '<tool_call>', \"}\" + [x(1)]\n\n", "count": 1})
SCHEMAS = {"add": {"a": {"type": "object"}}, "sub": {}, "many": TYPES}


def calls_of(source):
    template = ChatTemplate(source, {})
    return template_calls(template.render, template.call_form)


def read(source, answer, schemas=SCHEMAS):
    return read_answer(answer, calls_of(source).notations, schemas)


def written(source, *calls, content=None):
    """The answer with these calls, without the end token."""
    template, ask = ChatTemplate(source, {}), {"role": "user", "content": "?"}
    made = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    turns = template.call_form.applied([ask, {"role": "assistant", "content": content, "tool_calls": made}])
    return template.render(turns).removeprefix("<u>?<a>").removesuffix("</s>")


@pytest.mark.parametrize("source", [*WITH_JSON, *BY_ARGUMENT])
def test_calls_are_read_back(source):
    assert read(source, written(source, ADD)) == ("", [ADD])
    if source != BARE:
        assert read(source, written(source, ADD, SUB)) == ("", [ADD, SUB])
        assert read(source, written(source, SUB, ADD, ADD)) == ("", [SUB, ADD, ADD])
        assert read(source, "Let me see [1].\n" + written(source, SUB)) == ("Let me see [1].", [SUB])


@pytest.mark.parametrize("source", BY_ARGUMENT)
def test_the_text_of_an_argument_has_the_type_that_its_tool_declares(source):
    assert read(source, written(source, MANY)) == ("", [MANY])
    assert read(source, written(source, MULTILINE, SUB)) == ("", [MULTILINE, SUB])


@pytest.mark.parametrize(("text", "schema", "value"), [
    ("5", {"type": "string"}, "5"), ("5", {"type": "integer"}, 5), ("5.0", {"type": "integer"}, 5), ("5", {}, 5),
    ("five", {"type": "integer"}, "five"), ("true", {"type": "integer"}, "true"), ("True", {"type": "boolean"}, True),
    ("false", {"type": "boolean"}, False), ("1", {"type": "boolean"}, "1"), ("null", {"type": "string"}, "null"),
    ("None", {"type": ["integer", "null"]}, None), ("{'a': None}", {"type": "object"}, {"a": None}), ("007", {}, "007"),
    ("[1, 2", {"type": "array"}, "[1, 2"), ("NaN", {"type": "number"}, "NaN"), ("5", {"enum": ["5", "6"]}, "5"),
    ("x", {"type": 7, "anyOf": {}, "enum": 3}, "x"), ("9" * 5000, {"type": "integer"}, "9" * 5000),
    ("(" * 9000, {"type": "array"}, "(" * 9000), ("-" * 9000 + "1", {}, "-" * 9000 + "1"),
    ('"a"', {}, '"a"'), ("1e999", {"type": "number"}, "1e999"),
])  # fmt: skip
def test_a_text_that_does_not_fit_its_type_stays_text(text, schema, value):
    assert (typed(text, schema), type(typed(text, schema))) == (value, type(value))


@pytest.mark.parametrize("source", [*WITH_JSON, *BY_ARGUMENT])
def test_what_is_not_a_whole_call_is_text(source):
    call = WrittenCall("add", {"a": "[}]"})
    answer, schemas = written(source, call), {"add": {"a": {"type": "string"}}}
    for end in range(answer.rindex("[}")):
        assert read(source, answer[:end], schemas) == (answer[:end], [])
    assert read(source, "Hi {there}, [add] or add(1)") == ("Hi {there}, [add] or add(1)", [])


def test_a_call_behind_a_broken_one_is_read():
    broken = "<tool_call>add\n<arg_key>a</arg_value>\n</tool_call>"
    assert read(GLM, f"{broken}\n{written(GLM, ADD).strip()}") == (broken, [ADD])
    assert read(TAGS, '<function=add>{"a": <function=sub>{}</function>') == ('<function=add>{"a":', [SUB])


def test_json_that_is_the_whole_answer_is_a_call_only_of_a_known_function():
    text = written(BARE, ADD)
    assert read(BARE, text, {"sub": {}}) == (text, [])


def test_behind_a_broken_call_the_text_stays():
    first, broken = written(TAGS, ADD), '<function=sub>{"a": '
    assert read(TAGS, first + broken) == (broken.strip(), [ADD])


@pytest.mark.parametrize("source", [*WITH_JSON, *BY_ARGUMENT])
def test_text_comes_at_once_and_a_call_when_it_closes(source):
    """Character by character: nothing that is said waits for a call, and no call for the next one."""
    said = "" if source == BARE else "Let me see: 1 < 2, [x]. So"
    answer = said + (written(source, ADD) if source == BARE else written(source, ADD, SUB))
    reader = CallReader(calls_of(source).notations, SCHEMAS)
    came = [(at, piece) for at, character in enumerate(answer) for piece in reader.feed(character)]
    came += [(len(answer), piece) for piece in reader.end()]
    assert "".join(piece for _, piece in came if isinstance(piece, str)) == said
    assert all(at <= len(said) for at, piece in came if isinstance(piece, str))
    (first, call), *rest = [(at, piece) for at, piece in came if isinstance(piece, WrittenCall)]
    assert [call, *(piece for _, piece in rest)] == ([ADD] if source == BARE else [ADD, SUB])
    assert first < (len(answer) if source == BARE else answer.index("sub"))


# --- calls as rows have them in the text of an answer ----------------------------------------------------------------

NO_CALLS = TOOLS + TURNS.replace("{% elif m.tool_calls %}", "") + REST
FIVE = WrittenCall("add", {"a": 5, "b": "x"})
DEEPSEEK_CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>CALL<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
FIVE_JSON = json.dumps({"name": "add", "arguments": FIVE.arguments})


@pytest.mark.parametrize("source", [NO_CALLS, XML, GLM, BARE])
@pytest.mark.parametrize("text", [
    '[add(a=5, b="x")]', "[add(a=5, b='x')]", "<|tool_call_start|>[add(a=5, b='x')]<|tool_call_end|>",
    f"<functioncall> {FIVE_JSON}", '<functioncall> {"name": "add", "arguments": \'{"a": 5, "b": "x"}\'}',
    f"<tool_call>\n{FIVE_JSON}\n</tool_call>", f"[TOOL_CALLS] [{FIVE_JSON}]", f"[TOOL_CALLS]{FIVE_JSON}",
    '[TOOL_CALLS]add[ARGS]{"a": 5, "b": "x"}', '[TOOL_CALLS]add{"a": 5, "b": "x"}',
    '<function=add>{"a": 5, "b": "x"}</function>',
    "<tool_call>\n<function=add>\n<parameter=a>\n5\n</parameter>\n<parameter=b>\nx\n</parameter>\n"
    "</function>\n</tool_call>",
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>x</arg_value>\n</tool_call>",
    DEEPSEEK_CALL.replace("CALL", 'function<｜tool▁sep｜>add\n```json\n{"a": 5, "b": "x"}\n```'),
    DEEPSEEK_CALL.replace("CALL", 'add<｜tool▁sep｜>{"a": 5, "b": "x"}'),
    FIVE_JSON, f"[{FIVE_JSON}]",
])  # fmt: skip
def test_a_call_in_another_notation_than_the_template_s_is_read(source, text):
    schemas = {"add": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    assert read(source, text, schemas) == ("", [FIVE])
    if not text.startswith(("{", "[{")):
        assert read(source, f"So:\n{text}\nDone", schemas) == ("So:Done", [FIVE])
    if "[TOOL_CALLS]add" not in text and source != GLM:
        assert read(source, text, {"other": {}}) == (text, [])  # of a function that there is not


@pytest.mark.parametrize(("source", "begin", "rest"), [
    (DEEPSEEK, "<calls><call>function<sep>", "\n```json\n"), (NEMO, '[TOOL_CALLS][{"name": "', '", "arguments": '),
    (BARE, '{"name": "', '", "parameters": '), (TAGS, "<function=", ">"), (GLM, "<tool_call>", "\n"),
    (CODER, "<tool_call>\n<function=", ">\n"), (INVOKE, '<calls>\n<invoke name="', '">\n'),
    (PYTHON, "[", "("), (MARKED, "<|tool_call_start|>[", "("),
])  # fmt: skip
def test_an_answer_can_be_begun_with_a_call(source, begin, rest):
    assert calls_of(source).forced("add") == f"{begin}add{rest}"


def test_a_template_that_writes_no_tools_has_no_calls():
    assert calls_of(DEEPSEEK.removeprefix(TOOLS)) is None
    for source in (XML, NO_CALLS, "{{ messages }}{{ tools }}"):
        assert (calls_of(source).own, calls_of(source).forced("add")) == (None, None)
