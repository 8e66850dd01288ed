"""One step that several processes share, in a world of threads; real processes are in test_torch_runs.py."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dualtune.train.policies import Ordinary
from dualtune.train.prepare import prepare
from dualtune.train.run import load_engine
from dualtune.train.state import checkpoint
from dualtune.train.state.run_dir import shared
from dualtune.train.step import TrainingStep

_spec = importlib.util.spec_from_file_location("test_team", Path(__file__).with_name("test_team.py"))
threads = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(threads)


class WithProbes(Ordinary):
    name, num_probes = "with probes", 5


@pytest.fixture
def take(open_backend, make_config, write_rows, qa_rows, tiny_softmax, monkeypatch):
    """What a step of each process comes to."""
    changes = {"train.documents_per_step": 7, "train.micro_batch_tokens": 64, "data.packing": False}
    config = make_config(write_rows(qa_rows), changes, tiny_softmax)
    prepared = prepare(config, open_backend("numpy"), policy=WithProbes)

    def work(team):
        mine = replace(prepared, team=team)
        step = TrainingStep(mine, load_engine(mine), 0, mine.batches)
        probe_loss, loss = float(step.document_losses(step.probe_documents).mean()), step.batch_loss()
        update = mine.make_policy(mine.config).take(step).update
        return probe_loss, loss, (update.num_targets, update.num_tokens, update.lr), update.output.loss

    return work


@pytest.fixture
def engine(open_backend, make_config, write_rows, qa_rows, tiny_softmax):
    return load_engine(prepare(make_config(write_rows(qa_rows), {}, tiny_softmax), open_backend("numpy")))


def test_processes_that_share_a_step_agree_on_its_numbers(take):
    (alone,) = threads.in_world(1, take)
    for size in (2, 3):
        found = threads.in_world(size, take)
        assert len({(probe, loss) for probe, loss, _, _ in found}) == 1  # the same bits in each
        assert found[0][:2] == pytest.approx(alone[:2], rel=1e-12)
        assert [counts for _, _, counts, _ in found] == [alone[2]] * size
        # Each engine has its share of the loss, divided by the targets of all.
        shares = [float(loss) for *_, loss in found]
        assert sum(shares) == pytest.approx(alone[3], rel=1e-12) and min(shares) > 0


@pytest.mark.parametrize("policy", [{}, {"average": np.arange(6, dtype=np.float32)}])
def test_all_processes_get_the_policy_s_part_of_a_checkpoint(engine, tmp_path, policy):
    state = {"config": {}, "fingerprints": dict.fromkeys(checkpoint.FINGERPRINTS, ""), "place": {}, "schedule": {}}
    state |= {"guards": {}, "policy": {"name": "averaging", "values": {"n": 3}}}
    path = checkpoint.save(tmp_path / "checkpoints", 4, engine, state, policy)
    first, other = threads.in_world(2, lambda team: shared(team, checkpoint.read(path) if team.is_first else None))
    assert first.path != other.path and first.state == other.state
    for saved in (first, other):
        assert {name: x.tolist() for name, x in saved.policy.items()} == {
            name: x.tolist() for name, x in policy.items()
        }
