"""The predicted speed of a shape on a device: the one place where the performance model is asked."""

from __future__ import annotations

import numpy as np

from dualtune.data.batching.batches import SequenceLayout
from dualtune.errors import EnvironmentFault
from dualtune.memory.shapes import decoder_of
from dualtune.performance.documents import StepDocuments
from dualtune.performance.prediction import predict
from dualtune.platform.detect import detect
from dualtune.platform.machines import published
from dualtune.selftest.checks.engines import ask_for
from dualtune.selftest.checks.finding import Site
from dualtune.selftest.checks.sizes import TrainedShape


def predicted_tokens_per_s(site: Site, shape: TrainedShape) -> float | None:
    """Return the tokens per second that are predicted for training a shape of one micro-batch here.

    None: there is no formula, or no published limits of this machine; a CPU has none.
    """
    limits = None if site.device.kind == "cpu" else published(detect())
    if limits is None:
        return None
    (lengths,) = shape.lengths
    documents = StepDocuments.of(np.array(lengths), SequenceLayout(sum(lengths), sum(lengths)), "the self-test")
    try:
        return predict(decoder_of(dict(shape.config)), ask_for(site, shape), documents, limits).tokens_per_s
    except EnvironmentFault:
        return None
