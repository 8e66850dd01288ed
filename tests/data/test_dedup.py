"""data.dedup: what a run does not train on, that nothing else changes, and that the cache knows the difference."""

import json
import random

import pytest

from dualtune.data.documents import Data
from dualtune.data.preview import counts
from dualtune.data.tokens.tokenizer import Tokenizer

TEXT = "The harbour was quiet that morning, and the gulls sat in rows along the wall"


def row(number, text=TEXT):
    return {"prompt": f"{number}?", "completion": f"{text} {number}" if text else str(number)}


def near(number):
    return {"prompt": f"{number}?", "completion": f"{TEXT.upper()} {number}"}


@pytest.fixture
def documents_of(make_config, tiny_llama):
    """The training and evaluation documents of these settings."""
    tokenizer = Tokenizer(tiny_llama)

    def prepare(data, **settings):
        changes = {f"data.{key}": value for key, value in settings.items()}
        return Data(make_config(data, {"data.max_length": 256} | changes)).train_and_eval(tokenizer)

    return prepare


def lines(documents):
    return sorted(int(document.where.rpartition(":")[2]) for document in documents)


def test_off_is_the_default_and_each_mode_leaves_out_its_kind(documents_of, write_rows, make_config):
    different = [{"prompt": c * 9, "completion": c * 30} for c in "abcd"]
    path = write_rows([*different, row(1), different[2], near(1)])
    everything, _ = documents_of(path)
    assert (lines(everything), everything.left_out) == ([1, 2, 3, 4, 5, 6, 7], {})
    exact, _ = documents_of(path, dedup="exact")
    assert (lines(exact), exact.left_out) == ([1, 2, 3, 4, 5, 7], {"exact": 1})
    assert "; 1 duplicate left out (1 exact)" in exact.summary()
    both, held_out = documents_of(path, dedup="near")
    assert (lines(both), both.left_out) == ([1, 2, 3, 4, 5], {"exact": 1, "near": 1})
    assert "; 2 duplicates left out (1 exact, 1 near)" in both.summary() and "left out" not in everything.summary()
    recorded = counts(make_config(path), both, held_out, lambda ids: ("hf_" + "aB3" * 12 + " ") * len(ids))
    assert recorded["left_out"] == {"exact": 1, "near": 1}
    assert [row["where"] for row in recorded["samples"]] == [f"{path}:{line}" for line in (1, 3, 5)]
    assert recorded["samples"][0]["text"].startswith("hf_***") and len(recorded["samples"][2]["text"]) < 9000


def test_no_near_duplicate_of_a_held_out_row_is_trained_on(documents_of, write_rows):
    """Whichever rows the seed holds out: each text is on one side."""
    texts = [chr(97 + i) * 40 for i in range(12)]
    path = write_rows([row(1, text.upper() if copy == 1 else text) for copy in range(3) for text in texts])
    train, held_out = documents_of(path, dedup="near", eval=0.25)
    assert (len(train), len(held_out), train.left_out, held_out.left_out) == (9, 3, {"near": 12, "exact": 12}, {})
    assert not set(lines(train)) & set(lines(held_out)) and set(lines(train) + lines(held_out)) == set(range(1, 13))


def test_evaluation_data_stay_whole_and_training_rows_like_them_are_left_out(documents_of, write_rows, make_config):
    other = write_rows([row(1), row(1), near(1)], "eval.jsonl")
    path = write_rows([row(2, "x" * 40), row(1, TEXT.lower()), row(3, "y" * 40)])
    train, held_out = documents_of(path, dedup="near", eval=str(other))
    assert (lines(train), lines(held_out), train.left_out) == ([1, 3], [1, 2, 3], {"near": 1})
    # What is evaluated now does not change what was trained on.
    third = write_rows([row(2, "x" * 40)], "third.jsonl")
    again = Data(make_config(path, {"data.dedup": "near", "data.eval": str(other)}), str(third))
    assert [example.line for example in again.training_examples(held_out)] == [1, 3]


def test_evaluation_rows_that_repeat_each_other_are_all_compared(documents_of, write_rows):
    text = "".join(random.Random(0).choices("abcdefgh", k=220))
    windows = [{"text": text[at : at + 180]} for at in (0, 15, 30)]  # each is near to the next one alone
    train, held_out = documents_of(
        write_rows([windows[2], {"text": "?" * 9}]), dedup="near", eval=str(write_rows(windows[:2], "eval.jsonl"))
    )
    assert (lines(train), lines(held_out)) == ([2], [1, 2])


def test_the_first_source_keeps_its_rows_and_bad_rows_do_not_shift_the_count(documents_of, write_rows):
    first = write_rows([row(1), {"prompt": 1}, row(2, "x" * 40)], "a.jsonl")
    second = write_rows([row(2, "x" * 40), {"prompt": "?"}, near(1), row(3, "z" * 40)], "b.jsonl")
    train, _ = documents_of([str(first), str(second)], dedup="near", on_bad_row="skip", max_bad_rows=3)
    where = {document.where for document in train}
    assert where == {f"{first}:1", f"{first}:3", f"{second}:4"}
    assert (train.left_out, train.num_bad) == ({"exact": 1, "near": 1}, 2)


def test_the_cache_knows_mode_and_the_other_sources(documents_of, write_rows, monkeypatch):
    path = write_rows([row(1), row(1), row(2, "x" * 40)])
    other = write_rows([row(3, "y" * 40)], "eval.jsonl")

    def run(**settings):
        return lines(documents_of(path, eval=str(other), **settings)[0])

    assert [run(), run(dedup="exact"), run(dedup="near")] == [[1, 2, 3], [1, 3], [1, 3]]
    other.write_text(json.dumps(row(2, "x" * 40)) + "\n")
    assert run(dedup="exact") == [1]
    # All of these are in the cache now: nothing is compared again.
    monkeypatch.setattr("dualtune.data.documents.Repeats", None)
    assert [run(), run(dedup="exact")] == [[1, 2, 3], [1]]
    assert documents_of(path, eval=str(other), dedup="exact")[0].left_out == {"exact": 2}
