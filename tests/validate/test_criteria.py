"""Each criterion against runs made up for it: what meets it, what just does not, and what cannot be measured."""

import math
from dataclasses import replace

import pytest

from dualtune.doctor.validate.criteria import MEASURES, Criterion, Observed, judge, shown
from dualtune.doctor.validate.run import Watch
from dualtune.doctor.validate.tiers import TIERS, criteria_of
from dualtune.engine.backend import MemoryStats
from dualtune.train.hooks import StepRecord

WEIGHTS = {"layers": 2, "four_bit": 2, "parameters": 1000, "bytes": 516}


def steps(count, **changes) -> tuple[StepRecord, ...]:
    """Steps of a loss that falls from 4 to 1; a change is a value, or a function of the step counted from 1."""
    found = []
    for step in range(1, count + 1):
        values = {"loss": 4 - 3 * step / count, "grad_norm": 1.0, "step_s": 0.1, "peak_bytes": 100_000_000} | {
            key: value(step) if callable(value) else value for key, value in changes.items()
        }
        rate = 100 / values["step_s"]
        found.append(
            StepRecord(step=step, epoch=0, lr=1e-3, num_targets=50, num_tokens=100, tokens_per_s=rate,
                       documents_per_min=rate, skipped=False, **values)
        )  # fmt: skip
    return tuple(found)


def observed(count=500, *, asked=None, **changes) -> Observed:
    """A run without fault on a GPU, but for the changes: to a step's fields, or to those of Observed."""
    of_steps = {key: changes.pop(key) for key in ("loss", "grad_norm", "step_s", "peak_bytes") if key in changes}
    seen = Observed(
        device_kind="cuda", wanted_kind="cuda", num_steps=asked or count, save_every=100, steps_per_window=50,
        steps=steps(count, **of_steps), used_bytes=(90_000_000,) * count, num_tensors=8, elapsed_s=50.0,
        engine={"device": "cuda:0", "adapted_weights": WEIGHTS}, saved_steps=tuple(range(100, count + 1, 100)),
    )  # fmt: skip
    return replace(seen, **changes)


def level(measure: str, seen: Observed, *, tier="extended", random_weights=False) -> str:
    """Of the criterion that asks for the measure in a tier."""
    criteria = criteria_of(TIERS[tier], "torch", "nf4", on_cpu=False, is_twin=False)
    (criterion,) = [criterion for criterion in criteria if criterion.measure == measure]
    return judge(criterion, seen, random_weights=random_weights).level


def growing(share: float) -> tuple[int, ...]:
    """Bytes in use that grow by a share after step 100; in the first fifty steps, while all is allocated, by half. One
    step in three is seen before its batch is let go.
    """
    used = [60_000_000] * 50 + [90_000_000] * 50 + [round(90_000_000 * (1 + share))] * 400
    return tuple(bytes + 50_000_000 * (step % 3 == 0) for step, bytes in enumerate(used, start=1))


TABLE = [
    # measure, tier, a run that meets it, runs that do not
    ("device_is_ready", "quick", {}, [{"device_kind": "cpu"}]),
    ("model_is_on_device", "quick", {}, [{"engine": {"device": "cpu"}}, {"engine": None}]),
    ("passes_ran", "quick", {}, [{"grad_norm": 0.0}, {"grad_norm": math.nan}, {"loss": math.inf}, {"steps": ()}]),
    ("ran_to_the_end", "quick", {}, [{"problem": "out of memory"}]),
    ("missing_steps", "quick", {}, [{"asked": 501}]),
    ("bad_losses", "quick", {}, [{"loss": lambda step: math.nan if step == 7 else 1.0}, {"steps": ()}]),
    ("elapsed", "quick", {"elapsed_s": 119.9}, [{"elapsed_s": 120.0}]),
    ("elapsed", "convergence", {"elapsed_s": 300.0}, [{"elapsed_s": 300.1}]),
    ("least_gradient", "convergence", {"grad_norm": 1e-9}, [
        {"grad_norm": lambda step: 0.0 if step == 400 else 1.0},
        {"grad_norm": lambda step: math.nan if step == 400 else 1.0},
    ]),
    ("unchanged_tensors", "convergence", {}, [{"unchanged": ("a.lora_A.weight",)}, {"num_tensors": 0}]),
    ("decrease", "convergence", {"loss": lambda step: 2.0 if step <= 10 else 1.4}, [
        {"loss": lambda step: 2.0 if step <= 10 else 1.41},
        {"loss": lambda step: math.nan if step == 500 else 1 / step}, {"count": 19},
    ]),
    ("peak_bytes", "quick", {"peak_bytes": lambda step: 300_000_000 if step == 1 else 256_000_000}, [
        {"peak_bytes": lambda step: 256_000_001 if step == 2 else 1}, {"peak_bytes": 256_000_001, "count": 1},
        {"steps": ()},
    ]),
    ("peak_bytes", "convergence", {"peak_bytes": 256_000_000}, [{"peak_bytes": 256_000_001}]),
    ("peak_bytes", "memory", {"peak_bytes": 1_999_999_999}, [{"peak_bytes": 2_000_000_000}]),
    ("peak_bytes", "extended", {"peak_bytes": 1_999_999_999}, [{"peak_bytes": 2_000_000_000}]),
    ("peak_bytes", "full", {"peak_bytes": 11_999_999_999}, [{"peak_bytes": 12_000_000_000}]),
    ("plain_layers", "memory", {}, [
        {"engine": {"device": "cuda", "adapted_weights": WEIGHTS | {"four_bit": 1}}}, {"engine": {"device": "cuda"}},
    ]),
    ("bytes_per_weight", "memory", {"engine": {"device": "cuda", "adapted_weights": WEIGHTS | {"bytes": 550}}}, [
        {"engine": {"device": "cuda", "adapted_weights": WEIGHTS | {"bytes": 551}}}, {"engine": None},
    ]),
    ("growth", "extended", {"used_bytes": growing(0.01)}, [{"used_bytes": growing(0.011)}, {"count": 149}]),
    ("rise", "extended", {"loss": lambda step: 1.019 if step > 450 else 1.0}, [
        {"loss": lambda step: 1.021 if step > 450 else 1.0}, {"count": 99},
    ]),
    ("spread", "extended", {"step_s": lambda step: 5.0 if step <= 20 else 0.1 + 0.05 * (step % 2)}, [
        {"step_s": lambda step: 0.13 if step > 250 else 0.1}, {"count": 39},
    ]),
    ("missing_checkpoints", "full", {}, [{"saved_steps": (100, 200, 300, 400)}, {"save_every": None}]),
]  # fmt: skip


