"""What `dualtune check-gpu` reports on a machine: a row for each finding, and one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dualtune.checks import Check, Level, exit_code
from dualtune.errors import EnvironmentFault
from dualtune.platform.budget import GPU_RESERVE_BYTES, Budget, budget
from dualtune.platform.choose import choose
from dualtune.platform.machine import GB, GIB, Gpu, Machine
from dualtune.preflight.problems import problems
from dualtune.preflight.question import Question
from dualtune.preflight.recommend import Largest, largest_model, longest_of_7b
from dualtune.preflight.start import Start, start_of
from dualtune.preflight.thresholds import Class, class_of, device_of
from dualtune.text.show import in_bytes


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
    return MachineReport(
        label=kind.label,
        sentence=_sentence(machine, kind, longest, largest, start) if question is None else _answer(question),
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
        found = f"a run uses {first.name}, but {largest.name} with {_gb(largest.total_bytes)} is larger"
        yield Check("larger GPU", "advice", found, f"export CUDA_VISIBLE_DEVICES={largest.uuid}")
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
    found = f"{largest.name} in QLoRA, documents up to {_tokens(largest)}, {needs}"
    if device_of(machine) == "cpu":  # the verdict says that it is too slow: the memory alone is no "ok"
        return Check(name, "advice", f"{found}, by memory only: a CPU is too slow for it")
    return Check(name, "ok", found)


def _config_row(start: Start | None) -> Check:
    """Return a row with the config to start with, and the settings if this machine is smaller."""
    if start is None:
        return Check("config", "advice", "no example config fits, with any model that dualtune knows")
    found = f"configs/{start.config}"
    if start.need_bytes is not None:
        found += f", an estimated {in_bytes(start.need_bytes)}"
    if start.smaller is not None:
        found += f", too much for this machine: {start.smaller}"
    get = f"dualtune config {start.config.removesuffix('.yaml')} > config.yaml"
    return Check("config", "advice" if start.smaller else "ok", found, get)


# --- the sentence ----------------------------------------------------------------------------------------------------


def _sentence(machine: Machine, kind: Class, longest: int, largest: Largest | None, start: Start | None) -> str:
    """Say what the machine is, and why; what fits; which config to start with; what to fix first."""
    what = f"{_subject(machine)} is {kind.meaning}"
    if kind.level != "fail":
        what += f", which fit with documents up to {longest:,} tokens"
    fits = "no known model fits"
    if device_of(machine) == "cpu":
        fits = "small models can be trained with --platform cpu"
    elif largest is not None:
        fits = f"QLoRA of {largest.name} fits, with documents up to {_tokens(largest)}"
    first_step = f"Start with configs/{start.config}" if start else "No example config fits"
    first_step += ", with the settings shown at config" if start and start.smaller else ""
    first = next((row for row in problems(machine) if row.level == "fail"), None)
    fix = f". Before that: {first.found} -> {first.fix}" if first else ""
    return f"{what}; {fits}. {first_step}{fix}"


def _answer(question: Question) -> str:
    return f"{question}: it {'fits' if question.fits else 'does not fit'}"


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
