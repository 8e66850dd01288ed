"""Predictive training of several processes: they decide alike, and like one."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dualtune.train.prepare import prepare
from dualtune.train.run import load_engine
from dualtune.train.step import TrainingStep

_spec = importlib.util.spec_from_file_location("test_team", Path(__file__).with_name("test_team.py"))
threads = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(threads)

HYBRID = {
    "hybrid.enabled": True, "hybrid.warmup_steps": 3, "hybrid.full_steps": 4, "hybrid.correct_steps": 1,
    "hybrid.max_predict_steps": 4, "hybrid.probes": 3, "hybrid.trust_region": 9.0, "hybrid.gate": "none",
    "train.learning_rate": 1e-3, "train.schedule": "constant", "train.steps": 16, "train.documents_per_step": 6,
    "run.save_every": None,
}  # fmt: skip
LEAVE = """
import os
import numpy as np
import dualtune.train.run as run
fit = run.fit
def leave(job):
    num_steps = fit(job)
    np.savez(os.path.join({place!r}, os.environ["RANK"] + ".npz"), **job.engine.adapter_state())
    with open(os.path.join({place!r}, os.environ["RANK"] + ".json"), "w") as file:
        import json
        json.dump(dict(job.policy.state().values), file)
    return num_steps
run.fit = leave
"""


def test_every_process_has_the_loss_of_every_document(open_backend, make_config, write_rows, qa_rows, tiny_softmax):
    config = make_config(write_rows(qa_rows), HYBRID, tiny_softmax)
    prepared = prepare(config, open_backend("numpy"))

    def work(team):
        mine = replace(prepared, team=team)
        return TrainingStep(mine, load_engine(mine), 0, mine.batches).document_losses(prepared.data.probes).tolist()

    (alone,) = threads.in_world(1, work)
    assert len(alone) == 6 and min(alone) > 0
    for size in (2, 3, 8):
        found = threads.in_world(size, work)
        assert all(losses == found[0] for losses in found)  # the same bits in each
        assert found[0] == pytest.approx(alone, abs=1e-6)


def test_the_first_process_decides_by_its_clock(open_backend, make_config, write_rows, qa_rows, tiny_softmax):
    prepared = prepare(make_config(write_rows(qa_rows), HYBRID, tiny_softmax), open_backend("numpy"))

    def work(team):
        mine = replace(prepared, team=team)
        return TrainingStep(mine, load_engine(mine), 0, mine.batches).from_first(0.1 + team.rank)

    assert threads.in_world(3, work) == [0.1, 0.1, 0.1]


@pytest.mark.long  # the threads above share the same code
def test_two_processes_predict_alike(make_config, write_rows, start, tmp_path):
    from dualtune.config import to_yaml

    rows = [{"prompt": f"{i} plus {i}?", "completion": f"{2 * i}{'!' * (i % 5)}"} for i in range(30)]
    config = make_config(write_rows(rows), HYBRID | {"run.dir": tmp_path / "run", "memory.sharding": "none"})
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    leave = LEAVE.format(place=str(tmp_path))
    ended = start(2, "train", tmp_path / "config.yaml", "--platform", "cpu", inject={0: leave, 1: leave}).wait()
    assert [process.code for process in ended] == [0, 0], ended[0].output + ended[1].output
    first, second = (dict(np.load(tmp_path / f"{rank}.npz")) for rank in (0, 1))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    states = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert states[0] == states[1] and states[0]["counts"]["accepted"] >= 1