@pytest.mark.parametrize(("measure", "tier", "good", "bad"), TABLE, ids=lambda value: str(value)[:20])
def test_a_criterion_tells_a_good_run_from_bad_ones(measure, tier, good, bad):
    assert level(measure, observed(**good), tier=tier) == "ok"
    assert [level(measure, observed(**each), tier=tier) for each in bad] == ["fail"] * len(bad)


def test_the_table_has_every_criterion_of_every_tier():
    in_tiers = {criterion.measure for tier in TIERS.values() for criterion in tier.criteria}
    assert in_tiers == MEASURES.keys() == {measure for measure, *_ in TABLE}


def test_a_nan_meets_no_criterion():
    for relation in ("==", "<=", "<", ">=", ">"):
        criterion = Criterion("rise", "rise", relation, 1.0)
        assert judge(criterion, observed(loss=math.nan), random_weights=False).level == "fail"


def test_only_what_needs_pretrained_weights_is_skipped_with_random_ones():
    for tier in TIERS.values():
        rows = [judge(criterion, observed(), random_weights=True) for criterion in tier.criteria]
        skipped = {row.name: row.found for row in rows if row.level == "skipped"}
        assert skipped.keys() == {c.name for c in tier.criteria if c.measure in ("decrease", "rise")}
        assert set(skipped.values()) <= {"random weights cannot meet it"}


def test_a_number_that_is_not_judged_is_shown_with_the_reason():
    criteria = criteria_of(TIERS["extended"], "torch", "nf4", on_cpu=True, is_twin=True)
    (criterion,) = [criterion for criterion in criteria if criterion.measure == "spread"]
    check = judge(criterion, observed(step_s=lambda step: 0.1 * (1 + step % 20)), random_weights=False)
    assert check.figures["note"] == criterion.not_judged and check.figures["measured"] > check.figures["limit"] == 0.1
    assert check.level == "skipped" and "must be <= 10.0 %; not judged: the cores of a CPU are shared" in check.found


def test_on_a_cpu_the_memory_that_the_process_had_before_does_not_count():
    assert observed(peak_bytes=900_000_000, before_bytes=800_000_000).peak_bytes == 100_000_000


class Compiling:
    """A backend whose peak is that of a first step which compiles, until it is reset."""

    peak_bytes = 300_000_000

    def memory(self):
        return MemoryStats(90_000_000, self.peak_bytes, 10**9)

    def reset_peak_memory(self):
        assert self.peak_bytes == 300_000_000, "reset again"
        self.peak_bytes = 100_000_000


def test_what_compilation_takes_is_not_the_peak_of_a_run():
    backend = Compiling()
    watch = Watch(backend)
    for step in steps(3):
        watch.on_step(replace(step, peak_bytes=backend.memory().peak_bytes))
    assert [step.peak_bytes for step in watch.steps] == [300_000_000, 100_000_000, 100_000_000]
    assert observed(steps=tuple(watch.steps)).peak_bytes == 100_000_000


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(1.0, "yes", "yes"), (0.0, "yes", "no"), (0.3, "share", "30.0 %"), (2.56e8, "bytes", "256.0 MB"),
     (52.34, "seconds", "52.3 s"), (500.0, "count", "500"), (0.5156, "number", "0.516")],
)  # fmt: skip
def test_numbers_are_shown_in_their_units(value, unit, text):
    assert shown(value, unit) == text
