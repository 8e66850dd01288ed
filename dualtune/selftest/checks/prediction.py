"""The predicted speed of a shape on a device: the one place where a performance model is asked."""

from __future__ import annotations

from dualtune.selftest.checks.finding import Site
from dualtune.selftest.checks.sizes import TrainedShape


def predicted_tokens_per_s(site: Site, shape: TrainedShape) -> float | None:
    """Return the tokens per second that are predicted for training a shape here; None: there is no prediction."""
    return None
