"""What a run remembers when memory ran out: smaller micro-batches and recomputed activations, also after a resume."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualtune.backend import Engine
from dualtune.config import Config
from dualtune.data.batching.batches import SequenceLayout
from dualtune.evaluate.evaluation import layout_of
from dualtune.evaluate.limit import WatchedLimit
from dualtune.evaluate.recovery import Recovery
from dualtune.evaluate.shortage import explanation
from dualtune.hooks import Event
from dualtune.train.state.checkpoint import Checkpoint
from dualtune.train.state.metrics import Metrics
from dualtune.train.state.restart import read_restart, write_restart

if TYPE_CHECKING:
    from dualtune.train.prepare import Prepared

KEY = "memory"  # in state.json and dualtune.json; absent if memory never ran out


def remembered_layout(config: Config, saved: Checkpoint | None) -> SequenceLayout:
    """Return the config's sequence layout, or the smaller one with which the run has been trained.

    A changed train.micro_batch_tokens counts instead.
    """
    layout, before = layout_of(config), _before(config, saved)
    tokens = before.get("micro_batch_tokens", layout.max_tokens)
    return layout.cut_to(tokens) if tokens < layout.max_tokens else layout


def recovery_of(prepared: Prepared, engine: Engine, log: Metrics) -> Recovery:
    """Return the recovery of a run, with what the run remembers."""
    config, data = prepared.config, prepared.data

    def explain(recovery: Recovery, reason: str) -> str:
        return explanation(prepared.backend, _with(config, recovery, data.longest), reason)

    recovery = Recovery(
        prepared.backend, engine, data.layout, data.longest, team=prepared.team,
        recomputes=prepared.memory.recomputes_all, tell=log.event, explain=explain,
        limit=WatchedLimit(prepared.backend, prepared.memory.watched_bytes),
    )  # fmt: skip
    if _before(config, prepared.checkpoint).get("checkpointing") == "full":
        recovery.recompute_all()
    return recovery


def resume_smaller(path: Path, recovery: Recovery, prepared: Prepared, step: int, log: Metrics) -> None:
    """Take less memory than the process before, which a signal has killed, and note it for the next restart.

    OutOfMemory if nothing is left to try and that process was restarted from this step, too.
    """
    before = read_restart(path)
    if before is None:
        return
    if (tokens := before.memory.get("micro_batch_tokens", math.inf)) < recovery.layout.max_tokens:
        recovery.layout = recovery.layout.cut_to(tokens)
    if before.memory.get("checkpointing") == "full":
        recovery.recompute_all()
    why = f"the process before was killed by {before.killed_by}, as when memory runs out"
    batches = prepared.batches(min(step, prepared.data.order.num_steps - 1), recovery.layout)
    if not recovery.shrink(step, max(batch.tokens_BT.size for batch in batches), why):
        if before.step == step:
            raise recovery.given_up(f"{why}, twice after step {step}")
        log.event(Event(step, "restarted", f"{why}; nothing takes less, so the run resumes as it was"))
    memory = entry_of(recovery, prepared).get(KEY, {})
    write_restart(path, replace(before, step=step, memory=memory))


def entry_of(recovery: Recovery, prepared: Prepared) -> dict[str, Any]:
    """Return the entry in state.json and dualtune.json; empty if memory never ran out."""
    entry: dict[str, Any] = {}
    if recovery.layout.max_tokens != layout_of(prepared.config).max_tokens:
        entry["micro_batch_tokens"] = recovery.layout.max_tokens
    if recovery.recomputes and not prepared.memory.recomputes_all:
        entry["checkpointing"] = "full"
    return {KEY: entry} if entry else {}


def _before(config: Config, saved: Checkpoint | None) -> dict[str, Any]:
    if saved is None:
        return {}
    trained_with = saved.state["config"].get("train", {}).get("micro_batch_tokens")
    is_same = trained_with == config.train.micro_batch_tokens
    return saved.state.get(KEY) or {} if is_same else {}


def _with(config: Config, recovery: Recovery, longest: int) -> Config:
    """Return the config with what was tried last, and with the length of the longest document that there is."""
    train = config.train.model_copy(update={"micro_batch_tokens": recovery.layout.max_tokens})
    checkpointing = "full" if recovery.recomputes else config.memory.checkpointing
    memory = config.memory.model_copy(update={"checkpointing": checkpointing})
    data = config.data.model_copy(update={"max_length": min(longest, config.data.max_length)})
    return config.model_copy(update={"train": train, "memory": memory, "data": data})
