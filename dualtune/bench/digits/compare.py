"""The presets of predictive training on the images of digits, each beside a shorter ordinary run of equal cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

from dualtune.bench.digits.data import DigitsData, read_digits
from dualtune.bench.digits.network import STEP_COST
from dualtune.bench.digits.trial import DigitsTrial, config_of, run_trial
from dualtune.bench.intervals import Interval, paired
from dualtune.errors import ConfigError
from dualtune.text.show import in_bytes, in_columns

STEPS = 600
# benchmarks/digits.py tunes the rate for the baseline, on parts of the images for training.
CASES: Mapping[str, float] = MappingProxyType({"tuned": 2e-2, "a tenth": 2e-3, "a twentieth": 1e-3})
BASELINE = "baseline"
ARMS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        BASELINE: {},
        "conservative": {"enabled": True, "preset": "conservative"},
        "aggressive": {"enabled": True, "preset": "aggressive"},
    }
)


@dataclass(frozen=True, slots=True)
class DigitsRow:
    """An arm's runs, one for each seed. All rows have the same seeds, so their differences are paired."""

    case: str
    learning_rate: float
    arm: str
    trials: tuple[DigitsTrial, ...]
    baseline: tuple[DigitsTrial, ...]
    control: tuple[DigitsTrial, ...] | None = None  # baselines whose whole schedule has as many steps as this arm costs

    @property
    def rate(self) -> str:
        return f"{self.learning_rate:g} ({self.case})"

    def values(self, name: str) -> list[float]:
        return [getattr(trial, name) for trial in self.trials]

    def against(self, other: Sequence[DigitsTrial], name: str) -> Interval:
        """Return this arm's accuracy or loss minus that of other runs with the same seeds."""
        return paired(self.values(name), [getattr(trial, name) for trial in other])

    def counted(self, name: str) -> int:
        """Return a number of predictive training, summed over the seeds."""
        return sum(trial.hybrid.get(name, 0) for trial in self.trials)

    @property
    def backward_reduction_pct(self) -> float:
        return fmean(trial.hybrid.get("backward_reduction_pct", 0.0) for trial in self.trials)

    @property
    def cost_ratio(self) -> float:
        """The cost in times of the baseline's."""
        return fmean(self.values("cost")) / fmean(trial.cost for trial in self.baseline)

    @property
    def verdict(self) -> str:
        """Say what the runs prove about a predictive arm's loss against its control; empty for the others."""
        if self.control is None:
            return ""
        found = self.against(self.control, "eval_loss")
        if not found.excludes_zero:
            return "no evidence of a difference from its control"
        return "better than its control" if found.mean < 0 else "worse than its control"

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"case": self.case, "learning_rate": self.learning_rate, "arm": self.arm}
        for name in ("accuracy", "eval_loss", "cost", "wall_s", "peak_bytes"):
            values = self.values(name)
            found[name] = {"mean": fmean(values), "std": stdev(values) if len(values) > 1 else None}
        found["cost_ratio"] = self.cost_ratio
        for which, other in (("baseline", self.baseline), ("control", self.control)):
            if self.control is not None and other is not None:
                for name in ("accuracy", "eval_loss"):
                    found[f"{name}_minus_{which}"] = self.against(other, name).as_json()
        if self.control is not None:
            found["backward_reduction_pct"] = self.backward_reduction_pct
            found |= {name: self.counted(name) for name in ("attempts", "accepted", "undone", "divergences")}
            found["verdict"] = self.verdict
        return found | {"trials": [trial.as_json() for trial in self.trials]}


