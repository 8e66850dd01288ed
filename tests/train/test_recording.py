"""A recording of a teacher that is killed goes on where it was, to the same bytes, and takes no more memory."""

import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, LockedError
from dualtune.data.documents import in_memory
from dualtune.engine.backend import EngineDescription
from dualtune.train import activation_cache
from dualtune.train.objectives.distillation import read_distributions
from dualtune.train.objectives.recording import PARTIAL, record
from dualtune.train.state.lock import Lock


@dataclass
class Teacher:
    """Says something of each target that depends on its token alone; dies before call number `dies_at`."""

    dies_at: int | None = None
    calls: int = 0

    description = EngineDescription(
        device="cpu", dtype="float32", dtype_reason="", quantization="none", quantization_reason="",
        num_parameters=1, trainable_parameters=0,
    )  # fmt: skip

    def adapter_state(self):
        return {}

    def top_logprobs(self, batch, k):
        if self.calls == self.dies_at:
            raise KeyboardInterrupt
        self.calls += 1
        labels_M = batch.labels_BT[batch.is_target_BT]
        tokens_Mk = (labels_M[:, None] + np.arange(k)).astype(np.int32)
        return tokens_Mk, (-1.0 - tokens_Mk / 100).astype(np.float32)


def documents(number, length=40):
    rng = np.random.default_rng(0)
    rows = [(rng.integers(0, 50, length + n % 7, np.int32), np.arange(length + n % 7) > 3) for n in range(number)]
    return in_memory([*rows, rows[0]])  # one comes twice


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(activation_cache, "TOKENS_AT_ONCE", 200)


@pytest.mark.parametrize("torn", [0, 1, 9, 41])
def test_a_recording_that_was_killed_ends_with_the_same_bytes(tmp_path, torn):
    """Also if the last write was torn: bytes are missing at the end of a file."""
    parts, straight, killed = (documents(20), documents(5)), tmp_path / "straight", tmp_path / "killed"
    whole = Teacher()
    first = record(straight, whole, "t", parts, 3)
    with pytest.raises(KeyboardInterrupt):
        record(killed, Teacher(dies_at=4), "t", parts, 3)
    partial = tmp_path / f"killed{PARTIAL}"
    for name in ("logprobs", "ends"):
        (partial / name).write_bytes((partial / name).read_bytes()[: -torn or None])
    rest = Teacher()
    second = record(killed, rest, "t", parts, 3)
    assert killed.read_bytes() == straight.read_bytes() and not partial.exists()
    assert 0 < second.num_continued < 20 and second.num_targets == first.num_targets
    assert rest.calls <= whole.calls - 4 + 3 * bool(torn)
    assert read_distributions(killed).tokens_Nk.shape == (first.num_targets, 3)


def test_what_is_unfinished_of_another_teacher_is_not_continued(tmp_path):
    parts, out = (documents(20),), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        record(out, Teacher(dies_at=2), "t", parts, 3)
    for name, k, other in (("another", 3, "teacher"), ("t", 4, "k")):
        with pytest.raises(ConfigError, match=f"other values of {other}"):
            record(out, Teacher(), name, parts, k)
    with pytest.raises(ConfigError, match="other values of base"):
        record(out, Teacher(), "t", parts, 3, base="another")
    with pytest.raises(ConfigError, match="other values of documents"):
        record(out, Teacher(), "t", (documents(19),), 3)
    lock = Lock(tmp_path / f"out{PARTIAL}")
    with pytest.raises(LockedError):
        record(out, Teacher(), "t", parts, 3)
    lock.release("done")
    assert record(out, Teacher(), "t", parts, 3).num_continued > 0


def test_memory_does_not_grow_with_what_is_recorded(tmp_path):
    parts = (documents(60, length=80),)
    record(tmp_path / "first", Teacher(), "t", parts, 2)  # imports
    tracemalloc.start()
    try:
        record(tmp_path / "out", Teacher(), "t", parts, 512)  # 19 MB
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "out").stat().st_size > 15_000_000 and peak < 6_000_000
