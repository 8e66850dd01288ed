"""Run a tier, judge what was observed, and report it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.base.checks import VERDICTS, Check, exit_code
from dualtune.base.errors import DeviceFault, NonFiniteError, OutOfMemory
from dualtune.config import Config
from dualtune.doctor.validate.criteria import Observed, finite, judge
from dualtune.doctor.validate.losses import Decrease, decrease_of
from dualtune.doctor.validate.tiers import Plan, ValidationSetup
from dualtune.engine.backend import Backend
from dualtune.engine.card import card_of
from dualtune.engine.detect import detect
from dualtune.engine.machine import Machine
from dualtune.model.adapter import modules_of, tensor_name
from dualtune.model.formats.directory import read_adapter
from dualtune.show.run import run
from dualtune.train.hooks import Hook, RunInfo, StepRecord
from dualtune.train.state import checkpoint
from dualtune.train.state.records import environment
from dualtune.train.state.run_dir import CHECKPOINTS


@dataclass(frozen=True, slots=True)
class TierResult:
    """The result of a tier that has run, or could not run."""

    plan: Plan
    observed: Observed | None  # None: it did not run
    checks: tuple[Check, ...]  # a row for each criterion, and one for what ended the run or kept it from running
    environment: Mapping[str, Any]

    @property
    def exit_code(self) -> int:
        return exit_code(self.checks)

    @property
    def state(self) -> str:
        if self.observed is None:
            return "not run"
        return VERDICTS["fail" if self.exit_code else "ok"]

    @property
    def decrease(self) -> Decrease | None:
        """Return the decrease of the loss, if there are enough steps."""
        losses = self.observed.losses if self.observed else []
        return decrease_of(losses) if len(losses) >= 20 else None


def run_tier(plan: Plan, setup: ValidationSetup, hooks: Sequence[Hook] = ()) -> TierResult:
    """Train with the tier's config as `dualtune train` does, and judge. EnvironmentFault if there is no such model."""
    observed = observe(plan, setup, hooks)
    checks = tuple(judge(one, observed, random_weights=setup.random_weights) for one in plan.criteria)
    if observed.problem:
        checks += (Check("the run", "fail", observed.problem, exit_code=1),)
    return TierResult(plan, observed, checks, environment(setup.backend, observed.engine or {}))


def not_run(plan: Plan, setup: ValidationSetup, check: Check) -> TierResult:
    """Return the result of a tier that cannot run."""
    return TierResult(plan, None, (check,), environment(setup.backend, {}))


def observe(plan: Plan, setup: ValidationSetup, hooks: Sequence[Hook] = ()) -> Observed:
    """Train, and collect everything that criteria use."""
    backend, config = setup.backend, plan.config
    assert config.train.steps is not None  # every tier's config has it
    gc.collect()  # frees the model of the previous tier
    kind = backend.devices()[0].kind
    # The request is noted before the run, so that a run that fails at once can be judged, too.
    watch = Watch(backend)
    observed = Observed(
        device_kind=kind,
        wanted_kind=card_of(backend.name).kind_for(setup.platform, detect().kinds) or kind,
        num_steps=config.train.steps,
        save_every=config.run.save_every,
        steps_per_window=plan.steps_per_window,
        before_bytes=setup.before_bytes,
    )
    # An error that criteria judge ends the run, but not what is observed of it.
    problem = _train(lambda: run(config, backend, [watch, *hooks], resume="never"))
    observed = replace(
        observed,
        steps=tuple(watch.steps),
        used_bytes=tuple(watch.used_bytes),
        engine=watch.info.engine if watch.info else None,
        saved_steps=verified_checkpoints(Path(config.run.dir)),
        elapsed_s=watch.elapsed_s,
        problem=problem,
    )
    # The adapter is the only proof that an update reached every tensor.
    adapter_dir = Path(config.run.dir) / "adapter"
    if not adapter_dir.is_dir():
        return observed
    num_tensors, unchanged = unchanged_tensors(adapter_dir, config)
    return replace(observed, num_tensors=num_tensors, unchanged=unchanged)


