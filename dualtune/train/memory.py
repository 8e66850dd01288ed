"""The memory plan of a run: what `auto` means on this machine, and whether `memory.limit` can hold."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.activation_checkpointing import ActivationCheckpointing
from dualtune.backend import Backend
from dualtune.base_model import read_config
from dualtune.card import card_of
from dualtune.config import Config
from dualtune.data.batching.batches import SequenceLayout
from dualtune.data.batching.order import Order
from dualtune.distributed.team import Team
from dualtune.errors import ConfigError
from dualtune.evaluate.evaluation import layout_of
from dualtune.memory.ask import padded
from dualtune.memory.counted import Shape, shape_from
from dualtune.memory.estimate import checkpointing_of
from dualtune.memory.plan import MemoryPlan, plan_of
from dualtune.memory.shapes import UnknownShape
from dualtune.performance.documents import StepDocuments
from dualtune.platform.budget import Budget, budget, within
from dualtune.platform.detect import detect
from dualtune.text.show import in_bytes

LOOKED_AT = 64  # steps, to see how large their micro-batches are
RESERVE = "reserve"  # the part of an estimate that is no array, and not in the backend's counter
ALWAYS = {"weights", "adapter", "optimizer", RESERVE}  # the parts that are there all the time


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
        found = {"planned_bytes": self.plan.estimate.total_bytes, "parts": parts}
        return found | {"available_bytes": self.budget.bytes, "available": self.budget.reason}

    def lines(self) -> list[str]:
        """Describe the plan for the start of a run."""
        if self.plan is None:
            return [f"memory      not estimated: {self.why_no_plan}"]
        found = [f"memory      estimated: {self.plan.compare(self.budget.reason)}"]
        if not self.plan.fits:
            found.append(f"warning     it may run out of memory. {self.plan.smaller}")
        return found


def largest_micro_batch(order: Order, lengths: np.ndarray, layout: SequenceLayout) -> int:
    """Return the tokens of the largest micro-batch of a run's steps, padding included.

    By the first steps, with room for what a later one may have more: the longest documents, or one of them.
    """
    longest = np.sort(lengths)[::-1]
    limit, most = max(layout.max_tokens, padded(int(longest[0]))), 0
    for step in range(min(order.num_steps, LOOKED_AT)):
        most = max(most, *StepDocuments.of(lengths[order.step(step).documents], layout, "").cells)
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
    config: Config, backend: Backend, model_dir: Path, longest: int, num_processes: int, *, cells: int, eval_tokens: int
) -> RunMemory:
    """Plan a run whose longest document has `longest` tokens, and whose largest micro-batch has `cells`.

    `eval_tokens`: of all documents to evaluate on, whose micro-batches may be larger, but keep nothing for a backward
    pass. ConfigError if the estimate exceeds `memory.limit`, or for targets or layers that the model does not have.
    """
    evaluated = with_real_lengths(config, longest, max(cells, eval_tokens))
    found = _plan(with_real_lengths(config, longest, cells), evaluated, backend, model_dir, num_processes)
    limit = config.memory.limit
    if limit == "auto":
        return found
    if found.plan is not None and not found.plan.fits:
        need = in_bytes(found.plan.estimate.total_bytes)
        raise ConfigError(f"memory.limit: got {limit}, but the run needs an estimated {need}. {found.plan.smaller}")
    device = card_of(backend.name).device(backend.devices()[0].kind)
    if device and device.enforces_limit:
        return found
    if found.plan is None:
        raise ConfigError(
            f"memory.limit: got {limit}, which {backend.name} can only keep by plan, and there is none: "
            f"{found.why_no_plan}. Set memory.limit=auto"
        )
    reserve = sum(part.bytes for part in found.plan.estimate.parts if part.name == RESERVE)
    return replace(found, watched_bytes=(config.memory.limit_bytes or 0) - reserve)


def agreed(checkpointing: ActivationCheckpointing, team: Team) -> ActivationCheckpointing:
    """Return the first process's value in all: with a split base, recomputing a layer needs all of them."""
    if team.size == 1:
        return checkpointing
    return ActivationCheckpointing(**json.loads(team.broadcast(json.dumps(asdict(checkpointing)).encode())))


def _plan(config: Config, evaluated: Config, backend: Backend, model_dir: Path, num_processes: int) -> RunMemory:
    device = backend.devices()[0]
    name = f"cuda:{device.index}" if device.kind == "cuda" else device.kind
    has = within(budget(detect(), name), config.memory.limit_bytes)
    decoder, reason = _shape(backend.name, device.kind, model_dir)
    if config.memory.sharding == "full":
        decoder, reason = None, f"the base is split among {num_processes} processes"
    if decoder is None:
        return RunMemory(checkpointing_of(config), has, why_no_plan=reason)
    plan = plan_of(config, decoder, backend.name, device.kind, has.bytes, has.host_bytes, evaluated)
    return RunMemory(plan.ask.checkpointing, has, plan)


def _shape(backend: str, kind: str, model_dir: Path) -> tuple[Shape | None, str]:
    """Return the shape of the model, or None and why there is no estimate."""
    card = card_of(backend)
    if card.memory is None or card.device(kind) is None:
        return None, f"there is no estimate for the backend {backend}"
    try:
        return shape_from(read_config(model_dir), backend), ""
    except UnknownShape as error:
        return None, str(error)
