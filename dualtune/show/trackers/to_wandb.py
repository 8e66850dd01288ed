"""Weights & Biases: offline in the run directory, unless WANDB_MODE says online; `wandb sync` sends it later.

What could hold secrets or names is off: console output, code, git, the machine, its statistics and its packages.
"""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Sequence

import wandb

from dualtune.show.trackers.tracker import PROJECT, TrackedRow, TrackedRun


class ToWandb:
    """A run of W&B's, by the id of ours."""

    def __init__(self, run: TrackedRun) -> None:
        settings = wandb.Settings(
            console="off", disable_git=True, disable_code=True, save_code=False, host="", program="", silent=True,
            x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False,
        )  # fmt: skip
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT), id=run.id, name=run.name, resume="allow",
                mode=os.environ.get("WANDB_MODE", "offline"), dir=str(run.directory), config=dict(run.config),
                settings=settings,
            )  # fmt: skip
        except Exception:
            wandb.teardown()  # else the next try finds this run in use, by this process
            raise

    def log(self, rows: Sequence[TrackedRow]) -> None:
        for row in rows:
            self._run.log({**row.numbers, "_timestamp": row.time_s}, step=row.step)

    def close(self) -> None:
        self._run.finish()


open_tracker = ToWandb
