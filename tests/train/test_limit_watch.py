"""`memory.limit` where the backend cannot enforce it: the peak is watched, and an excess is a shortage of memory."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dualtune.base.errors import OutOfMemory
from dualtune.data.batches import SequenceLayout, make_batch
from dualtune.data.documents import in_memory
from dualtune.engine.backend import MemoryStats
from dualtune.engine.testing.numpy_engine import NumpyBackend
from dualtune.show.run import run
from dualtune.train import memory, prepare
from dualtune.train.recovery import Recovery

RUN = {
    "adapter.dropout": 0.3, "data.eval": 0.25, "train.steps": 3, "train.documents_per_step": 8,
    "train.micro_batch_tokens": 256, "run.eval_every": 1,
}  # fmt: skip
WEIGHTS = 1000  # bytes that are always in use; each token of a micro-batch takes 10 more


class CountingBackend(NumpyBackend):
    """A backend with a counter of the peak, which it calls by hand."""

    peak = synchronized = 0

    def memory(self):
        return MemoryStats(WEIGHTS, self.peak, 1 << 40)

    def reset_peak_memory(self):
        self.peak = 0

    def synchronize(self):
        self.synchronized += 1

    def load(self, request):
        engine = super().load(request)
        forward_backward = engine.forward_backward

        def counted(batch, *, divisor):
            self.peak = max(self.peak, WEIGHTS + 10 * batch.tokens_BT.size)
            forward_backward(batch, divisor=divisor)

        engine.forward_backward = counted
        return engine


def watch(monkeypatch, limit_bytes):
    """Let every run watch this limit, as if it had a plan that respects it."""
    planned = memory.plan_memory

    def watched(*args, **named):
        return replace(planned(*args, **named), watched_bytes=limit_bytes)

    monkeypatch.setattr(prepare, "plan_memory", watched)


def cuts_of(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["tokens_after"]) for row in rows if row.get("event") == "out_of_memory"]


@pytest.fixture
def small_run(make_config, write_rows, qa_rows, tmp_path, tiny_softmax, tiny_llama):
    def start(backend, name, **settings):
        model = tiny_softmax if backend.name == "numpy" else tiny_llama
        settings = RUN | {"run.dir": tmp_path / name} | {k.replace("__", "."): v for k, v in settings.items()}
        return run(make_config(write_rows(qa_rows), settings, model), backend)

    return start


def test_micro_batches_are_halved_until_they_stay_below_the_limit(small_run, monkeypatch, rows_of):
    backend = CountingBackend()
    straight = small_run(backend, "straight")
    watch(monkeypatch, WEIGHTS + 10 * 120)
    found = small_run(backend, "found")
    assert [cut[1] for cut in cuts_of(found.run_dir)] == [120]  # of the 240 that the first micro-batch has
    assert backend.peak <= WEIGHTS + 10 * 120 and backend.synchronized == 1
    losses = [[row["loss"] for row in rows_of(each.run_dir)[0]] for each in (found, straight)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert found.eval_loss == pytest.approx(straight.eval_loss, rel=1e-6)


def test_a_limit_that_the_smallest_micro_batch_exceeds_ends_the_run_with_8(small_run, monkeypatch):
    watch(monkeypatch, WEIGHTS)
    with pytest.raises(OutOfMemory, match=r"1.4 KiB were in use, and memory.limit leaves 1000 B for arrays; micro"):
        small_run(CountingBackend(), "run")


def batch_of(length):
    return make_batch(in_memory([(np.arange(length, dtype=np.int32), np.ones(length, bool))]), [[0]], seed=0, step=0)


def engine_on(device):
    return SimpleNamespace(description=SimpleNamespace(device=device))


def test_without_a_limit_nothing_is_read():
    class Unreadable(NumpyBackend):
        def memory(self):
            raise AssertionError

    for backend, limit_bytes in ((Unreadable(), None), (None, 5)):
        recovery = Recovery(backend, engine_on("cpu"), SequenceLayout(64), limit_bytes=limit_bytes)
        assert recovery.attempt(0, [batch_of(3)], lambda batch: None)


@pytest.mark.parametrize(("device", "width"), [("cpu", 304), ("cuda:0", 320), ("metal", 320)])
def test_only_a_cpu_computes_no_padding_for_the_sake_of_few_widths(device, width):
    widths = []
    recovery = Recovery(None, engine_on(device), SequenceLayout(512))
    assert recovery.attempt(0, [batch_of(300)], lambda batch: widths.append(batch.tokens_BT.shape[1]))
    assert widths == [width]


def test_mlx_keeps_a_limit_below_its_own_peak_with_the_same_result(small_run, monkeypatch, open_backend, rows_of):
    """The limit is between the peaks of the whole micro-batch and of a quarter of it."""
    backend = open_backend("mlx")
    settings = {"data__eval": 0, "train__steps": 2, "adapter__dropout": 0.3}

    def peak_of(tokens):
        found = small_run(backend, f"with {tokens}", train__micro_batch_tokens=tokens, **settings)
        backend.synchronize()
        return found, backend.memory().peak_bytes

    (straight, most), (_, least) = peak_of(256), peak_of(64)
    assert least < 0.9 * most
    watch(monkeypatch, (most + least) // 2)
    found = small_run(backend, "found", **settings)
    assert len(cuts_of(found.run_dir)) >= 1
    losses = [[row["loss"] for row in rows_of(each.run_dir)[0]] for each in (found, straight)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_only_a_limit_that_is_not_enforced_is_watched(open_backend, make_config, write_rows, qa_rows):
    config = make_config(write_rows(qa_rows), {"memory.limit": "900MB"})
    planned = prepare.prepare(config, open_backend("mlx")).memory
    assert planned.watched_bytes == 900_000_000 - planned.plan.estimate["reserve"]
    assert prepare.prepare(config, open_backend("torch")).memory.watched_bytes is None
    free = make_config(write_rows(qa_rows), {})
    assert prepare.prepare(free, open_backend("mlx")).memory.watched_bytes is None
