"""Rows with two answers and a verdict, as the data sets on the hub have them: which answer is the better one."""

import pytest

from dualtune.base.errors import DataError
from dualtune.data.chat.examples import answers
from dualtune.data.chat.formats import to_examples
from dualtune.data.documents import Data
from dualtune.data.preferences import PreferenceCounts
from dualtune.data.sources.rows import BadRow, BadRows, RawRow, Tie
from dualtune.data.tokens.tokenizer import Tokenizer


def read(row, columns=None, format="auto"):
    (example,) = to_examples([RawRow("f", 1, row)], format, columns or {})
    return example


def better_and_worse(example):
    return tuple((answer.messages[0].content, answer.messages[-1].content) for answer in answers(example))


SHP = {"history": "Why?", "human_ref_A": "So.", "human_ref_B": "No.", "score_A": 9, "score_B": 4}
HELPSTEER2 = {"prompt": "Why?", "response_1": "So.", "response_2": "No."}
HELPSTEER3 = {"context": [{"role": "user", "content": "Why?"}], "response1": "So.", "response2": "No."}
FARM = {"instruction": "Why?", "output_1": "So.", "output_2": "No."}
SAFE = {"prompt": "Why?", "response_0": "So.", "response_1": "No."}
ARENA = {
    f"conversation_{model}": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": answer}]
    for model, answer in (("a", "So."), ("b", "No."))
}
OWN = {"prompt": "Why?", "answer_a": "So.", "answer_b": "No."}
FIRST, SECOND = (("Why?", "So."), ("Why?", "No.")), (("Why?", "No."), ("Why?", "So."))
VERDICTS = [
    (SHP, "labels", {1: FIRST, 0: SECOND}),
    (HELPSTEER2, "preference_strength", {-3: FIRST, 1: SECOND, "2": SECOND, 0: None}),
    (HELPSTEER3, "overall_preference", {-1: FIRST, 3: SECOND, 0: None}),
    (HELPSTEER2, "overall_preference", {-1: FIRST, 3: SECOND, 0: None}),
    (FARM, "preference", {1: FIRST, 2.0: SECOND, 1.5: None}),
    (SAFE, "better_response_id", {0: FIRST, 1: SECOND}),
    (ARENA, "winner", {"model_a": FIRST, "model_b": SECOND, "tie": None, "tie (bothbad)": None}),
    (OWN, "better", {"a": FIRST, "B": SECOND, "second": SECOND, "tie": None}),
]


@pytest.mark.parametrize(
    ("row", "key", "verdict", "expected"),
    [(row, key, verdict, expected) for row, key, verdicts in VERDICTS for verdict, expected in verdicts.items()],
)
def test_the_better_answer_is_the_chosen_one(row, key, verdict, expected):
    example = read({**row, key: verdict})
    if expected is None:
        assert isinstance(example, Tie)
    else:
        assert better_and_worse(example) == expected


@pytest.mark.parametrize(
    ("row", "key", "verdict", "reason"),
    [
        (SHP, "labels", 2, "better: got 2, allowed here: 1, 0"),
        (HELPSTEER2, "preference_strength", "much", "better: got 'much', a number is needed, below 0 if the first is "),
        (FARM, "preference", 0, "better: got 0, allowed here: 1, 2, 1.5"),
        (OWN, "better", 1, "better: got 1, allowed here: a, answer_a, first, b, "),  # the first, or the second?
        (OWN | {"answer_b": "So."}, "better", "a", "'chosen' and 'rejected' are the same"),
    ],
)
def test_a_verdict_that_could_mean_either_is_a_bad_row(row, key, verdict, reason):
    example = read({**row, key: verdict})
    assert isinstance(example, BadRow) and not isinstance(example, Tie) and example.reason.startswith(reason)


def test_scores_that_contradict_the_verdict_are_told():
    assert read(SHP | {"labels": 1}).notices == set()
    assert read(SHP | {"labels": 0}).notices == {"reversed_scores"}


def test_other_names_and_sft_on_the_better_answers():
    row = {"q": "Why?", "x": "So.", "y": "No.", "winner": "b"}
    columns = {"prompt": "q", "answer_a": "x", "answer_b": "y", "better": "winner"}
    assert better_and_worse(read(row, columns)) == SECOND
    (only,) = answers(read(SHP | {"labels": 0}, {"rejected": None}))
    assert only.messages[-1].content == "No." and only.messages[-1].train
    with pytest.raises(DataError, match="no known format"):
        read(row, columns | {"better": None})


def test_ties_are_left_out_and_counted(write_rows, make_config, tiny_llama):
    rows = [{**HELPSTEER2, "prompt": f"{n}?", "preference_strength": n % 3 - 1} for n in range(9)]
    config = make_config(write_rows(rows, "ties.jsonl"), {"data.eval": 0, "train.objective": "dpo"}, tiny_llama)
    data = Data(config)
    documents, _ = data.train_and_eval(Tokenizer.of(tiny_llama, config.data))
    assert (len(documents), documents.num_bad, documents.left_out) == (12, 0, {"ties": 3})
    assert "3 ties left out" in documents.summary()
    counts, bad = PreferenceCounts(), BadRows()
    list(bad.sift(counts.examples(data.train[0].examples())))
    assert (counts.num_rows, counts.num_ties, bad.count, bad.num_ties) == (6, 3, 0, 3)
