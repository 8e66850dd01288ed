"""What the step policy of predictive training itself costs: processor time of its own code, as a share of a step.

    python benchmarks/policy_cost.py [--steps 150] [--shared ../shared] [CASE …]
    python benchmarks/policy_cost.py --table    # writes the table of docs/hybrid.md from the recorded result

A run with `hybrid.enabled`, on one thread of torch's CPU in float32. All that the policy asks of the run is timed
apart: gradients and updates; losses of probe documents; reading and writing weights. What is left is its own code: the
line fit, the line search without its losses, the monitor, the bookkeeping. The share is that of an ordinary step
(gradients and update) of the same run; the demo's model, the smallest of all, is the worst case. The other is a Llama
of 18.9M random weights on GSM8K. A predicted step counts as the steps that it stands for.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads

import page_tables
import record
from origins import read
from packing import Case, configs, measured

from dualtune.engine.backend import get_backend
from dualtune.show.run import run
from dualtune.train.hybrid.policy import Predictive
from dualtune.train.policy import Outcome

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "hybrid.md"
MEASURED = ("torch, the demo's", "torch, llama-19m on gsm8k")
KINDS = {  # what a policy asks of the run
    "add_gradients": "step", "update": "step", "document_losses": "probes", "adapter_state": "weights",
    "optimizer_state": "weights", "load_adapter_state": "weights", "load_optimizer_state": "weights",
}  # fmt: skip


class TimedPolicy(Predictive):
    """Predictive training that adds up seconds of the processor by kind. The first step is left out: it compiles."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.spent: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()

    def take(self, step: Any, /) -> Outcome:
        spent: Counter[str] = Counter()
        began = time.process_time()
        outcome = super().take(Timed(step, spent))
        spent["own"] = time.process_time() - began - spent.total()
        if step.index:
            self.spent += spent
            self.steps += Counter(all=outcome.num_steps, ordinary=int(outcome.update is not None))
        return outcome


class Timed:
    """A step, or its engine, whose slow actions are timed."""

    def __init__(self, inner: Any, spent: Counter[str]) -> None:
        self._inner, self._spent = inner, spent

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name == "engine":
            return Timed(found, self._spent)
        return self._timed(found, KINDS[name]) if name in KINDS else found

    def _timed(self, action: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.process_time()
            try:
                return action(*args)
            finally:
                self._spent[kind] += time.process_time() - began

        return call

    @contextlib.contextmanager
    def trying(self, adapter: Any) -> Generator[None]:
        """Time what comes before and after the block: the weights are set, and put back."""
        trial = self._inner.trying(adapter)
        self._timed(trial.__enter__, "weights")()
        try:
            yield
        finally:
            self._timed(trial.__exit__, "weights")(None, None, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("cases", nargs="*", metavar="CASE", default=MEASURED)
    parser.add_argument("--table", action="store_true", help="write the table of the recorded result")
    args = parser.parse_args()
    if args.table:
        return print(page_tables.write(PAGE, tables(read("policy_cost"))))
    cases = measured(args.cases, args.shared, partial(measure, steps=args.steps))
    return print(record.write("policy_cost", {"steps": args.steps, "cases": cases}))


def measure(case: Case, folder: Path, shared: Path, steps: int) -> dict[str, Any]:
    config = configs(case, folder, shared)["packed"]
    changes = {
        "train": {"steps": steps, "documents_per_step": 4, "learning_rate": 1e-3},
        "hybrid": {"enabled": True, "gate": "none", "warmup_steps": 10},
        "run": {"dir": str(folder / f"run-{len(case.name)}"), "eval_every": None, "save_every": None, "report": False},
    }
    given = config.model_dump(exclude_unset=True)
    policies: list[TimedPolicy] = []

    def policy(config: Any) -> TimedPolicy:
        policies.append(TimedPolicy(config))
        return policies[-1]

    run(type(config).model_validate(given | changes), get_backend(case.backend, "cpu"), policy=policy)
    spent, number = policies[-1].spent, policies[-1].steps
    ordinary_s = spent["step"] / number["ordinary"]
    return {
        "steps": number["all"],
        "attempts": policies[-1].statistics().counts.attempts,
        "ordinary_step_ms": 1e3 * ordinary_s,
        "ms_per_step": {kind: 1e3 * seconds / number["all"] for kind, seconds in spent.items()},
        "share_of_step": {kind: seconds / number["all"] / ordinary_s for kind, seconds in spent.items()},
    }


def tables(found: dict[str, Any]) -> dict[str, str]:
    names = {"own": "its own code", "weights": "weights read and set", "probes": "losses of probe documents"}
    header = ("model and rows", "an ordinary step", *(f"{name}, of a step" for name in names.values()))
    rows = [
        (
            name,
            f"{case['ordinary_step_ms']:.3g} ms",
            *(f"{100 * case['share_of_step'].get(kind, 0):.2g} %" for kind in names),
        )
        for name, case in found["cases"].items()
    ]
    return {"policy": page_tables.table(header, rows)}


if __name__ == "__main__":
    main()
