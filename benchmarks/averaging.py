"""What better weights from the same steps are worth: decaying rates, schedule-free AdamW, averages of the weights.

    python benchmarks/averaging.py [--shared ../shared] [--seeds 1 2 3]
    python benchmarks/averaging.py --table    # writes results/averaging.md from the result

stories260k learns GSM8K with LoRA for 240 steps, on torch on one thread of the CPU in float32. The control is the
cosine schedule, once with all the steps and once compressed to nine tenths of them. The seed is that of the adapter's
start and of the order of the data. One run with a constant rate gives all averages, because they do not change the
training: one is `train.average` itself, the others are computed from the weights after each step, and so is the first
one again, which must agree.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stories_gsm8k import HELD_OUT, base_config

from dualtune.doctor.bench.intervals import paired

ROOT = Path(__file__).parents[1]
STEPS, DOCUMENTS = 240, 8
CONTROL, CONSTANT = "cosine", {"learning_rate": 6e-3, "schedule": "constant"}
SHIPPED = "constant, tail over 0.4"
ARMS: Mapping[str, Mapping[str, Any]] = {
    CONTROL: {"learning_rate": 8e-3},
    "cosine, 0.9 of the steps": {"learning_rate": 8e-3, "steps": STEPS * 9 // 10},
    "linear": {"learning_rate": 8e-3, "schedule": "linear"},
    "schedule_free": {"learning_rate": 1.1e-2, "schedule": "schedule_free"},
    SHIPPED: {**CONSTANT, "average": "tail", "average_over": 0.4},
}
COMPUTED = {
    "constant, tail over 0.2": ("tail", 0.2), "constant, ema over 0.1": ("ema", 0.1),
    "constant, ema over 0.2": ("ema", 0.2), "constant, without an average": ("tail", 1), SHIPPED: ("tail", 0.4),
}  # fmt: skip
AGREE = 1e-5  # losses of one average, computed in two ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--table", action="store_true", help="write the table of the recorded result")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # read by torch, which is not imported yet
    import page_tables
    import record
    from origins import read

    if args.table:
        return print(page_tables.write(page_tables.RESULTS / "averaging.md", {"arms": table(read("averaging"))}))
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        base = base_config(Path(name), args.shared.resolve())
        for seed in args.seeds:
            for arm in ARMS:
                for each, loss in losses_of(arm, seed, Path(name), base).items():
                    losses.setdefault(each, []).append(loss)
                    print(f"seed {seed}, {each}: {loss:.4f}", file=sys.stderr, flush=True)
    setting = {"steps": STEPS, "documents_per_step": DOCUMENTS, "rank": 8, "held_out_rows": HELD_OUT}
    return print(
        record.write("averaging", {**setting, "seeds": args.seeds, "control": CONTROL, "arms": summed(losses)})
    )


def losses_of(arm: str, seed: int, folder: Path, base: Mapping[str, Any]) -> dict[str, float]:
    """Train an arm and return its evaluation loss at the end; with the shipped average, also those of the others."""
    import dualtune

    run = {"dir": str(folder / f"{list(ARMS).index(arm)}-{seed}"), "seed": seed, "eval_every": None, "save_every": None}
    train = {"steps": STEPS, "documents_per_step": DOCUMENTS, **ARMS[arm]}
    others = Averages() if arm == SHIPPED else None
    loss = dualtune.train({**base, "train": train, "run": run}, "cpu").eval_loss
    assert loss is not None
    if others is None:
        return {arm: loss}
    again = others.losses.pop(SHIPPED)
    assert abs(again - loss) <= AGREE, f"{SHIPPED}: {loss} by train.average, {again} from the weights of each step"
    return {arm: loss, **others.losses}


class Averages:
    """The losses of COMPUTED in the next run: it takes the weights after each step, and evaluates after the last."""

    def __init__(self) -> None:
        from dualtune.model.optimizer import averaging
        from dualtune.train import objective, policies
        from dualtune.train import run as training
        from dualtune.train.evaluation import evaluate, using
        from dualtune.train.policies import Ordinary
        from dualtune.train.policy import Outcome, StepActions

        self.losses: dict[str, float] = {}
        weights: list[Any] = []

        class Recording(Ordinary):
            def take(self, step: StepActions, /) -> Outcome:
                outcome = super().take(step)
                weights.append(step.engine.adapter_state())
                return outcome

        def average(kind: str, over: float) -> Any:
            how = averaging(kind, objective.steps_of(over, STEPS), STEPS)
            assert how is not None
            found = {name: w * 0.0 for name, w in weights[0].items()}
            for step, after in enumerate(weights, 1):
                c = how.share(step)
                found = {name: (1 - c) * found[name] + c * w for name, w in after.items()}
            return found

        def evaluate_all(engine: Any, documents: Any, layout: Any, step: int, *rest: Any) -> Any:
            for arm, how in COMPUTED.items() if step == STEPS else ():
                with using(engine, average(*how)):
                    self.losses[arm] = evaluate(engine, documents, layout, step, *rest).eval_loss
            if step == STEPS:
                policies.Ordinary, training.evaluate = Ordinary, evaluate
            return evaluate(engine, documents, layout, step, *rest)

        policies.Ordinary, training.evaluate = Recording, evaluate_all


def summed(losses: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return mean and standard deviation of each arm, and its mean difference to the control with a 95 % interval."""
    control, arms = losses[CONTROL], dict[str, Any]()
    for arm, found in losses.items():
        settings = {**ARMS.get(arm, CONSTANT)}
        arms[arm] = {**settings, "eval_loss": found, "mean": statistics.mean(found), "std": statistics.stdev(found)}
        if arm != CONTROL:
            arms[arm]["minus_control"] = paired(found, control).as_json()
    return arms


def table(result: Mapping[str, Any]) -> str:
    """Return the table of results/averaging.md."""
    lines = ["| | learning rate | evaluation loss | minus cosine |", "|---|---|---|---|"]
    for arm, found in result["arms"].items():
        gap = found.get("minus_control")
        shown = f"{gap['mean']:+.4f} ± {gap['margin_95']:.4f}" if gap else ""
        lines.append(f"| {arm} | {found['learning_rate']:g} | {found['mean']:.4f} ± {found['std']:.4f} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
