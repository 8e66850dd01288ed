"""Chat templates by name: the text of each family's original, as recorded by scripts/record_templates.py."""

import json
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.config.values import NEWEST_TEMPLATES
from dualtune.data.chat.conversations import Message
from dualtune.data.chat.examples import Example
from dualtune.data.chat.formats import to_examples
from dualtune.data.chat.template import NAMES, WITH_TOOLS, ChatTemplate, named_template
from dualtune.data.sources.rows import RawRow, RowError
from dualtune.data.tokens.tokenize import tokenize_rows
from dualtune.data.tokens.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "named_templates"
RECORDED = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in GOLDEN.glob("*.json")}
ENDS = {
    "chatml": "<|im_end|>", "llama-3": "<|eot_id|>", "llama-3.1": "<|eot_id|>", "qwen-2.5": "<|im_end|>",
    "qwen-3": "<|im_end|>", "gemma-2": "<end_of_turn>", "gemma-3": "<end_of_turn>", "mistral-small": "</s>",
    "phi-3": "<|end|>",
}  # fmt: skip


@pytest.fixture(scope="module")
def recorder():
    """The conversations and the special tokens that were recorded."""
    return runpy.run_path(str(ROOT / "scripts" / "record_templates.py"))


def test_each_name_has_a_record_and_an_end():
    assert set(NAMES) == RECORDED.keys() == ENDS.keys()


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_that_of_the_original(recorder, name, prompt):
    template, conversations = ChatTemplate(named_template(name), recorder["SPECIAL"]), recorder["CONVERSATIONS"]
    assert RECORDED[name]["texts"].keys() == conversations.keys()
    for conversation, texts in RECORDED[name]["texts"].items():
        expected = texts[str(prompt).lower()]
        if expected is None:
            with pytest.raises(RowError, match="refuses this conversation"):
                template.render(conversations[conversation], add_generation_prompt=prompt)
        else:
            found = template.render(conversations[conversation], add_generation_prompt=prompt)
            assert found == expected, conversation


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_the_text_of_tools_is_that_of_the_original(recorder, name, prompt):
    template, conversations = ChatTemplate(named_template(name), recorder["SPECIAL"]), recorder["TOOL_CONVERSATIONS"]
    texts = RECORDED[name]["with_tools"]["texts"]
    assert texts.keys() == conversations.keys() and sum(found["false"] is not None for found in texts.values()) > 9
    for conversation, (messages, tools) in conversations.items():
        expected = texts[conversation][str(prompt).lower()]
        if expected is None:
            with pytest.raises(RowError, match="refuses this conversation"):
                template.render(messages, tools=tools, add_generation_prompt=prompt)
        else:
            found = template.render(messages, tools=tools, add_generation_prompt=prompt)
            assert found == expected, conversation


