"""Checks of what a device computes: beside formulas, beside plain code, beside recorded losses, and after a resume."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.base.checks import Check
from dualtune.base.errors import ConfigError
from dualtune.base.files import write_file
from dualtune.base.untrusted import read_json
from dualtune.base.versions import versions_of
from dualtune.config import Config, parse_config
from dualtune.doctor.selftest.case import (
    DeviceCheck,
    LossAndGradient,
    Site,
    compared_batches,
    distance,
    judged,
    most_apart,
    request_for,
    step_of,
    written_model,
)
from dualtune.engine.backend import NOISE
from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing, Card, Device
from dualtune.engine.testing import conformance, tolerances
from dualtune.engine.testing.conformance import llama_case
from dualtune.model.adapter import Tensors
from dualtune.model.formats.directory import read_adapter, write_adapter
from dualtune.show.run import run
from dualtune.train.state.checkpoint import path_of
from dualtune.train.state.run_dir import CHECKPOINTS, METRICS

# ----------------------------------------------------------------------------------------------------------------------
# Short runs of training, for the checks of recorded losses and of a resume.

RESUMED_STEPS, STOPPED_AT = 6, 3


@dataclass(frozen=True, slots=True)
class ShortRun:
    """What a short run left."""

    directory: Path
    losses: list[float]  # of the steps that this run took
    adapter: Tensors


def short_config(site: Site, name: str, **changes: Any) -> Config:
    """Return the config of a short run in a directory of this name. `changes`: keys, with __ for the dot."""
    settings = {
        **site.training, "adapter.rank": 4, "adapter.alpha": 8, "adapter.dropout": 0.1, "data.max_length": 128,
        "data.eval": None, "train.steps": RESUMED_STEPS, "train.documents_per_step": 8, "train.learning_rate": 1e-3,
        "run.save_every": STOPPED_AT, "run.eval_every": None, "run.dir": str(site.directory / name),
    } | {key.replace("__", "."): value for key, value in changes.items()}  # fmt: skip
    return parse_config("model: {}", overrides=[f"{key}={json.dumps(value)}" for key, value in settings.items()])


def short_run(site: Site, config: Config, resume: str = "never") -> ShortRun:
    """Train, and read the losses and the adapter."""
    result = run(config, site.backend, resume=resume)
    lines = (result.run_dir / METRICS).read_text(encoding="utf-8").splitlines()
    losses = [float(row["loss"]) for row in map(json.loads, lines) if "loss" in row]
    return ShortRun(result.run_dir, losses, dict(read_adapter(result.adapter_dir).tensors))


# ----------------------------------------------------------------------------------------------------------------------
# The plain code on the device beside independent formulas in float64: does the device compute float32 as such?
#
# A GPU that rounds the inputs of float32 products to fewer bits (TF32) shows here first.

FORMULAS = {
    "loss": conformance.check_loss_equals_the_oracle,
    "gradient": conformance.check_gradient_equals_finite_differences,
    "optimizers": conformance.check_optimizer_is_its_formula,
}
LIMITS = {
    "loss": {"log-probability": tolerances.LOGPROBS},
    "gradient": {"share": tolerances.GRADIENT},
    "optimizers": {"weight": tolerances.UPDATE},
}


def number_checks() -> list[DeviceCheck]:
    """Return a check for each formula."""
    return [
        DeviceCheck(f"numbers/{name}", f"float32: the {name} beside float64 in NumPy", partial(_against_formula, name))
        for name in FORMULAS
    ]


def _against_formula(name: str, site: Site) -> Check:
    """Compare with a formula, in what the conformance suite checks of every backend."""
    check = f"numbers/{name}"
    case = replace(llama_case(site.backend, site.directory), dtype="float32", kernels="reference")
    try:
        FORMULAS[name](case)
    except AssertionError as error:
        return Check(check, "fail", f"not what the formula gives: {error}")
    return Check(check, "ok", "as the formula gives it", limits=LIMITS[name])


# ----------------------------------------------------------------------------------------------------------------------
# Every fast piece beside the plain code on the device: the loss, and the gradient of the adapter.
#
# In float32 both compute the same numbers but for rounding. In 16 bits both round, so each is compared with the plain
# code in float32: the fast code may be at most `MOST_ROUNDING` times as far from it as the plain code is.

MOST_ROUNDING = 2.0  # both errors are norms over thousands of numbers: they hardly vary, and a wrong factor is far off
LEAST_ROUNDING = 1e-3  # of a gradient in 16 bits: below it, nobody is to be measured by plain code that was lucky
# What an engine says of a piece that it tried and refused for its numbers, and not because something is missing.
WRONG = ("computes different logits", "computes something else", "weights differently")
SWITCH = "DUALTUNE_KERNELS"  # "triton": use every kernel of the device, also where it saves nothing


@dataclass(frozen=True, slots=True)
class KernelCase:
    """What is compared. The plain engine has the same values, but for kernels and checkpointing."""

    name: str
    dtype: str
    pieces: tuple[str, ...]
    model: str = "llama"
    quantization: str = "none"
    dropout: float = 0.0
    checkpointing: ActivationCheckpointing = KEEP_ALL
    kernels: str = "auto"  # "fused": the piece must work, or say why not
    piece: str = ""  # that has to be in use, or nothing is compared
    is_small: bool = False  # whether the piece pays only at sizes that are not tested

    @property
    def check_name(self) -> str:
        return f"kernels/{self.name}"


def kernel_checks(card: Card, device: Device) -> list[DeviceCheck]:
    """Return a check for each fast piece alone, and for all of them together in different settings."""
    return [DeviceCheck(case.check_name, _title(case), partial(compare_kernels, case)) for case in cases(card, device)]


def cases(card: Card, device: Device) -> Iterator[KernelCase]:
    """Yield the comparisons that make sense for a device. A new piece comes with its name in `Card.pieces`."""
    if not card.pieces:
        return
    every = KernelCase("", device.auto_dtype, (*card.pieces, *device.pieces))
    for dtype in dict.fromkeys(("float32", device.auto_dtype)):
        yield replace(every, name=f"all {dtype}", dtype=dtype)
        for piece in card.pieces:
            yield KernelCase(f"{piece} {dtype}", dtype, (piece,), kernels="fused", piece=piece)
    for piece, quantization in device.pieces.items():
        yield KernelCase(
            piece, device.auto_dtype, ("lora", piece), quantization=quantization, dropout=0.1, kernels="fused",
            piece=piece, is_small=True,
        )  # fmt: skip
    yield replace(every, name="normalized heads, tied head", model="qwen3")
    yield replace(every, name="dropout", dropout=0.1)
    yield replace(every, name="checkpointing", checkpointing=ActivationCheckpointing("all"), dropout=0.1)
    for quantization in ("nf4", "affine4"):
        if quantization in device.quantizations:
            yield replace(every, name=quantization, quantization=quantization)
    if device.records_graphs:
        yield replace(every, name="graph", kernels="graph")


def _title(case: KernelCase) -> str:
    pieces = "all fast pieces" if len(case.pieces) > 1 else "a fast piece"
    return f"{pieces} beside the plain code: {case.name}"


def compare_kernels(case: KernelCase, site: Site) -> Check:
    """Compare the fast code of a case with the plain code."""
    batches = compared_batches(site)
    if case.kernels == "graph":
        batches = [batches[0]] * 3  # a graph is recorded at the second and replayed from then on
    fast_request = request_for(
        written_model(site, case.model), case.dtype, case.quantization, case.dropout,
        kernels=case.kernels, pieces=frozenset(case.pieces), checkpointing=case.checkpointing,
    )  # fmt: skip
    try:
        with _switched(case.is_small):
            fast, engine = step_of(site, fast_request, batches)
    except ConfigError as error:
        return _refused(case, str(error))
    used = engine.description.kernels or "not reported"
    if case.piece not in used:
        return Check(case.check_name, "skipped", f"not used here: {used}", figures={"kernels": used})
    plain_request = replace(fast_request, kernels="reference", pieces=None, checkpointing=KEEP_ALL)
    plain, _ = step_of(site, plain_request, batches)
    exact = plain if case.dtype == "float32" else step_of(site, replace(plain_request, dtype="float32"), batches)[0]
    figures, limits = _figures(case.dtype, fast, plain, exact)
    text = f"gradient {figures['gradient']:.1e} apart, {limits['gradient']:.1e} allowed; {used}"
    row = judged(case.check_name, text, {**figures, "kernels": used}, limits)
    return replace(row, level="fail") if _is_wrong(used) else row


def _refused(case: KernelCase, message: str) -> Check:
    """Return the row of a piece that the engine tried and does not use."""
    reason = message.partition("): ")[2].removesuffix(". Set auto to use those that work") or message
    return Check(case.check_name, "fail" if _is_wrong(reason) else "skipped", reason, figures={"plain": reason})


def _is_wrong(kernels: str) -> bool:
    return any(phrase in kernels for phrase in WRONG)


@contextmanager
def _switched(is_small: bool) -> Generator[None]:
    """Inside the block, have every kernel of the device used, however little it saves."""
    before = os.environ.get(SWITCH)
    if is_small:
        os.environ[SWITCH] = "triton"
    try:
        yield
    finally:
        os.environ.pop(SWITCH, None)
        if before is not None:
            os.environ[SWITCH] = before


def _figures(
    dtype: str, fast: LossAndGradient, plain: LossAndGradient, exact: LossAndGradient
) -> tuple[dict[str, float], dict[str, float]]:
    """Return how far the fast code is from the exact numbers, and how far it may be."""
    figures: dict[str, Any] = {"loss": abs(fast.loss - exact.loss), "gradient": distance(fast.gradient, exact.gradient)}
    if dtype == "float32":
        return figures, {"loss": tolerances.LOGPROBS, "gradient": tolerances.GRADIENT}
    figures |= {"plain loss": abs(plain.loss - exact.loss), "plain gradient": distance(plain.gradient, exact.gradient)}
    gradient = max(MOST_ROUNDING * figures["plain gradient"], LEAST_ROUNDING)
    return figures, {"loss": NOISE[dtype], "gradient": gradient}


# ----------------------------------------------------------------------------------------------------------------------
# Training beside what was recorded on two CPUs, so that machines that never meet are compared with each other.
#
# `recorded/` holds, from the demo's model and data: the losses of a run in float32 on every backend, a checkpoint from
# the middle of it, and its adapter. `scripts/record_selftest.py` makes it anew.

RECORDED = Path(__file__).parent / "recorded"
SERIES, ADAPTER = "series.json", "adapter"
MAX_SERIES_BYTES = 1 << 16
RECORDED_STEPS, HALF = 12, 6


def recorded_checks(dtypes: Sequence[str]) -> list[DeviceCheck]:
    """Return a check for each dtype."""
    return [
        DeviceCheck(
            f"recorded/{dtype}", f"losses in {dtype} beside those recorded on CPUs", partial(compare_recorded, dtype)
        )
        for dtype in dict.fromkeys(dtypes)
    ]


def compare_recorded(dtype: str, site: Site, recorded: Path = RECORDED) -> Check:
    """Train the recorded run whole, and from its checkpoint, and use its adapter. FormatError if it is damaged."""
    series: Mapping[str, Any] = read_json(recorded / SERIES, max_bytes=MAX_SERIES_BYTES)["series"]
    whole = _whole(site, dtype).losses
    continued = short_run(site, _config(site, "continued", dtype), str(path_of(recorded / CHECKPOINTS, HALF))).losses
    adapter_loss = _adapter_loss(site, dtype, recorded / ADAPTER)
    gaps: dict[str, float] = {}
    for name, machine in series.items():
        expected = machine["losses"]
        gaps[f"whole, {name}"] = _largest_gap(whole, expected)
        gaps[f"continued, {name}"] = _largest_gap(continued, expected[HALF:])
        gaps[f"adapter, {name}"] = abs(adapter_loss - machine["adapter_loss"])
    most = most_apart(dtype)
    worst = max(gaps, key=lambda name: gaps[name])
    text = f"losses up to {gaps[worst]:.1e} nats apart ({worst}), {most:.0e} allowed"
    figures = {"losses": whole, "continued": continued, "adapter_loss": adapter_loss, **gaps}
    return judged(f"recorded/{dtype}", text, figures, dict.fromkeys(gaps, most))


def record(sites: Mapping[str, Site], target: Path) -> None:
    """Write a new record: losses on each site, and the files of the first one. Paths in the files are as the site's."""
    series: dict[str, Any] = {}
    for name, site in sites.items():
        whole = _whole(site, "float32")
        if not series:
            _copy_files(whole, target)
        loss = _adapter_loss(site, "float32", target / ADAPTER)
        packages = versions_of(("dualtune", *site.card.package.recorded))
        series[name] = {"losses": whole.losses, "adapter_loss": loss, "packages": packages}
    write_file(target / SERIES, json.dumps({"schema_version": 1, "series": series}, indent=2) + "\n")