@dataclass(frozen=True, slots=True)
class DigitsResult:
    """The whole comparison: for each case its baseline, then each arm with its control."""

    rows: tuple[DigitsRow, ...]
    held_out_images: int

    def as_json(self) -> dict[str, Any]:
        return {
            "steps": STEPS,
            "held_out_images": self.held_out_images,
            "step_cost": STEP_COST,
            "rows": [row.as_json() for row in self.rows],
        }

    def lines(self) -> list[str]:
        """Return the comparison as lines of text: two tables, and what the runs prove."""
        told = [f"{row.rate}, {row.arm}: {row.verdict}" for row in self.rows if row.verdict]
        tables = (in_columns([*cells]).splitlines() for cells in (self.costs(), self.predictions()))
        return [*next(tables), "", *next(tables), "", *told]

    def costs(self) -> Iterator[tuple[str, ...]]:
        """Yield the cells of the table of what runs reached and took, the header first."""
        yield "rate", "arm", "accuracy", "loss", "cost", "of baseline's", "seconds", "peak memory"
        for row in self.rows:
            yield (
                row.rate, row.arm,
                _spread(row.values("accuracy"), 100, 2, " %"), _spread(row.values("eval_loss"), 1, 4),
                f"{fmean(row.values('cost')):.0f}", f"{row.cost_ratio:.2f}", _spread(row.values("wall_s"), 1, 2),
                in_bytes(fmean(row.values("peak_bytes"))),
            )  # fmt: skip

    def predictions(self) -> Iterator[tuple[str, ...]]:
        """Yield the cells of the table of what predictions did, the header first."""
        yield (
            "rate", "arm", "attempts", "accepted", "undone", "divergences", "backward passes skipped",
            "accuracy − control", "loss − control",
        )  # fmt: skip
        for row in self.rows:
            if row.control is None:
                continue
            counts = (str(row.counted(name)) for name in ("attempts", "accepted", "undone", "divergences"))
            yield (
                row.rate, row.arm, *counts, f"{row.backward_reduction_pct:.1f} %",
                _gap(row.against(row.control, "accuracy"), 100, 2), _gap(row.against(row.control, "eval_loss"), 1, 4),
            )  # fmt: skip


def digits(seeds: int = 5, tell: Callable[[str], None] = lambda text: None) -> DigitsResult:
    """Train every arm of every case with the seeds 1 to `seeds`. `tell` hears what is trained.

    ConfigError for less than one seed; EnvironmentFault without scikit-learn.
    """
    if seeds < 1:
        raise ConfigError(f"seeds: got {seeds}, allowed: 1 or more; intervals need 2 or more")
    data = read_digits()
    rows = (row for case in CASES for row in _rows(data, case, range(1, seeds + 1), tell))
    return DigitsResult(tuple(rows), len(data.held_out))


def _rows(data: DigitsData, case: str, seeds: Sequence[int], tell: Callable[[str], None]) -> Iterator[DigitsRow]:
    """Yield the baseline of a case, then each predictive arm and its control."""
    rate = CASES[case]

    def trained(arm: str, hybrid: Mapping[str, Any], steps: Sequence[int]) -> tuple[DigitsTrial, ...]:
        tell(f"{case}, {arm}")
        configs = (config_of(seed, n, rate, hybrid) for seed, n in zip(seeds, steps, strict=True))
        return tuple(run_trial(data, config) for config in configs)

    baseline = trained(BASELINE, {}, [STEPS] * len(seeds))
    yield DigitsRow(case, rate, BASELINE, baseline, baseline)
    for arm, hybrid in ARMS.items():
        if arm == BASELINE:
            continue
        trials = trained(arm, hybrid, [STEPS] * len(seeds))
        control = trained(f"control of {arm}", {}, [max(1, round(trial.cost / STEP_COST)) for trial in trials])
        yield DigitsRow(case, rate, arm, trials, baseline, control)
        yield DigitsRow(case, rate, f"control of {arm}", control, baseline)


def _spread(values: Sequence[float], factor: float, places: int, unit: str = "") -> str:
    """Format mean ± standard deviation; of a single value, the value."""
    mean = f"{factor * fmean(values):.{places}f}"
    return f"{mean} ± {factor * stdev(values):.{places}f}{unit}" if len(values) > 1 else f"{mean}{unit}"


def _gap(found: Interval, factor: float, places: int) -> str:
    """Format a mean difference ± half of its 95 % interval."""
    mean = f"{factor * found.mean:+.{places}f}"
    return mean if found.margin is None else f"{mean} ± {factor * found.margin:.{places}f}"
