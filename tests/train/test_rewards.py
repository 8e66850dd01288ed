"""Rewards: what the built-in ones say, and what a function of the user can do to a run: nothing."""

import math
import os
import signal

import psutil
import pytest

from dualtune.base.errors import ConfigError
from dualtune.train.rl.rewards import IsolatedReward, JudgedAnswer, Rewards, resolved, short_name

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
    assert short_name("sql:dir/world.sql") == "sql"


def test_a_function_that_fails_costs_its_answer_alone(file, wording):
    rewards = Rewards([f"{file}:sometimes", "exact"], [], 1.0)
    answers = judged(rewards, "hang", "ab", "exit", "ab")
    assert [math.isnan(value) for value in answers.totals_N] == [True, False, True, False]
    assert not [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "61"]]
    assert answers.totals_N[[1, 3]].tolist() == [2, 2]
    others = [judged(Rewards([f"{file}:{name}"], [], 30.0), "a").failures[0] for name in ("raises", "text", "infinite")]
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
    ["exactly", "regex:(", "brief:x", "none.py:f", "mine.py:none", "broken.py:f", "mine.py", "brief:", "sql:none.sql"],
)
def test_a_reward_that_is_not_there_is_refused(file, monkeypatch, name, wording):
    monkeypatch.chdir(file.parent)
    (file.parent / "broken.py").write_text("import nothing_like_this")
    with pytest.raises(ConfigError) as error:
        Rewards([name], [], 30.0)
    wording(str(error.value))


@pytest.mark.parametrize(("name", "short"), [("dir/mine.py:tidy", "tidy"), ("exact", "exact"), ("regex:a:b", "regex"),
                                             ("brief:9", "brief")])  # fmt: skip
def test_short_names(name, short):
    assert short_name(name) == short
