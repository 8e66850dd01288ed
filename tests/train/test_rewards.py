"""Rewards: what the built-in ones say, and what a function of the user can do to a run: nothing."""

import math
import os
import signal

import numpy as np
import psutil
import pytest

from dualtune.base.errors import ConfigError
from dualtune.train.rl.isolated import FIRST
from dualtune.train.rl.rewards import IsolatedReward, JudgedAnswer, Rewards, resolved, short_names

SOURCE = """
import os, subprocess, sys

def length(completion):
    print("noise on standard output", flush=True)
    os.write(1, b"and below Python")
    return len(completion)

def all_of_it(completion, prompt, expected):
    return 100 * len(prompt) + 10 * len(expected) + len(completion)

def raises(completion, **fields):
    return fields["nothing"]

def text(completion):
    return "good"

def as_trl(prompts, completions, answer, **columns):
    assert len(prompts) == len(completions) == len(answer) == len(columns["level"]) == 1
    return [100 * answer[0] + 10 * columns["level"][0] + len(completions[0]) + len(columns)]

def by_column(completion, level, absent=5):
    return 10 * level + absent

def infinite(completion):
    return float("inf")

def unjudged(completion):
    return None if completion == "hard" else True

def nothing(prompts, completions, **columns):
    return [None for _ in completions]

async def later(completions, prompts, **columns):
    return [len(completion[0]["content"]) + 10 * len(prompts[0]) for completion in completions]

def too_few(completions):
    return []

def no_list(completions):
    return 1.0

def listed(completion):
    return [1.0]

def by_position(completion, /):
    return 1.0

class Judge:
    def __call__(self, completion, state=None):
        return len(completion)

judge = Judge()

def sometimes(completion):
    if completion == "hang":
        subprocess.run(["sleep", "61"])
    if completion == "exit":
        os._exit(3)
    return 1.0
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(("name", "completion", "expected", "reward"), [
    ("exact", " 42\n", "42", 1), ("exact", "42.", "42", 0),
    ("contains", "It is 42.", "42", 1), ("contains", "It is 43.", "42", 0),
    ("number", "First 7, then 1,234.50", "so #### 1234.5", 1), ("number", "none", "none", 0), ("number", "-3", "3", 0),
    ("json", '{"a": 1, "b": 2}', '{"a": 1, "b": 3}', 0.5), ("json", '{"a": 1, "c": 2}', '{"a": 1}', 0.5),
    ("json", "{}", "{}", 0), ("json", "[1]", "[1]", 1), ("json", "a", "{}", 0), ("json", "[" * 10**5, "{}", 0),
    (r"regex:#### -?\d+$", "so\n#### 18", "", 1), (r"regex:#### -?\d+$", "18", "", 0),
    ("brief:4", "four", "", 1), ("brief:4", "eight888", "", 0.5),
])  # fmt: skip
def test_built_in_rewards(name, completion, expected, reward):
    assert resolved(name)(completion, prompt="", expected=expected) == reward


def judged(rewards, *completions, row=None):
    try:
        return rewards.judge([JudgedAnswer("ask", each, "ab", row or {}) for each in completions])
    finally:
        rewards.close()


def test_rewards_are_weighted_and_a_function_gets_what_it_names(file):
    rewards = Rewards([f"{file}:length", "exact", f"{file}:all_of_it"], [1.0, -2.0, 0.5], 30.0)
    answers = judged(rewards, "abc", "ab")
    assert answers.values_NR.tolist() == [[3, 0, 323], [2, 1, 322]]
    assert answers.totals_N.tolist() == [3 + 161.5, 2 - 2 + 161]
    assert answers.failures == ()


def test_a_function_gets_the_columns_that_it_names_and_lists_as_trl_passes_them(file):
    rewards = Rewards([f"{file}:by_column", f"{file}:as_trl", "exact"], [], 30.0)
    assert rewards.ask_for_rows
    answers = judged(rewards, "abc", row={"answer": 7, "level": 2, "prompt": "no", "day": "2026-11-27"})
    assert answers.values_NR.tolist() == [[25, 720 + 3 + 3, 0]]  # `columns` has expected, level and day
    assert judged(rewards, "abc", row={"level": 2}).failures[0].startswith(f"{file}:as_trl: TypeError")
    few = Rewards([f"{file}:all_of_it", "exact"], [], 30.0)
    assert not few.ask_for_rows
    few.close()


def test_none_judges_no_answer_and_the_others_count(file):
    """As in TRL: None adds nothing to the sum, and an answer that no function judges has no reward."""
    rewards = Rewards([f"{file}:unjudged", f"{file}:nothing", f"{file}:judge"], [2.0, 1.0, 1.0], 30.0)
    answers = judged(rewards, "hard", "easy one")
    np.testing.assert_array_equal(answers.values_NR, [[math.nan, math.nan, 4], [1, math.nan, 8]])
    assert answers.totals_N.tolist() == [4, 10] and not answers.failures
    alone = judged(Rewards([f"{file}:nothing"], [], 30.0), "a")
    assert np.isnan(alone.totals_N).all() and not alone.failures and not alone.failed_N.any()
    with_environment = alone.beside(np.array([3.0]), [])
    assert with_environment.totals_N.tolist() == [3]
    assert np.isnan(answers.beside(np.array([math.nan, 1.0]), ["lost"]).totals_N).tolist() == [True, False]


def test_a_coroutine_of_trls_form_gets_messages_for_messages(file):
    """The form that notebooks have: completion[0]["content"]."""
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ask"}]
    rewards = Rewards([f"{file}:later"], [], 30.0)
    assert rewards.ask_for_messages
    try:
        answers = rewards.judge([JudgedAnswer("ask", "four", "", {"prompt": asked}, asked)])
    finally:
        rewards.close()
    assert (answers.failures, answers.totals_N.tolist()) == ((), [4 + 20])


def test_what_a_function_cannot_do_without_must_be_a_column(file, wording):
    rewards = Rewards([f"{file}:by_column", f"{file}:as_trl"], [], 30.0)
    rewards.check_columns(["level", "answer", "prompt"])
    said = list[str]()
    for columns in (["answer", "prompt"], ["level"]):
        with pytest.raises(ConfigError) as error:
            rewards.check_columns(columns)
        said.append(str(error.value).replace(str(file), "mine.py"))
    assert judged(rewards, "abc", row={"answer": 7, "level": None}).failures  # of one row: its reward alone
    wording(said)


def test_each_reason_is_told_once(file):
    answers = judged(Rewards([f"{file}:sometimes"], [], 30.0), "exit", "a", "exit")
    assert answers.failure_texts() == [f"{file}:sometimes: its process ended with 3 (2 of 3 answers)"]


def test_a_query_is_rewarded_for_the_rows_that_it_gives(tmp_path):
    (tmp_path / "world.sql").write_text("CREATE TABLE t (n INT); INSERT INTO t VALUES (1), (2), (3);")
    rewards = Rewards([f"sql:{tmp_path / 'world.sql'}"], [], 30.0)
    endless = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r"
    queries = ["SELECT n FROM t WHERE n > 1", "SELECT n FROM t", "DROP TABLE t", endless, "no query"]
    try:
        answers = rewards.judge([JudgedAnswer("", query, "SELECT n FROM t WHERE n >= 2") for query in queries])
    finally:
        rewards.close()
    assert answers.values_NR.ravel().tolist() == [1, 0, 0, 0, 0] and not answers.failures


def test_a_function_that_fails_costs_its_answer_alone(file, wording):
    rewards = Rewards([f"{file}:sometimes", "exact"], [], 1.0)
    answers = judged(rewards, "hang", "ab", "hang", "exit", "ab")
    assert [math.isnan(value) for value in answers.totals_N] == [True, False, True, True, False]
    # What a function imports in its first call is lost with the process.
    assert [FIRST in why for why in answers.failures] == [True, False, False]
    assert not [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "61"]]
    assert answers.totals_N[[1, 4]].tolist() == [2, 2]
    wrong = ("raises", "text", "infinite", "too_few", "no_list", "listed")
    others = [judged(Rewards([f"{file}:{name}"], [], 30.0), "a").failures[0] for name in wrong]
    wording([each.replace(str(file), "mine.py") for each in (*answers.failures, *others)])


def test_a_process_that_was_killed_is_started_again(file):
    reward = IsolatedReward(f"{file}:length", 30.0)
    try:
        os.kill(reward._process.pid, signal.SIGKILL)
        reward._process.wait()
        assert "ended with -9" in reward(JudgedAnswer("", "abc", ""))
        assert reward(JudgedAnswer("", "abc", "")) == 3
    finally:
        reward.close()


@pytest.mark.parametrize(
    "name",
    [
        "exactly",
        "regex:(",
        "brief:x",
        "brief:0",
        "none.py:f",
        "mine.py:none",
        "broken.py:f",
        "mine.py",
        "brief:",
        "sql:none.sql",
        "mine.py:Judge",
        "mine.py:by_position",
    ],
)
def test_a_reward_that_is_not_there_is_refused(file, monkeypatch, name, wording):
    monkeypatch.chdir(file.parent)
    (file.parent / "broken.py").write_text("import nothing_like_this")
    with pytest.raises(ConfigError) as error:
        Rewards([name], [], 30.0)
    wording(str(error.value))


@pytest.mark.parametrize(("names", "short"), [
    (["dir/mine.py:tidy", "exact", "regex:a:b", "brief:9", "sql:dir/world.sql"],
     ["tidy", "exact", "regex", "brief", "sql"]),
    (["regex:a", "a.py:f", "regex:b", "b.py:f", "exact"], ["regex_1", "f_1", "regex_2", "f_2", "exact"]),
    (["mine.py:environment", "environment"], ["environment_1", "environment_2"]),
])  # fmt: skip
def test_no_two_rewards_have_one_name_in_metrics(names, short):
    assert short_names(names) == short
