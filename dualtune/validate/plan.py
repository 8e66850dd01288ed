"""Prepare a tier for this machine: its complete config, and the criteria that apply here."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from dualtune.backend import Backend
from dualtune.base_model import copy_without_weights
from dualtune.card import card_of
from dualtune.config import Config, load_config
from dualtune.config.examples import example_path
from dualtune.errors import ConfigError, EnvironmentFault
from dualtune.io.disk import write_file
from dualtune.memory.shapes import KNOWN
from dualtune.platform.choose import PlatformChoice, open_backend
from dualtune.validate import tiers
from dualtune.validate.concepts import FILE, write_rows
from dualtune.validate.criteria import Criterion
from dualtune.validate.tiers import Tier, criteria_of

DEMO_MODEL = Path(__file__).parents[1] / "demo" / "model"


@dataclass(frozen=True, slots=True)
class ValidationSetup:
    """The backend, the output directory and the options of a validation."""

    platform: str  # as in `dualtune.platform.choose`
    backend: Backend
    out: Path  # contains a directory for each tier
    random_weights: bool = False
    before_bytes: int = 0  # on a CPU, the process's memory before the first model was loaded; elsewhere 0

    @property
    def on_cpu(self) -> bool:
        return self.backend.devices()[0].kind == "cpu"

    @property
    def is_twin(self) -> bool:
        """Random weights need no twin: they exist to test the real shape."""
        return self.on_cpu and not self.random_weights


def open_setup(choice: PlatformChoice, out: Path, *, random_weights: bool = False) -> ValidationSetup:
    """Open the backend. EnvironmentFault if there is no such device."""
    if choice.platform == "cpu" and not random_weights:
        # Must be set before torch loads: for a twin's small matrices, threads mostly wait for each other.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    setup = ValidationSetup(choice.platform, open_backend(choice), free_directory(out), random_weights)
    return replace(setup, before_bytes=setup.backend.memory().used_bytes) if setup.on_cpu else setup


@dataclass(frozen=True, slots=True)
class Plan:
    """A tier, ready to run."""

    tier: Tier
    config: Config
    criteria: tuple[Criterion, ...]
    model: str  # its name in a report
    notes: tuple[str, ...]  # how it differs from the tier's config, a sentence each
    steps_per_window: int
    is_twin: bool


def plan(tier: Tier, setup: ValidationSetup) -> Plan:
    """Complete a tier's config for a setup, and write its inputs: data, and a model directory for random weights."""
    directory = setup.out / tier.name
    source = example_path(tier.config)
    written = load_config(source)
    quantization = _four_bit(setup.backend)
    divisor = card_of(setup.backend.name).twin.divisors.get(tier.name, 1) if setup.is_twin else 1
    overrides = [f"data.train={write_rows(directory / FILE)}", f"run.dir={directory / 'run'}"]
    notes: list[str] = []
    model = written.model.name
    if setup.is_twin:
        model = "the small model that is part of dualtune"
        overrides += [f"model.name={DEMO_MODEL}", *tiers.TWIN_OVERRIDES]
        changed = " and ".join(f"{key} {value}" for key, value in (o.split("=") for o in tiers.TWIN_OVERRIDES))
        notes.append(f"this is the tier's twin for a CPU: {model} in place of {written.model.name}, {changed}")
    elif setup.random_weights:
        overrides += [f"model.name={random_model(model, directory / 'model')}", "model.init=random"]
        notes.append("random weights in the real shape, with the tokenizer of dualtune's own model")
    if quantization != written.model.quantization:
        overrides.append(f"model.quantization={quantization}")
        notes.append(f"{quantization} in place of {written.model.quantization}, which this backend does not support")
    if divisor > 1:
        assert written.train.steps is not None
        overrides += [f"train.steps={written.train.steps // divisor}"]
        overrides += [f"run.save_every={every // divisor}" for every in [written.run.save_every] if every]
        notes.append(f"1/{divisor} of the steps, also per window and between checkpoints, to finish sooner")
    config = load_config(source, overrides)
    criteria = criteria_of(tier, setup.backend.name, quantization, on_cpu=setup.on_cpu, is_twin=setup.is_twin)
    return Plan(tier, config, criteria, model, tuple(notes), tiers.WINDOW // divisor, setup.is_twin)


def random_model(name: str, directory: Path) -> Path:
    """Create a model directory without weights: the published shape, and the tokenizer of dualtune's own model."""
    if name not in KNOWN:
        raise ConfigError(f"--random-weights: the shape of '{name}' is not known. Known: {', '.join(KNOWN)}")
    copy_without_weights(DEMO_MODEL, directory)
    write_file(directory / "config.json", json.dumps(dict(KNOWN[name]), indent=2) + "\n")
    return directory


def _four_bit(backend: Backend) -> str:
    honoured = backend.capabilities().get("model.quantization", frozenset())
    found = next((name for name in tiers.FORMATS_4_BIT if name in honoured), None)
    if found is None:
        raise EnvironmentFault(
            f"the backend '{backend.name}' has no 4-bit weights, which every tier needs: "
            f"{' or '.join(tiers.FORMATS_4_BIT)}"
        )
    return found


def free_directory(path: Path) -> Path:
    """Return the path, or the first of path-2, path-3, … that does not exist yet."""
    names = (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in range(1, 10_000))
    return next(name for name in names if not name.exists())
