"""A run that learns from its own samples, killed where they are drawn, judged and learned from."""

import json

import pytest

DRAW, JUDGE = "dualtune.train.generation.batched.PromptedRow.append", "dualtune.train.rl.rewards.Rewards.judge"
UPDATE = "dualtune.engine.testing.numpy_engine.NumpyEngine.optim_step"


@pytest.fixture
def sampling_box(box, write_rows):
    (box.home / "mine.py").write_text("def low(completion):\n    return sum(c < 'm' for c in completion)\n")
    rows = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(12)]
    box.settings |= {
        "data.train": write_rows(rows, "asked.jsonl"), "data.eval": 0, "adapter.dropout": 0.0,
        "train.objective": "grpo", "train.steps": 5, "train.documents_per_step": 2, "run.save_every": 2,
        "rollouts.rewards": [f"{box.home / 'mine.py'}:low"], "rollouts.samples": 4, "rollouts.max_tokens": 4,
    }  # fmt: skip
    return box


def samples_of(run_dir):
    return [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.fault(
    row=3,
    fault="kill -9 in a step that learns from its own samples",
    injection="SIGKILL while the samples are drawn, when they are judged, before the update",
    expected="the step draws the same again; adapter and samples equal, each sample there once",
)
def test_a_run_killed_among_its_samples_goes_on_bitwise(sampling_box):
    box = sampling_box
    straight = box.straight()
    # Each process goes on from the checkpoint after step 2, and dies in step 4: 8 samples of 4 tokens are drawn in a
    # step, and answers judged and weights updated once.
    box.train(-9, inject=f"enter({DRAW!r}, {3 * 32 + 10}, send('SIGKILL'))")
    assert [row["step"] for row in samples_of(box.dir)] == [1] * 8 + [2] * 8 + [3] * 8
    for where in (JUDGE, UPDATE):
        box.train(-9, inject=f"enter({where!r}, 2, send('SIGKILL'))")
        assert box.checkpoints == ["step-00000002"]
    box.resume()
    assert box.adapter == straight
    assert samples_of(box.dir) == samples_of(box.home / "ref")
