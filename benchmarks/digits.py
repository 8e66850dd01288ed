"""Predictive training of a small network on real images of digits, beside an ordinary run of equal cost.

    python benchmarks/digits.py [--seeds 5]
    python benchmarks/digits.py --table    # writes those of docs/hybrid_claims.md, from the recorded result

The images are the 1,797 of scikit-learn; the comparison is that of `dualtune.bench.digits`. Before it, the tuned rate is
looked for: the best of RATES for the baseline, on a fifth of the training images, so the held-out ones choose nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from statistics import fmean
from typing import Any

RATES = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2)
PAGE = "hybrid_claims.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--table", action="store_true", help="write the tables of the recorded result")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read by NumPy, which is not loaded yet
    import page_tables
    import record

    if not args.table:
        from dualtune.bench.digits import digits

        tried = tried_rates(args.seeds)
        result = digits(args.seeds, lambda text: print(text, file=sys.stderr, flush=True))
        print(*result.lines(), sep="\n")
        print(record.write("digits", {"seeds": args.seeds, "tried_rates": tried, **result.as_json()}))
    recorded = json.loads((record.RESULTS / "digits.json").read_text(encoding="utf-8"))
    print(page_tables.write(PAGE, tables(recorded)))


def tried_rates(seeds: int) -> dict[str, float]:
    """Return the mean evaluation loss of the baseline by learning rate, on images held out of those for training."""
    from dualtune.bench.digits.compare import STEPS
    from dualtune.bench.digits.data import read_digits, split
    from dualtune.bench.digits.network import losses
    from dualtune.bench.digits.trial import config_of, train

    inner = split(read_digits().train)
    found: dict[str, float] = {}
    for rate in RATES:
        engines = [train(inner, config_of(seed, STEPS, rate, {}))[0] for seed in range(1, seeds + 1)]
        found[f"{rate:g}"] = fmean(float(losses(engine.weights, inner.held_out).mean()) for engine in engines)
    return found


def tables(recorded: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the page, by name."""
    import page_tables

    result = restored(recorded)
    found = {"costs": [*result.costs()], "predictions": [*result.predictions()]}
    return {name: page_tables.table(cells[0], cells[1:]) for name, cells in found.items()}


def restored(recorded: Mapping[str, Any]) -> Any:
    """Return the comparison that a JSON file holds."""
    from dualtune.bench.digits.compare import BASELINE, DigitsResult, DigitsRow
    from dualtune.bench.digits.trial import DigitsTrial

    trials = {
        (row["case"], row["arm"]): tuple(DigitsTrial(**trial) for trial in row["trials"]) for row in recorded["rows"]
    }
    rows = [
        DigitsRow(
            case, row["learning_rate"], arm, trials[case, arm], trials[case, BASELINE],
            trials.get((case, f"control of {arm}")),
        )
        for row in recorded["rows"] for case, arm in [(row["case"], row["arm"])]
    ]  # fmt: skip
    return DigitsResult(tuple(rows), recorded["held_out_images"])


if __name__ == "__main__":
    main()