def test_a_schema_that_the_original_of_hermes_never_ends_with_is_written():
    types = {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": ["string", "null"]}}
    tool = {"function": {"name": "f", "parameters": {"properties": types}}}
    text = ChatTemplate(named_template("chatml"), {}).render([{"role": "user", "content": "?"}], tools=[tool])
    assert '"description": "f(a: list[int], b: Union[str,None]) - ' in text


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_are_learned_in_rows_of_any_form(knowing_all_ends, name):
    """Ids of another form, arguments as text, content null, a result that is an object."""
    call = {"id": "call_1", "function": {"name": "add", "arguments": '{"a": 2}'}}
    turns = [
        {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": {"sum": 4}, "tool_call_id": "call_1"}, {"role": "assistant", "content": "It is 4."},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
    (example,) = to_examples([RawRow("f", 1, {"messages": turns, "tools": tools})], "auto", {})
    tokenizer = Tokenizer(knowing_all_ends, name)
    (row,) = tokenize_rows([example], tokenizer, "assistant", 5000)
    ((tokens, mask),) = row.documents
    runs = np.split(tokens, np.flatnonzero(np.diff(mask.astype(int))) + 1)[1::2]
    first, last = (tokenizer.decode_all(run.tolist()) for run in runs)
    assert '{"a": 2}' in first and "add" in first and first.endswith(ENDS[name])
    assert last.endswith(f"It is 4.{ENDS[name]}") and '{"sum": 4}' not in first + last
    assert row.notices <= {"uneven_start"}


@pytest.mark.parametrize("name", sorted({*NAMES} - {*WITH_TOOLS}))
def test_tools_are_refused_and_not_hidden(name):
    template = ChatTemplate(named_template(name), {"bos_token": "<s>", "eos_token": "</s>"})
    asks, call = {"role": "user", "content": "?"}, {"function": {"name": "f", "arguments": {}}}
    for messages, tools in (
        ([asks, {"role": "assistant", "content": "", "tool_calls": [call]}], ()),
        ([asks, {"role": "assistant", "content": "!"}, {"role": "tool", "content": "3"}], ()),
        ([asks], [call]),
    ):
        with pytest.raises(RowError, match=r"writes no tools, as its original\. Set data\.template to one that does"):
            template.render(messages, tools=tools)


@pytest.fixture(scope="module")
def knowing_all_ends(tiny_llama, tmp_path_factory):
    """A model directory whose tokenizer has one token for the end of a turn in each template."""
    from tokenizers import Tokenizer as Rust

    path = tmp_path_factory.mktemp("knowing")
    shutil.copytree(tiny_llama, path, dirs_exist_ok=True)
    rust = Rust.from_file(str(path / "tokenizer.json"))
    rust.add_special_tokens([*ENDS.values()])
    rust.save(str(path / "tokenizer.json"))
    config = json.loads((path / "config.json").read_text()) | {"vocab_size": 300}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_each_answer_and_its_end_are_targets(knowing_all_ends, name):
    """So that the model learns to stop. An empty block for reasoning, which Qwen 3 writes last, is learned too."""
    from tokenizers import Tokenizer as Rust

    tokenizer, rust = Tokenizer(knowing_all_ends, name), Rust.from_file(str(knowing_all_ends / "tokenizer.json"))
    turns = [("user", "2+2?"), ("assistant", "It is 4."), ("user", "3+3?"), ("assistant", "6")]
    if name != "gemma-2":
        turns.insert(0, ("system", "Be brief."))
    example = Example(path="f", line=1, messages=tuple(Message(role=role, content=text) for role, text in turns))
    (row,) = tokenize_rows([example], tokenizer, "assistant", 500)
    ((tokens, mask),) = row.documents
    runs = np.split(tokens, np.flatnonzero(np.diff(mask.astype(int))) + 1)[1::2]  # the document begins outside
    thought, rest = "<think>\n\n</think>\n\n" if name == "qwen-3" else "", "\n</s>" if name == "phi-3" else ""
    assert [rust.decode(run.tolist(), skip_special_tokens=False) for run in runs] == [
        f"It is 4.{ENDS[name]}",
        f"{thought}6{ENDS[name]}{rest}",
    ]


def test_a_name_that_does_not_exist_is_refused_with_those_that_do(tiny_llama):
    with pytest.raises(ConfigError, match="got 'llama-4', allowed: auto, none, chatml, llama-3, "):
        Tokenizer(tiny_llama, "llama-4")


def test_a_template_whose_end_is_no_token_of_the_model_is_named(tiny_llama):
    assert Tokenizer(tiny_llama, "chatml").warning is None
    assert "ends a turn with <|eot_id|>, which this tokenizer splits" in Tokenizer(tiny_llama, "llama-3").warning


@pytest.mark.parametrize("short", NEWEST_TEMPLATES)
def test_a_short_name_is_the_newest_version_and_a_config_holds_the_full_name(knowing_all_ends, make_config, short):
    full = make_config("d.jsonl", {"data.template": short}).data.template
    assert full == NEWEST_TEMPLATES[short] and full.startswith(short)
    family = [name for name in NAMES if name.startswith(short)]
    assert full == family[-1], "the versions of a family stand in their order"
    assert Tokenizer(knowing_all_ends, short).template.source == named_template(full) != named_template("chatml")


@pytest.mark.parametrize(
    ("theirs", "ours"), [("llama3", "llama-3"), ("qwen_25", "qwen-2.5"), ("gemma3", "gemma-3"), ("phi_35", "phi-3")]
)
def test_a_name_of_another_trainer_leads_to_ours(tiny_llama, theirs, ours):
    with pytest.raises(
        ConfigError, match=rf"got '{theirs}', allowed: .*, or an existing Jinja file. Did you mean '{ours}'\?"
    ):
        Tokenizer(tiny_llama, theirs)
