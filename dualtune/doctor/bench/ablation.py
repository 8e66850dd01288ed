"""Each memory technique alone and all together: what it takes against the plan, and what it costs, measured here.

A row of the table is a technique of `TECHNIQUES` that the backend honours, with the config's own model and data. Each
measurement is a process of its own (`ablation_process.py`). `none`, with every technique off, is measured anew in each
round, and times are compared within a round, because a machine is not equally busy all the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.base.text import in_bytes
from dualtune.config import Config, load_config
from dualtune.doctor.bench.ablation_process import AblationWork, Failed, Measured, run_apart
from dualtune.engine.capabilities import check_capabilities
from dualtune.engine.card import Card, card_of
from dualtune.engine.choose import choose
from dualtune.engine.detect import detect
from dualtune.engine.machine import budget
from dualtune.engine.memory.counted import Shape, shape_from
from dualtune.engine.memory.estimate import Estimate, ask_of, estimate, tokens_at_once
from dualtune.engine.memory.shapes import UnknownShape
from dualtune.model.base_model import resolve_model
from dualtune.model.config_file import read_config

WITHIN = 0.10  # of what was measured, that the plan may differ
LOSS_WITHIN = 1e-6  # of the loss in float32, for a technique that does not change the result
CHECKPOINTING, TOKENS, BASE = "memory.checkpointing", "train.micro_batch_tokens", "model.quantization"


@dataclass(frozen=True, slots=True)
class Technique:
    name: str
    settings: Mapping[str, Any]  # on top of those of NONE
    same_result: bool = True
    combined: bool = True  # whether `all` contains it


NONE = Technique("none", {CHECKPOINTING: "none", BASE: "none"}, combined=False)
ALL = "all"


def techniques(layers: int, tokens: int, longest: int) -> tuple[Technique, ...]:
    """Return the techniques for a model of so many layers, whose largest micro-batch has `tokens`, padding included.

    `longest`: the tokens of the longest document. A new technique is one line. The values of keys that a backend does
    not honour are not offered on it.
    """
    return (
        Technique("adapter inputs", {CHECKPOINTING: "adapter_inputs"}, combined=False),
        Technique("half of the layers", {CHECKPOINTING: f"{{layers: {layers // 2}}}"}, combined=False),
        Technique("all layers", {CHECKPOINTING: "full"}),
        Technique("half the micro-batch", {TOKENS: max(longest, tokens // 2)}),
        Technique("int8 base", {BASE: "int8"}, same_result=False, combined=False),
        Technique("affine4 base", {BASE: "affine4"}, same_result=False),
        Technique("nf4 base", {BASE: "nf4"}, same_result=False),
        Technique("offloaded activations", {CHECKPOINTING: "full", "memory.offload": "activations"}),
        Technique("streamed layers", {CHECKPOINTING: "full", "memory.resident_layers": 2}),
        Technique("8-bit AdamW", {"train.optimizer": "adamw_8bit"}, same_result=False),
    )


NAMES = (*(technique.name for technique in techniques(0, 0, 0)), ALL)


@dataclass(slots=True)
class AblationRow:
    """A technique and its measurements, one for each round."""

    technique: Technique
    planned: Estimate | None = None
    measured: list[Measured] = field(default_factory=lambda: [])
    process_bytes: int | None = None  # the most anonymous memory of the process during the steps
    failure: str = ""  # why it was not measured

    @property
    def overrides(self) -> tuple[str, ...]:
        """Return the settings of the technique as overrides of a config."""
        return tuple(f"{key}={value}" for key, value in {**NONE.settings, **self.technique.settings}.items())

    @property
    def planned_bytes(self) -> int | None:
        """Return the bytes of tensors by plan: what a process takes besides them is not counted."""
        return None if self.planned is None else self.planned.total_bytes - self.planned["reserve"]

    @property
    def peak_bytes(self) -> int | None:
        return max((one.peak_bytes for one in self.measured if one.peak_bytes is not None), default=None)

    @property
    def difference(self) -> float | None:
        """Return the plan's difference from what was measured, as a share of that."""
        planned, peak = self.planned_bytes, self.peak_bytes
        return None if planned is None or not peak else planned / peak - 1

    @property
    def loss(self) -> float | None:
        return self.measured[0].loss if self.measured else None

    def time_of(self, baseline: AblationRow) -> float | None:
        """Return the time of a step in times of the baseline's, the median of the rounds."""
        pairs = zip(self.measured, baseline.measured, strict=False)
        ratios = [median(mine.step_s) / median(other.step_s) for mine, other in pairs]
        return median(ratios) if ratios else None

    def loss_difference(self, baseline: AblationRow) -> float | None:
        """Return the difference from the baseline's loss as a share of it."""
        if self.loss is None or not baseline.loss:
            return None
        return self.loss / baseline.loss - 1

    def problem(self, baseline: AblationRow) -> str:
        """Return what is wrong with this row; empty if nothing is."""
        if self.failure:
            return f"was not measured: {self.failure}"
        if self.difference is None:
            return "was not compared: this backend does not count its tensors"
        if abs(self.difference) > WITHIN:
            return f"the plan is {self.difference:+.1%} off, more than {WITHIN:.0%}"
        off = self.loss_difference(baseline)
        if self.technique.same_result and off is not None and not abs(off) <= LOSS_WITHIN and self._is_exact:
            return f"the loss is {off:+.1e} off, but this technique must not change it by more than {LOSS_WITHIN:.0e}"
        return ""

    @property
    def _is_exact(self) -> bool:
        return self.measured[0].dtype == "float32"


