"""The five tiers that train as data: a config each, the criteria for its run, and the changes on a CPU.

A CPU cannot run these models in the time of a test. There each tier has a twin: the same criteria and steps, on the
small model that is part of dualtune, with separate limits for quantities that depend on the device.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from dualtune.base.checks import Check
from dualtune.base.errors import ConfigError, DiskError, EnvironmentFault
from dualtune.base.files import write_file
from dualtune.config import Config, load_config
from dualtune.config.render import example_path
from dualtune.doctor.validate.criteria import Criterion
from dualtune.engine.backend import Backend
from dualtune.engine.card import card_of
from dualtune.engine.choose import PlatformChoice, open_backend
from dualtune.engine.machine import Budget, Machine, budget, within
from dualtune.engine.memory.counted import shape_from
from dualtune.engine.memory.plan import plan_of
from dualtune.engine.memory.shapes import KNOWN, UnknownShape
from dualtune.model.base_model import resolve_model
from dualtune.model.copies import copy_without_weights

# ----------------------------------------------------------------------------------------------------------------------
# The data of the tiers: synthetic, the same on every machine, and of known difficulty.
#
# A row asks for concept number i. The wording of the answer is always the same, so its loss falls towards zero. The
# keywords are drawn at random, so nothing can predict them, and their loss stays at ln 16, for a uniform draw from
# sixteen. So the loss falls far and then stays constant, instead of approaching zero, where a relative change would be
# noise.

FILE = "explain_concepts.jsonl"
NUM_ROWS = 1000  # no tier uses a row twice: the longest takes 1000 steps of one row
NUM_KEYWORDS = 6
KEYWORDS = (
    "time", "water", "light", "sound", "stone", "paper", "house", "river", "music", "color", "metal", "glass", "heart",
    "money", "world", "night",
)  # fmt: skip


def rows(count: int = NUM_ROWS, seed: int = 0) -> list[dict[str, str]]:
    """Return Alpaca rows, which depend only on the arguments."""
    return [_row(number, random.Random(f"{seed} {number}")) for number in range(1, count + 1)]


def write_rows(path: Path) -> Path:
    """Write the rows as JSON lines. DiskError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"{path.parent}: cannot be created: {error.strerror}") from error
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows()))
    return path


def _row(number: int, draw: random.Random) -> dict[str, str]:
    keywords = ", ".join(draw.choice(KEYWORDS) for _ in range(NUM_KEYWORDS))
    return {
        "instruction": f"Explain concept number {number}.",
        "input": "",
        "output": f"Concept number {number} is explained by these keywords: {keywords}.",
    }


# ----------------------------------------------------------------------------------------------------------------------
MB, GB = 10**6, 10**9
WINDOW = 50  # steps, for the mean loss and the growth of memory

