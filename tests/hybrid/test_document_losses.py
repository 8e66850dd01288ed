"""The loss of each probe document: the same however they lie in batches, and when memory runs out on the way."""

from dataclasses import replace

import numpy as np
import pytest

from dualtune.data.batches import SequenceLayout, make_batch
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.numpy_engine import NumpyEngine
from dualtune.train.recovery import Recovery
from dualtune.train.run import load_engine
from dualtune.train.step import TrainingStep


def step_of(prepared, engine, layout=None):
    layout = layout or prepared.data.layout
    recovery = Recovery(prepared.backend, engine, layout, prepared.data.longest)
    return TrainingStep(prepared, engine, 0, prepared.batches, recovery=recovery)


def alone(prepared, engine, document):
    """The loss of a document by itself."""
    found = engine.evaluate(make_batch(prepared.data.train, [[document]], seed=0, step=0))
    return found.loss_sum / found.num_targets


def test_each_document_has_its_own_loss_in_every_layout(any_lab):
    prepared = any_lab.prepared()
    engine, documents = load_engine(prepared), prepared.data.probes
    expected = [alone(prepared, engine, document) for document in documents]
    assert len(set(expected)) == len(documents)
    for layout in (SequenceLayout(64), SequenceLayout(512, 128), prepared.data.layout):
        found = step_of(prepared, engine, layout).document_losses(documents)
        assert found == pytest.approx(expected, abs=tolerances.LOGPROBS)
    backwards = step_of(prepared, engine).document_losses(documents[::-1])
    assert backwards == pytest.approx(expected[::-1], abs=tolerances.LOGPROBS)


def test_loss_weights_count(lab, monkeypatch):
    prepared = lab.prepared()
    engine, documents = load_engine(prepared), prepared.data.probes
    step = step_of(prepared, engine)
    plain, batches_of = step.document_losses(documents), type(prepared).batches_of

    def halved(prepared, *args):
        batches = batches_of(prepared, *args)
        return [replace(b, weights_BT=np.full(b.labels_BT.shape, 0.5, np.float32)) for b in batches]

    monkeypatch.setattr(type(prepared), "batches_of", halved)
    assert step.document_losses(documents) == pytest.approx(plain / 2)


def test_when_memory_runs_out_the_documents_lie_otherwise_and_lose_the_same(lab, monkeypatch):
    prepared = lab.prepared(train__micro_batch_tokens=512)
    engine, documents = load_engine(prepared), prepared.data.probes
    step = step_of(prepared, engine)
    expected, logprobs, calls = step.document_losses(documents), NumpyEngine.target_logprobs, []

    def short_of_memory(engine, batch, **options):
        calls.append(batch.tokens_BT.size)
        if len(calls) == 1:
            raise MemoryError
        return logprobs(engine, batch, **options)

    monkeypatch.setattr(NumpyEngine, "target_logprobs", short_of_memory)
    with step.trying(engine.adapter_state()):
        assert step.document_losses(documents) == pytest.approx(expected, abs=1e-12)
    assert len(calls) > 2 and max(calls[1:]) < calls[0]


def test_a_gradient_that_is_discarded_meanwhile_is_made_again(lab, monkeypatch):
    prepared = lab.prepared(train__micro_batch_tokens=512)
    engine, calls, logprobs = load_engine(prepared), [], NumpyEngine.target_logprobs
    step = step_of(prepared, engine)
    step.add_gradients()
    expected = {name: g.copy() for name, g in engine._grads.items()}

    def short_of_memory(engine, batch, **options):
        calls.append(batch)
        if len(calls) == 1:
            raise MemoryError
        return logprobs(engine, batch, **options)

    monkeypatch.setattr(NumpyEngine, "target_logprobs", short_of_memory)
    step.document_losses(prepared.data.probes)
    assert all(g == pytest.approx(expected[name], abs=1e-12) for name, g in engine._grads.items())
    assert any(g.any() for g in expected.values())
