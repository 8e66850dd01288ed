"""Is the confidence of predictive training honest? Predictions, judged on documents that nothing else has used.

    python benchmarks/hybrid_calibration.py [--shared ../shared] [--seeds 14]
    python benchmarks/hybrid.py --table    # writes its table, too, from the recorded result

stories260k on WikiSQL, LoRA of rank 8, torch on one CPU thread in float32; rates below the tuned one, because there
predictions happen. One is tried at every opportunity, and made if it looks better at all, whatever its confidence. The
documents that judge are not trained on and not probed: did it lower their loss, and did it gain at least half of what
as many computed steps had gained before? The second is what the confidence claims. The rate is constant, so a predicted
step is worth one computed step.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads

import numpy as np
import page_tables
import record
from hybrid import corpora

from dualtune.doctor.bench.hybrid import Place
from dualtune.engine.choose import choose, open_backend
from dualtune.show.run import run
from dualtune.train.hybrid.policy import Predictive
from dualtune.train.hybrid.prediction import Economics, calibration, mean_and_error
from dualtune.train.hybrid.step import WORTH
from dualtune.train.policy import Outcome

ROOT = Path(__file__).parents[1]
FRESH = 48  # documents that judge
THRESHOLD, ASKED = 0.6, 0.55
COMMON = {
    "train.schedule": "constant", "train.warmup": 2, "train.steps": 120, "train.documents_per_step": 8,
    "data.eval": 0, "run.eval_every": None, "run.save_every": None,
    "hybrid.enabled": True, "hybrid.gate": "none", "hybrid.warmup_steps": 6, "hybrid.full_steps": 6,
    "hybrid.correct_steps": 2, "hybrid.max_predict_steps": 8, "hybrid.trust_region": 9.0,
    "hybrid.confidence_threshold": 0.01, "hybrid.max_consecutive_predicts": 1,
}  # fmt: skip
RATES = {"wikisql": (5e-4, 1e-3)}


class JudgedPredictions(Predictive):
    """Predictive training that measures the fresh documents half a window before a prediction, before and after it."""

    def __init__(self, config: Any, seed: int, found: list[dict[str, Any]]) -> None:
        super().__init__(config)
        self._own, self._seed, self._found = self.num_probes, seed, found
        self.num_probes += FRESH
        self._middle_D: np.ndarray | None = None

    def take(self, step: Any, /) -> Outcome:
        mixed = np.random.default_rng(self._seed).permutation(step.probe_documents).tolist()
        own, fresh = sorted(mixed[: self._own]), sorted(mixed[self._own :])
        window, left = self._memory.window, self._memory.stage.left
        before_D = None
        if window is not None and left == window.half:
            self._middle_D = step.document_losses(fresh)
        elif window is not None and left == 0:
            before_D = step.document_losses(fresh)
        outcome = super().take(_Probing(step, own))
        most = self._settings.max_predict_steps
        self._memory = replace(self._memory, economics=Economics(most, most, most))  # neither waits nor gives up
        prediction = next((event.details for event in outcome.events if event.event == "predicted"), None)
        if prediction is not None and before_D is not None and self._middle_D is not None and window is not None:
            gains_D, step_D = before_D - step.document_losses(fresh), (self._middle_D - before_D) / window.half
            half_of_computed = WORTH * prediction["steps"] * max(0.0, float(step_D.mean()))
            gain, error = mean_and_error(gains_D)
            self._found.append(
                {"confidence": prediction["confidence"], "steps": prediction["steps"], "gain": gain, "error": error,
                 "helped": gain > 0, "was_worth": gain > half_of_computed}
            )  # fmt: skip
        return outcome


class _Probing:
    """A step whose probe documents are only these."""

    def __init__(self, step: Any, documents: list[int]) -> None:
        self._step, self.probe_documents = step, documents

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--seeds", type=int, default=14)
    parser.add_argument("--corpora", default=",".join(RATES))
    args = parser.parse_args()
    predictions: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        os.environ["DUALTUNE_CACHE"] = str(Path(name) / "cache")
        configs = corpora(Path(name), args.shared.resolve())
        for seed in range(1, args.seeds + 1):
            for corpus in args.corpora.split(","):
                for rate in RATES[corpus]:
                    new = judged(configs[corpus], rate, seed, Path(name) / f"{corpus}-{rate}-{seed}")
                    predictions += [
                        {"corpus": corpus, "learning_rate": rate, "seed": seed, **prediction} for prediction in new
                    ]
                    print(f"{corpus}, rate {rate:g}, seed {seed}: {len(new)} predictions", file=sys.stderr, flush=True)
    print(record.write("hybrid_calibration", {"fresh": FRESH, "settings": COMMON, **summed(predictions)}))


def judged(base: Mapping[str, Any], rate: float, seed: int, run_dir: Path) -> list[dict[str, Any]]:
    """Train, and return the predictions of the run with their judgement."""
    changes = {**COMMON, "train.learning_rate": rate, "run.seed": seed, "run.dir": run_dir}
    found: list[dict[str, Any]] = []
    backend = open_backend(choose("cpu"))
    config = Place({**base, "train": {}, "run": {}}, (), backend).load(changes)
    run(config, backend, resume="never", policy=lambda each: JudgedPredictions(each, seed, found))
    return found


def summed(predictions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the shares of all predictions and of those that the threshold accepts, and the bins of both judgements."""
    accepted = [prediction for prediction in predictions if prediction["confidence"] >= THRESHOLD]
    shares = {
        name: {
            what: sum(prediction[what] for prediction in group) / max(1, len(group)) for what in ("helped", "was_worth")
        }
        | {"number": len(group)}
        for name, group in (("all", predictions), (f"confidence >= {THRESHOLD}", accepted))
    }
    pairs = {
        what: [(prediction["confidence"], prediction[what]) for prediction in predictions]
        for what in ("helped", "was_worth")
    }
    bins = [
        {"confidence": helped.mean_confidence, "number": helped.number,
         "helped": helped.share_better, "was_worth": worth.share_better}
        for helped, worth in zip(*map(calibration, pairs.values()), strict=True)
    ]  # fmt: skip
    return {"threshold": THRESHOLD, "asked": ASKED, "shares": shares, "bins": bins, "predictions": list(predictions)}


def table(found: Mapping[str, Any]) -> str:
    header = ("mean confidence", "predictions", "lowered the loss of fresh documents", "gained half of computed steps")
    rows = [
        (f"{each['confidence']:.2f}", str(each["number"]), f"{each['helped']:.0%}", f"{each['was_worth']:.0%}")
        for each in found["bins"]
    ]
    for name, each in found["shares"].items():
        rows.append((name, str(each["number"]), f"{each['helped']:.0%}", f"{each['was_worth']:.0%}"))
    return page_tables.table(header, rows)


if __name__ == "__main__":
    main()
