"""The plain code on the device beside independent formulas in float64: does the device compute float32 as such?

A GPU that rounds the inputs of float32 products to fewer bits (TF32) shows here first.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from dualtune.selftest.checks.finding import CheckFinding, DeviceCheck, Site
from dualtune.testing import conformance, tolerances
from dualtune.testing.conformance import llama_case

FORMULAS = {
    "loss": conformance.check_loss_equals_the_oracle,
    "gradient": conformance.check_gradient_equals_finite_differences,
    "optimizers": conformance.check_optimizer_is_its_formula,
}
_TOLERANCE = {
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


def _against_formula(name: str, site: Site) -> CheckFinding:
    """Compare with a formula, in what the conformance suite checks of every backend."""
    case = replace(llama_case(site.backend, site.directory), dtype="float32", kernels="reference")
    try:
        FORMULAS[name](case)
    except AssertionError as error:
        return CheckFinding("failed", f"not what the formula gives: {error}")
    return CheckFinding("passed", "as the formula gives it", tolerance=_TOLERANCE[name])