@dataclass(frozen=True, slots=True)
class Ablation:
    """The table. The first row is the baseline."""

    rows: tuple[AblationRow, ...]
    not_offered: Mapping[str, str]  # technique -> why

    @property
    def baseline(self) -> AblationRow:
        return self.rows[0]

    @property
    def problems(self) -> list[str]:
        """Return a line for each technique that was not measured or differs from what it promises."""
        problems = ((row.technique.name, row.problem(self.baseline)) for row in self.rows)
        return [f"{name}: {problem}" for name, problem in problems if problem]

    def as_json(self) -> dict[str, Any]:
        rows = [_as_json(row, self.baseline) for row in self.rows]
        return {"problems": self.problems, "not_offered": dict(self.not_offered), "rows": rows}


@dataclass(frozen=True, slots=True)
class _Place:
    """What is measured, and where."""

    config: Path
    overrides: tuple[str, ...]
    platform: str
    steps: int
    card: Card  # with only the device that computes
    decoder: Shape
    have_bytes: int

    def config_with(self, overrides: Iterable[str]) -> Config:
        """ConfigError if a value does not exist, or if the backend does not honour it on this device."""
        config = load_config(self.config, (*self.overrides, *overrides))
        check_capabilities(self.card, config)
        return config

    def plan(self, overrides: Iterable[str], sizes: Iterable[Sequence[int]] = ()) -> Estimate:
        """Plan the largest of these micro-batches; without any, that of the config."""
        ask = ask_of(self.config_with(overrides), self.decoder, self.card.name, self.card.devices[0].kind)
        asks = [replace(ask, micro_batch_tokens=cells, max_length=longest) for cells, longest in sizes]
        return max((estimate(self.decoder, one) for one in asks or [ask]), key=lambda estimated: estimated.total_bytes)


def ablate(
    config: Path, overrides: Sequence[str] = (), platform: str = "auto", *, steps: int = 3, rounds: int = 2,
    only: Sequence[str] = (), tell: Callable[[str], None] = lambda text: None,
) -> Ablation:  # fmt: skip
    """Measure the techniques, or `only` those of these names, besides the baseline. `tell` hears what is measured.

    ConfigError for an unknown name or an impossible config; EnvironmentFault where there is no plan to compare with.
    """
    if unknown := [name for name in only if name not in NAMES]:
        raise ConfigError(f"--only: got '{unknown[0]}', allowed: {', '.join(NAMES)}")
    place = _place(config, tuple(overrides), platform, steps)
    baseline = AblationRow(NONE)
    tell(NONE.name)
    _measure(place, baseline)
    # The baseline shows the real micro-batches, on which the values of some techniques depend.
    if baseline.measured:
        tokens, longest = (max(values) for values in zip(*baseline.measured[0].micro_batches, strict=True))
    else:
        settings = place.config_with(())
        longest = settings.data.max_length
        tokens = tokens_at_once(settings.train.micro_batch_tokens, longest)
    offered, not_offered = _offered(place, tokens, longest, only)
    rows = [baseline, *offered]
    for number in range(rounds):
        for row in rows[number == 0 :]:  # the baseline of the first round is done
            if not row.failure:
                tell(f"{row.technique.name}, round {number + 1} of {rounds}")
                _measure(place, row)
    return Ablation(tuple(rows), not_offered)


