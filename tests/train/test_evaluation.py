"""Evaluation in the loop: the mean over all targets, read one micro-batch late."""

from types import SimpleNamespace

import numpy as np

from dualtune.data.batches import SequenceLayout
from dualtune.data.documents import in_memory
from dualtune.engine.backend import LossSum
from dualtune.train.evaluation import evaluate


class Engine:
    """Notes when a micro-batch is handed over and when its loss is asked for."""

    description = SimpleNamespace(device="cpu")

    def __init__(self):
        self.log = []

    def evaluate(self, batch):
        number = sum(kind == "queued" for kind, _ in self.log)
        self.log.append(("queued", number))
        return LossSum(Lazy(self.log, number, 0.5 * batch.num_targets * (number + 1)), batch.num_targets)


class Lazy:
    def __init__(self, log, number, value):
        self._log, self._number, self._value = log, number, value

    def __float__(self):
        self._log.append(("read", self._number))
        return self._value


def test_a_loss_is_read_when_the_next_micro_batch_is_on_the_device():
    engine = Engine()
    documents = in_memory([(np.arange(8, dtype=np.int32), np.ones(8, bool))] * 3)
    record = evaluate(engine, documents, SequenceLayout(max_tokens=32))
    assert engine.log == [("queued", 0), ("queued", 1), ("read", 0), ("read", 1)]
    assert record.eval_targets == 3 * 7
    assert record.eval_loss == (0.5 * 14 + 1.0 * 7) / 21
