"""The numbers of the data, against counts in plain Python: the byte tokenizer's documents can be counted by hand."""

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualtune.base.text import visible
from dualtune.config import parse_config
from dualtune.data import survey as module
from dualtune.data.batches import SequenceLayout, micro_batches
from dualtune.data.chat.examples import Example
from dualtune.data.documents import Data, tokenize
from dualtune.data.order import Order
from dualtune.data.preview import first_documents, pieces, show_document
from dualtune.data.survey import histogram, steps_per_epoch, survey
from dualtune.data.survey import warnings as warnings_of
from dualtune.data.tokens.store import Document
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.train.evaluation import layout_of

WORDS = st.text("abcé", min_size=1, max_size=12)
PAIRS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=30)


@pytest.fixture(scope="session")
def bare(tiny_llama) -> Tokenizer:
    return Tokenizer(tiny_llama, "none")


@pytest.fixture(scope="session")
def chatml(tiny_llama) -> Tokenizer:
    return Tokenizer(tiny_llama)


def config_of(**changes):
    settings = {"data.max_length": 16, "train.documents_per_step": 4} | changes
    lines = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return parse_config("model: {name: x}\ndata: {train: x.jsonl}", overrides=lines)


def in_memory(pairs, tokenizer, config):
    examples = [Example("f", line, prompt=p, completion=c) for line, (p, c) in enumerate(pairs, start=1)]
    return tokenize(examples, tokenizer, "assistant", config.data.max_length)


def survey_of(config, train, eval_):
    return survey(config, train, eval_, Order(config, train.lengths, train.sources, train.weights), layout_of(config))


def from_files(config):
    tokenizer = Tokenizer(Path(config.model.name), config.data.template)
    data = Data(config)
    train, eval_ = data.train_and_eval(tokenizer)
    found = survey_of(config, train, eval_)
    return found, warnings_of(found, config, data.train, train, tokenizer)


# --- numbers ---------------------------------------------------------------------------------------------------------


@given(pairs=PAIRS, eval_pairs=PAIRS)
def test_every_number_is_what_counting_by_hand_gives(bare, pairs, eval_pairs):
    config = config_of()
    pairs.append(("a", "b"))  # one that fits
    train, eval_ = in_memory(pairs, bare, config), in_memory(eval_pairs, bare, config)
    found = survey_of(config, train, eval_)

    def counted(pair) -> tuple[bytes, int, int]:  # (what tells documents apart, tokens, targets), uncut
        before, after = (text.encode() for text in pair)
        return before + b"|" + after, len(before) + len(after) + 2, len(after) + 1

    rows = [counted(pair) for pair in pairs]
    # A row that is cut keeps as many tokens to learn as there is room behind <s> and the question.
    kept = [(min(n, 16), targets - max(0, n - 16)) for _, n, targets in rows]
    kept = [(n, targets) for n, targets in kept if targets > 0]
    lengths = sorted(n for n, _ in kept)
    long = [n for _, n, _ in rows if n > 16]
    assert (found.rows, found.documents, found.bad_rows) == (len(rows), len(kept), 0)
    assert (found.tokens, found.trained_tokens) == (sum(lengths), sum(targets for _, targets in kept))
    assert found.trained_share == found.trained_tokens / found.tokens
    assert (found.over_long, found.split) == (len(long), 0)
    assert sum(found.dropped.values()) == len(rows) - len(kept) == len(long) - found.cut
    assert found.longest_row == max(n for _, n, _ in rows)
    assert (found.lengths.min, found.lengths.max) == (lengths[0], lengths[-1])
    assert found.lengths.mean == pytest.approx(math.fsum(lengths) / len(lengths))
    middle = len(lengths) // 2
    assert found.lengths.median == (lengths[middle] + lengths[-1 - middle]) / 2
    assert sum(n <= found.lengths.p90 for n in lengths) >= 0.9 * len(lengths)
    assert sum(n < found.lengths.p90 for n in lengths) <= 0.9 * len(lengths)

    def document(pair) -> tuple[bytes, int]:  # (the text that is left, where the answer begins in it)
        before, after = (text.encode() for text in pair)
        return (before + after + b"$")[:15], len(before)

    documents = [document(pair) for pair in pairs if len(pair[0].encode()) < 15]
    eval_documents = [document(pair) for pair in eval_pairs if len(pair[0].encode()) < 15]
    assert found.documents == len(documents)
    assert found.duplicates == sum(count - 1 for count in Counter(documents).values())
    assert (found.eval_rows, found.eval_documents) == (len(eval_pairs), len(eval_documents))
    assert found.eval_in_training == sum(document in documents for document in eval_documents)


def test_the_first_pairs_are_named_by_their_lines(bare):
    config = config_of()
    train = in_memory([("a", "b"), ("c", "d"), ("e", "f"), ("c", "d"), ("a", "b"), ("c", "d")], bare, config)
    eval_ = in_memory([("a", "x"), ("e", "f"), ("c", "d")], bare, config)
    found = survey_of(config, train, eval_)
    assert (found.duplicates, found.first_duplicate) == (3, ["f:4", "f:2"])
    assert (found.eval_in_training, found.first_eval_in_training) == (2, ["f:2", "f:3"])
    alone = survey_of(config, in_memory([("a", "b")], bare, config), in_memory([], bare, config))
    assert (alone.first_duplicate, alone.first_eval_in_training, alone.eval_documents) == (None, None, 0)


