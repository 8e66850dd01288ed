"""A place to run tiers in, also shortened, and on backends whose engines have a fault that a criterion must find."""

from dataclasses import replace

import pytest

from dualtune.doctor.validate.run import run_tier
from dualtune.doctor.validate.tiers import TIERS, Plan, ValidationSetup, plan

PLATFORMS = {"torch": "cpu", "mlx": "mlx"}


class FaultyBackend:
    """A backend whose engines are wrapped, or whose load requests are changed."""

    def __init__(self, inner, engine, change):
        self._inner, self._engine, self._change = inner, engine, change

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def load(self, request):
        return self._engine(self._inner.load(self._change(request)))


@pytest.fixture
def place(open_backend, tmp_path):
    """Where tiers run, on a backend by name."""

    def make(name: str, *, engine=None, change=None, random_weights=False) -> ValidationSetup:
        backend = open_backend(name)
        before_bytes = backend.memory().used_bytes
        if engine or change:
            backend = FaultyBackend(backend, engine or (lambda inner: inner), change or (lambda request: request))
        return ValidationSetup(PLATFORMS[name], backend, tmp_path / "out", random_weights, before_bytes)

    return make


def shortened(made: Plan, divisor: int) -> Plan:
    """The same with so many times fewer steps, as in a twin that takes fewer."""
    steps, every = made.config.train.steps, made.config.run.save_every
    run = made.config.run.model_copy(update={"save_every": every and every // divisor})
    train = made.config.train.model_copy(update={"steps": steps // divisor})
    config = made.config.model_copy(update={"train": train, "run": run})
    return replace(made, config=config, steps_per_window=made.steps_per_window // divisor)


@pytest.fixture
def run_twin(place):
    """Run the twin of a tier, and return its result."""

    def run(tier: str, name: str, *, hooks=(), divisor=1, **fault):
        there = place(name, **fault)
        return run_tier(shortened(plan(TIERS[tier], there), divisor), there, hooks)

    return run