def _place(config: Path, overrides: tuple[str, ...], platform: str, steps: int) -> _Place:
    loaded, choice, machine = load_config(config, overrides), choose(platform), detect()
    card = card_of(choice.backend)
    kind = card.kind_for(choice.platform, machine.kinds)
    device = card.device(kind or "")
    if card.memory is None or device is None:
        raise EnvironmentFault(f"there is no memory plan for the backend {choice.backend}, so nothing to compare with")
    try:
        decoder = shape_from(read_config(resolve_model(loaded.model.name, weights=False)), choice.backend)
    except UnknownShape as reason:
        raise EnvironmentFault(f"model.name: {loaded.model.name}: {reason}") from reason
    has = budget(machine, choice.platform if device.kind == "cuda" else device.kind)
    device_card = replace(card, devices=(device,))
    return _Place(config, overrides, choice.platform, steps, device_card, decoder, has.bytes)


def _offered(
    place: _Place, tokens: int, longest: int, only: Sequence[str] = ()
) -> tuple[list[AblationRow], dict[str, str]]:
    """Return the techniques that this backend honours, with `all` of them together, and why it lacks the others."""
    rows: list[AblationRow] = []
    refused: dict[str, str] = {}
    for technique in techniques(place.decoder.layers, tokens, longest):
        row = AblationRow(technique)
        try:
            place.config_with(row.overrides)
        except ConfigError as error:
            refused[technique.name] = str(error).splitlines()[0]
            continue
        if technique.settings.get(TOKENS) == tokens:
            refused[technique.name] = f"the largest micro-batch is a single document of {longest} tokens"
            continue
        rows.append(row)
    if combined := [row.technique for row in rows if row.technique.combined]:
        # The last one in the table counts of several values for a key.
        settings = {key: value for technique in combined for key, value in technique.settings.items()}
        same = all(technique.same_result for technique in combined)
        rows.append(AblationRow(Technique(ALL, settings, same_result=same)))
    return [row for row in rows if not only or row.technique.name in only], refused


def _measure(place: _Place, row: AblationRow) -> None:
    """Add a measurement to a row, or the reason why there is none."""
    try:
        need = place.plan(row.overrides, row.measured[0].micro_batches if row.measured else ()).total_bytes
        if need > place.have_bytes:
            raise Failed(f"it needs an estimated {in_bytes(need)}, this machine has {in_bytes(place.have_bytes)}")
        work = AblationWork(str(place.config), (*place.overrides, *row.overrides), place.platform, place.steps)
        measured, process_bytes = run_apart(work)
        row.measured.append(measured)
        row.planned = place.plan(row.overrides, measured.micro_batches)
    except (Failed, ConfigError) as error:
        row.failure = str(error)
        return
    if measured.device == "cpu":
        row.process_bytes = max(row.process_bytes or 0, process_bytes)
    if not math.isfinite(measured.loss):
        row.failure = f"the loss is {measured.loss}"


def _as_json(row: AblationRow, baseline: AblationRow) -> dict[str, Any]:
    parts = row.planned.parts if row.planned else ()
    return {
        "technique": row.technique.name,
        "set": list(row.overrides),
        "planned_bytes": row.planned_bytes,
        "parts": {part.name: part.bytes for part in parts},
        "measured_bytes": row.peak_bytes,
        "difference": row.difference,
        "process_bytes": row.process_bytes,
        "step_s": [one.step_s for one in row.measured],
        "time": row.time_of(baseline),
        "loss": row.loss,
        "loss_difference": row.loss_difference(baseline),
        "same_result": row.technique.same_result,
        "problem": row.problem(baseline),
    }
