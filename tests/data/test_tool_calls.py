"""Tool calls as rows have them, in the form that each kind of chat template takes, compared with transformers.

The templates are small ones of the kinds in use; what transformers is given is written by hand.
"""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from dualtune.data.chat.formats import to_examples
from dualtune.data.chat.template import ChatTemplate
from dualtune.data.chat.tools import CallForm
from dualtune.data.documents import tokenize
from dualtune.data.sources.readers import read_file
from dualtune.data.sources.rows import BadRow, RawRow, RowError
from dualtune.data.tokens.masks import render_example

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
ASK, SAY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4."}
RESULT = {"role": "tool", "content": "four"}
TEXT = '{"a":2, "b": "é"}'  # not as json.dumps writes it
END = "{% if add_generation_prompt %}<a>{% endif %}"

DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}<a>{% for c in m.tool_calls %}"
    "{{ '<call>' + c.type + '<sep>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```</call>' }}"
    "{% endfor %}</s>{% elif m.role == 'assistant' %}<a>{{ m.content }}</s>"
    "{% elif m.role == 'tool' %}<out>{{ m.content }}</out>{% else %}<u>{{ m.content }}{% endif %}{% endfor %}" + END
)
HERMES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is not none %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}{{ '<h>' + m.role + '</h>' }}{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}"
    '{% set c = m.tool_calls[0].function %}{"name": "{{ c.name }}", "parameters": { {% for k, v in '
    "c.arguments.items() %}{{ k | tojson }}: {{ v | tojson }}, {% endfor %}} }"
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}<eot>{% endfor %}"
    "{% if add_generation_prompt %}<h>assistant</h>{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('ids of length 9!') }}{% endif %}"
    '{{ c.function | tojson }}, "id": "{{ c.id }}"{% endfor %}]</s>'
    "{% elif m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids of length 9!') }}{% endif %}[TOOL_RESULTS]{{ m.content }} {{ m.tool_call_id }}"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
PRINTED = HERMES.replace("c.function.arguments | tojson", "c.function.arguments")  # an object as Python writes it
SPOKEN = HERMES.replace("{% if m.content is not none %}{{ m.content }}{% endif %}", "{{ m.content }}")
WALKED = HERMES.replace("{{ c.function.arguments | tojson }}", "{% for k, v in c.function.arguments | items %}"
                        "{{ k }}={{ v }}{% endfor %}")  # fmt: skip


def call(arguments, **extra):
    return {"type": "function", **extra, "function": {"name": "add", "arguments": arguments}}


def calls(*each, content=None):
    return {"role": "assistant", "content": content, "tool_calls": list(each)}


def example(*turns, tools=(), **fields):
    (found,) = to_examples([RawRow("f", 1, {"messages": list(turns), "tools": list(tools), **fields})], "auto", {})
    assert not isinstance(found, BadRow), found.reason
    return found


def by_transformers(source, *turns, tools=None):
    texts, _ = render_jinja_template(
        [list(turns)], tools=tools, chat_template=source, bos_token="<s>", eos_token="</s>"
    )
    return texts[0]


def learned(tokenizer, found):
    """The targets as text."""
    [document] = tokenize([found], tokenizer, "assistant", 4096)
    return tokenizer.decode_all(
        [id for id, is_target in zip(document.tokens, document.loss_mask, strict=True) if is_target]
    )


# --- the form --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "form"), [
    (DEEPSEEK, CallForm("text", None, writes_calls=True)),
    (HERMES, CallForm("object", None, writes_calls=True)),
    (LLAMA, CallForm("object", None, writes_calls=True)),
    (MISTRAL, CallForm("object", None, "nine", needs_ids=True, writes_calls=True)),
    (PRINTED, CallForm("text", None, writes_calls=True)),
    (SPOKEN, CallForm("object", "", writes_calls=True)),
    (WALKED, CallForm("object", None, writes_calls=True)),
    ("{% for m in messages %}{{ m.content }}{% endfor %}", CallForm()),
])  # fmt: skip
def test_each_kind_of_template_has_its_form(source, form):
    assert ChatTemplate(source, {}).call_form == form


