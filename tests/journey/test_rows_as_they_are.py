"""The README's short config on rows and templates as people have them: what is trained, what is said to be left out.

An Arrow-made data set of tool calls, a ShareGPT set with roles in disorder, and a DeepSeek-style template.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

import dualtune

pytest.importorskip("torch")
parquet = pytest.importorskip("pyarrow.parquet")
arrow = pytest.importorskip("pyarrow")

ROOT = Path(dualtune.__file__).parents[1]
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is not none %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK = (  # joins the arguments as text, and keeps of an answer only what follows its thoughts
    "{% for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}{% elif m.role == 'tool' %}"
    "<out>{{ m.content }}</out>{% elif m.tool_calls %}<Assistant>{% for c in m.tool_calls %}"
    "{{ '<call>' + c.function.name + '<sep>' + c.function.arguments + '</call>' }}{% endfor %}<|im_end|>"
    "{% else %}<Assistant>{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<Assistant>{% endif %}"
)


@pytest.fixture
def train(dualtune_main, tmp_path, monkeypatch):
    """Train the demo's model on a file by the README's short config; return what it said and previewed."""
    (text,) = re.findall(r"A config can be three lines.*?```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "dualtune/demo/model", "model")

    def run(template, file):
        settings = json.loads(Path("model/tokenizer_config.json").read_text()) | {"chat_template": template}
        Path("model/tokenizer_config.json").write_text(json.dumps(settings))
        config = yaml.safe_load(text) | {"model": {"name": "model"}, "run": {"dir": "run"}}
        config["data"]["train"] = file
        Path("config.yaml").write_text(yaml.safe_dump(config))
        shown = dualtune_main("preview", "config.yaml", "--rows", 9)
        trained = dualtune_main("train", "config.yaml", "--platform", "cpu")
        assert (shown.returncode, trained.returncode) == (0, 0), shown.stderr + trained.stderr
        return " ".join(trained.stdout.split()), re.findall("⟦(.*?)⟧", shown.stdout, re.S)

    return run


def call(arguments, id):
    return {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}


def tool(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def test_nulls_that_arrow_added_are_neither_read_nor_learned(train):
    """A column of structures has one type: each call gets the arguments of all others, each tool their properties."""
    rows = [
        {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "tool_calls": [call(arguments, "1")]}],
         "tools": [tool(name, **properties)]}
        for arguments, name, properties in (
            ({"a": 2}, "add", {"a": {"type": "integer"}}), ({"city": "Oslo"}, "weather", {"city": {"type": "string"}}),
        )
    ]  # fmt: skip
    parquet.write_table(arrow.Table.from_pylist(rows * 8), "tools.parquet")
    said, learned = train(HERMES, "tools.parquet")
    assert set(learned) == {
        '<tool_call>add {"a": 2}</tool_call><|im_end|>', '<tool_call>add {"city": "Oslo"}</tool_call><|im_end|>'
    }  # fmt: skip
    assert "16 of 16 rows: nulls" in said


def test_roles_in_disorder_are_joined_or_named(train, write_rows):
    kinds = (
        (("human", "2+2?"), ("gpt", "4.")), (("gpt", "Hello."), ("human", "2+2?"), ("gpt", "4.")),
        (("human", "2"), ("human", "+2?"), ("gpt", "4.")), (("human", "2+2?"), ("gpt", "4."), ("human", "?")),
    )  # fmt: skip
    rows = [{"conversations": [{"from": who, "value": text} for who, text in turns]} for turns in kinds]
    said, learned = train(HERMES, str(write_rows(rows * 4)))
    assert set(learned) == {"4.<|im_end|>", "Hello.<|im_end|>"} and len(learned) > 9  # both turns of the second kind
    assert "4 of 16 rows: turns of one role" in said


def test_arguments_are_text_where_a_template_joins_them_and_what_it_cuts_is_counted(train, write_rows):
    ask = {"role": "user", "content": "2+2?"}
    rows = [
        {"messages": [ask, {"role": "assistant", "content": None, "tool_calls": [call({"a": 2}, "1")]}]},
        {"messages": [ask, {"role": "assistant", "content": None, "tool_calls": [call('{"a":2}', "1")]}]},
        {"messages": [ask, {"role": "assistant", "content": "4."}]},
    ]  # fmt: skip
    thought = {"messages": [ask, {"role": "assistant", "content": "<think>2, 3, 4</think>4."}]}
    said, learned = train(DEEPSEEK, str(write_rows([*rows * 10, thought])))
    assert set(learned) == {
        f"{text}<|im_end|>" for text in ('<call>add<sep>{"a": 2}</call>', '<call>add<sep>{"a":2}</call>', "4.")
    }
    assert "1 of 31 rows: the reasoning in content, up to </think>, is not in the text" in said
