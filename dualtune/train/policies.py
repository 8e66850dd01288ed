"""The step policies by name; saving their state in a checkpoint and restoring it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dualtune.base import fields
from dualtune.base.errors import ConfigError, FormatError
from dualtune.config import Config
from dualtune.train.hybrid.policy import Predictive
from dualtune.train.policy import PolicyState, StepPolicy
from dualtune.train.state.checkpoint import Checkpoint
from dualtune.train.step import Ordinary

ORDINARY = Ordinary.name
MakePolicy = Callable[[Config], StepPolicy]
POLICIES: dict[str, MakePolicy] = {
    ORDINARY: Ordinary,
    Predictive.name: Predictive,
}


def chosen(config: Config) -> str:
    """Return the name of the policy that the config chooses."""
    return Predictive.name if config.hybrid.enabled else ORDINARY


def open_policy(policy: str | MakePolicy, config: Config, saved: Checkpoint | None) -> StepPolicy:
    """Return a policy by its name or from the function that makes it, with the state from the checkpoint, if any."""
    if isinstance(policy, str) and policy not in POLICIES:
        raise ConfigError(f"step policy: got {policy!r}, allowed: {', '.join(sorted(POLICIES))}")
    make = POLICIES[policy] if isinstance(policy, str) else policy
    opened = make(config)
    if saved is not None:
        restore_policy(opened, saved)
    return opened


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