@pytest.mark.parametrize("given", [TEXT, json.loads(TEXT)], ids=["text", "object"])
@pytest.mark.parametrize("content", [None, "", ...], ids=["null", "blank", "absent"])
@pytest.mark.parametrize(("source", "as_text", "silence"), [
    (DEEPSEEK, True, None), (HERMES, False, None), (LLAMA, False, None), (PRINTED, True, None), (SPOKEN, False, ""),
])  # fmt: skip
def test_arguments_and_silence_reach_a_template_as_it_takes_them(
    with_template, source, as_text, silence, given, content
):
    turn = calls(call(given), content=content)
    if content is ...:
        del turn["content"]
    tokenizer, found = with_template(source), example(ASK, turn, RESULT, SAY, tools=[])
    theirs = (
        (given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)) if as_text else json.loads(TEXT)
    )
    expected = by_transformers(source, ASK, calls(call(theirs), content=silence), RESULT, SAY)
    assert tokenizer.render(found.messages) == expected
    told = [found.messages[:2], found.messages[:3]]  # a prompt of `chat`, `serve` and `generate`
    assert all(expected.startswith(tokenizer.render(turns).removesuffix("</s>")) for turns in told)


@pytest.mark.parametrize("source", [DEEPSEEK, HERMES, PRINTED, WALKED, MISTRAL])
def test_calls_are_learned(with_template, source):
    text = learned(with_template(source), example(ASK, calls(call(TEXT)), RESULT, SAY))
    assert "add" in text and "é" in text and "4." in text and "four" not in text


def test_a_control_token_in_arguments_stays_text(with_template):
    tokenizer = with_template(DEEPSEEK)
    found = example(ASK, calls(call('{"a":  "<|im_end|>"}')), RESULT, SAY)
    assert '{"a":  "<|im_end|>"}' in learned(tokenizer, found)
    [document] = tokenize([found], tokenizer, "assistant", 4096)
    assert document.tokens.tolist().count(tokenizer.encode("<|im_end|>", special=False)[0]) == 0


# --- ids -------------------------------------------------------------------------------------------------------------


def test_ids_that_a_template_refuses_are_renumbered_alike_in_calls_and_results(with_template):
    turns = [
        ASK, calls(call({"a": 1}, id="call_1"), call({"a": 2}, id="a1B2c3D4e")),
        RESULT | {"tool_call_id": "a1B2c3D4e"}, RESULT | {"tool_call_id": "call_1"}, SAY,
    ]  # fmt: skip
    tokenizer, found = with_template(MISTRAL), example(*turns)
    text = tokenizer.render(found.messages)
    new = text.partition('"id": "')[2][:9]
    assert new.isalnum() and text.count(new) == 2 and text.count("a1B2c3D4e") == 2  # an id that fits stays
    theirs = json.loads(json.dumps(turns).replace("call_1", new))
    assert text == by_transformers(MISTRAL, *theirs)
    assert text == with_template(MISTRAL).render(example(*turns).messages)
    assert text.startswith(tokenizer.render(found.messages[:2]))


def test_calls_without_ids_get_some_where_the_template_needs_them(with_template):
    turns = [ASK, calls(call({"a": 1}), call({"a": 2})), RESULT, RESULT | {"content": "five"}, SAY]
    text = with_template(MISTRAL).render(example(*turns).messages)
    first, second = (part[:9] for part in text.split('"id": "')[1:])
    assert first != second and f"[TOOL_RESULTS]four {first}" in text and f"[TOOL_RESULTS]five {second}" in text
    gap = HERMES.replace("<tool_call>", "<tool_call {{ c.id }}>")
    assert f"<tool_call {first}>" in with_template(gap).render(example(*turns).messages)
    written = with_template(HERMES + "{{ messages | tojson }}").render(example(*turns).messages)
    assert '"id"' not in written and '"tool_call_id"' not in written  # nothing lacks there


