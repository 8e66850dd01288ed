"""Every fast piece beside the plain code on the device: the loss, and the gradient of the adapter.

In float32 both compute the same numbers but for rounding. In 16 bits both round, so each is compared with the plain
code in float32: the fast code may be at most `MOST_ROUNDING` times as far from it as the plain code is.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dualtune.activation_checkpointing import KEEP_ALL, ActivationCheckpointing
from dualtune.backend import NOISE
from dualtune.card import Card, Device
from dualtune.errors import ConfigError
from dualtune.selftest.checks.engines import (
    LossAndGradient,
    compared_batches,
    distance,
    request_for,
    step_of,
    written_model,
)
from dualtune.selftest.checks.finding import CheckFinding, DeviceCheck, Site, judged
from dualtune.testing import tolerances

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


def kernel_checks(card: Card, device: Device) -> list[DeviceCheck]:
    """Return a check for each fast piece alone, and for all of them together in different settings."""
    return [DeviceCheck(f"kernels/{case.name}", _title(case), partial(compare, case)) for case in cases(card, device)]


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
    what = "all fast pieces" if len(case.pieces) > 1 else "a fast piece"
    return f"{what} beside the plain code: {case.name}"


def compare(case: KernelCase, site: Site) -> CheckFinding:
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
        return _refused(str(error))
    used = engine.description.kernels or "not reported"
    if case.piece not in used:
        return CheckFinding("skipped", f"not used here: {used}", {"kernels": used})
    plain_request = replace(fast_request, kernels="reference", pieces=None, checkpointing=KEEP_ALL)
    plain, _ = step_of(site, plain_request, batches)
    exact = plain if case.dtype == "float32" else step_of(site, replace(plain_request, dtype="float32"), batches)[0]
    figures, tolerance = _figures(case.dtype, fast, plain, exact)
    outcome = "failed" if _is_wrong(used) else judged(figures, tolerance)
    words = f"gradient {figures['gradient']:.1e} apart, {tolerance['gradient']:.1e} allowed; {used}"
    return CheckFinding(outcome, words, {**figures, "kernels": used}, tolerance)


def _refused(reason: str) -> CheckFinding:
    """Return the finding for a piece that the engine tried and does not use."""
    reason = reason.partition("): ")[2].removesuffix(". Set auto to use those that work") or reason
    return CheckFinding("failed" if _is_wrong(reason) else "skipped", reason, {"plain": reason})


def _is_wrong(kernels: str) -> bool:
    return any(words in kernels for words in WRONG)


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