RAN = (
    Criterion("device initialised", "device_is_ready", "==", 1, "yes"),
    Criterion("model on the device", "model_is_on_device", "==", 1, "yes"),
    Criterion("forward and backward ran", "passes_ran", "==", 1, "yes"),
    Criterion("no error of the device", "ran_to_the_end", "==", 1, "yes"),
    Criterion("steps not taken", "missing_steps", "==", 0),
    Criterion("losses that are not finite", "bad_losses", "==", 0),
)
ADAPTER_UPDATED = (
    Criterion("smallest gradient norm", "least_gradient", ">", 0, "number"),
    Criterion("adapter tensors unchanged", "unchanged_tensors", "==", 0),
)
IN_4_BIT = (
    Criterion("adapted layers not in 4 bits", "plain_layers", "==", 0),
    Criterion("bytes per weight of these layers", "bytes_per_weight", "<=", 0.55, "number"),
)
CONVERGED = (
    Criterion("loss decrease, first 10 to last 10 steps", "decrease", ">=", 0.30, "share", needs_pretrained=True),
)


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier."""

    name: str
    title: str
    config: str  # in configs/
    peak_bytes: int  # the device memory that its run may use
    criteria: tuple[Criterion, ...]


def _peak(limit: int, relation: Literal["<=", "<"] = "<=") -> Criterion:
    return Criterion("peak device memory", "peak_bytes", relation, limit, "bytes")


TIERS: Mapping[str, Tier] = MappingProxyType(
    {
        tier.name: tier
        for tier in (
            Tier(
                "quick", "the pipeline runs", "gpu_smollm2_quick.yaml", 256 * MB,
                (*RAN, *IN_4_BIT, _peak(256 * MB), Criterion("elapsed", "elapsed", "<", 120, "seconds")),
            ),
            Tier(
                "convergence", "the adapter learns", "gpu_smollm2_convergence.yaml", 256 * MB,
                (*RAN, *ADAPTER_UPDATED, *CONVERGED, *IN_4_BIT, _peak(256 * MB),
                 Criterion("elapsed", "elapsed", "<=", 300, "seconds")),
            ),
            Tier(
                "memory", "a 4-bit model keeps to its memory", "gpu_tinyllama_memory.yaml", 2 * GB,
                (*RAN, *ADAPTER_UPDATED, *IN_4_BIT, _peak(2 * GB, "<")),
            ),
            Tier(
                "extended", "no leak, no drift, no slowdown", "gpu_tinyllama_extended.yaml", 2 * GB,
                (*RAN, *ADAPTER_UPDATED, *IN_4_BIT, _peak(2 * GB, "<"),
                 Criterion("memory growth after the first window", "growth", "<=", 0.01, "share"),
                 Criterion(
                     "largest rise of the loss between windows", "rise", "<=", 0.02, "share", needs_pretrained=True,
                 ),
                 Criterion("variation of tokens/s after step 20", "spread", "<=", 0.10, "share")),
            ),
            Tier(
                "full", "a 7B model, as in real use", "gpu_llama7b_full.yaml", 12 * GB,
                (*RAN, *ADAPTER_UPDATED, *CONVERGED, *IN_4_BIT, _peak(12 * GB, "<"),
                 Criterion("checkpoints missing or damaged", "missing_checkpoints", "==", 0)),
            ),
        )
    }
)  # fmt: skip
ALL = ("quick", "convergence", "memory", "extended")  # the meaning of `all`
SELFTEST = "selftest"  # the tier before these: `dualtune.doctor.selftest`, which needs none of their models


def tiers_of(name: str) -> list[Tier]:
    """Return the tiers of a name, in order. "all" excludes the longest one, which must be named."""
    if name == "all":
        return [TIERS[one] for one in ALL]
    if name not in TIERS:
        raise ConfigError(f"--tier: got '{name}', allowed: {', '.join((SELFTEST, *TIERS, 'all'))}")
    return [TIERS[name]]


# --- what a device changes -------------------------------------------------------------------------------------------

# How a backend stores a weight in 4 bits; the first format that it supports is used. The limits follow from the format.
#   nf4      0.5 and, per block of 64, one byte of scale with a share of a second scale: 0.516
#   affine4  0.5 and, per group of 64, a scale and a bias of 2 bytes each: 0.5625; in float32, of 4 bytes each: 0.625
FORMATS_4_BIT = ("nf4", "affine4")
BYTES_PER_WEIGHT = {"nf4": 0.55, "affine4": 0.57}
BYTES_PER_WEIGHT_ON_CPU = BYTES_PER_WEIGHT | {"affine4": 0.63}  # in float32, the dtype of `auto` there
BYTES_PER_WEIGHT_OF_TWIN = BYTES_PER_WEIGHT_ON_CPU | {"nf4": 0.62}  # a layer's two tables, 1088 bytes, count too

# A twin's model is small, so it needs larger steps to learn as much in the same number of steps.
TWIN_OVERRIDES = ("train.learning_rate=5e-3",)
# By measure: another limit, or the reason why it is not judged.
TWIN_LIMITS: Mapping[str, float | str] = MappingProxyType(
    {
        "growth": 0.05,  # of the process's resident memory, which C's allocator returns to the system with delay
        "spread": "the cores of a CPU are shared with other programs",
    }
)
# The real shapes on a CPU.
CPU_LIMITS: Mapping[str, float | str] = MappingProxyType(
    {
        "peak_bytes": "the limit is that of a GPU, which computes in 16 bits",
        "elapsed": "the limit is that of a GPU",
        "growth": 0.05,
        "spread": TWIN_LIMITS["spread"],
    }
)


def criteria_of(tier: Tier, backend: str, quantization: str, *, on_cpu: bool, is_twin: bool) -> tuple[Criterion, ...]:
    """Return the tier's criteria for this device."""
    changes: dict[str, float | str] = {}
    if is_twin:
        changes |= {**TWIN_LIMITS, "peak_bytes": card_of(backend).twin.peak_bytes}
    elif on_cpu:
        changes |= CPU_LIMITS
    formats = BYTES_PER_WEIGHT_OF_TWIN if is_twin else BYTES_PER_WEIGHT_ON_CPU if on_cpu else BYTES_PER_WEIGHT
    changes["bytes_per_weight"] = formats[quantization]
    return tuple(_changed(criterion, changes.get(criterion.measure)) for criterion in tier.criteria)


def _changed(criterion: Criterion, change: float | str | None) -> Criterion:
    if change is None:
        return criterion
    return replace(criterion, not_judged=change) if isinstance(change, str) else replace(criterion, limit=change)


# ----------------------------------------------------------------------------------------------------------------------
# The memory check before a tier: is there enough for its run?


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
    planned = plan_of(plan.config, decoder, setup.backend.name, kind, has)
    return compare(has, planned.estimate.total_bytes)


def compare(available: Budget, needed_bytes: int) -> Check:
    """Compare in whole MB, rounded so that the margin never looks larger than it is."""
    free, needed = available.bytes // MB, -(-needed_bytes // MB)
    if needed > free:
        text = f"{free} MB free, {needed} MB needed → short by {needed - free} MB ({available.reason})"
        fix = "free memory on the device, choose a smaller tier, or use a machine with more"
        return Check("memory", "fail", text, fix)
    return Check("memory", "ok", f"{free} MB free, {needed} MB needed → {free - needed} MB buffer ({available.reason})")


