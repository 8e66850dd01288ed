"""The turns of a document: every token in its place, in one part of one turn."""

import json

import pytest

from dualtune.data.documents import Data
from dualtune.data.order import Order
from dualtune.data.preview import kinds_of, samples
from dualtune.data.survey import by_source, survey
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.train.evaluation import layout_of

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' or not tools %}"
    "<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def row(*messages, **more):
    return {"messages": [{"role": role, "content": content} | extra for role, content, extra in messages]} | more


def message(role, content, **extra):
    return role, content, extra


@pytest.fixture
def samples_of(tmp_path, write_rows, make_config, tiny_llama):
    """The samples of rows, with the numbers of all of them."""

    def make(rows, number=9, template=TEMPLATE, **changes):
        (tmp_path / "t.jinja").write_text(template)
        settings = {"data.template": tmp_path / "t.jinja", "data.max_length": 1000} | changes
        config = make_config(write_rows(rows), settings)
        tokenizer = Tokenizer(tiny_llama, config.data.template)
        data = Data(config)
        train, eval_ = data.train_and_eval(tokenizer)
        order = Order(config, train.lengths, train.sources, train.weights)
        found = survey(config, train, eval_, order, layout_of(config))
        return samples(data, train, eval_, order, tokenizer, number), found

    return make


def told(sample):
    """(role, [(kind, text), …]) of each turn."""
    return [
        (turn.role, [(part.kind, "".join(token.text for token in part.tokens)) for part in turn.parts])
        for turn in sample.turns
    ]


def test_the_parts_of_a_conversation_with_tools(samples_of):
    chat = row(
        message("system", "Be brief."), message("user", " user "), message("assistant", "", tool_calls=[CALL]),
        message("tool", "12 degrees"), message("assistant", "It is 12 degrees, s."), tools=TOOLS,
    )  # fmt: skip
    (sample,), _ = samples_of([chat])
    end = ("frame", "<|im_end|>")
    assert told(sample) == [
        ("system", [
            ("frame", "<|im_start|>system\n"), ("content", "Be brief."), ("frame", "\n\n"),
            ("tools", f"# Tools\n{json.dumps(TOOLS)}"), end,
        ]),
        ("user", [("frame", "\n<|im_start|>user\n"), ("content", "user"), end]),
        ("assistant", [
            ("frame", "\n<|im_start|>assistant\n"), ("call", f"<call>{json.dumps(CALL['function'])}</call>"), end,
        ]),
        ("tool", [("frame", "\n<|im_start|>user\n"), ("content", "12 degrees"), end]),
        ("assistant", [
            ("frame", "\n<|im_start|>assistant\n"), ("content", "It is 12 degrees, s."), ("frame", "<|im_end|>\n"),
        ]),
    ]  # fmt: skip


def test_tools_without_a_system_message_are_a_turn_of_the_template(samples_of):
    (sample,), _ = samples_of([row(message("user", "q"), message("assistant", "a"), tools=TOOLS)])
    role, parts = told(sample)[0]
    assert (role, [kind for kind, _ in parts]) == ("template", ["tools"])
    assert [role for role, _ in told(sample)] == ["template", "user", "assistant"]


@pytest.mark.parametrize("length", range(12, 70, 7))
def test_a_cut_row_keeps_its_turns_up_to_the_cut(samples_of, length):
    """No token is lost or shown twice, wherever the cut falls."""
    chat = row(message("user", "hello"), message("assistant", "first"), message("user", "é"), message("assistant", "b"))
    found, numbers = samples_of([chat], **{"data.max_length": length, "data.loss_on": "all"})
    for sample in found:
        tokens = [token for turn in sample.turns for part in turn.parts for token in part.tokens]
        assert len(tokens) == sample.num_tokens == min(length, numbers.longest_row)
        assert sample.num_targets == sum(token.is_target for token in tokens)
        assert sample.lost == numbers.longest_row - sample.num_tokens
        assert [turn.role for turn in sample.turns] == ["user", "assistant", "user", "assistant"][: len(sample.turns)]
        contents = [
            "".join(t.text for p in turn.parts if p.kind == "content" for t in p.tokens) for turn in sample.turns
        ]
        assert all(
            whole.startswith(shown) for whole, shown in zip(["hello", "first", "é", "b"], contents, strict=False)
        )


