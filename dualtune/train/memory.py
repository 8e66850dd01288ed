"""The memory of a run: what it remembers of shortages, what a killed process left, and the plan on this machine."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dualtune.base.errors import ConfigError, FormatError
from dualtune.base.text import in_bytes
from dualtune.config import Config
from dualtune.config.schema import AdapterConfig, MemoryConfig
from dualtune.data.batches import SequenceLayout, step_documents
from dualtune.data.order import Order
from dualtune.engine.backend import Backend, Engine
from dualtune.engine.card import ActivationCheckpointing, card_of
from dualtune.engine.detect import detect
from dualtune.engine.machine import Budget, budget, within
from dualtune.engine.memory.counted import Shape, shape_from
from dualtune.engine.memory.estimate import MemoryPart, ask_of, checkpointing_of, estimate, padded
from dualtune.engine.memory.plan import MemoryPlan, plan_of
from dualtune.engine.memory.shapes import UnknownShape
from dualtune.model.config_file import read_config
from dualtune.train.evaluation import layout_of
from dualtune.train.hooks import Event
from dualtune.train.profiler.snapshot import each_snapshot
from dualtune.train.recovery import Recovery, explanation
from dualtune.train.state.checkpoint import Checkpoint
from dualtune.train.state.metrics import Metrics
from dualtune.train.state.run_dir import TIMELINE, RunDir, read_restart, write_restart
from dualtune.train.team import Team

if TYPE_CHECKING:
    from dualtune.train.prepare import Prepared

# ----------------------------------------------------------------------------------------------------------------------
# What a run remembers when memory ran out: smaller micro-batches and recomputed activations, also after a resume.

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
        """Explain the memory of what was tried last."""
        checkpointing = "full" if recovery.recomputes else config.memory.checkpointing
        tried = with_real_lengths(config, data.longest, recovery.layout.max_tokens)
        tried = tried.model_copy(update={"memory": config.memory.model_copy(update={"checkpointing": checkpointing})})
        return explanation(prepared.backend, tried, reason)

    recovery = Recovery(
        prepared.backend, engine, data.layout, data.longest, team=prepared.team,
        recomputes=prepared.memory.recomputes_all, tell=log.event, explain=explain,
        limit_bytes=prepared.memory.watched_bytes,
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


# ----------------------------------------------------------------------------------------------------------------------
# What the files of a run say about a process before that was killed without a word.

CLOSE = 0.9  # of the memory that a run may use


def suspected(run_dir: RunDir, memory: RunMemory) -> list[str]:
    """Return a note if the process before was killed, and came close to the end of its memory before.

    Its last rows may be missing: a killed process could not write them.
    """
    if run_dir.lock is None or not run_dir.lock.holder_was_killed:
        return []
    try:
        rows = each_snapshot(run_dir.path / TIMELINE)
        most = max((max(row.used_bytes, row.peak_bytes or 0, row.process_bytes or 0) for row in rows), default=0)
    except FormatError:
        return []
    if most < CLOSE * memory.budget.bytes:
        return []
    return [
        f"the process before was killed after it had used {in_bytes(most)}, and {in_bytes(memory.budget.bytes)} are "
        "available: memory is the likely cause. --max-restarts 3 resumes such a run by itself, with smaller "
        "micro-batches; or lower train.micro_batch_tokens"
    ]


# ----------------------------------------------------------------------------------------------------------------------
# The plan: what `auto` means on this machine, and whether `memory.limit` can hold.

LOOKED_AT = 64  # steps, to see how large their micro-batches are
RESERVE = "reserve"  # the part of an estimate outside of arrays, and not in the backend's counter
TEACHER = "teacher"  # the part of a model that is loaded beside
ALWAYS = {"weights", "adapter", "optimizer", RESERVE, TEACHER}  # the parts that are there all the time


@dataclass(frozen=True, slots=True)
class RunMemory:
    """What a run recomputes to save memory, and the plan behind it."""

    checkpointing: ActivationCheckpointing
    budget: Budget
    plan: MemoryPlan | None = None
    why_no_plan: str = ""
    watched_bytes: int | None = None  # that arrays may take, where only the plan and a watch keep memory.limit

    @property
    def recomputes_all(self) -> bool:
        return self.checkpointing.layers == "all"

    @property
    def reused_bytes(self) -> int | None:
        """What a step allocates and frees again, so that the next one can reuse it; None without a plan."""
        if self.plan is None:
            return None
        return sum(part.bytes for part in self.plan.estimate.parts if part.name not in ALWAYS)

    def as_json(self) -> dict[str, Any] | None:
        """Return what environment.json records; None without a plan."""
        if self.plan is None:
            return None
        parts = [asdict(part) for part in self.plan.estimate.parts]
        values = {"planned_bytes": self.plan.estimate.total_bytes, "parts": parts}
        return values | {"available_bytes": self.budget.bytes, "available": self.budget.reason}

    def lines(self) -> list[str]:
        """Describe the plan for the start of a run."""
        if self.plan is None:
            return [f"memory      not estimated: {self.why_no_plan}"]
        lines = [f"memory      estimated: {self.plan.compare()}"]
        if not self.plan.fits:
            lines.append(f"warning     it may run out of memory. {self.plan.smaller}")
        return lines


def largest_micro_batch(order: Order, lengths: np.ndarray, layout: SequenceLayout) -> int:
    """Return the tokens of the largest micro-batch of a run's steps, padding included.

    By the first steps, with room for what a later one may have more: the longest documents, or one of them.
    """
    longest = np.sort(lengths)[::-1]
    limit, most = max(layout.max_tokens, padded(int(longest[0]))), 0
    for step in range(min(order.num_steps, LOOKED_AT)):
        most = max(most, *step_documents(lengths[order.step(step).documents], layout, "").cells)
        if most >= layout.max_tokens:
            return limit
    number = order.documents_per_step
    later = int(longest[:number].sum()) if number else min(order.tokens_per_step, most + int(longest[0]))
    return min(max(most, padded(later)), limit)


def with_real_lengths(config: Config, longest: int, cells: int) -> Config:
    """Return the config with the lengths that its data have: of the longest document, and of a micro-batch."""
    longest = min(longest, config.data.max_length)
    cells = min(cells, layout_of(config).max_tokens)
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"max_length": longest}),
            "train": config.train.model_copy(update={"micro_batch_tokens": max(cells, longest)}),
        }
    )


def plan_memory(
    config: Config, backend: Backend, model_dir: Path, longest: int, num_processes: int, *, cells: int,
    eval_tokens: int, teacher_dir: Path | None = None,
) -> RunMemory:  # fmt: skip
    """Plan a run whose longest document has `longest` tokens, and whose largest micro-batch has `cells`.

    `eval_tokens`: of all documents to evaluate on, whose micro-batches may be larger, but keep nothing for a backward
    pass. `teacher_dir`: of a model that is loaded beside. ConfigError if the estimate exceeds `memory.limit`, or for
    targets or layers that the model does not have.
    """
    device, card = backend.devices()[0], card_of(backend.name)
    name = f"cuda:{device.index}" if device.kind == "cuda" else device.kind
    has = within(budget(detect(), name), config.memory.limit_bytes)

    # Without formulas, or the shape that they need, there is no plan, and the reason is shown instead.
    trained = with_real_lengths(config, longest, cells)
    memory = RunMemory(checkpointing_of(trained), has)
    if config.memory.sharding == "full":
        memory = replace(memory, why_no_plan=f"the base is sharded among {num_processes} processes")
    elif card.memory is None or card.device(device.kind) is None:
        memory = replace(memory, why_no_plan=f"there is no estimate for the backend {backend.name}")
    else:
        try:
            decoder = shape_from(read_config(model_dir), backend.name)
            teacher = teacher_dir and shape_from(read_config(teacher_dir), backend.name)
        except UnknownShape as error:
            memory = replace(memory, why_no_plan=str(error))
        else:
            evaluated = with_real_lengths(config, longest, max(cells, eval_tokens))
            beside = teacher and weights_of_teacher(config, teacher, backend.name, device.kind)
            plan = plan_of(trained, decoder, backend.name, device.kind, has, evaluated, beside)
            memory = RunMemory(plan.ask.checkpointing, has, plan)

    # A limit that the plan exceeds ends the run here. Where the device cannot keep it, the run watches its peak.
    limit = config.memory.limit
    if limit == "auto":
        return memory
    if memory.plan is not None and not memory.plan.fits:
        need = in_bytes(memory.plan.estimate.total_bytes)
        raise ConfigError(f"memory.limit: got {limit}, but the run needs an estimated {need}. {memory.plan.smaller}")
    declared = card.device(device.kind)
    if declared and declared.enforces_limit:
        return memory
    if memory.plan is None:
        raise ConfigError(
            f"memory.limit: got {limit}, which {backend.name} can only keep by plan, and there is none: "
            f"{memory.why_no_plan}. Set memory.limit=auto"
        )
    reserve = sum(part.bytes for part in memory.plan.estimate.parts if part.name == RESERVE)
    return replace(memory, watched_bytes=(config.memory.limit_bytes or 0) - reserve)


def as_teacher(config: Config) -> Config:
    """Return the config of the teacher as it is loaded: another model, without an adapter of the run."""
    settings = config.distill
    model = {"dtype": settings.teacher_dtype, "quantization": settings.teacher_quantization, "name": settings.teacher}
    return config.model_copy(update={
        "model": config.model.model_copy(update=model), "adapter": AdapterConfig(), "memory": MemoryConfig(),
    })  # fmt: skip


def weights_of_teacher(config: Config, shape: Shape, backend: str, device: str) -> MemoryPart:
    """Return what the weights of the teacher take, a model of this shape that is loaded beside.

    ConfigError for a quantization that the device does not have.
    """
    loaded = as_teacher(config)
    try:
        weights = estimate(shape, ask_of(loaded, shape, backend, device)).parts[0]
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.", "distill.teacher_", 1)) from None
    assert weights.name == "weights"
    return replace(weights, name=TEACHER, formula=f"{loaded.model.name}: {weights.formula}")


def agreed(checkpointing: ActivationCheckpointing, team: Team) -> ActivationCheckpointing:
    """Return the first process's value in all: with a split base, recomputing a layer needs all of them."""
    if team.size == 1:
        return checkpointing
    return ActivationCheckpointing(**json.loads(team.broadcast(json.dumps(asdict(checkpointing)).encode())))
