"""What a step policy may do in a step of this experiment: `dualtune.policy.StepActions` on images."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from dualtune.adapter.spec import Tensors
from dualtune.bench.digits.data import Images
from dualtune.bench.digits.network import DigitsEngine, losses
from dualtune.config import Config
from dualtune.data.batching.order import Order, without
from dualtune.data.held_out import probe_documents
from dualtune.evaluate.weights import using
from dualtune.policy import Update
from dualtune.train.schedule import learning_rate


class DigitsCourse:
    """What all steps of a run share. An image is a document of one token."""

    def __init__(self, config: Config, images: Images, engine: DigitsEngine, num_probes: int) -> None:
        self.config, self.images, self.engine = config, images, engine
        self.probes = probe_documents(len(images), num_probes, config.run.seed)
        sources = without(np.zeros(len(images), np.int64), self.probes)
        self.order = Order(config, np.ones(len(images), np.int64), sources)


class DigitsStep:
    """One step: the same methods as `dualtune.train.step.TrainingStep` has for a policy."""

    def __init__(self, course: DigitsCourse, index: int) -> None:
        self._course, self._index = course, index

    @property
    def engine(self) -> Any:
        """A `DigitsEngine`: the part of `Engine` that policies use."""
        return self._course.engine

    @property
    def index(self) -> int:
        return self._index

    @property
    def max_steps(self) -> int:
        return self.steps_left  # nothing is saved or evaluated before the end

    @property
    def steps_left(self) -> int:
        return self._course.order.num_steps - self._index

    @property
    def probe_documents(self) -> Sequence[int]:
        return self._course.probes

    @property
    def documents(self) -> np.ndarray:
        """The images that this step trains on, by their indices."""
        return self._course.order.step(self._index).documents

    def add_gradients(self) -> None:
        self._course.engine.forward_backward(self._course.images.chosen(self.documents))

    def update(self) -> Update:
        lr, number = self.rate(), len(self.documents)
        output = self._course.engine.optim_step(lr=lr, max_grad_norm=self._course.config.train.max_grad_norm)
        return Update(output, lr, number, number)

    def rate(self, ahead: int = 0) -> float:
        num_steps = self._course.order.num_steps
        return learning_rate(self._course.config, max(0, min(self._index + ahead, num_steps - 1)), num_steps)

    def tokens_of(self, documents: Sequence[int]) -> int:
        return len(documents)

    def document_losses(self, documents: Sequence[int]) -> np.ndarray:
        return losses(self._course.engine.weights, self._course.images.chosen(list(documents)))

    def trying(self, adapter: Tensors) -> AbstractContextManager[None]:
        return using(self.engine, adapter)