def test_a_template_that_hides_where_a_message_is_leaves_the_text_whole(samples_of):
    chat = row(message("user", "ab"), message("assistant", "cd"))
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content | upper }}</s>"
        "{% endgeneration %}{% else %}{{ m.content | length }}{% endif %}{% endfor %}"
    )
    (sample,), _ = samples_of([chat], template=template)
    assert told(sample) == [("text", [("content", "2CD</s>")])]


def test_prompt_and_completion_without_a_template(make_config, write_rows, tiny_llama):
    config = make_config(write_rows([{"prompt": "2+2?", "completion": " 4"}]), {"data.template": "none"})
    tokenizer, data = Tokenizer(tiny_llama, "none"), Data(config)
    train, eval_ = data.train_and_eval(tokenizer)
    (sample,) = samples(data, train, eval_, Order(config, train.lengths), tokenizer, 3)
    assert told(sample) == [
        ("prompt", [("frame", "<s>"), ("content", "2+2?")]),
        ("completion", [("content", " 4"), ("frame", "</s>")]),
    ]


def test_each_kind_of_row_is_shown_once_with_all_that_it_is(samples_of, write_rows, tmp_path):
    rows = [row(message("user", f"q{i}"), message("assistant", "a" * (i + 1))) for i in range(6)]
    rows += [rows[2], row(message("user", "long"), message("assistant", "b" * 300))]
    write_rows(rows[:2], "eval.jsonl")
    found, numbers = samples_of(rows, 2, **{"data.eval": str(tmp_path / "eval.jsonl"), "data.max_length": 100})
    lines = {
        kind.name: [s.where.rpartition("/")[2] for s in found if kind.name in s.kinds] for kind in kinds_of(numbers)
    }
    assert lines["cut"] == ["train.jsonl:8"]
    assert lines["duplicate"] == ["train.jsonl:7"]
    assert lines["longest"] == ["train.jsonl:8", "train.jsonl:6"] or set(lines["longest"]) == {
        "train.jsonl:8", "train.jsonl:6",
    }  # fmt: skip
    assert lines["evaluation"] == ["eval.jsonl:1", "eval.jsonl:2"]
    assert len(lines["first"]) == 2 and lines["bad"] == []
    assert len({(s.where, "evaluation" in s.kinds) for s in found}) == len(found)
    (original,) = [s.original.rpartition("/")[2] for s in found if s.original]
    assert original == "train.jsonl:3"
    totals = {kind.name: kind.total for kind in kinds_of(numbers)}
    assert totals == {"first": 8, "bad": 0, "cut": 1, "duplicate": 1, "longest": 8, "control": 0, "evaluation": 2}


def test_the_numbers_of_the_sources_add_up(make_config, write_rows, tiny_llama):
    one = write_rows([{"prompt": "a", "completion": "bb"}] * 3, "one.jsonl")
    two = write_rows([{"prompt": "a", "completion": "b" * 9}], "two.jsonl")
    none = write_rows([{"prompt": "a" * 200, "completion": "b"}], "none.jsonl")
    config = make_config([str(one), str(two), str(none)])
    data = Data(config)
    train, _ = data.train_and_eval(Tokenizer(tiny_llama))
    found = by_source(data.train, train)
    assert [(source.path, source.documents) for source in found] == [(str(one), 3), (str(two), 1), (str(none), 0)]
    assert sum(source.tokens for source in found) == train.num_tokens
    assert sum(source.trained_tokens for source in found) == train.num_targets
    assert [source.lengths and source.lengths.max for source in found][2] is None
    assert found[1].lengths.min == found[1].lengths.max == found[1].tokens