def test_equal_texts_of_which_other_parts_are_learned_are_no_duplicates(bare):
    train = in_memory([("ab", "c"), ("a", "bc")], bare, config_of())
    assert train[0].tokens.tolist() == train[1].tokens.tolist()
    assert survey_of(config_of(), train, in_memory([], bare, config_of())).duplicates == 0


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=50))
def test_the_bars_cover_every_length_once(lengths):
    bars = histogram(np.array(lengths))
    assert [bar.documents for bar in bars] == [sum(bar.first <= n <= bar.last for n in lengths) for bar in bars]
    assert (bars[0].first, bars[-1].last) == (min(lengths), max(lengths))
    assert all(a.last + 1 == b.first for a, b in pairwise(bars))
    assert len(bars) <= 10


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    steps=st.sampled_from([{"train.documents_per_step": 7}, {"train.documents_per_step": None}]),
)
def test_the_steps_of_an_epoch_take_every_document_once(lengths, steps):
    order = Order(config_of(**{"train.tokens_per_step": 100} | steps), lengths)
    number = steps_per_epoch(order)
    taken = np.concatenate([order.step(step).documents for step in range(number)])
    assert sorted(taken.tolist()) == list(range(len(lengths)))


def test_weights_make_an_epoch_longer():
    sources = np.repeat([0, 1], [10, 20])
    order = Order(config_of(**{"train.documents_per_step": 5}), np.ones(30, np.int64), sources, (2.0, 0.5))
    assert steps_per_epoch(order) == (2 * 10 + 20 // 2) / 5


@pytest.mark.parametrize("packing", [True, False])
def test_the_cells_that_hold_a_token_are_those_of_the_batches(bare, packing):
    config = config_of(**{"data.packing": packing, "train.documents_per_step": 8, "train.micro_batch_tokens": 64})
    train = in_memory([("a" * (i % 5 + 1), "b" * (i % 7 + 1)) for i in range(30)], bare, config)
    found = survey_of(config, train, in_memory([], bare, config))
    order = Order(config, train.lengths)
    for row_length, share in ((16, found.fill_packed), (None, found.fill_alone)):
        batches = [
            batch
            for step in range(4)
            for batch in micro_batches(
                train, order.step(step).documents, SequenceLayout(64, row_length), seed=0, step=step
            )
        ]
        used = sum(int((batch.segments_BT > 0).sum()) for batch in batches)
        assert share == used / sum(batch.segments_BT.size for batch in batches)
    assert (found.packing, found.fill_steps, found.steps_per_epoch) == (packing, 4, 4)
    assert found.fill_packed > found.fill_alone


def test_of_many_steps_the_first_are_measured(bare, monkeypatch):
    monkeypatch.setattr(module, "MEASURED_STEPS", 2)
    config = config_of()
    train = in_memory([("a", "b" * (i % 9 + 1)) for i in range(30)], bare, config)
    found = survey_of(config, train, in_memory([], bare, config))
    assert (found.fill_steps, found.steps_per_epoch) == (2, 8)
    assert "in the first 2 steps" in dict(module.describe(found))["filled"]


def test_rows_that_were_left_out_are_counted_once_with_their_reasons(make_config, write_rows, qa_rows):
    data = write_rows([*qa_rows, {"prompt": "no answer"}])
    settings = {"data.eval": 0.25, "data.on_bad_row": "skip", "data.max_bad_rows": 1}
    found, _ = from_files(make_config(data, settings))
    assert (found.rows, found.eval_rows, found.bad_rows) == (12, 4, 1)
    assert [reason.partition(": ")[0] for reason in found.first_bad_rows] == [f"{data}:17"]


# --- warnings --------------------------------------------------------------------------------------------------------

TEMPLATES = {
    "everything": "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}</s>{% endgeneration %}",
    "no end": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %} |{% endfor %}",  # [END] would be one: a text stops too,
}


def pairs(number, answer="yes"):
    return [{"prompt": f"Question {i}?", "completion": answer} for i in range(number)]


@pytest.mark.parametrize(
    ("rows", "settings", "template", "warning"),
    [
        (pairs(20), {}, None, None),
        (pairs(20), {}, "everything", "100 % of the tokens are targets, prompts too"),
        (pairs(20), {"data.loss_on": "all"}, "everything", None),  # as was asked for
        (pairs(20), {}, "no end", "no end token is a target, so the model would not learn to stop"),
        ([{"prompt": "a" * 900, "completion": "b"}], {}, None, "0 % of the tokens are targets"),
        (pairs(9) + pairs(1, "x" * 90), {"data.max_length": 60}, None, None),  # 10 % are not yet too many
        (pairs(8) + pairs(2, "x" * 90), {"data.max_length": 60}, None, "20% of the rows are cut"),
        (pairs(19) + pairs(1), {}, None, None),
        (pairs(18) + pairs(2), {}, None, "10% of the documents are duplicates"),
        ([{"text": f"A story of {i}."} for i in range(20)], {}, None, None),  # all of a text is a target
    ],
)
def test_what_ruins_a_training_is_said_and_nothing_else(
    make_config, write_rows, tmp_path, rows, settings, template, warning
):
    changes = {"data.max_length": 1000} | settings
    if template:
        (tmp_path / "template.jinja").write_text(TEMPLATES[template])
        changes["data.template"] = tmp_path / "template.jinja"
    data = write_rows(rows)
    _, warnings = from_files(make_config(data, changes))
    assert len(warnings) == (warning is not None), warnings
    assert all(warning in text for text in warnings)


