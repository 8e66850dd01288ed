"""Training beside what was recorded on two CPUs, so that machines that never meet are compared with each other.

`recorded/` holds, from the demo's model and data: the losses of a run in float32 on every backend, a checkpoint from
the middle of it, and its adapter. `scripts/record_selftest.py` makes it anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dualtune.adapter.formats.directory import read_adapter, write_adapter
from dualtune.config import Config
from dualtune.io.disk import write_file
from dualtune.io.untrusted import read_json
from dualtune.selftest.checks.finding import CheckFinding, DeviceCheck, Site, judged, most_apart
from dualtune.selftest.checks.resume import ShortRun, short_config, short_run
from dualtune.train.state.checkpoint import path_of
from dualtune.train.state.run_dir import CHECKPOINTS
from dualtune.versions import versions_of

RECORDED = Path(__file__).parents[1] / "recorded"
SERIES, ADAPTER = "series.json", "adapter"
MAX_SERIES_BYTES = 1 << 16
STEPS, HALF = 12, 6


def recorded_checks(dtypes: Sequence[str]) -> list[DeviceCheck]:
    """Return a check for each dtype."""
    return [
        DeviceCheck(f"recorded/{dtype}", f"losses in {dtype} beside those recorded on CPUs", partial(compare, dtype))
        for dtype in dict.fromkeys(dtypes)
    ]


def compare(dtype: str, site: Site, recorded: Path = RECORDED) -> CheckFinding:
    """Train the recorded run whole, and from its checkpoint, and use its adapter. FormatError if it is damaged."""
    series: Mapping[str, Any] = read_json(recorded / SERIES, max_bytes=MAX_SERIES_BYTES)["series"]
    whole = _whole(site, dtype).losses
    continued = short_run(site, _config(site, "continued", dtype), str(path_of(recorded / CHECKPOINTS, HALF))).losses
    of_adapter = _adapter_loss(site, dtype, recorded / ADAPTER)
    gaps: dict[str, float] = {}
    for name, each in series.items():
        expected = each["losses"]
        gaps[f"whole, {name}"] = _largest_gap(whole, expected)
        gaps[f"continued, {name}"] = _largest_gap(continued, expected[HALF:])
        gaps[f"adapter, {name}"] = abs(of_adapter - each["adapter_loss"])
    most = most_apart(dtype)
    tolerance = dict.fromkeys(gaps, most)
    figures = {"losses": whole, "continued": continued, "adapter_loss": of_adapter, **gaps}
    worst = max(gaps, key=lambda name: gaps[name])
    words = f"losses up to {gaps[worst]:.1e} nats apart ({worst}), {most:.0e} allowed"
    return CheckFinding(judged(gaps, tolerance), words, figures, tolerance)


def record(sites: Mapping[str, Site], target: Path) -> None:
    """Write a new record: losses on each site, and the files of the first one. Paths in the files are as the site's."""
    series: dict[str, Any] = {}
    for name, site in sites.items():
        found = _whole(site, "float32")
        if not series:
            _copy_files(found, target)
        loss = _adapter_loss(site, "float32", target / ADAPTER)
        packages = versions_of(("dualtune", *site.card.package.recorded))
        series[name] = {"losses": found.losses, "adapter_loss": loss, "packages": packages}
    write_file(target / SERIES, json.dumps({"schema_version": 1, "series": series}, indent=2) + "\n")


def _copy_files(found: ShortRun, target: Path) -> None:
    checkpoint = path_of(target / CHECKPOINTS, HALF)
    checkpoint.mkdir(parents=True)
    for file in path_of(found.directory / CHECKPOINTS, HALF).iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
    adapter = read_adapter(found.directory / ADAPTER)
    write_adapter(target / ADAPTER, replace(adapter, metadata={}), layout="peft")


def _config(site: Site, name: str, dtype: str, **changes: Any) -> Config:
    settings = {"adapter__rank": 2, "adapter__alpha": 4, "train__steps": STEPS, "run__save_every": HALF} | changes
    return short_config(site, name, model__dtype=dtype, **settings)


def _whole(site: Site, dtype: str) -> ShortRun:
    return short_run(site, _config(site, "whole", dtype))


def _adapter_loss(site: Site, dtype: str, adapter: Path) -> float:
    """Return the loss of the adapter on the documents of a first step, without dropout."""
    changes = {"adapter__init_from": str(adapter), "adapter__dropout": 0.0, "train__steps": 1}
    return short_run(site, _config(site, "adapter-loss", dtype, **changes)).losses[0]


def _largest_gap(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))