def _copy_files(run: ShortRun, target: Path) -> None:
    checkpoint = path_of(target / CHECKPOINTS, HALF)
    checkpoint.mkdir(parents=True)
    for file in path_of(run.directory / CHECKPOINTS, HALF).iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
    adapter = read_adapter(run.directory / ADAPTER)
    write_adapter(target / ADAPTER, replace(adapter, metadata={}), layout="peft")


def _config(site: Site, name: str, dtype: str, **changes: Any) -> Config:
    settings = {
        "adapter__rank": 2,
        "adapter__alpha": 4,
        "train__steps": RECORDED_STEPS,
        "run__save_every": HALF,
    } | changes
    return short_config(site, name, model__dtype=dtype, **settings)


def _whole(site: Site, dtype: str) -> ShortRun:
    return short_run(site, _config(site, "whole", dtype))


def _adapter_loss(site: Site, dtype: str, adapter: Path) -> float:
    """Return the loss of the adapter on the documents of a first step, without dropout."""
    changes = {"adapter__init_from": str(adapter), "adapter__dropout": 0.0, "train__steps": 1}
    return short_run(site, _config(site, "adapter-loss", dtype, **changes)).losses[0]


def _largest_gap(losses: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# A run that was stopped and resumed beside one that was not: equal to the bit, or how far off.


def resume_checks(kind: str) -> list[DeviceCheck]:
    """Return the check of a resumed run; on a GPU also with run.deterministic, which has to make it bitwise."""
    title = "a resumed run ends as one that was not stopped"
    usual = DeviceCheck("resume/usual", title, partial(resume_and_compare, False))
    exact = DeviceCheck("resume/deterministic", f"{title}, to the bit", partial(resume_and_compare, True))
    return [usual, exact] if kind == "cuda" else [usual]


def resume_and_compare(is_deterministic: bool, site: Site) -> Check:
    """Train straight, again, and from the checkpoint in the middle by a new engine."""

    def config(name: str) -> Config:
        return short_config(site, name, run__deterministic=is_deterministic)

    straight = short_run(site, config("straight"))
    again = short_run(site, config("again"))
    saved = path_of(straight.directory / CHECKPOINTS, STOPPED_AT)
    resumed = short_run(site, config("resumed"), resume=str(saved))
    figures = {
        "bitwise": _same_bits(straight, resumed, RESUMED_STEPS - STOPPED_AT),
        "straight_runs_bitwise": _same_bits(straight, again, RESUMED_STEPS),
        "loss": _largest_gap(resumed.losses, straight.losses[STOPPED_AT:]),
        "adapter": distance(resumed.adapter, straight.adapter),
    }
    most = most_apart(site.device.auto_dtype)
    text = "bitwise: the same losses and the same adapter"
    if not figures["bitwise"]:
        text = (
            f"not bitwise: losses up to {figures['loss']:.1e} apart ({most:.0e} allowed), the adapter "
            f"{figures['adapter']:.1e} of its norm; two straight runs "
        ) + ("agree to the bit" if figures["straight_runs_bitwise"] else "differ as well")
    row = judged("resume/deterministic" if is_deterministic else "resume/usual", text, figures, {"loss": most})
    # On a GPU that is not told otherwise, sums may be added in another order each time.
    must_be_bitwise = is_deterministic or site.device.kind != "cuda"
    return replace(row, level="fail") if must_be_bitwise and not figures["bitwise"] else row


def _same_bits(a: ShortRun, b: ShortRun, last: int) -> bool:
    same = all(np.array_equal(a.adapter[name], b.adapter[name]) for name in a.adapter)
    return same and a.losses[-last:] == b.losses[-last:]
