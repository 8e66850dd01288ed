"""Predictive training of a small network on real images of digits, beside an ordinary run of equal cost.

    python benchmarks/digits.py [--seeds 5]

The images are the 1,797 of scikit-learn; the comparison is that of `dualtune.doctor.bench.digits`. Before it, RATES are
tried with the baseline on parts of the training images. The tuned rate is the best of them: held-out images chose
nothing.
Writes results/digits.json and those of results/hybrid_claims.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from statistics import fmean

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy loads

import hybrid_claims
import record

from dualtune.cli.hybrid import digits_text
from dualtune.doctor.bench.digits import STEPS, config_of, digits, losses, read_digits, split, train

RATES = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    tried = tried_rates(seeds)
    result = digits(seeds, lambda text: print(text, file=sys.stderr, flush=True))
    print(digits_text(result))
    print(record.write("digits", {"seeds": seeds, "tried_rates": tried, **result.as_json()}))
    hybrid_claims.main()


def tried_rates(seeds: int) -> dict[str, float]:
    """Return the baseline's mean loss by learning rate, each seed on another fifth of the images for training."""
    inner = [split(read_digits().train, seed) for seed in range(1, seeds + 1)]
    found: dict[str, float] = {}
    for rate in RATES:
        engines = [train(data, config_of(seed, STEPS, rate, {}))[0] for seed, data in enumerate(inner, 1)]
        pairs = zip(engines, inner, strict=True)
        found[f"{rate:g}"] = fmean(float(losses(engine.weights, data.held_out).mean()) for engine, data in pairs)
    return found


if __name__ == "__main__":
    main()
