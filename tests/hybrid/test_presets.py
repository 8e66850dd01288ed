"""The documents' presets end to end: what hooks, the profiler and the live line see of their phases."""

import csv
import math

import pytest

from dualtune.cli.progress import Progress
from dualtune.show.view.run_view import RunView
from dualtune.train.hooks import Hook, StepRecord, StepTaken
from dualtune.train.hybrid.policy import Predictive
from dualtune.train.hybrid.settings import PRESETS

pytestmark = pytest.mark.covering(1)


class Phases(Hook):
    def __init__(self):
        self.taken, self.changes = [], []

    def after_step(self, step):
        self.taken.append((step.step, step.phase, step.lr is None))

    def on_phase_change(self, change):
        self.changes.append(change.phase)


@pytest.mark.parametrize("preset", ["conservative", "aggressive"])
def test_a_preset_runs_end_to_end(any_lab, preset):
    seen = Phases()
    ended = any_lab.run(hooks=[seen], hybrid__preset=preset)
    statistics = ended.policy.statistics()
    assert ended.policy._settings.confidence_threshold == PRESETS[preset].confidence_threshold
    assert statistics.counts.accepted >= 1 and statistics.counts.divergences == statistics.counts.undone == 0
    by_phase = {phase: [row for row in seen.taken if row[1] == phase] for phase in ("warmup", "full", "correct")}
    shares = statistics.as_json()["phases"]
    assert {phase: len(rows) for phase, rows in by_phase.items()} == {phase: shares[phase] for phase in by_phase}
    jumps = [(step, phase) for step, phase, is_predicted in seen.taken if is_predicted]
    assert jumps == [(row["step"], "predict") for row in ended.events("predicted")]
    with (ended.path / "memory.csv").open() as file:
        memory = [(row["phase"], int(row["used_bytes"])) for row in csv.DictReader(file)]
    assert seen.changes.count("probe") == sum(phase == "probe" for phase, _ in memory) >= 3 * statistics.counts.attempts
    assert all(used > 0 for _, used in memory)


def test_an_ordinary_run_has_no_phase_of_prediction(lab):
    seen = Phases()
    lab.run(hooks=[seen], hybrid__enabled=False)
    assert {phase for _, phase, _ in seen.taken} == {None} and "probe" not in seen.changes


class Shown:
    is_live = False

    def __init__(self):
        self.fields = []

    def begin(self, *words, since=None): ...

    def update(self, done, total, *fields, seconds_left=None):
        self.fields.append(fields)


def test_the_live_line_says_the_phase():
    shown = Shown()
    hook = Progress(100, shown, RunView(None, None, num_steps=9))
    record = StepRecord(1, 0.1, 2.0, 1e-3, 1.0, 5, 6, 0.1, 60.0, 600.0, 7, False)
    hook.on_step(record)
    hook.after_step(StepTaken(2, 6, 5, 1e-3, "correct"))
    hook._drawn = -math.inf  # some time ago
    hook.on_step(record)
    assert ("correct",) not in shown.fields[0] and ("correct",) in shown.fields[1]


class Watched(Predictive):
    """Notes what the engine is like when a step is taken, and while a prediction is probed."""

    def __init__(self, config):
        super().__init__(config)
        self.engines = {}

    def take(self, step):
        def note(phase):
            now = step.engine.description
            self.engines.setdefault(phase, set()).add(
                (now.dtype, now.quantization, now.checkpointing, str(now.streaming))
            )

        probe = step.document_losses
        step.document_losses = lambda documents: (note("probe"), probe(documents))[1]
        outcome = super().take(step)
        note(outcome.phase)
        return outcome


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_precision_and_recomputation_are_the_same_in_every_phase(lab_for, name):
    """As the table of docs/hybrid.md says: a phase changes which steps are computed, never how."""
    four_bits = {"torch": "nf4", "mlx": "affine4"}[name]
    lab = lab_for(name)
    if four_bits not in lab.backend.capabilities()["model.quantization"]:
        pytest.skip(f"{four_bits} does not run here")
    changes = {"model__quantization": four_bits, "memory__checkpointing": "full"}
    engines = lab.run(policy=Watched, **changes).policy.engines
    assert {"warmup", "full", "predict", "probe"} <= engines.keys()
    assert len(set.union(*engines.values())) == 1
