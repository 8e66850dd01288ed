"""Right answers: found by the last match of a pattern, compared as numbers where they are numbers."""

import re

import pytest

from dualtune.data.chat.formats import Example, Message
from dualtune.errors import DataError
from dualtune.evaluate import tasks
from dualtune.evaluate.inference import Answer
from dualtune.evaluate.tasks import TASKS, Answers, check_answers

GSM8K = re.compile(TASKS["gsm8k"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so 3 * 4\n#### 12", "12"),
        ("#### 1\nno: #### 2", "2"),
        ("####-1,234.5 apples", "-1,234.5"),
        ("#### 70,000.", "70,000"),
        ("12", None),
        ("### 12", None),
    ],
)
def test_the_answer_is_the_last_match(text, expected):
    assert tasks.last_match(GSM8K, text) == expected


@pytest.fixture
def check(monkeypatch):
    """`check_answers` on (expected, generated) pairs."""

    def run(pairs, pattern=GSM8K) -> Answers:
        examples = [
            Example("f", i, (Message("user", str(i)), Message("assistant", expected)), (), str(i), expected)
            for i, (expected, _) in enumerate(pairs, start=1)
        ]
        made = iter(got for _, got in pairs)
        monkeypatch.setattr(tasks, "answer", lambda model, example, _: Answer("", example.completion, next(made)))
        return check_answers(None, examples, pattern, max_tokens=8)  # type: ignore[arg-type]

    return run


@pytest.mark.parametrize(
    ("expected", "got", "right", "lenient"),
    [
        ("#### 12", "12 is it\n#### 12", 1, 1),
        ("#### 1,200", "#### 1200.0", 1, 1),
        ("#### 12", "#### 13", 0, 0),
        ("#### 12", "3 * 4 is 12", 0, 1),
        ("#### 12", "12 or 13", 0, 0),
        ("#### 12", "#### 13 or 12", 0, 0),  # where the pattern is there, it counts
        ("#### 12", "", 0, 0),
    ],
)
def test_numbers_are_compared_as_numbers(check, expected, got, right, lenient):
    assert check([(expected, got)]) == Answers(1, right, lenient)


def test_other_answers_are_compared_as_text(check):
    pattern = re.compile(r"Answer: (\w+)")
    assert check([("Answer: B", "…\nAnswer: B"), ("Answer: B", "Answer: C")], pattern) == Answers(2, 1, 1)


def test_a_row_whose_expected_answer_has_no_match_is_named(check):
    with pytest.raises(DataError, match=r"f:2: the expected answer does not match the pattern"):
        check([("#### 1", "#### 1"), ("1", "#### 1")])
