"""A run that pauses at a step: evaluated and saved there, and resumed as if it had not."""

import pytest

from dualtune.base.errors import Paused
from dualtune.show.run import run
from dualtune.train.policies import Ordinary
from dualtune.train.policy import Outcome
from dualtune.train.state.listing import summary_of

SETTINGS = {
    "data__eval": 0.25,
    "train__steps": 6,
    "run__eval_every": None,
    "run__save_every": None,
    "run__report": False,
}


def test_a_paused_run_resumes_bitwise(lab, weights_of, rows_of):
    whole = lab.run("whole", **SETTINGS)
    with pytest.raises(Paused, match=r"Paused after step 4 of 6; saved in .*step-00000004"):
        run(lab.config("paused", **SETTINGS), lab.backend, pause_after=4)
    path = lab.tmp_path / "paused"
    summary = summary_of(path)
    assert (summary.state, summary.step, summary.checkpoint) == ("preempted", 4, 4)
    assert [row["step"] for row in rows_of(path)[1]] == [0, 4]  # also where no evaluation is due
    assert not (path / "adapter").exists()
    resumed = run(lab.config("paused", **SETTINGS), lab.backend)
    assert weights_of(resumed.run_dir) == weights_of(whole.run_dir)
    assert resumed.eval_loss == whole.eval_loss


def test_a_pause_without_held_out_rows_is_saved_too(lab):
    with pytest.raises(Paused):
        run(lab.config(**SETTINGS | {"data__eval": 0}), lab.backend, pause_after=4)
    assert summary_of(lab.tmp_path / "run").checkpoint == 4


def test_a_pause_at_the_end_or_later_is_none(lab, weights_of):
    whole = lab.run("whole", **SETTINGS)
    for name, step in (("at", 6), ("later", 60)):
        assert weights_of(run(lab.config(name, **SETTINGS), lab.backend, pause_after=step).run_dir) == weights_of(
            whole.run_dir
        )


def test_a_policy_that_takes_several_steps_at_once_stops_there(lab, rows_of):
    with pytest.raises(Paused):
        run(lab.config(**SETTINGS), lab.backend, pause_after=4, policy=ThreeAtOnce)
    assert [row["step"] for row in rows_of(lab.tmp_path / "run")[0]] == [3, 4]


class ThreeAtOnce(Ordinary):
    """Every step stands for three, where it may."""

    name = "three at once"

    def take(self, step):
        return Outcome(super().take(step).update, num_steps=min(3, step.max_steps))
