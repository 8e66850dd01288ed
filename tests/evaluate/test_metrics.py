"""Right answers: by the last match of a pattern, by a field of JSON, or by a function of the user's."""

import re

import pytest

from dualtune.base.errors import ConfigError, DataError
from dualtune.use.scoring.metrics import TASKS, is_right, json_metric, last_match, pattern_metrics, user_metric

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
    assert last_match(GSM8K, text) == expected


@pytest.mark.parametrize(
    ("expected", "got", "right", "lenient"),
    [
        ("#### 12", "12 is it\n#### 12", True, True),
        ("#### 1,200", "#### 1200.0", True, True),
        ("#### 12", "#### 13", False, False),
        ("#### 12", "3 * 4 is 12", False, True),
        ("#### 12", "12 or 13", False, False),
        ("#### 12", "#### 13 or 12", False, False),  # where the pattern is there, it counts
        ("#### 12", "", False, False),
    ],
)
def test_numbers_are_compared_as_numbers(expected, got, right, lenient):
    metrics = pattern_metrics(GSM8K)
    scores = [metric.score("f:1", expected, got) for metric in metrics]
    assert scores == [right, lenient]
    assert is_right(scores) is right


def test_other_answers_are_compared_as_text():
    strict, _ = pattern_metrics(re.compile(r"Answer: (\w+)"))
    assert strict.score("f:1", "Answer: B", "…\nAnswer: B") is True
    assert strict.score("f:1", "Answer: B", "Answer: C") is False


def test_a_row_whose_expected_answer_cannot_be_scored_is_named():
    with pytest.raises(DataError, match=r"^f:2: the expected answer does not match the pattern"):
        pattern_metrics(GSM8K)[0].score("f:2", "1", "#### 1")
    with pytest.raises(DataError, match=r"^f:2: the expected answer: JSON object: there is no field 'a\.b'$"):
        json_metric("a.b").score("f:2", '{"a": {"c": 1}}', "{}")
    with pytest.raises(DataError, match=r"^f:2: the expected answer: JSON object: not valid JSON"):
        json_metric("a").score("f:2", "no object", "{}")


@pytest.mark.parametrize(
    ("got", "right"),
    [
        ('{"n": 2, "x": {"y": "b"}}', True),
        ('Here it is:\n```json\n{"n": 2.0, "x": {"y": "b"}}\n```', True),
        ('{"n": 2, "x": {"y": "c"}}', False),
        ('{"n": 2, "x": "b"}', False),
        ('{"x": {"y": "b"}}', False),
        ('{"n": true, "x": {"y": "b"}}', False),
        ('{"n": "2", "x": {"y": "b"}}', False),
        ('{"n": 2, "x": {"y": "b"}', False),
        ("", False),
        ("[" * 5000, False),
        ('{"n": ' * 300 + "1" + "}" * 300, False),
    ],
)
def test_fields_of_a_json_object(got, right):
    metrics = [json_metric("n"), json_metric("x.y")]
    scores = [metric.score("f:1", '{"n": 2, "x": {"y": "b"}}', got) for metric in metrics]
    assert is_right(scores) is right


def test_true_is_not_one():
    assert json_metric("n").score("f:1", '{"n": 1}', '{"n": true}') is False
    assert json_metric("n").score("f:1", '{"n": true}', '{"n": true}') is True


# --- the user's own --------------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the current directory, as a user would write one."""
    (tmp_path / "own_metrics.py").write_text(
        "import numpy\n"
        "def overlap(expected, got): return len(set(expected) & set(got)) / len(set(expected))\n"
        "def same(expected, got): return numpy.bool_(expected == got)\n"
        "def text(expected, got): return 'yes'\n"
        "def nan(expected, got): return float('nan')\n"
        "def broken(expected, got): raise KeyError('a\\nb')\n"
        "NUMBER = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_metrics", raising=False)


def test_a_function_of_a_module_in_the_current_directory(module):
    import sys

    before = list(sys.path)
    overlap, same = user_metric("own_metrics:overlap"), user_metric("own_metrics:same")
    assert (overlap.name, overlap.score("f:1", "abcd", "cdx")) == ("own_metrics:overlap", 0.5)
    assert same.score("f:1", "a", "a") is True
    assert is_right([1.0, False]) is False and is_right([1.0, True]) is True
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", r"^f:7: the metric own_metrics:broken raised KeyError: 'a\\nb'$"),
        ("text", r"^f:7: the metric own_metrics:text returned 'yes', it must be a finite number or a bool$"),
        ("nan", r"^f:7: the metric own_metrics:nan returned 'nan', it must be a finite number or a bool$"),
    ],
)
def test_a_metric_that_fails_names_the_row_in_one_line(module, name, message):
    with pytest.raises(DataError, match=message):
        user_metric(f"own_metrics:{name}").score("f:7", "a", "b")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", r"--metric: got 'nowhere', allowed: an entry point of the group dualtune\.metrics"),
        ("own_metrics:none", "--metric own_metrics:none: AttributeError"),
        ("no_such_module:f", "--metric no_such_module:f: ModuleNotFoundError"),
        ("own_metrics:NUMBER", "--metric own_metrics:NUMBER: got a int, it must be a function"),
    ],
)
def test_a_metric_that_cannot_be_loaded_is_one_error(module, name, message):
    with pytest.raises(ConfigError, match=message):
        user_metric(name)


def test_an_installed_metric_is_found_by_its_name(monkeypatch):
    from importlib.metadata import EntryPoint

    from dualtune.use.scoring import metrics

    point = EntryPoint("plus", "operator:add", "dualtune.metrics")
    monkeypatch.setattr(metrics, "points_of", lambda group: [point] if group == "dualtune.metrics" else [])
    with pytest.raises(DataError, match=r"^f:1: the metric plus returned 'ab'"):
        user_metric("plus").score("f:1", "a", "b")


def test_a_metric_without_a_verdict_decides_nothing():
    assert is_right([]) is None and is_right([1.0, 0.0]) is None
