"""What `dualtune check-gpu` reports on a machine: a row for each finding, and one sentence."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dualtune.base.checks import Check, Level, exit_code
from dualtune.base.errors import ConfigError, DualtuneError, EnvironmentFault
from dualtune.base.text import in_bytes
from dualtune.config.render import example_path
from dualtune.engine.card import driver_of
from dualtune.engine.choose import choose, open_backend
from dualtune.engine.machine import GB, GIB, GPU_RESERVE_BYTES, Budget, Gpu, Machine, budget, within
from dualtune.engine.memory.counted import Shape
from dualtune.engine.memory.estimate import Ask, Estimate, estimate, longest_that_fits
from dualtune.engine.memory.plan import Smaller, plan_of
from dualtune.engine.memory.shapes import KNOWN, Decoder, decoder_of, published
from dualtune.engine.problems import (
    CPU_CONFIG,
    CUDA_CONFIGS,
    MAC_CONFIGS,
    SEVEN_B,
    Class,
    class_of,
    device_of,
    problems,
)

if TYPE_CHECKING:
    from dualtune.config import Config

# ----------------------------------------------------------------------------------------------------------------------
# Prove that a device computes: import its framework and multiply two matrices.

SIZE, DTYPE = 1024, "float32"


def probe(machine: Machine) -> Check:
    """Return a row that says which device computed the product, or why none did."""
    try:
        backend = open_backend(choose("auto", machine))
        device = backend.devices()[0].name
        product = backend.matmul(SIZE, DTYPE)
        product()  # the first one also loads the device's libraries
        began = time.perf_counter()
        product()
    # torch raises RuntimeError for every CUDA error; loading a missing library raises OSError.
    except (DualtuneError, RuntimeError, OSError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return Check("probe", "fail", f"no matrix product: {lines[0]}", "dualtune check-env says what is missing")
    elapsed_ms = (time.perf_counter() - began) * 1e3
    return Check(
        "probe", "ok", f"{backend.name} multiplied two {SIZE} x {SIZE} matrices on {device}: {elapsed_ms:.1f} ms"
    )


# ----------------------------------------------------------------------------------------------------------------------
# Questions that replace the usual thresholds of a machine: is there enough memory, does this config fit?


@dataclass(frozen=True, slots=True)
class Question:
    """The memory that a run needs, and what the machine has for it."""

    subject: str  # "a run of 12GB", "configs/rtx_16gb.yaml"
    need_bytes: int
    budget: Budget
    smaller: Smaller | None = None  # if it does not fit
    estimate: Estimate | None = None

    @property
    def fix(self) -> str | None:
        return str(self.smaller) if self.smaller else None

    @property
    def fits(self) -> bool:
        return self.need_bytes <= self.budget.bytes

    def __str__(self) -> str:
        need, have = in_bytes(self.need_bytes), in_bytes(self.budget.bytes)
        return f"{self.subject} needs {need}, has {have} ({self.budget.reason})"


def about_memory(machine: Machine, size: str) -> Question:
    """Ask whether an accelerator has a size such as "12GB" for a run. The memory of a CPU does not count.

    ConfigError for an invalid size.
    """
    from pydantic import ValidationError

    from dualtune.config import MemoryConfig

    try:
        need_bytes = MemoryConfig(limit=size).limit_bytes
    except ValidationError:
        need_bytes = None
    if need_bytes is None:
        raise ConfigError(f"--require-memory: got '{size}', must be a size such as 12GB, 1.5 TB or 512MiB")
    kind = device_of(machine)
    has = budget(machine, kind) if kind != "cpu" else Budget(0, "there is no GPU that it could use")
    return Question(f"a run of {size}", need_bytes, has)


def about_config(machine: Machine, path: Path) -> Question:
    """Ask whether the estimate of a config fits the best device of the machine.

    ConfigError for an invalid config, or one that the backend of that device does not honour; EnvironmentFault for a
    model of unknown shape.
    """
    from dualtune.config import load_config

    config = load_config(path)
    kind = device_of(machine)
    decoder = _decoder(config, driver_of(kind).name)
    has = within(budget(machine, kind), config.memory.limit_bytes)
    plan = plan_of(config, decoder, driver_of(kind).name, kind, has, packages=frozenset(machine.packages))
    return Question(str(path), plan.estimate.total_bytes, has, None if plan.fits else plan.smaller, plan.estimate)


def _decoder(config: Config, backend: str) -> Shape:
    """Return the shape of a published model, or of one on this machine."""
    if (shape := published(config.model.name)) is not None:
        return decoder_of(shape)
    from dualtune.doctor.check_config_model import decoder_to_plan  # late: it imports NumPy and tokenizers

    return decoder_to_plan(config, backend)


# ----------------------------------------------------------------------------------------------------------------------
# What a machine can train: the largest model, and the longest document with a 7B model.

RANK = 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LEAST_LENGTH = 1024  # tokens: a model that can train only on shorter documents is not recommended


@dataclass(frozen=True, slots=True)
class Largest:
    """A model, the longest document that it can train on here, and the memory for that."""

    name: str
    max_length: int
    estimate: Estimate


def longest_of_7b(machine: Machine) -> int:
    """Return the longest document in tokens for QLoRA of a 7B model here; 0 if not even a short one fits."""
    has = budget(machine, device_of(machine))
    longest = longest_that_fits(decoder_of(KNOWN[SEVEN_B]), qlora(machine), has.bytes)
    return min(longest, KNOWN[SEVEN_B]["max_position_embeddings"])


def largest_model(machine: Machine) -> Largest | None:
    """Return the largest published model that QLoRA (rank 16, all seven targets) can train here.

    One document at a time. Only memory counts: on a CPU it would be slow. None if no known model fits.
    """
    have_bytes = budget(machine, device_of(machine)).bytes
    for name, decoder in _by_size():
        ask = qlora(machine)
        positions = KNOWN[name]["max_position_embeddings"]
        length = min(longest_that_fits(decoder, ask, have_bytes), positions)
        if length >= LEAST_LENGTH:
            return Largest(name, length, estimate(decoder, qlora(machine, length)))
    return None


def qlora(machine: Machine, length: int = LEAST_LENGTH) -> Ask:
    """Return the setup of 4-bit training on a machine, one document of up to `length` tokens at a time."""
    kind = device_of(machine)
    card = driver_of(kind)
    device = card.device(kind)
    assert device is not None  # since the card is for this kind
    return Ask(
        backend=card.name,
        device=kind,
        quantization=device.four_bit or "none",
        dtype=device.auto_dtype,
        rank=RANK,
        targets=TARGETS,
        micro_batch_tokens=length,
        max_length=length,
        packages=frozenset(machine.packages),
    )


@cache
def _by_size() -> tuple[tuple[str, Decoder], ...]:
    """Return the published models, largest first."""
    decoders = {name: decoder_of(config) for name, config in KNOWN.items()}
    return tuple(sorted(decoders.items(), key=lambda item: -item[1].num_parameters))


# ----------------------------------------------------------------------------------------------------------------------
# The example config to start with on a machine, and the settings with which it fits.


@dataclass(frozen=True, slots=True)
class Start:
    """A file in configs/ that fits a machine, possibly with other settings."""

    config: str
    need_bytes: int | None = None  # without other settings; None: it fits any machine
    smaller: Smaller | None = None


def start_of(machine: Machine, largest: Largest | None) -> Start | None:
    """Return the fitting config made for the largest machine up to this one; None if none fits.

    A config may fit with smaller micro-batches, or with documents that are shorter, but not too short; the last config
    may also fit with the largest model that fits.
    """
    configs = _configs(machine)
    if configs == (CPU_CONFIG,):
        return Start(CPU_CONFIG)
    questions = {name: about_config(machine, example_path(name)) for name in configs}
    starts = [Start(name, question.need_bytes, question.smaller) for name, question in questions.items()]
    first = next((start for start in starts if start.smaller is None or _is_worth_it(start.smaller)), None)
    if first is not None or largest is None:
        return first
    length = largest.max_length
    settings = {"model.name": largest.name, "model.quantization": qlora(machine).quantization}
    lengths = {"data.max_length": length, "train.micro_batch_tokens": length}
    return replace(starts[-1], smaller=Smaller(settings | lengths, "fits"))


def _configs(machine: Machine) -> tuple[str, ...]:
    """Return the example configs for machines up to this one, largest first."""
    match device_of(machine):
        case "cuda":
            memory = machine.gpus[0].total_bytes / GB
            return tuple(name for least, name in CUDA_CONFIGS if memory >= least)
        case "metal":
            memory = machine.memory_bytes / GIB
            return tuple(name for least, name in MAC_CONFIGS if memory >= least)
        case "cpu":
            return (CPU_CONFIG,)


def _is_worth_it(smaller: Smaller) -> bool:
    return bool(smaller.settings) and int(smaller.settings.get("data.max_length", LEAST_LENGTH)) >= LEAST_LENGTH


# ----------------------------------------------------------------------------------------------------------------------
# The report: rows, and one sentence.


@dataclass(frozen=True, slots=True)
class MachineReport:
    """The full report on a machine."""

    label: str  # of its class
    sentence: str
    checks: tuple[Check, ...]
    platform: str  # "none" if no backend that can train is installed
    reason: str
    config: str | None  # None if no example fits
    largest: Largest | None
    budget: Budget
    question: Question | None

    @property
    def exit_code(self) -> int:
        return exit_code(self.checks)


def judge(machine: Machine, question: Question | None = None, probed: Check | None = None) -> MachineReport:
    """Return the rows and the verdict. A question replaces the thresholds: only it and a failed probe decide then."""
    platform, reason = _platform(machine)
    largest, longest = largest_model(machine), longest_of_7b(machine)
    start, kind = start_of(machine, largest), class_of(machine, longest)
    rows = [*_system_rows(machine), *_accelerator_rows(machine, kind.level), *problems(machine)]
    rows.append(Check("packages", "ok", ", ".join(f"{n} {v}" for n, v in machine.packages.items()) or "none"))
    rows.append(Check("platform", "ok" if platform != "none" else "fail", f"{platform}: {reason}"))
    rows += [_largest_row(machine, largest), _config_row(start)]
    if question is not None:
        rows = [replace(row, level="advice") if row.level == "fail" else row for row in rows]
        rows.append(Check("asked", "ok" if question.fits else "fail", str(question), question.fix))
    if probed is not None:
        rows.append(probed)
    sentence = _sentence(machine, kind, longest, largest, start)
    if question is not None:
        sentence = f"{question}: it {'fits' if question.fits else 'does not fit'}"
    return MachineReport(
        label=kind.label,
        sentence=sentence,
        checks=tuple(rows),
        platform=platform,
        reason=reason,
        config=start and start.config,
        largest=largest,
        budget=budget(machine, device_of(machine)),
        question=question,
    )


# --- rows ------------------------------------------------------------------------------------------------------------


def _platform(machine: Machine) -> tuple[str, str]:
    try:
        choice = choose("auto", machine)
    except EnvironmentFault as error:
        return "none", str(error)
    return choice.platform, choice.reason


def _system_rows(machine: Machine) -> Iterator[Check]:
    system = f"macOS {machine.macos}" if machine.macos else machine.system
    around = machine.surroundings
    where = [name for name, here in (("WSL", around.wsl), ("in a container", around.container)) if here]
    yield Check("system", "ok", ", ".join([f"{system} {machine.arch}", *where, f"Python {machine.python}"]))
    yield Check("cpu", "ok", ", ".join([machine.cpu, f"{machine.cores} cores", *machine.cpu_features]))
    memory = f"{machine.memory_bytes / GIB:.1f} GiB, {machine.available_bytes / GIB:.1f} GiB of it available"
    limited = "" if machine.memory_limit_bytes is None else "; a control group limits it"
    yield Check("memory", "ok", memory + limited)


def _accelerator_rows(machine: Machine, level: Level) -> Iterator[Check]:
    """Yield the rows on GPUs and driver. `level` is for the device that a run would use."""
    if machine.kind == "metal":
        yield Check("Metal", level, budget(machine, "metal").reason)
    elif not machine.gpus:
        yield Check("GPU", "fail", _nothing_found(machine))
    for index, gpu in enumerate(machine.gpus):
        yield Check(f"GPU {index}", level if index == 0 else "ok", _described(gpu))
        if gpu.processes:
            holders = (f"{p.name} ({p.pid}{_used(p.used_bytes)})" for p in gpu.processes)
            yield Check("programs", "advice", f"on GPU {index}: {', '.join(holders)}", "nvidia-smi; kill PID ends one")
    if machine.gpus:
        yield Check("driver", "ok", f"{machine.driver}, CUDA up to {machine.cuda}")
        yield from _other_gpus(machine)


def _other_gpus(machine: Machine) -> Iterator[Check]:
    """Yield rows on a larger GPU that a run would not use, and on hidden ones, by UUID: CUDA may number differently."""
    first, *rest = machine.gpus
    others = [*rest, *machine.hidden_gpus]
    largest = max(others, key=lambda gpu: gpu.total_bytes, default=first)
    if largest.total_bytes > first.total_bytes:
        text = f"a run uses {first.name}, but {largest.name} with {_gb(largest.total_bytes)} is larger"
        yield Check("larger GPU", "advice", text, f"export CUDA_VISIBLE_DEVICES={largest.uuid}")
    if machine.hidden_gpus:
        why = "CUDA_VISIBLE_DEVICES leaves out" if machine.visible_devices is not None else "CUDA uses one slice, not"
        yield Check("hidden", "ok", f"{why} {', '.join(gpu.name for gpu in machine.hidden_gpus)}")


def _described(gpu: Gpu) -> str:
    size = f"{gpu.total_bytes / GIB:.1f} GiB ({_gb(gpu.total_bytes)}), {gpu.free_bytes / GIB:.1f} GiB of it free"
    mig = f", MIG slice {gpu.mig}" if gpu.mig else ""
    return f"{gpu.name}, {size}, compute capability {gpu.compute_capability}{mig}"


def _used(used_bytes: int | None) -> str:
    return "" if used_bytes is None else f", {used_bytes / GIB:.1f} GiB"


def _nothing_found(machine: Machine) -> str:
    reason = f" ({machine.gpu_problem})" if machine.gpu_problem else ""
    return f"no NVIDIA GPU is visible{reason}, and this is not a Mac with Apple silicon"


def _largest_row(machine: Machine, largest: Largest | None) -> Check:
    name = "largest model"
    if largest is None:
        return Check(name, "advice", "none of the published models that dualtune knows fits")
    needs = f"an estimated {in_bytes(largest.estimate.total_bytes)}"
    text = f"{largest.name} in QLoRA, documents up to {_tokens(largest)}, {needs}"
    if device_of(machine) == "cpu":  # the verdict says that it is too slow: the memory alone is no "ok"
        return Check(name, "advice", f"{text}, by memory only: a CPU is too slow for it")
    return Check(name, "ok", text)


def _config_row(start: Start | None) -> Check:
    """Return a row with the config to start with, and the settings if this machine is smaller."""
    if start is None:
        return Check("config", "advice", "no example config fits, with any model that dualtune knows")
    text = f"configs/{start.config}"
    if start.need_bytes is not None:
        text += f", an estimated {in_bytes(start.need_bytes)}"
    if start.smaller is not None:
        text += f", too much for this machine: {start.smaller}"
    get = f"dualtune config {start.config.removesuffix('.yaml')} > config.yaml"
    return Check("config", "advice" if start.smaller else "ok", text, get)


# --- the sentence ----------------------------------------------------------------------------------------------------


def _sentence(machine: Machine, kind: Class, longest: int, largest: Largest | None, start: Start | None) -> str:
    """Say what the machine is, and why; what fits; which config to start with; what to fix first."""
    text = f"{_subject(machine)} is {kind.meaning}"
    if kind.level != "fail":
        text += f": they fit with documents up to {longest:,} tokens"
    fits = "no known model fits"
    if device_of(machine) == "cpu":
        fits = "small models can be trained with --platform cpu"
    elif largest is not None:
        fits = f"QLoRA of {largest.name} fits, with documents up to {_tokens(largest)}"
    first_step = f"Start with configs/{start.config}" if start else "No example config fits"
    first_step += ", with the settings shown at config" if start and start.smaller else ""
    first = next((row for row in problems(machine) if row.level == "fail"), None)
    fix = f". Before that: {first.found} -> {first.fix}" if first else ""
    return f"{text}; {fits}. {first_step}{fix}"


def _subject(machine: Machine) -> str:
    match machine.kind:
        case "cuda":
            gpu = machine.gpus[0]
            busy = (
                f", {_gb(gpu.free_bytes)} of it free," if gpu.free_bytes < gpu.total_bytes - GPU_RESERVE_BYTES else ""
            )
            return f"{gpu.name} with {_gb(gpu.total_bytes)}{busy}"
        case "metal":
            return f"{machine.cpu} with {machine.memory_bytes / GIB:.0f} GiB of unified memory"
        case "cpu":
            reason = f" ({machine.gpu_problem})" if machine.gpu_problem else ""
            return f"A CPU with {machine.memory_bytes / GIB:.0f} GiB and no NVIDIA GPU{reason}"


def _tokens(largest: Largest) -> str:
    return f"{largest.max_length:,} tokens"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:.1f} GB"