def test_ids_that_a_template_takes_stay(with_template):
    source = HERMES.replace("<tool_call>", "<tool_call {{ c.id }}>")
    text = with_template(source).render(example(ASK, calls(call({}, id="call_77")), RESULT, SAY).messages)
    assert "<tool_call call_77>" in text


SAID = {"role": "assistant", "content": '<tool_call>\n{"name": "add"}\n</tool_call>'}
FRAMED = "{{ '<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' if m.role == 'tool' else m.content }}"

# --- calls as text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [
    "[add(a=2)]", '<functioncall> {"name": "add"}', '<function=add>{"a": 2}</function>', "[TOOL_CALLS][{}]",
    '<|python_tag|>{"name": "add"}', "<tool_call>\n{}\n</tool_call>", '{"name": "add", "parameters": {}}',
    "```tool_code\nadd(2)\n```", "add(2)", "I will ask.\nAction: add\nAction Input: 2", "<invoke name='add'/>",
])  # fmt: skip
def test_a_call_in_the_content_may_be_answered_in_any_notation(with_template, text):
    found = example(ASK, {"role": "assistant", "content": text}, RESULT, SAY)
    tokenizer = with_template(HERMES)
    assert "<|im_start|>tool\nfour<|im_end|>\n" in tokenizer.render(found.messages)
    assert learned(tokenizer, found) == f"{text}<|im_end|>4.<|im_end|>"


@pytest.mark.parametrize(
    "content", ["four", "<tool_response>\nfour\n</tool_response>", " <tool_response>four</tool_response>\n"]
)
@pytest.mark.parametrize("turn", [calls(call({"a": 2})), SAID])
def test_a_result_that_is_framed_already_is_framed_once(with_template, content, turn):
    """As the data sets of Hermes have them. A template that writes no frame leaves that of the row."""
    found = example(ASK, turn, {"role": "tool", "content": content}, SAY)
    framed = HERMES.replace("{{ m.content }}", FRAMED)
    assert (
        "tool\n<tool_response>\nfour\n</tool_response><|im_end|>"
        in render_example(found, with_template(framed), "assistant").text
    )
    assert f"tool\n{content}<|im_end|>" in render_example(found, with_template(HERMES), "assistant").text


def test_several_framed_results_in_one_message_stay_apart(with_template):
    content = "<tool_response>\nfour\n</tool_response>\n<tool_response>\nfive\n</tool_response>"
    found = example(ASK, calls(call({"a": 2})), {"role": "tool", "content": content}, SAY)
    framed = with_template(HERMES.replace("{{ m.content }}", FRAMED))
    assert f"tool\n{content}<|im_end|>" in framed.render(found.messages)


def test_a_template_that_does_not_write_the_result_is_refused(with_template):
    source = HERMES.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' else '' }}")
    with pytest.raises(RowError, match="message 3: the chat template does not write the result"):
        render_example(example(ASK, calls(call({})), RESULT, SAY), with_template(source), "assistant")


# --- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("content", "text"), [
    ({"sum": 4, "unit": "é"}, '{"sum": 4, "unit": "é"}'), ([1, {"a": []}], '[1, {"a": []}]'), ([], "[]"), ({}, "{}"),
    ([{"type": "text", "text": "fo"}, {"type": "text", "text": "ur"}], "four"), (None, ""), (4, "4"), ("", ""),
    ({"sum": 4, "unit": None}, '{"sum": 4}'),
])  # fmt: skip
def test_results_are_text_or_json(content, text):
    assert example(ASK, calls(call({})), {"role": "tool", "content": content}, SAY).messages[2].content == text


# --- nulls -----------------------------------------------------------------------------------------------------------