def test_a_leak_is_a_warning(make_config, write_rows, qa_rows):
    eval_ = write_rows([qa_rows[3], {"prompt": "new", "completion": "one"}], "eval.jsonl")
    found, warnings = from_files(make_config(write_rows(qa_rows), {"data.eval": eval_}))
    assert found.eval_in_training == 1
    assert [w.partition(",")[0] for w in warnings] == ["1 of 2 evaluation documents are in the training data"]


def test_a_chat_among_texts_is_judged_alone(make_config, write_rows, tmp_path):
    """All of each text is a target, and has an end token; the chats of the other file never end."""
    texts, chats = write_rows([{"text": f"Story {i}."} for i in range(9)], "texts.jsonl"), write_rows(pairs(5))
    (tmp_path / "template.jinja").write_text(TEMPLATES["no end"])
    config = make_config([str(texts), str(chats)], {"data.template": tmp_path / "template.jinja"})
    _, warnings = from_files(config)
    assert [w.partition(": ")[0] for w in warnings] == [str(chats)]


# --- documents as text -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 261), max_size=40))
def test_the_texts_of_the_tokens_join_to_the_text_of_all(bare, ids):
    """Any bytes, also such as are no UTF-8, and special tokens."""
    assert "".join(pieces(ids, bare.decode_all)) == bare.decode_all(ids)


@pytest.mark.parametrize("text", ["Once upon a time", "  two spaces", "héllo 日本語 🙂!", "a\ufffd", "\ufffd\ufffdb"])
def test_so_do_those_of_a_tokenizer_that_falls_back_to_bytes(shared, text):
    tokenizer = Tokenizer(shared("models/stories260k"))
    ids = tokenizer.encode(text, special=True).tolist()
    found = pieces(ids, tokenizer.decode_all)
    assert "".join(found) == tokenizer.decode_all(ids)
    assert len(found) == len(ids)
    assert tokenizer.decode_all(ids).endswith(text)


def test_a_character_of_several_tokens_belongs_to_the_last(bare):
    ids = bare.encode("aé🙂b", special=False).tolist()
    assert pieces(ids, bare.decode_all) == ["a", "", "é", "", "", "", "🙂", "b"]


def test_the_runs_are_the_answer_and_the_rest(make_config, write_rows, chatml):
    config = make_config(write_rows([{"prompt": "2+2? é", "completion": "4 日本"}]), {"train.steps": 1})
    train, _ = Data(config).train_and_eval(chatml)
    (document,) = first_documents(train, Order(config, train.lengths), chatml, 3)
    question = "<s><|im_start|>user\n2+2? é<|im_end|>\n<|im_start|>assistant\n"
    assert document.runs() == [(False, question), (True, "4 日本<|im_end|>"), (False, "\n")]
    assert document.text == question + "4 日本<|im_end|>\n"
    assert [token.id for token in document.tokens] == train[0].tokens.tolist()
    assert document.num_targets == train[0].num_targets == len("4 日本".encode()) + 1
    assert document.where == train[0].where


def test_the_first_token_is_never_shown_as_a_target(bare):
    """Nothing precedes it, so it cannot be predicted; the sums do not count it either."""
    document = Document(bare.encode("abc", special=False), np.ones(3, bool))
    shown = show_document(document, bare.decode_all)
    assert (shown.runs(), shown.num_targets) == ([(False, "a"), (True, "bc")], document.num_targets)


def test_the_documents_shown_are_those_that_are_trained_first(bare):
    config = config_of(**{"train.epochs": 2})
    train = in_memory([("q", chr(97 + i % 26) * (i % 5 + 1)) for i in range(10)], bare, config)
    order = Order(config, train.lengths)
    wheres = [document.where for document in first_documents(train, order, bare, 7)]
    assert wheres == [train[i].where for i in [*order.step(0).documents, *order.step(1).documents][:7]]
    assert len(first_documents(train, order, bare, 99)) == 20  # two epochs, no more


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\n é 日", "a\tb\n é 日"),
        ("\x1b[31m", "␛[31m"),
        ("\r\0\x7f", r"␍␀\u007f"),
        ("\x9b", r"\u009b"),
        ("\udcff", r"\udcff"),
        ("a\u202eb", r"a\u202eb"),
    ],
)
def test_control_characters_become_visible(text, shown):
    assert visible(text) == shown
