"""The samples of a run in its report: which are shown, in which bounds, and that they stay text."""

import html
import json

from dualtune.show.report.rollouts import MAX_SHOWN, MAX_TEXT, rollouts
from dualtune.show.report.run_page import run_page

ATTACK = '"><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }} {% raw %} \u202e'


def row(step, reward, **changes):
    return {
        "step": step, "row": f"{ATTACK}:{step}", "sample": 0, "prompt": f"ask {step}", "completion": f"say {step}",
        "rewards": {"exact": reward}, "reward": reward, "advantage": 0.5, "tokens": 3, "is_whole": True, **changes,
    }  # fmt: skip


def write(copy, rows):
    (copy / "rollouts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))


def test_the_first_the_last_the_best_and_the_worst_are_shown(copy):
    rewards = [(7 * n) % 101 / 100 for n in range(1, 100)]
    write(copy, [row(n, reward) for n, reward in enumerate([*rewards, None], start=1)])
    found = rollouts(copy)
    kinds = {kind: [sample.step for sample in samples] for kind, samples in found["kinds"]}
    by_reward = sorted(range(1, 100), key=lambda n: rewards[n - 1])
    assert kinds == {
        "first": [*range(1, MAX_SHOWN + 1)], "last": [*range(101 - MAX_SHOWN, 101)],
        "best": by_reward[::-1][:MAX_SHOWN], "worst": by_reward[:MAX_SHOWN],
    }  # fmt: skip
    assert (found["count"], found["problem"]) == (100, "")
    page = run_page([copy])
    assert "Of 100 samples" in page and "<td>–</td>" in page  # the reward that failed


def test_what_a_model_or_a_reward_wrote_is_text_in_bounds(copy):
    write(copy, [row(1, 1.0, prompt=ATTACK, completion=ATTACK + "x" * 10**5, rewards={ATTACK: 1.0, "b": [1]})])
    page = run_page([copy])
    section = page.partition("<h2>Rollouts</h2>")[2].partition("<h2>")[0]
    assert "<script" not in section and "<img" not in section and "49" not in section
    assert "alert(1)</script>" in html.unescape(section) and "{{ 7 * 7 }}" in html.unescape(section)
    assert section.count("x" * 100) and len(section) < 4 * 3 * MAX_TEXT + 8000


def test_rows_of_any_shape_cost_themselves(copy):
    good = row(1, 1.0)
    wrong = {"step": "1", "prompt": 3, "completion": None, "rewards": [1], "advantage": "x", "tokens": 10**400}
    bad = [{**good, key: value} for key, value in wrong.items()]
    write(copy, [good, *bad, {**good, "reward": "high"}])
    found = rollouts(copy)
    assert found["count"] == 2 and found["problem"].endswith("Rows left out: 6")
    assert [len(samples) for _, samples in found["kinds"]] == [2, 2, 1, 1]
    (copy / "rollouts.jsonl").unlink()
    assert rollouts(copy) is None
