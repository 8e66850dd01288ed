"""The memory check before a tier: is there enough for its run?"""

from __future__ import annotations

import json

from dualtune.base_model import resolve_model
from dualtune.checks import Check
from dualtune.memory.counted import shape_from
from dualtune.memory.plan import plan_of
from dualtune.memory.shapes import UnknownShape
from dualtune.platform.budget import Budget, budget, within
from dualtune.platform.machine import Machine
from dualtune.validate.plan import Plan, ValidationSetup
from dualtune.validate.tiers import MB


def check_memory(plan: Plan, setup: ValidationSetup, machine: Machine) -> Check:
    """Return a row: available, needed with `memory.checkpointing: auto` as the run decides it, and the difference.

    EnvironmentFault if there is no such model.
    """
    model_dir = resolve_model(plan.config.model.name, weights=False)
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    try:
        decoder = shape_from(config, setup.backend.name)
    except UnknownShape as reason:
        return Check("memory", "skipped", f"not estimated: {reason}")
    kind = setup.backend.devices()[0].kind
    has = within(budget(machine, setup.platform if kind == "cuda" else kind), plan.config.memory.limit_bytes)
    planned = plan_of(plan.config, decoder, setup.backend.name, kind, has.bytes, has.host_bytes)
    return compare(has, planned.estimate.total_bytes)


def compare(there: Budget, needed_bytes: int) -> Check:
    """Compare in whole MB, rounded so that the margin never looks larger than it is."""
    free, needed = there.bytes // MB, -(-needed_bytes // MB)
    if needed > free:
        found = f"{free} MB free, {needed} MB needed → short by {needed - free} MB ({there.reason})"
        fix = "free memory on the device, choose a smaller tier, or use a machine with more"
        return Check("memory", "fail", found, fix)
    return Check("memory", "ok", f"{free} MB free, {needed} MB needed → {free - needed} MB buffer ({there.reason})")
