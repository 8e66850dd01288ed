"""Whether a run that was stopped and resumed ends as one that was not: to the bit, or how far off."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.adapter.formats.directory import read_adapter
from dualtune.adapter.spec import Tensors
from dualtune.config import Config, parse_config
from dualtune.selftest.checks.engines import distance
from dualtune.selftest.checks.finding import CheckFinding, DeviceCheck, Outcome, Site, most_apart
from dualtune.train.run import run
from dualtune.train.state.checkpoint import path_of
from dualtune.train.state.run_dir import CHECKPOINTS, METRICS

STEPS, STOPPED_AT = 6, 3


@dataclass(frozen=True, slots=True)
class ShortRun:
    """What a short run left."""

    directory: Path
    losses: list[float]  # of the steps that this run took
    adapter: Tensors


def resume_checks(kind: str) -> list[DeviceCheck]:
    """Return the check of a resumed run; on a GPU also with run.deterministic, which has to make it bitwise."""
    title = "a resumed run ends as one that was not stopped"
    usual = DeviceCheck("resume/usual", title, partial(resume_and_compare, False))
    exact = DeviceCheck("resume/deterministic", f"{title}, to the bit", partial(resume_and_compare, True))
    return [usual, exact] if kind == "cuda" else [usual]


def short_config(site: Site, name: str, **changes: Any) -> Config:
    """Return the config of a short run in a directory of this name. `changes`: keys, with __ for the dot."""
    settings = {
        **site.training, "adapter.rank": 4, "adapter.alpha": 8, "adapter.dropout": 0.1, "data.max_length": 128,
        "data.eval": None, "train.steps": STEPS, "train.documents_per_step": 8, "train.learning_rate": 1e-3,
        "run.save_every": STOPPED_AT, "run.eval_every": None, "run.dir": str(site.directory / name),
    } | {key.replace("__", "."): value for key, value in changes.items()}  # fmt: skip
    return parse_config("model: {}", overrides=[f"{key}={json.dumps(value)}" for key, value in settings.items()])


def short_run(site: Site, config: Config, resume: str = "never") -> ShortRun:
    """Train, and read the losses and the adapter."""
    result = run(config, site.backend, resume=resume)
    lines = (result.run_dir / METRICS).read_text(encoding="utf-8").splitlines()
    losses = [float(row["loss"]) for row in map(json.loads, lines) if "loss" in row]
    return ShortRun(result.run_dir, losses, dict(read_adapter(result.adapter_dir).tensors))


def resume_and_compare(is_deterministic: bool, site: Site) -> CheckFinding:
    """Train straight, again, and from the checkpoint in the middle by a new engine."""

    def config(name: str) -> Config:
        return short_config(site, name, run__deterministic=is_deterministic)

    straight = short_run(site, config("straight"))
    again = short_run(site, config("again"))
    saved = path_of(straight.directory / CHECKPOINTS, STOPPED_AT)
    resumed = short_run(site, config("resumed"), resume=str(saved))
    figures = {
        "bitwise": _same_bits(straight, resumed, STEPS - STOPPED_AT),
        "straight_runs_bitwise": _same_bits(straight, again, STEPS),
        "loss": max(abs(a - b) for a, b in zip(straight.losses[STOPPED_AT:], resumed.losses, strict=True)),
        "adapter": distance(resumed.adapter, straight.adapter),
    }
    most = most_apart(site.device.auto_dtype)
    outcome, words = _verdict(figures, most, must_be_bitwise=is_deterministic or site.device.kind != "cuda")
    return CheckFinding(outcome, words, figures, {"loss": most})


def _verdict(figures: Mapping[str, Any], most: float, *, must_be_bitwise: bool) -> tuple[Outcome, str]:
    """Return outcome and words. On a GPU that is not told otherwise, sums may be added in another order each time."""
    if figures["bitwise"]:
        return "passed", "bitwise: the same losses and the same adapter"
    words = (
        f"not bitwise: losses up to {figures['loss']:.1e} apart ({most:.0e} allowed), the adapter "
        f"{figures['adapter']:.1e} of its norm; two straight runs "
    )
    words += "agree to the bit" if figures["straight_runs_bitwise"] else "differ as well"
    return ("failed" if must_be_bitwise or not figures["loss"] <= most else "passed"), words


def _same_bits(a: ShortRun, b: ShortRun, last: int) -> bool:
    same = all(np.array_equal(a.adapter[name], b.adapter[name]) for name in a.adapter)
    return same and a.losses[-last:] == b.losses[-last:]