# ----------------------------------------------------------------------------------------------------------------------
# Prepare a tier for this machine: its complete config, and the criteria that apply here.

DEMO_MODEL = Path(__file__).parents[2] / "demo" / "model"


@dataclass(frozen=True, slots=True)
class ValidationSetup:
    """The backend, the output directory and the options of a validation."""

    platform: str  # as in `dualtune.engine.choose`
    backend: Backend
    out: Path  # contains a directory for each tier
    random_weights: bool = False
    before_bytes: int = 0  # on a CPU, the process's memory before the first model was loaded; elsewhere 0
    model: str | None = None  # a model in place of each tier's own, and of the twin
    steps: int | None = None  # the number of steps in place of a tier's own, where that is larger

    @property
    def on_cpu(self) -> bool:
        return self.backend.devices()[0].kind == "cpu"

    @property
    def is_twin(self) -> bool:
        """Random weights and a model that was asked for need no twin: they exist to test a real shape."""
        return self.on_cpu and not self.random_weights and self.model is None


def open_setup(
    choice: PlatformChoice, out: Path, *, random_weights: bool = False, model: str | None = None,
    steps: int | None = None,
) -> ValidationSetup:  # fmt: skip
    """Open the backend. EnvironmentFault if there is no such device."""
    if choice.platform == "cpu" and not random_weights and model is None:
        # Must be set before torch loads: for a twin's small matrices, threads mostly wait for each other.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    setup = ValidationSetup(
        choice.platform, open_backend(choice), free_directory(out), random_weights, model=model, steps=steps
    )
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
    assert written.train.steps is not None  # every tier's config has it
    divisor = card_of(setup.backend.name).twin.divisors.get(tier.name, 1) if setup.is_twin else 1
    steps = min(written.train.steps // divisor, setup.steps or written.train.steps)
    # The files of a tier lie in its own directory, whatever its config names.
    overrides = [f"data.train={write_rows(directory / FILE)}", f"run.dir={directory / 'run'}"]
    notes: list[str] = []
    model = written.model.name
    # A CPU gets a small model, and random weights the real shape: each difference is a note of the report.
    if setup.model is not None:
        model = Path(setup.model).stem if Path(setup.model).exists() else setup.model  # a report contains no local path
        overrides.append(f"model.name={setup.model}")
        notes.append(f"{model} in place of {written.model.name}")
    elif setup.is_twin:
        model = "the small model that is part of dualtune"
        overrides += [f"model.name={DEMO_MODEL}", *TWIN_OVERRIDES]
        changed = " and ".join(f"{key} {value}" for key, value in (o.split("=") for o in TWIN_OVERRIDES))
        notes.append(f"this is the tier's twin for a CPU: {model} in place of {written.model.name}, {changed}")
    elif setup.random_weights:
        overrides += [f"model.name={random_model(model, directory / 'model')}", "model.init=random"]
        notes.append("random weights in the real shape, with the tokenizer of dualtune's own model")
    if quantization != written.model.quantization:
        overrides.append(f"model.quantization={quantization}")
        notes.append(f"{quantization} in place of {written.model.quantization}, which this backend does not support")
    # Fewer steps keep their proportions: windows and checkpoints shrink with them.
    share = steps / written.train.steps
    if share < 1:
        overrides += [f"train.steps={steps}"]
        overrides += [f"run.save_every={max(1, int(every * share))}" for every in [written.run.save_every] if every]
        notes.append(
            f"{steps} of {written.train.steps} steps, also per window and between checkpoints, to finish sooner"
        )
    config = load_config(source, overrides)
    criteria = criteria_of(tier, setup.backend.name, quantization, on_cpu=setup.on_cpu, is_twin=setup.is_twin)
    return Plan(tier, config, criteria, model, tuple(notes), max(1, int(WINDOW * share)), setup.is_twin)


def random_model(name: str, directory: Path) -> Path:
    """Create a model directory without weights: the published shape, and the tokenizer of dualtune's own model."""
    if name not in KNOWN:
        raise ConfigError(f"--random-weights: the shape of '{name}' is not known. Known: {', '.join(KNOWN)}")
    copy_without_weights(DEMO_MODEL, directory)
    write_file(directory / "config.json", json.dumps(dict(KNOWN[name]), indent=2) + "\n")
    return directory


def _four_bit(backend: Backend) -> str:
    honoured = backend.capabilities().get("model.quantization", frozenset())
    quantization = next((name for name in FORMATS_4_BIT if name in honoured), None)
    if quantization is None:
        raise EnvironmentFault(
            f"the backend '{backend.name}' has no 4-bit weights, which every tier needs: {' or '.join(FORMATS_4_BIT)}"
        )
    return quantization


def free_directory(path: Path) -> Path:
    """Return the path, or the first of path-2, path-3, … that does not exist yet."""
    names = (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in range(1, 10_000))
    return next(name for name in names if not name.exists())
