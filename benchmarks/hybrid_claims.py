"""The figures of the documents on predictive training beside ours: the tables of results/hybrid_claims.md.

    python benchmarks/hybrid_claims.py

A figure of ours is from results/digits.json, or it is a bound that is computed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import page_tables
import record

from dualtune.base.text import in_bytes
from dualtune.cli.hybrid import digits_costs, digits_predictions
from dualtune.doctor.bench.digits import BASELINE, CASES, DigitsResult, DigitsRow, DigitsTrial

# What the validation plan reports of MNIST: seconds, speed-up, accuracy, MB, backward reduction in %.
THEIRS: Mapping[str, tuple[float, float | None, float, float, float | None]] = {
    "baseline": (810.4, None, 97.45, 195.3, None),
    "conservative": (599.0, 1.35, 99.05, 161.8, 32.8),
    "aggressive": (431.5, 1.88, 99.37, 189.1, 42.8),
}
# Forward passes that a computed step costs (dualtune/train/hybrid/settings.py).
ADAPTER, WHOLE = "an adapter", "an adapter with full checkpointing, or a model trained whole"
STEP_COSTS = {ADAPTER: 2.11, WHOLE: 3.11}
SHARES = (0.328, 0.428, 0.6, 0.78, 1.0)  # of the steps, that are predicted

MNIST, GOALS, STATUS = "the validation plan, MNIST results", "the validation plan, goals", "the status report"
SCRIPT = "(`benchmarks/digits.py`, tuned rate)"
# What the documents say, where, why it can or cannot hold, and what we measure; {names} are those of `claims`.
CLAIMS = (
    (
        "accuracy 97.45 %; 99.05 % and 99.37 % with prediction", MNIST,
        "The accuracy is a random number from 97 to 99.5 %, beside a network that has just been made. The images are "
        "random pixels with random labels. The final losses, which were measured, are those of guessing: ln 10",
        "accuracy minus the baseline's, in points: {accuracies} " + SCRIPT,
    ),
    (
        "1.35× and 1.88× faster", MNIST,
        "The times were measured, one run each. But a predicted step leaves the weights as they are, so this is the "
        "speed of training less. Without 32.8 % and 42.8 % of the backward passes a run is at most {forward} as fast, "
        "and {skipped} if the whole steps are left out. So 1.88× has other causes, too",
        "cost in times of the baseline's: {ratios}; seconds, which are not judged: {seconds} " + SCRIPT,
    ),
    (
        "161.8 and 189.1 MB of memory instead of 195.3", MNIST,
        "The memory is a random number from 150 to 200 MB. Prediction takes more memory, not less: for its window, and "
        "for the way back",
        "peak of a run's own allocations: {peaks}; baseline {base_peak} " + SCRIPT,
    ),
    (
        "zero divergences", MNIST + ", and goals",
        "It could not be anything else: nothing calls the function that counts them",
        "{events} in {runs} runs each " + SCRIPT + ". A test injects a NaN and finds it counted",
    ),
    (
        "32.8 % and 42.8 % fewer backward passes", MNIST,
        "A count, and measured. But skipped steps alone are no gain. What counts is the loss beside that of a run "
        "which was shorter from the start",
        "loss minus that of a control of equal cost: {losses} " + SCRIPT,
    ),
    (
        "40–60 % speed-up on a GPU; 60–78 % in previous research", GOALS,
        "Of the time of an adapter's run, predictions that cost a forward pass save at most {saved}, even if every "
        "step is predicted. The 60–78 % are from a regression with one weight. More is possible only if skipped steps "
        "cost nothing: then their data are left out, too",
        "not on a GPU: none was available",
    ),
    (
        "`wall_clock_speedup` of the trainer", "the validation plan, example program",
        "It is the time of a full step, divided by that of a predicted one: it says nothing about the whole run",
        "ours is from end to end ([hybrid.md](../../docs/hybrid.md#statistics))",
    ),
    (
        "quality within 2 % of the baseline", GOALS,
        "Possible, but it proves little: a run with somewhat fewer steps can pass as well. So the control of equal "
        "cost is the test",
        "each arm beside its control: [below](#measured); on a language model: "
        "[hybrid.md](../../docs/hybrid.md#measured)",
    ),
    (
        "50 to 85 % less memory while it predicts", f"{GOALS}; {STATUS}",
        "The modules for it were counters and not connected to the trainer, as the status report says. Optimizer state "
        "elsewhere saves a share of the states, and those of an adapter are small. A search runs forward passes only, "
        "so it is never the peak of a run, and less memory in it lets no larger model fit",
        "`hybrid.offload: optimizer` does it, with the same bits; not on a GPU so far. Techniques one by one: "
        "[validation_results.md](validation_results.md)",
    ),
    (
        "models of 1B and 7B on GPUs with 16 and 24 GB", f"{GOALS}; {STATUS}",
        "Not run: the status report lists both as blocked. Whether a model fits does not depend on prediction",
        "`dualtune plan` says what fits: [MEMORY_OPTIMIZATION_GUIDE.md](../../docs/MEMORY_OPTIMIZATION_GUIDE.md)",
    ),
)  # fmt: skip


def main() -> None:
    recorded = json.loads((record.RESULTS / "digits.json").read_text(encoding="utf-8"))
    print(page_tables.write(page_tables.RESULTS / "hybrid_claims.md", tables(recorded)))


def tables(recorded: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the page, by name."""
    result = restored(recorded)
    tuned = {row.arm: row for row in result.rows if row.case == next(iter(CASES))}
    cells = {
        "figures": figures(tuned),
        "bounds": bounds(),
        "claims": claims(tuned),
        "costs": digits_costs(result),
        "predictions": digits_predictions(result),
    }
    found = {name: [*rows] for name, rows in cells.items()}
    return {name: page_tables.table(header, rows) for name, (header, *rows) in found.items()}


