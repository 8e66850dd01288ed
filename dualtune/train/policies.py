"""The step policies that a config can choose, and what a checkpoint keeps of one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from dualtune.base import fields
from dualtune.base.errors import ConfigError, FormatError
from dualtune.base.plugins import installed
from dualtune.config import Config
from dualtune.engine.backend import Engine
from dualtune.train.hybrid.policy import Predictive
from dualtune.train.objectives.policy_gradient import GAP
from dualtune.train.policy import Outcome, PolicyState, StepActions, StepPolicy
from dualtune.train.state.checkpoint import Checkpoint

MakePolicy = Callable[[Config], StepPolicy]


class Ordinary:
    """Every step makes an optimizer update with the gradient of all its micro-batches, or several with its samples."""

    name = "ordinary"
    num_probes = 0
    _num_updates = 1  # of a policy that is made of this one, and has an `__init__` of its own

    def __init__(self, config: Config) -> None:
        self._num_updates = config.rollouts.updates

    def take(self, step: StepActions, /) -> Outcome:
        if self._num_updates == 1:
            step.add_gradients()
            return Outcome(step.update())
        with undone_by_errors(step.engine):
            step.add_gradients()
            update = first = step.update()
            for _ in range(1, self._num_updates):
                step.add_gradients()
                update = step.update()
        # Only before the first update is the gap one of rounding.
        return Outcome(replace(update, metrics={**update.metrics, GAP: first.metrics[GAP]}))

    def state(self) -> PolicyState:
        return PolicyState()

    def load_state(self, state: PolicyState, /) -> None:
        if not state.is_empty:
            raise ValueError("the ordinary policy has no state")


@contextlib.contextmanager
def undone_by_errors(engine: Engine) -> Generator[None]:
    """Restore adapter and optimizer as they were before the block, if it raises."""
    adapter, optimizer = engine.adapter_state(), engine.optimizer_state()
    try:
        yield
    except BaseException:
        engine.discard()
        engine.load_adapter_state(adapter)
        engine.load_optimizer_state(optimizer)
        raise


def policy_of(config: Config) -> MakePolicy:
    """Return what makes the policy that the config chooses. ConfigError if it is not installed."""
    if config.train.policy != "auto":
        return installed_policy(config.train.policy)
    return Predictive if config.hybrid.enabled else Ordinary


POLICIES_GROUP = "dualtune.policies"
_PARTS = ("name", "num_probes", "take", "state", "load_state")


def installed_policy(name: str) -> MakePolicy:
    """Return what makes the policy of this name: an entry point of the group `dualtune.policies`.

    It names a callable that gets the `Config` and returns a `StepPolicy`, such as a class. ConfigError if there is
    none, or if it cannot be used.
    """
    return installed(POLICIES_GROUP, name, key="train.policy", others=("auto",), parts=_PARTS, page="docs/hooks.md")


def restore_policy(policy: StepPolicy, saved: Checkpoint) -> None:
    """Restore a policy's state from a checkpoint. ConfigError if another policy saved it, FormatError if damaged."""
    entry: dict[str, Any] = saved.state.get("policy") or {"name": policy.name}
    if entry["name"] != policy.name:
        other = fields.shown(fields.text_of(entry["name"]))
        raise ConfigError(
            f"{saved.path}: was saved by the step policy {other!r}, but this run has {policy.name!r}. "
            "Restore the config, or choose another run.dir to start a new run"
        )
    try:
        policy.load_state(PolicyState(entry.get("values") or {}, saved.policy))
    except ValueError as error:
        raise FormatError(f"{saved.path}: the state of the step policy {policy.name!r}: {error}") from None


def entry_of(policy: StepPolicy, state: PolicyState) -> dict[str, Any]:
    """Return the policy's entry in state.json; empty for a policy without state, so its checkpoints do not change."""
    return {} if state.is_empty else {"policy": {"name": policy.name, "values": dict(state.values)}}
