"""Weights of messages, from the row to the batch; and what stays as it was where there are none."""

import json

import numpy as np
import pytest

from dualtune.base.errors import DataError
from dualtune.data.batches import SequenceLayout, make_batch, micro_batches
from dualtune.data.chat.conversations import Message, read_messages
from dualtune.data.chat.examples import Example
from dualtune.data.documents import Data, in_memory, tokenize
from dualtune.data.preview import show_document
from dualtune.data.tokens import store as cache
from dualtune.data.tokens.masks import render_example
from dualtune.data.tokens.store import INDEX, WEIGHTS
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import IGNORE_INDEX


@pytest.fixture(scope="module")
def tokenizer(tiny_llama) -> Tokenizer:
    return Tokenizer(tiny_llama)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty cache of its own."""
    monkeypatch.setenv("DUALTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def row(*weights, start=0):
    """A conversation whose answers have these weights; None: says nothing of it."""
    messages = []
    for i, weight in enumerate(weights, start=start):
        said = {} if weight is None else {"weight": weight}
        messages += [
            {"role": "user", "content": f"Question {i}?"},
            {"role": "assistant", "content": f"answer {i}", **said},
        ]
    return {"messages": messages}


def example(*weights):
    return Example("f", 1, read_messages(row(*weights)["messages"], "messages"))


def test_a_message_keeps_its_weight_as_float32():
    weights = [m.weight for m in example(None, 0.1, 2, 1e-60).messages if m.role == "assistant"]
    assert weights == [1.0, float(np.float32(0.1)), 2.0, 1.0]
    assert [m.train for m in example(0.1, 1e-60, 0).messages[1::2]] == [True, False, False]
    assert Message("assistant", "x").weight == 1.0


@pytest.mark.parametrize(("loss_on", "expected"), [
    ("assistant", {"answer 0<|im_end|>": 0.25, "answer 1<|im_end|>": 1.0, "answer 3<|im_end|>": 3.0}),
    ("last", {"answer 3<|im_end|>": 3.0}),
])  # fmt: skip
def test_a_turn_is_learned_by_its_weight(tokenizer, loss_on, expected):
    rendered = render_example(example(0.25, None, 0, 3), tokenizer, loss_on)
    texts = [rendered.text[start:end] for start, end in rendered.ranges]
    assert dict(zip(texts, rendered.weights, strict=True)) == expected


def test_all_but_the_weighted_turns_is_learned_as_usual(tokenizer):
    rendered = render_example(example(0.25, None, 0, 3), tokenizer, "all")
    texts = [rendered.text[start:end] for start, end in rendered.ranges]
    assert rendered.weights == [1.0, 0.25, 1.0, 1.0, 3.0]
    assert texts[1] == "answer 0<|im_end|>" and texts[4] == "answer 3<|im_end|>"
    assert "answer 1" in texts[2] and "Question 2" in texts[2] and "Question 3" in texts[3]
    assert "answer 2" not in "".join(texts)


@pytest.mark.parametrize("weights", [(1, 0), (None, None), (1.0, 0.0)])
def test_without_fractions_there_is_no_trace_of_weights(tokenizer, weights):
    assert render_example(example(*weights), tokenizer, "assistant").weights is None
    documents = tokenize([example(*weights)], tokenizer, "assistant", 200)
    assert documents[0].weights is None and documents.stores[0].weights is None
    assert make_batch(documents, [[0]], seed=0, step=0).weights_BT is None
    assert not documents.has_message_weights


def test_the_tokens_of_a_turn_and_its_end_have_its_weight(tokenizer):
    document = tokenize([example(0.25, None, 3)], tokenizer, "assistant", 200)[0]
    runs = show_document(document, tokenizer.decode_all).runs()
    assert [run for run in runs if run[0]] == [
        (0.25, "answer 0<|im_end|>"), (1.0, "answer 1<|im_end|>"), (3.0, "answer 2<|im_end|>"),
    ]  # fmt: skip
    assert document.weights.dtype == np.float32
    assert np.array_equal(document.weights > 0, document.loss_mask)


def test_the_end_token_that_is_added_has_the_weight_of_the_last_turn(with_template):
    bare = with_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    document = tokenize([example(None, 0.5)], bare, "assistant", 200)[0]
    assert int(document.tokens[-1]) == bare.eos_id and document.weights[-1] == 0.5


def test_a_batch_has_the_weights_at_the_labels_of_weighted_documents(tokenizer):
    plain = Example("f", 2, read_messages(row(None)["messages"], "messages"))
    documents = tokenize([example(0.25), plain], tokenizer, "assistant", 200)
    size = len("answer 0") + 1  # and its end token
    packed = make_batch(documents, [[0, 1]], seed=0, step=0)
    targets = packed.labels_BT != IGNORE_INDEX
    assert packed.weights_BT.dtype == np.float32
    assert packed.weights_BT[targets].tolist() == [0.25] * size + [1.0] * size
    assert packed.total_weight == 1.25 * size and packed.num_targets == 2 * size
    alone = make_batch(documents, [[1]], seed=0, step=0)
    assert alone.weights_BT is None and alone.total_weight == size
    assert make_batch(documents, [], seed=0, step=0).total_weight == 0


def test_a_step_has_the_same_weight_however_it_is_divided():
    masks = [np.float32([0, 0, 0.5, 2.0]), np.array([False, True, True, True]), np.float32([0, 0.25, 0, 0])]
    documents = in_memory([(np.arange(4, dtype=np.int32), mask) for mask in masks])
    for layout in (SequenceLayout(16), SequenceLayout(64), SequenceLayout(16, 16)):
        for size in (1, 2, 3):
            shares = [
                micro_batches(documents, range(3), layout, seed=0, step=0, rank=r, size=size) for r in range(size)
            ]
            assert sum(batch.total_weight for share in shares for batch in share) == 5.75


# --- the store --------------------------------------------------------------------------------------------------------


def read(make_config, path, tokenizer):
    return Data(make_config(path, {"data.max_length": 200})).train_and_eval(tokenizer)[0]


def test_the_cache_holds_weights_only_where_there_are_some(here, make_config, write_rows, tokenizer):
    rows = [row(None), row(0), row(None, 0.5), row(1), row(2.5, 0)]
    found = read(make_config, write_rows(rows), tokenizer)
    (place,) = here.iterdir()
    assert (place / WEIGHTS).stat().st_size == 4 * found.num_tokens
    again = read(make_config, write_rows(rows), tokenizer)
    for documents in (found, again):
        assert [d.weights is None for d in documents] == [True, False, True, False]  # the second row is dropped
        assert set(documents[1].weights.tolist()) == {0.0, 1.0, 0.5}
        assert set(documents[3].weights.tolist()) == {0.0, 2.5}
    plain = read(make_config, write_rows([row(None), row(0), row(1, 0)], "plain.jsonl"), tokenizer)
    (other,) = set(here.iterdir()) - {place}
    assert {path.name for path in other.iterdir()} == {"tokens.bin", "index.bin", "store.json"}
    assert not plain.has_message_weights


def test_other_weights_are_other_documents(tokenizer):
    prints = {
        tokenize([example(*w)], tokenizer, "assistant", 200).fingerprint() for w in ((0.5,), (0.25,), (1,), (None,))
    }
    assert len(prints) == 3


def test_a_changed_weight_is_a_damaged_cache(here, make_config, write_rows, tokenizer):
    path = write_rows([row(0.5)])
    read(make_config, path, tokenizer)
    (place,) = here.iterdir()
    whole = bytearray((place / WEIGHTS).read_bytes())
    whole[-3] ^= 1
    (place / WEIGHTS).write_bytes(whole)
    with pytest.raises(DataError, match="is damaged"):
        read(make_config, path, tokenizer)[0]


def test_a_cache_of_before_is_read(tmp_path):
    """Written here as it was before there were weights: two files, the digest over the tokens alone."""
    raw = np.array([~5, 7, 8], "<i4")
    entry = np.zeros(1, INDEX)
    entry["length"], entry["num_targets"], entry["row_length"] = 3, 2, 3
    entry["digest"] = np.void(bytes.fromhex("447ac80638a74a98e2881e97c37aeb0c"))
    (tmp_path / "tokens.bin").write_bytes(raw.tobytes())
    (tmp_path / "index.bin").write_bytes(entry.tobytes())
    table = {
        "files": ["a"],
        "num_rows": 1,
        "answers": 1,
        "num_bad": 0,
        "bad": [],
        "bytes": {"tokens.bin": 12, "index.bin": entry.nbytes},
    }
    (tmp_path / "store.json").write_text(json.dumps(table))
    document = cache._read(tmp_path).document(0)
    assert (document.tokens.tolist(), document.loss_mask.tolist(), document.weights) == (
        [5, 7, 8],
        [False, True, True],
        None,
    )
