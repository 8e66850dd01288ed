"""Run a tier and judge the observations."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dualtune.base.checks import Check, exit_code
from dualtune.base.errors import DeviceFault, EnvironmentFault, NonFiniteError, OutOfMemory
from dualtune.config import Config
from dualtune.doctor.validate.criteria import (
    CriterionResult,
    Observed,
    Watch,
    judge,
    unchanged_tensors,
    verified_checkpoints,
)
from dualtune.doctor.validate.losses import Decrease, decrease_of
from dualtune.doctor.validate.tiers import Plan, ValidationSetup
from dualtune.engine.card import card_of
from dualtune.engine.detect import detect
from dualtune.show.run import run
from dualtune.train.hooks import Hook
from dualtune.train.state.records import environment


@dataclass(frozen=True, slots=True)
class TierResult:
    """The result of a tier that has run, or could not run."""

    plan: Plan
    observed: Observed | None  # None: it did not run
    verdicts: tuple[CriterionResult, ...]
    checks: tuple[Check, ...]  # one row per verdict, or for the reason why the tier did not run
    environment: Mapping[str, Any]

    @property
    def exit_code(self) -> int:
        return exit_code(self.checks)

    @property
    def state(self) -> str:
        if self.observed is None:
            return "not run"
        return "failed" if self.exit_code else "passed"

    @property
    def decrease(self) -> Decrease | None:
        """Return the decrease of the loss, if there are enough steps."""
        losses = self.observed.losses if self.observed else []
        return decrease_of(losses) if len(losses) >= 20 else None


def run_tier(plan: Plan, setup: ValidationSetup, hooks: Sequence[Hook] = ()) -> TierResult:
    """Train with the tier's config as `dualtune train` does, and judge. EnvironmentFault if there is no such model."""
    observed = observe(plan, setup, hooks)
    verdicts = tuple(judge(each, observed, random_weights=setup.random_weights) for each in plan.criteria)
    checks = tuple(verdict.check() for verdict in verdicts)
    if observed.problem:
        checks += (Check("the run", "fail", observed.problem, exit_code=1),)
    return TierResult(plan, observed, verdicts, checks, environment(setup.backend, observed.engine or {}))


def not_run(plan: Plan, setup: ValidationSetup, check: Check) -> TierResult:
    """Return the result of a tier that cannot run."""
    return TierResult(plan, None, (), (check,), environment(setup.backend, {}))


def observe(plan: Plan, setup: ValidationSetup, hooks: Sequence[Hook] = ()) -> Observed:
    """Train, and collect everything that criteria use."""
    backend, config = setup.backend, plan.config
    assert config.train.steps is not None  # every tier's config has it
    gc.collect()  # frees the model of the previous tier
    kind = backend.devices()[0].kind
    watch = Watch(backend)
    seen = Observed(
        device_kind=kind,
        wanted_kind=card_of(backend.name).kind_for(setup.platform, detect().kinds) or kind,
        num_steps=config.train.steps,
        save_every=config.run.save_every,
        steps_per_window=plan.steps_per_window,
        before_bytes=setup.before_bytes,
    )
    problem = _train(lambda: run(config, backend, [watch, *hooks], resume="never"))
    seen = replace(
        seen,
        steps=tuple(watch.steps),
        used_bytes=tuple(watch.used_bytes),
        engine=watch.info.engine if watch.info else None,
        saved_steps=verified_checkpoints(Path(config.run.dir)),
        elapsed_s=watch.elapsed_s,
        problem=problem,
    )
    adapter_dir = Path(config.run.dir) / "adapter"
    if not adapter_dir.is_dir():
        return seen
    num_tensors, unchanged = unchanged_tensors(adapter_dir, config)
    return replace(seen, num_tensors=num_tensors, unchanged=unchanged)


def _train(run: Callable[[], object]) -> str | None:
    """Return why a run ended early, if criteria judge that reason: numbers, memory, the device."""
    try:
        run()
    except (
        NonFiniteError,
        OutOfMemory,
        DeviceFault,
        MemoryError,
        RuntimeError,
    ) as error:  # a device's faults are RuntimeErrors
        reason = str(error).strip().splitlines()
        return f"{type(error).__name__}: {reason[0] if reason else 'no message'}"
    return None


def exit_code_of(results: Sequence[TierResult]) -> int:
    """Return 0, or the lowest exit code of the failed tiers."""
    return exit_code([check for result in results for check in result.checks])


# --- the report ------------------------------------------------------------------------------------------------------


def report(result: TierResult) -> dict[str, Any]:
    """Return a tier as JSON values: config, machine, measured values and limits. It contains no local path."""
    plan, observed = result.plan, result.observed
    return {
        "tier": plan.tier.name,
        "title": plan.tier.title,
        "state": result.state,
        "exit_code": result.exit_code,
        "twin": plan.is_twin,
        "model": plan.model,
        "notes": list(plan.notes),
        "config_file": plan.tier.config,
        "config": _shareable(plan.config, plan.model),
        "environment": dict(result.environment),
        "criteria": [_row(verdict) for verdict in result.verdicts],
        "checks": [check.to_json() for check in result.checks],
    } | ({} if observed is None else _measured(observed))


def _measured(observed: Observed) -> dict[str, Any]:
    training_s = sum(step.step_s for step in observed.steps)
    return {
        "elapsed_s": round(observed.elapsed_s, 3),
        "training_s": round(training_s, 3),
        "tokens_per_s": round(sum(step.num_tokens for step in observed.steps) / training_s, 1) if training_s else None,
        "peak_bytes": observed.peak_bytes if observed.steps else None,
        "first_step_peak_bytes": observed.steps[0].peak_bytes if observed.steps else None,  # it compiles
        "used_bytes": {"first": observed.used_bytes[0], "last": observed.used_bytes[-1]} if observed.used_bytes else {},
        "losses": [_finite(loss) for loss in observed.losses],
        "checkpoints": list(observed.saved_steps),
        "problem": observed.problem,
    }


def _row(verdict: CriterionResult) -> dict[str, Any]:
    criterion = verdict.criterion
    return {
        "name": criterion.name,
        "level": verdict.level,
        "measured": None if verdict.measured is None else _finite(verdict.measured),
        "relation": criterion.relation,
        "limit": criterion.limit,
        "unit": criterion.unit,
        "note": verdict.note,
    }


def _finite(value: float) -> float | str:
    """JSON has no NaN."""
    return value if math.isfinite(value) else str(value)


def _shareable(config: Config, model: str) -> dict[str, Any]:
    """Return the config without the directories of this run."""
    values = config.model_dump(mode="json")
    values["model"]["name"] = model
    values["data"]["train"] = Path(str(config.data.train)).name
    values["run"]["dir"] = Path(config.run.dir).parent.name
    return values


def missing(error: EnvironmentFault) -> Check:
    """Return a row with the reason why a tier cannot run here."""
    return Check("tier not run", "fail", str(error), exit_code=error.exit_code)