def restored(recorded: Mapping[str, Any]) -> DigitsResult:
    """Return the comparison that results/digits.json holds."""
    names = [(row["case"], row["arm"]) for row in recorded["rows"]]
    trials = {
        name: tuple(DigitsTrial(**trial) for trial in row["trials"])
        for name, row in zip(names, recorded["rows"], strict=True)
    }
    rows = (
        DigitsRow(
            case, row["learning_rate"], arm, trials[case, arm], trials[case, BASELINE],
            trials.get((case, f"control of {arm}")),
        )
        for (case, arm), row in zip(names, recorded["rows"], strict=True)
    )  # fmt: skip
    return DigitsResult(tuple(rows), recorded["held_out_images"])


def bound(share: float, step_cost: float) -> float:
    """Return the largest speed-up if this share of the steps needs only a forward pass, and all else is free."""
    return 1 / (1 - share * (1 - 1 / step_cost))


def figures(ours: Mapping[str, DigitsRow]) -> Iterator[Sequence[str]]:
    """Yield the figures of MNIST, then ours of the same arms. Our speed-up is by cost."""
    yield "", "time", "speed-up", "accuracy", "memory", "backward passes skipped", "divergences"
    for arm, (seconds, speedup, accuracy, megabytes, skipped) in THEIRS.items():
        shown = (f"{speedup:.2f}×" if speedup else "", f"{accuracy} % (mocked)", f"{megabytes} MB (mocked)")
        events = "0 (never counted)" if skipped else ""
        yield f"MNIST, {arm}, upstream", f"{seconds} s", *shown, f"{skipped} %" if skipped else "", events
    for arm in THEIRS:
        row = ours[arm]
        is_baseline = row.control is None
        yield (
            f"digits, {arm}, ours", f"{_mean(row, 'wall_s'):.2f} s",
            "" if is_baseline else f"{1 / row.cost_ratio:.2f}×",
            f"{100 * _mean(row, 'accuracy'):.2f} %", in_bytes(_mean(row, "peak_bytes")),
            "" if is_baseline else f"{row.backward_reduction_pct:.1f} %",
            "" if is_baseline else f"{row.counted('divergences')} in {len(row.trials)} runs",
        )  # fmt: skip


def bounds() -> Iterator[Sequence[str]]:
    """Yield the largest speed-up by what is trained and by the share of the steps that is predicted."""
    yield "what is trained", *(f"{share:.1%} of the steps" for share in SHARES)
    for what, cost in STEP_COSTS.items():
        yield f"{what}: a step costs {cost} forward passes", *(f"{bound(share, cost):.2f}×" for share in SHARES)
    yield "a predicted step costs nothing", *(f"{1 / (1 - share):.2f}×" if share < 1 else "–" for share in SHARES)


def claims(ours: Mapping[str, DigitsRow]) -> Iterator[Sequence[str]]:
    """Yield CLAIMS with their figures."""
    base, *arms = (ours[arm] for arm in THEIRS)
    forward = [bound(share, STEP_COSTS[WHOLE]) for share in SHARES[:2]]
    known = {
        "accuracies": [_gap(row, row.baseline, "accuracy", 100, 2) for row in arms],
        "losses": [_gap(row, row.control or (), "eval_loss", 1, 4) for row in arms],
        "ratios": [f"{row.cost_ratio:.3f}" for row in arms],
        "seconds": [f"{_mean(row, 'wall_s') / _mean(base, 'wall_s'):.2f}" for row in arms],
        "peaks": [in_bytes(_mean(row, "peak_bytes")) for row in arms],
        "events": [str(row.counted("divergences")) for row in arms],
        "forward": [f"{most:.2f}×" for most in forward],
        "skipped": [f"{1 / (1 - share):.2f}×" for share in SHARES[:2]],
        "saved": [f"{1 - 1 / STEP_COSTS[ADAPTER]:.0%}"],
        "base_peak": [in_bytes(_mean(base, "peak_bytes"))],
        "runs": [str(len(base.trials))],
    }
    shown = {name: " and ".join(values) for name, values in known.items()}
    yield "claim", "where", "why it can or cannot hold", "what we measure"
    yield from (tuple(cell.format(**shown) for cell in row) for row in CLAIMS)


def _mean(row: DigitsRow, name: str) -> float:
    values = row.values(name)
    return sum(values) / len(values)


def _gap(row: DigitsRow, other: Sequence[DigitsTrial], name: str, factor: float, places: int) -> str:
    found = row.against(other, name)
    return f"{factor * found.mean:+.{places}f} ± {factor * (found.margin or 0):.{places}f}"


if __name__ == "__main__":
    main()
