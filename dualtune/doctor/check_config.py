"""Checks of a config before anything is downloaded, loaded or written: a row for each check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from dualtune.base.checks import Check
from dualtune.base.errors import ConfigError, DiskError, DualtuneError, EnvironmentFault
from dualtune.base.files import existing
from dualtune.base.text import in_bytes
from dualtune.config import Config, load_config
from dualtune.config.combinations import PREFERENCE_KEYS
from dualtune.config.rates import far_rate, usual_rate
from dualtune.config.schema import AdapterConfig
from dualtune.config.values import POLICY_OBJECTIVES
from dualtune.doctor.check_config_data import (
    SourceSample,
    check_sources,
    step_rows,
    steps_of_run,
    typical_step,
    with_lengths_of,
)
from dualtune.doctor.check_config_model import (
    activation_cache_rows,
    decoder_to_plan,
    failure,
    find_model,
    length_row,
    load_tokenizer,
    router_rows,
    shape_of,
    stop_rows,
    targets_rows,
)
from dualtune.doctor.storage import writable
from dualtune.engine.backend import get_backend
from dualtune.engine.capabilities import Honours, check_capabilities
from dualtune.engine.card import card_of
from dualtune.engine.choose import PlatformChoice, choose
from dualtune.engine.detect import detect
from dualtune.engine.machine import Machine, budget, within
from dualtune.engine.machines import MachineLimits, named, published
from dualtune.engine.memory.counted import Shape
from dualtune.engine.memory.estimate import Ask, ask_of, num_beside, num_trained
from dualtune.engine.memory.plan import MemoryPlan, plan_of
from dualtune.engine.step_time import StepDocuments, predict
from dualtune.model.methods import INITS
from dualtune.model.optimizer import OPTIMIZERS, OptimizerName
from dualtune.model.targets import ALL_LAYERS
from dualtune.train.generation.sampling_cost import samples_of, sampling_cost
from dualtune.train.memory import as_teacher, weights_of_teacher
from dualtune.train.objectives.comparison import configured_objective
from dualtune.train.policies import policy_of
from dualtune.train.prepare import start_of, state_of_start, with_adapter_of
from dualtune.train.rl.environments import check_unrun as check_environment
from dualtune.train.rl.package_environments import package_of
from dualtune.train.rl.rewards import check_unrun as check_reward
from dualtune.train.saver import check_space
from dualtune.train.state.run_dir import RunDir, check_usable, is_run_dir, path_of

# ----------------------------------------------------------------------------------------------------------------------
# Whether a config fits into the memory of a machine, and what to change if not.


TEACHER_KEY = "distill.teacher"


def memory_row(plan: MemoryPlan) -> Check:
    if not plan.budget.bytes:  # no such device: another row reports it
        return Check("memory", "skipped", f"needs {in_bytes(plan.estimate.total_bytes)}; {plan.budget.reason}")
    return Check("memory", "ok" if plan.fits else "fail", plan.compare(), None if plan.fits else str(plan.smaller))


def plan_memory(
    config: Config, evaluated: Config | None, shape: tuple[Shape | None, str], choice: PlatformChoice, machine: Machine
) -> MemoryPlan:
    """Plan the run of a config on a machine; `evaluated` is as for `plan_of`, and `shape` as of `shape_of`.

    ConfigError for an invalid combination, EnvironmentFault where there is no formula.
    """
    kind = _planned_kind(choice, machine)
    decoder, reason = shape
    if decoder is None:
        raise EnvironmentFault(reason)
    has = within(budget(machine, choice.platform if kind == "cuda" else kind), config.memory.limit_bytes)
    teacher = _teacher(config, choice.backend)
    beside = teacher and weights_of_teacher(config, teacher, choice.backend, kind)
    packages = frozenset(machine.packages)
    return plan_of(config, decoder, choice.backend, kind, has, evaluated, beside, packages)


def _teacher(config: Config, backend: str) -> Shape | None:
    """Return the shape of a teacher that is loaded beside, None without one; otherwise as `decoder_to_plan`."""
    return decoder_to_plan(as_teacher(config), backend, TEACHER_KEY) if config.distill.loads_model else None


def _planned_kind(choice: PlatformChoice, machine: Machine) -> str:
    """Return the kind of device that a choice plans for. EnvironmentFault for a backend without a formula."""
    card = card_of(choice.backend)
    kind = card.kind_for(choice.platform, machine.kinds)
    if card.memory is None or kind is None:
        raise EnvironmentFault(f"there is no memory estimate for the backend {choice.backend}")
    return kind


def plan_config(
    config: Config, machine: Machine, choice: PlatformChoice, evaluated: Config | None = None
) -> MemoryPlan:
    """Plan the run of a config on a machine, with the model found for it; otherwise as `plan_memory`.

    EnvironmentFault also where the model's shape is not known, or where there is no such device.
    """
    if config.adapter.init_from is not None:
        start = start_of(config)
        config, evaluated = with_adapter_of(config, start), evaluated and with_adapter_of(evaluated, start)
    _planned_kind(choice, machine)  # before the model is looked at: without a formula, its shape would not help
    if config.memory.sharding == "full":
        raise ConfigError("memory.sharding: got full: the memory of a split base is not planned yet. Set it to auto")
    plan = plan_memory(config, evaluated, (decoder_to_plan(config, choice.backend), ""), choice, machine)
    if not plan.budget.bytes:
        raise EnvironmentFault(f"{plan.budget.reason}. Plan for another machine with --machine, such as h100-80")
    return plan


# ----------------------------------------------------------------------------------------------------------------------
# The usual range for LoRA. Ranks outside of it may be right, but get an advice.
LEAST_RANK, MOST_RANK = 8, 64
MOST_DROPOUT = 0.2
LEAST_TARGETS = 4


@dataclass(slots=True)
class ConfigReport:
    """The rows in the order of the checks, and the memory if it could be estimated."""

    checks: list[Check] = field(default_factory=lambda: [])
    memory: MemoryPlan | None = None


def check_config(
    path: Path, overrides: Iterable[str] = (), *, platform: str = "auto", machine_name: str | None = None
) -> ConfigReport:
    """Check a config for this machine, or for one of `machines.MACHINES`.

    ConfigError for an unknown machine or platform; problems of the config itself are rows.
    """
    machine = named(machine_name) if machine_name else detect()
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        lines = str(error).splitlines()
        rows = [Check("schema", "fail", line, exit_code=error.exit_code) for line in lines]
        return ConfigReport(rows)
    # What training starts from decides rank and targets, so it comes before all that depends on them.
    config, start = _with_start(config)
    report = ConfigReport(
        [Check("schema", "ok", "every key and value is allowed"), *adapter_rows(config.adapter), *start]
    )
    report.checks += [*rate_rows(config), *_installed_rows(config), *_reward_rows(config)]
    # A GPU is loaded only where it is this machine's and the rows so far found it in order.
    choice = _choice(platform, machine, report)
    if choice is not None:
        device = choice.device if report.checks[-1].level == "ok" and machine_name is None else "cpu"
        report.checks += _backend_rows(config, choice, device, is_here=machine_name is None)
    # The tokenizer is the model's, the data are tokenized with it, and the steps follow from their lengths.
    model, rows = find_model(config)
    report.checks += rows
    if config.distill.loads_model:
        _, found = find_model(as_teacher(config), TEACHER_KEY)
        report.checks += [
            replace(row, name="teacher" if row.name == "model" else f"teacher {row.name}") for row in found
        ]
    tokenizer, row = load_tokenizer(config, model)
    report.checks += [row, *stop_rows(config, model, tokenizer), length_row(config, model)]
    rows, samples = check_sources(config, tokenizer)
    report.checks += [*rows, *step_rows(config, samples)]
    # The memory estimate checks the targets itself; without a shape the names in the files are all there is.
    decoder, reason = shape_of(model, config.model.name, choice.backend) if choice else (None, "")
    report.checks += activation_cache_rows(config, decoder)
    report.checks += router_rows(config, model)
    if decoder is None:
        report.checks += targets_rows(config, model)
    # Of a config that the backend refuses, no number would be true.
    if choice is not None and not any(check.name == "backend" and check.exit_code == 2 for check in report.checks):
        _add_costs(report, config, samples, (decoder, reason), choice, machine)
    # Last, since the room for checkpoints needs the number of weights and of steps.
    report.checks += _run_dir_rows(config, decoder, steps_of_run(config, samples))
    return report


def _add_costs(
    report: ConfigReport, config: Config, samples: list[SourceSample], shape: tuple[Shape | None, str],
    choice: PlatformChoice, machine: Machine,
) -> None:  # fmt: skip
    """Add the memory plan of a run with its row, and if there is one, the rows of its time and its sampling."""
    try:
        steps, evaluated = with_lengths_of(config, samples)
        report.memory = plan = plan_memory(steps, evaluated, shape, choice, machine)
    except EnvironmentFault as error:
        report.checks.append(Check("memory", "skipped", str(error)))
        return
    except DualtuneError as error:  # targets or layers that the model does not have
        report.checks.append(failure("memory", error))
        return
    report.checks.append(memory_row(plan))
    limits, documents = published(machine), typical_step(config, samples)
    report.checks.append(_time_row(plan, documents, steps_of_run(config, samples), limits, teacher_of(config, plan)))
    prompts = len(documents.lengths) // max(1, samples_of(config))
    if (cost := sampling_cost(config, plan, prompts, limits)) is not None:
        report.checks.append(Check("samples", "ok" if cost.fits else "advice", str(cost)))


def adapter_rows(adapter: AdapterConfig) -> list[Check]:
    """Return rows with advice on the adapter."""
    if adapter.trains_model:
        return [Check("adapter", "ok", "none: all parameters of the model are trained")]
    rows = [Check("adapter", "advice", text, fix) for text, fix in _advice(adapter)]
    targets = adapter.targets if isinstance(adapter.targets, str) else f"{len(adapter.targets)} targets"
    scaling = "" if adapter.scaling == "standard" else f" over √rank: scale {adapter.alpha / adapter.rank**0.5:.4g}"
    usual = f"rank {adapter.rank}, alpha {adapter.alpha:g}{scaling}, dropout {adapter.dropout:g}, {targets}"
    if adapter.rank_pattern or adapter.alpha_pattern:
        usual += f", others in {len({*adapter.rank_pattern, *adapter.alpha_pattern})} patterns"
    usual += "" if adapter.layers == ALL_LAYERS else f" in layers {adapter.layers}"
    usual += ", experts too" * adapter.experts
    usual += "" if adapter.init == INITS[0] else f", starts {adapter.init}"
    return rows or [Check("adapter", "ok", usual)]


def rate_rows(config: Config) -> list[Check]:
    """Return a row if the learning rate is far above the usual one."""
    usual, text = usual_rate(config), far_rate(config)
    if usual is None or text is None:
        return []
    return [Check("learning rate", "advice", text, f"train.learning_rate {usual.rate:g} is usual")]


def _with_start(config: Config) -> tuple[Config, list[Check]]:
    """Return the config with rank, alpha and targets of the adapter that training starts from, as in the run."""
    if config.adapter.init_from is None:
        return config, []
    try:
        start = start_of(config)
        config = with_adapter_of(config, start)
        state = state_of_start(config, start)
    except DualtuneError as error:
        return config, [failure("start", error)]
    text = f"training continues from {config.adapter.init_from}: rank {config.adapter.rank}"
    optimizer = f", its optimizer after {state.optimizer.step} updates" if state else ""
    return config, [Check("start", "ok", f"{text}, alpha {config.adapter.alpha:g}{optimizer}")]


def _installed_rows(config: Config) -> Iterator[Check]:
    """Check that step policy, optimizer and objective can be used, if the config names those of other packages."""
    if config.train.policy != "auto":
        yield _installed_row("policy", config.train.policy, lambda: policy_of(config))
    if (name := config.train.optimizer) not in get_args(OptimizerName):
        yield _installed_row("optimizer", name, lambda: OPTIMIZERS[name])
    if config.train.objective not in PREFERENCE_KEYS:
        yield _installed_row("objective", config.train.objective, lambda: configured_objective(config))


def _reward_rows(config: Config) -> Iterator[Check]:
    """Check that what judges and replies is there. Nothing of it is run: a file may do anything."""
    if config.train.objective not in POLICY_OBJECTIVES:
        return
    rewards, environment = config.rollouts.rewards, config.rollouts.environment
    if rewards:
        yield _there_row("rewards", ", ".join(rewards), lambda: [check_reward(name) for name in rewards])
    if environment is not None and package_of(environment) is None:
        yield _there_row("environment", environment, lambda: check_environment(environment))


def _there_row(name: str, value: str, check: Callable[[], object]) -> Check:
    try:
        check()
    except DualtuneError as error:
        return failure(name, error)
    return Check(name, "ok", value)


def _installed_row(name: str, value: str, find: Callable[[], object]) -> Check:
    return _there_row(name, f"{value} is installed", find)


def _advice(adapter: AdapterConfig) -> Iterator[tuple[str, str]]:
    """Yield what is unusual, and what is usual."""
    if not LEAST_RANK <= adapter.rank <= MOST_RANK:
        yield f"rank {adapter.rank} is unusual", f"adapter.rank from {LEAST_RANK} to {MOST_RANK} is usual"
    if adapter.scaling == "standard" and adapter.alpha != 2 * adapter.rank:
        scale = adapter.alpha / adapter.rank
        yield f"alpha {adapter.alpha:g} scales the adapter by {scale:g}", f"adapter.alpha {2 * adapter.rank} is usual"
    if adapter.dropout > MOST_DROPOUT:
        yield f"dropout {adapter.dropout:g} is high", f"adapter.dropout up to {MOST_DROPOUT:g} is usual"
    names = () if isinstance(adapter.targets, str) or "all-linear" in adapter.targets else adapter.targets
    if names and len(names) < LEAST_TARGETS:
        text = f"only {', '.join(names)} {'is' if len(names) == 1 else 'are'} adapted"
        yield text, "Name more adapter.targets: all of attention, or all seven, which learn more at the same rank"


# --- platform and backend --------------------------------------------------------------------------------------------


def _choice(platform: str, machine: Machine, report: ConfigReport) -> PlatformChoice | None:
    """Choose the backend and device, and add their row."""
    try:
        choice = choose(platform, machine)
    except EnvironmentFault as error:
        report.checks.append(failure("platform", error))
        return None
    if choice.platform.startswith("cuda") and not machine.gpus:
        text = f"cuda, but there is no NVIDIA GPU: {machine.gpu_problem or 'none is visible'}"
        fix = "dualtune check-gpu, or check another machine with --machine, such as h100-80"
        report.checks.append(Check("platform", "fail", text, fix, EnvironmentFault.exit_code))
    else:
        report.checks.append(Check("platform", "ok", f"{choice.platform}: {choice.reason}"))
    return choice


def _backend_rows(config: Config, choice: PlatformChoice, device: str, *, is_here: bool) -> list[Check]:
    """Check that the backend can be loaded and honours every key."""
    try:
        # Load the backend for a GPU: its framework may be built without support for it. A CPU needs no such check.
        backend: Honours = card_of(choice.backend)
        if device != "cpu" or not backend.honoured or not backend.package.is_installed:
            backend = get_backend(choice.backend, device)
        check_capabilities(backend, config)
    except ConfigError as error:
        return [Check("backend", "fail", line, exit_code=error.exit_code) for line in str(error).splitlines()]
    except EnvironmentFault as error:
        if is_here:
            return [failure("backend", error)]
        return [Check("backend", "skipped", f"which keys it honours is not known on this machine: {error}")]
    return [Check("backend", "ok", f"{backend.name} honours every key")]


# --- memory and disk -------------------------------------------------------------------------------------------------


def teacher_of(config: Config, plan: MemoryPlan) -> tuple[Shape, Ask] | None:
    """Return the shape of a teacher that answers on the run's device, as it is loaded; None without one.

    Of the config of a plan: so the shape of another model is known.
    """
    settings, ask = config.distill, plan.ask
    if settings.teacher is None or settings.is_served:
        return None
    if (shape := _teacher(config, ask.backend)) is None:
        return plan.decoder, replace(ask, compares=False, kernels="auto", teacher=None)
    return shape, ask_of(as_teacher(config), shape, ask.backend, ask.device)


def _time_row(
    plan: MemoryPlan, documents: StepDocuments, num_steps: int | None, limits: MachineLimits | None,
    teacher: tuple[Shape, Ask] | None,
) -> Check:  # fmt: skip
    if limits is None:
        return Check("time", "skipped", "no limits are known for this machine; dualtune bench measures a step")
    try:
        time = predict(plan.decoder, plan.ask, documents, limits, teacher)
        return Check("time", "ok", f"{time.of_run(num_steps)}; {time.describe()}")
    except EnvironmentFault as error:
        return Check("time", "skipped", str(error))


def _run_dir_rows(config: Config, decoder: Shape | None, num_steps: int | None) -> list[Check]:
    """Check that the run directory can be used, and that the disk has room for the checkpoints."""
    path = path_of(config)
    try:
        check_usable(path, "auto")
    except ConfigError as error:
        return [failure("run.dir", error)]
    place = writable("run.dir", path, "set run.dir")
    if place.level == "fail":
        return [replace(place, exit_code=DiskError.exit_code)]
    holds = " holds a run, which would be resumed" if path.is_dir() and is_run_dir(path) else " is free"
    rows = [Check("run.dir", "ok", f"{path}{holds}")]
    if decoder is None:
        return rows
    try:
        num_weights = num_trained(decoder, config.adapter) + num_beside(decoder, config)
        check_space(RunDir(existing(path), None), config, num_weights, num_steps)
    except DiskError as error:
        return [*rows, failure("disk", error)]
    except ConfigError:  # reported in the row on memory
        return rows
    return [*rows, Check("disk", "ok", f"room for the checkpoints of {num_weights:,} trainable weights")]