def tool(name, properties, required=()):
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CITY = tool("city", {"name": {"type": "string"}, "unit": {"type": ["string", "null"]}}, ["name", "unit"])
TIME = tool(
    "time", {"zone": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "day": {"type": "string", "enum": ["a"]}}
)


def called(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def union_rows():
    """Rows of two tools, and what each means."""
    rows = [
        {"tools": [CITY], "messages": [ASK, calls(called("city", {"name": "Bern", "unit": None})), RESULT, SAY]},
        {"tools": [TIME], "messages": [ASK, calls(called("time", {"zone": "UTC"})), RESULT, SAY]},
    ]
    return rows, [row["messages"][1]["tool_calls"][0]["function"]["arguments"] for row in rows]


def examples_of(path):
    return list(to_examples(read_file(path, lambda share: None), "auto", {}))


def test_nulls_of_tables_are_left_out_of_json_and_parquet_by_one_rule(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows, arguments = union_rows()
    table = pa.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "a.parquet")
    lines = table.to_pylist()  # what `datasets` writes as JSON lines
    assert lines[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {
        "name": None,
        "unit": None,
        "zone": "UTC",
    }
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for line in lines:  # the same as JSON in strings
        function = line["messages"][1]["tool_calls"][0]["function"]
        function["arguments"] = json.dumps(function["arguments"])
        line["tools"] = json.dumps(line["tools"])
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "clean.jsonl").write_text("\n".join(map(json.dumps, rows)))
    clean = examples_of(tmp_path / "clean.jsonl")
    assert [row.notices for row in clean] == [frozenset()] * 2
    for name in ("a.parquet", "a.jsonl", "b.jsonl"):
        found = examples_of(tmp_path / name)
        assert [row.tools for row in found] == [(CITY,), (TIME,)]
        assert [row.messages[1].extra["tool_calls"][0]["function"]["arguments"] for row in found] == arguments
        assert [row.messages for row in found] == [row.messages for row in clean]
        assert [row.notices for row in found] == [{"dropped_nulls"}] * 2


@pytest.mark.parametrize(("schema", "is_required", "stays"), [
    ({"type": ["string", "null"]}, True, True), ({"type": ["string", "null"]}, False, False),
    ({"type": "string"}, True, False), ({"type": "string", "nullable": True}, True, True),
    ({"oneOf": [{"type": "null"}, {"type": "string"}]}, True, True), ({"enum": ["a", None]}, True, True),
    ({}, True, False),
])  # fmt: skip
def test_an_argument_is_null_only_where_its_schema_requires_it_and_allows_null(schema, is_required, stays):
    tools = [tool("add", {"x": schema, "in": {"type": "object", "properties": {"y": schema}, "required": ["y"]}},
                  ["x"] if is_required else [])]  # fmt: skip
    found = example(
        ASK, calls(call({"x": None, "in": {"y": None}, "other": None, "list": [None]})), RESULT, SAY, tools=tools
    )
    allows = stays or (not is_required and "null" in schema.get("type", ()))
    expected = ({"x": None} if stays else {}) | {"in": {"y": None} if allows else {}, "list": [None]}
    assert found.messages[1].extra["tool_calls"][0]["function"]["arguments"] == expected


def test_the_text_of_arguments_is_without_nulls_too(with_template):
    turns = [ASK, calls(call('{"a":2, "x": null}')), RESULT, SAY]
    assert '```json\n{"a": 2}\n```' in with_template(DEEPSEEK).render(example(*turns).messages)


@pytest.mark.parametrize("part", ["function", "parameters", "all"])
def test_any_part_of_a_tool_may_be_json_in_a_string(part):
    given = json.loads(json.dumps(CITY))
    if part in ("parameters", "all"):
        given["function"]["parameters"] = json.dumps(given["function"]["parameters"])
    if part in ("function", "all"):
        given["function"] = json.dumps(given["function"])
    found = example(ASK, calls(called("city", {})), RESULT, SAY, tools=[json.dumps(given) if part == "all" else given])
    assert found.tools == (CITY,)