def _train(run: Callable[[], object]) -> str | None:
    """Return why a run ended early, if criteria judge that reason: numbers, memory, the device."""
    try:
        run()
    except (NonFiniteError, OutOfMemory, DeviceFault, MemoryError, RuntimeError) as error:  # torch: RuntimeError
        reason = str(error).strip().splitlines()
        return f"{type(error).__name__}: {reason[0] if reason else 'no message'}"
    return None


# --- what is observed: by a hook during training, and in the files that a run leaves ---------------------------------


class Watch(Hook):
    """Keeps the records of a run, with the memory in use after each step. A step without record was not taken.

    The peak of memory is counted anew after the first record: the first step compiles, and to choose among kernels
    Inductor times them with a buffer as large as the GPU's second cache, which no later step allocates.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._start = time.perf_counter()
        self.info: RunInfo | None = None
        self.steps: list[StepRecord] = []
        self.used_bytes: list[int] = []

    def on_start(self, info: RunInfo) -> None:
        self.info = info

    def on_step(self, record: StepRecord) -> None:
        if not self.steps:
            self._backend.reset_peak_memory()
        self.steps.append(record)
        self.used_bytes.append(self._backend.memory().used_bytes)

    @property
    def elapsed_s(self) -> float:
        """Seconds since this object was created."""
        return time.perf_counter() - self._start


def unchanged_tensors(adapter_dir: Path, config: Config) -> tuple[int, tuple[str, ...]]:
    """Return the number of the adapter's tensors, and the names of those that still have their initial values."""
    adapter = read_adapter(adapter_dir)
    trained = adapter.tensors
    shapes = {
        module: (trained[tensor_name(module, "B")].shape[0], trained[tensor_name(module, "A")].shape[1])
        for module in modules_of(trained)
    }
    initial = replace(adapter.spec, init=config.adapter.init).initial(shapes, config.run.seed)
    return len(trained), tuple(name for name, tensor in initial.items() if np.array_equal(tensor, trained[name]))


def verified_checkpoints(run_dir: Path) -> tuple[int, ...]:
    """Return the steps of complete checkpoints: every file has the size and sha256 of its manifest."""
    directory = run_dir / CHECKPOINTS
    entries = checkpoint.entries(directory) if directory.is_dir() else []
    return tuple(sorted(entry.step for entry in entries if entry.problem is None))


# --- the report ------------------------------------------------------------------------------------------------------


def report(results: Sequence[TierResult], setup: ValidationSetup, machine: Machine) -> dict[str, Any]:
    """Return all results as JSON values. They contain no local path."""
    code = exit_code([check for result in results for check in result.checks])
    gpus = [{"name": g.name, "bytes": g.total_bytes, "capability": g.compute_capability} for g in machine.gpus]
    return {
        "ok": code == 0,
        "exit_code": code,
        "date": datetime.now(UTC).date().isoformat(),
        "platform": setup.platform,
        "on_cpu": setup.on_cpu,
        "random_weights": setup.random_weights,
        "machine": {
            "cpu": machine.cpu,
            "cores": machine.cores,
            "memory_bytes": machine.memory_bytes,
            "gpus": gpus,
            "driver": machine.driver,
            "cuda": machine.cuda,
        },
        "tiers": [_tier(result) for result in results],
    }


def _tier(result: TierResult) -> dict[str, Any]:
    """Return a tier's config, environment, measured values and limits."""
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
        "criteria": [{"name": row.name, "level": row.level, **row.figures} for row in result.checks if row.figures],
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
        "losses": [finite(loss) for loss in observed.losses],
        "checkpoints": list(observed.saved_steps),
        "problem": observed.problem,
    }


def _shareable(config: Config, model: str) -> dict[str, Any]:
    """Return the config without the directories of this run."""
    values = config.model_dump(mode="json")
    values["model"]["name"] = model
    values["data"]["train"] = Path(str(config.data.train)).name
    values["run"]["dir"] = Path(config.run.dir).parent.name
    return values
