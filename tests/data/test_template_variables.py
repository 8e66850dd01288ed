"""`data.template_variables`: the same text as transformers gives with them, wherever the template goes."""

import json

import pytest
from safetensors.numpy import load_file
from transformers.utils.chat_template_utils import render_jinja_template

from dualtune.base.errors import ConfigError
from dualtune.config import parse_config
from dualtune.data.chat.conversations import Message
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.model.adapter import AdapterSpec, init_adapter
from dualtune.model.formats.chat_template import TEMPLATE_FILE
from dualtune.model.formats.directory import Adapter, write_adapter
from dualtune.train.generation.sampling import Sampling
from dualtune.use.chat import Chat, load_adapter_set
from dualtune.use.serve.answers import Answers
from dualtune.use.serve.requests import read_request

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}\n{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
SOURCES = {
    "a guarded read": QWEN,
    "a default of its own": "{% set level = level if level is defined else 1 %}{{ level }}{{ messages[0].content }}",
    "in a macro": "{% macro f(m) %}{{ m.content }}{{ level | tojson }}{% endmacro %}{{ f(messages[0]) }}",
    "a leading line break": "\n  {{ level | tojson }}\n{% if level %}\n{{ level }}{% endif %}",
    "in a loop": "{% for m in messages %}{{ m.content }}{{ level | tojson }}{% endfor %}",
}
VALUES = [False, None, 3, -1.5, "a \"b\" 'c'\n\\ {{ x }} {% y %} é 🙂", ["x", {"k": True}], {}]
QUESTION = [Message("user", "Hi")]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_it_renders_as_in_transformers(tiny_llama, tmp_path, source, value):
    (tmp_path / "t.jinja").write_text(source)
    name = "enable_thinking" if source is QWEN else "level"
    tokenizer = Tokenizer(tiny_llama, str(tmp_path / "t.jinja"), template_variables={name: value})
    for prompt in (False, True):
        (expected,), _ = render_jinja_template(
            [[{"role": "user", "content": "Hi"}]], chat_template=source, add_generation_prompt=prompt,
            **tokenizer.special_tokens, **{name: value},
        )  # fmt: skip
        assert tokenizer.render(QUESTION, add_generation_prompt=prompt) == expected
        # The saved template gives the same text without them, and another value where one is given.
        saved = tokenizer.template.source
        (again,), _ = render_jinja_template(
            [[{"role": "user", "content": "Hi"}]], chat_template=saved, add_generation_prompt=prompt,
            **tokenizer.special_tokens,
        )  # fmt: skip
        assert again == expected
        forms = [
            render_jinja_template(
                [[{"role": "user", "content": "Hi"}]], chat_template=each, add_generation_prompt=prompt,
                **tokenizer.special_tokens, **{name: "other"},
            )[0]
            for each in (source, saved)
        ]  # fmt: skip
        assert forms[0] == forms[1]


def test_they_change_the_hash_and_the_fingerprint_and_are_not_added_twice(tiny_llama, tmp_path):
    (tmp_path / "t.jinja").write_text(QWEN)
    plain = Tokenizer(tiny_llama, str(tmp_path / "t.jinja"))
    off, on = (
        Tokenizer(tiny_llama, str(tmp_path / "t.jinja"), template_variables={"enable_thinking": each})
        for each in (False, True)
    )
    assert len({each.template_hash for each in (plain, off, on)}) == 3
    assert len({each.fingerprint() for each in (plain, off, on)}) == 3
    (tmp_path / TEMPLATE_FILE).write_text(off.template.source)
    copy = str(tmp_path / TEMPLATE_FILE)
    assert Tokenizer(tiny_llama, copy).template_hash == off.template_hash
    again = Tokenizer(tiny_llama, copy, template_variables={"enable_thinking": False})
    assert again.template_hash == off.template_hash
    changed = Tokenizer(tiny_llama, copy, template_variables={"enable_thinking": True})
    prompts = [each.render(QUESTION, add_generation_prompt=True) for each in (off, on, changed)]
    assert prompts[0].endswith("</think>\n\n") and prompts[1] == prompts[2] and prompts[1].endswith("assistant\n")


def test_a_variable_that_the_template_does_not_read_is_refused_with_those_that_it_reads(tiny_llama, tmp_path):
    (tmp_path / "t.jinja").write_text(QWEN)
    with pytest.raises(ConfigError, match="got thinking, which the chat template does not read; allowed: enable_thi"):
        Tokenizer(tiny_llama, str(tmp_path / "t.jinja"), template_variables={"thinking": False})
    with pytest.raises(ConfigError, match="no chat template"):
        Tokenizer(tiny_llama, "none", template_variables={"thinking": False})


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "a-b", "1a", "", "a }}"])
def test_names_that_a_template_is_given_anyway_or_that_are_none_are_refused(name):
    data = {"train": "t.jsonl", "template_variables": {name: 1}}
    with pytest.raises(ConfigError, match=r"data\.template_variables"):
        parse_config(json.dumps({"model": {"name": "m"}, "data": data}))


def test_any_json_value_is_read():
    values = {f"v{i}": "é 'x'" if isinstance(value, str) else value for i, value in enumerate(VALUES)}
    data = {"train": "t.jsonl", "template_variables": values}
    assert parse_config(json.dumps({"model": {"name": "m"}, "data": data})).data.template_variables == values


@pytest.fixture
def thoughtless(tiny_softmax, tmp_path):
    """An adapter whose training had `enable_thinking: false`."""
    (tmp_path / "qwen.jinja").write_text(QWEN)
    tokenizer = Tokenizer(tiny_softmax, str(tmp_path / "qwen.jinja"), template_variables={"enable_thinking": False})
    spec, tensors = AdapterSpec(2, 4.0, 0.0, ("head",)), init_adapter({"head": head_shape(tiny_softmax)}, 2, 0)
    write_adapter(tmp_path / "tuned", Adapter(spec, tensors, template=tokenizer.template.source))
    return tmp_path / "tuned"


def head_shape(model):
    return load_file(model / "model.safetensors")["head.weight"].shape


def test_chat_and_serve_ask_with_the_variables_of_the_training(thoughtless, tiny_softmax, open_backend, monkeypatch):
    adapters = load_adapter_set(open_backend("numpy"), str(tiny_softmax), {"tuned": thoughtless})
    tokenizer, prompts = adapters.models["tuned"].tokenizer, []

    def generate(prompt, *, choose, cache=None):
        prompts.append(tokenizer.decode_all(prompt.tolist()))
        yield from ()

    monkeypatch.setattr(adapters.engine, "generate", generate)
    list(Chat(adapters, "tuned", Sampling()).ask("Hi"))
    answers = Answers(adapters, max_tokens=4, max_prompt=500, max_waiting=4, time_limit_s=60)
    body = {"model": "tuned", "messages": [{"role": "user", "content": "Hi"}]}
    answers.submit(read_request(json.dumps(body).encode(), is_chat=True))
    answers.answer_next()
    assert prompts == ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"] * 2
