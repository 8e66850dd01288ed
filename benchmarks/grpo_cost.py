"""What a step of GRPO costs by its parts, and whether its memory stays flat.

    python benchmarks/grpo_cost.py [--steps 500] [--real-steps 3]

The tiny model of the demo draws 8 answers of up to 16 tokens to each of 4 prompts, for 500 steps; SmolLM2-135M-Instruct
16 answers of up to 12 tokens to each of 8 prompts, for 3. One thread of torch's CPU. Recorded are the seconds of the
processor in each part of a step, without the first one, and the memory of the process along the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads

import psutil
import record
from grpo import rows

from dualtune.config import parse_config
from dualtune.engine.backend import get_backend
from dualtune.model.gguf import model_from_gguf
from dualtune.model.package import fetch_model
from dualtune.train.hooks import Hook, PhaseChange, StepTaken
from dualtune.train.rl.rewards import Rewards
from dualtune.train.run import run

DEMO = Path(__file__).parents[1] / "dualtune" / "demo" / "model"
SUMS = [(a, b) for a in range(10, 42) for b in range(10, 42)]
PARTS = {"sampling": "sampling", "micro-batch": "gradient", "optimizer": "update"}  # the other phases: the rest
EVERY = 25  # steps between two measurements of memory


class Parts(Hook):
    """Adds up the processor's seconds of each part of the steps after the first, and notes the memory."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.memory: dict[int, int] = {}
        self._part, self._since, self._is_first = "rest", time.process_time(), True

    def judging(self, judge: Callable[[Rewards, Any], Any]) -> Callable[[Rewards, Any], Any]:
        """Return what judges, as a part of its own: to hooks it is part of the sampling."""

        def judged(rewards: Rewards, answers: Any) -> Any:
            self._enter("rewards")
            try:
                return judge(rewards, answers)
            finally:
                self._enter("sampling")

        return judged

    def on_phase_change(self, change: PhaseChange) -> None:
        self._enter(PARTS.get(change.phase, "rest"))

    def after_step(self, step: StepTaken) -> None:
        self._enter("rest")
        self._is_first = False
        if step.step % EVERY == 0:
            self.memory[step.step] = psutil.Process().memory_info().rss

    def _enter(self, part: str) -> None:
        now = time.process_time()
        if not self._is_first:
            self.seconds[self._part] += now - self._since
        self._part, self._since = part, now


def measured(model: Path, steps: int, **rollouts: Any) -> dict[str, Any]:
    """Return the seconds of a step by part, and the memory by step."""
    parts = Parts()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {
            "model": {"name": str(model), "dtype": "float32"}, "adapter": {"rank": 16, "alpha": 32, "dropout": 0.0},
            "data": {"train": rows(folder / "train.jsonl", SUMS), "eval": 0, "max_length": 128},
            "train": {"objective": "grpo", "steps": steps, "documents_per_step": rollouts.pop("prompts"),
                      "learning_rate": 1e-4, "schedule": "constant", "warmup": 0.0},
            "rollouts": {"rewards": ["number", "brief:3"], **rollouts},
            "run": {"dir": str(folder / "run"), "save_every": None, "report": False},
        }  # fmt: skip
        with mock.patch.object(Rewards, "judge", parts.judging(Rewards.judge)):
            run(parse_config(json.dumps(config)), get_backend("torch", "cpu"), [parts])
    return {
        "steps": steps, "rss_mib": {step: round(size / 2**20, 1) for step, size in parts.memory.items()},
        "seconds_of_a_step": {part: round(total / (steps - 1), 4) for part, total in sorted(parts.seconds.items())},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--real-steps", type=int, default=3)
    args = parser.parse_args()
    figures = {"tiny": measured(DEMO, args.steps, prompts=4, samples=8, max_tokens=16)}
    real = model_from_gguf(fetch_model())
    figures["SmolLM2-135M"] = measured(real, args.real_steps, prompts=8, samples=16, max_tokens=12)
    print(json.dumps(figures, indent=1))
    record.write("grpo_cost", figures)


if __name__ == "__main__":
    main()
