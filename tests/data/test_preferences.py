"""Numbers of preferences, and where two answers differ. Expected by hand."""

import pytest

from dualtune.data.chat.formats import to_examples
from dualtune.data.documents import Data
from dualtune.data.preferences import (
    PreferenceCounts,
    difference,
    from_difference,
    label_numbers,
    pair_numbers,
    preference_warnings,
)
from dualtune.data.preview import counts
from dualtune.data.sources.rows import RawRow
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.show.report.run_sections import _preferences as preferences_told


def counted(*rows, **options):
    counts = PreferenceCounts(**options)
    examples = list(counts.examples(to_examples([RawRow("f", n, row) for n, row in enumerate(rows, 1)], "auto", {})))
    assert len(examples) == len(rows)
    return counts


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **extra):
    return {"role": "assistant", "content": content} | extra


def test_pairs_are_measured_by_the_characters_of_their_answers():
    turns = [user("a"), assistant("before")]
    counts = counted(
        {"prompt": "p", "chosen": "four", "rejected": "no"},
        {"prompt": "p", "chosen": "six", "rejected": "three"},
        {"chosen": [*turns, user("b"), assistant("12"), user("c"), assistant("345")],
         "rejected": [*turns, user("b"), assistant("12345")]},
        {"prompt": "q", "chosen": "same", "rejected": "same"},
    )  # fmt: skip
    pairs = counts.pairs
    assert (pairs.pairs, pairs.unit, pairs.chosen_longer, pairs.rejected_longer) == (3, "characters", 1, 1)
    assert (pairs.chosen.min, pairs.chosen.median, pairs.chosen.mean, pairs.chosen.max) == (3, 4, 4, 5)
    assert (pairs.rejected.min, pairs.rejected.median, pairs.rejected.mean, pairs.rejected.max) == (2, 5, 4, 5)
    assert (pairs.chosen.cut, counts.num_equal, counts.num_prompts, counts.labels) == (None, 1, 2, None)


def test_a_prompt_is_all_that_stands_before_the_answers():
    def pair(question, *answers):
        chosen, rejected = ([user("Hi"), assistant("Ho"), user(question), assistant(answer)] for answer in answers)
        return {"chosen": chosen, "rejected": rejected}

    assert counted(pair("a", "1", "2"), pair("a", "1", "3"), pair("b", "1", "2")).num_prompts == 2


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_run_records_its_preferences_and_its_page_tells_them(objective, make_config, write_rows, tiny_softmax):
    rows = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no" if n else "never"} for n in range(4)]
    config = make_config(write_rows(rows), {"train.objective": objective, "data.eval": 0})
    tokenizer = Tokenizer(tiny_softmax)
    recorded = counts(config, *Data(config).train_and_eval(tokenizer), tokenizer.decode_all)
    told = dict(preferences_told(recorded))
    texts = [sample["text"][slice(*sample["targets"][0])].removesuffix("<|im_end|>") for sample in recorded["samples"]]
    answers = [sample["answer"] for sample in recorded["samples"]]
    if objective == "dpo":
        assert answers == ["chosen", "chosen", "rejected"]
        assert (recorded["documents"], recorded["labels"], recorded["pairs"]["chosen_longer"]) == (8, None, 3)
        assert told == {"pairs": "4; the chosen answer is the longer one in 3, the rejected one in 1"}
        assert texts == ["yes", "yes", "no"]
    else:
        assert answers == ["desirable"] * 3
        assert (recorded["documents"], recorded["pairs"], recorded["labels"]["balance"]) == (16, None, 1)
        assert told == {"labels": "4 desirable, 4 undesirable"}
        assert texts == ["yes", "yes", "yes"]  # none of them an answer to another prompt


def test_labels_are_balanced_by_number_and_weight():
    rows = [{"prompt": "p", "completion": str(n), "label": n > 0} for n in range(4)]
    assert counted(*rows).labels == label_numbers(3, 1)
    assert counted(*rows, weights=(1.0, 2.5)).labels.balance == pytest.approx(1.2)
    assert counted(*rows).num_prompts == 1
    assert counted({"prompt": "p", "completion": "c"}).labels is None


@pytest.mark.parametrize(("counts", "weights", "advised"), [
    ((6, 6), (1, 1), {}), ((8, 6), (1, 1), {}), ((8, 4), (1, 2), {}), ((8, 4), (1, 1.4), {"undesirable": (1.5, 2)}),
    ((9, 6), (1, 1), {"undesirable": (1.125, 1.5)}), ((3, 6), (1, 1), {"desirable": (2, 8 / 3)}), ((5, 0), (1, 1), {}),
])  # fmt: skip
def test_the_weights_that_balance_labels_are_those_of_the_paper(counts, weights, advised):
    numbers = label_numbers(*counts, weights)
    expected = {f"preference.{kind}_weight": pytest.approx(values) for kind, values in advised.items()}
    assert numbers.weights == expected
    for key, (low, high) in numbers.weights.items():  # between them, nothing is advised any more
        used = ((low + high) / 2, 1.0) if key == "preference.desirable_weight" else (1.0, (low + high) / 2)
        assert label_numbers(*counts, used).weights == {}


def test_what_would_be_learned_instead_is_warned_of(wording):
    import numpy as np

    long, short = np.full(10, 9), np.full(10, 3)
    for chosen, rejected in ((long, short), (short, long)):
        wording(preference_warnings(pair_numbers(chosen, rejected, "tokens", 5), None))
    half = np.where(np.arange(10) < 8, long, short)
    assert preference_warnings(pair_numbers(half, 12 - half, "tokens"), None) == []
    wording(preference_warnings(None, label_numbers(5, 0)))
    wording(preference_warnings(None, label_numbers(9, 3)))


def test_a_difference_is_where_the_first_message_begins_to_differ():
    turns = [user("a"), assistant("b"), user("c")]
    row = {
        "chosen": [*turns, assistant("It is 4.")],
        "rejected": [*turns, assistant("It is 5."), user("?"), assistant("So")],
    }
    found = difference(counted(row).first)
    assert (found.where, found.message, found.character) == ("f:1", 4, 7)
    assert found.chosen == "assistant: It is 4."
    assert found.rejected == "assistant: It is 5.\nuser: ?\nassistant: So"
    assert from_difference(found.chosen, found.rejected)[0] == "assistant: It is ▸4."
    start = "x" * 200
    assert from_difference(f"{start}a", f"{start}b{'c' * 500}") == (f"…{'x' * 60}▸a", f"…{'x' * 60}▸b{'c' * 399}…")
