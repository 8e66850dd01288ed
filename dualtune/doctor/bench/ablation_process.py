"""One memory technique measured in a process of its own: memory that a process has used does not all come back.

The process answers {"loaded": true} when training begins, then with a `Measured`, or {"error": …}. In between,
`run_apart` samples the memory of the process from outside.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from dualtune.base import interrupt
from dualtune.base.errors import DualtuneError
from dualtune.config import load_config
from dualtune.doctor.apart import apart, at_work
from dualtune.doctor.bench.measure import document_lengths
from dualtune.engine.backend import Batch, Engine
from dualtune.engine.choose import choose, open_backend
from dualtune.train.objectives.comparison import AnswerComparison
from dualtune.train.policy import StepPolicy
from dualtune.train.prepare import Prepared, prepare
from dualtune.train.profiler.snapshot import process_reader
from dualtune.train.recovery import explained
from dualtune.train.start import load_comparison, load_engine
from dualtune.train.step import TrainingStep


@dataclass(frozen=True, slots=True)
class AblationWork:
    """What a process measures."""

    config: str  # the path of the file
    overrides: Sequence[str]
    platform: str
    steps: int  # after the first one, which may compile


@dataclass(frozen=True, slots=True)
class Measured:
    """What the training steps of a process took."""

    backend: str
    device: str  # its kind
    dtype: str
    # [cells, tokens of the longest document] of the micro-batches, each pair once: the memory depends on them.
    micro_batches: Sequence[tuple[int, int]]
    peak_bytes: int | None  # of tensors; None: the backend does not count them
    step_s: Sequence[float]  # of processor time on a CPU, otherwise of wall time
    loss: float  # of the last step


# --- the process that asks --------------------------------------------------------------------------------------------

PROGRAM = ("-m", "dualtune.doctor.bench.ablation_process")
EVERY_S = 0.003  # a sample of the memory


class Failed(Exception):
    """A measurement that could not be made. The message says why."""


def run_apart(work: AblationWork) -> tuple[Measured, int]:
    """Return what a process measured, and the most bytes that it had while it trained. Failed if it did not end well.

    On Linux they are the anonymous memory: mapped files, such as unchanged weights on a CPU, are not counted.
    """
    with apart(PROGRAM, work) as process:
        answers = process.answers()
        message, peak = next(answers, None), 0
        if message == {"loaded": True}:
            with _sampling(process_reader(process.child.pid)) as most:
                message, peak = next(answers, None), most()
        if message is None:
            raise Failed(process.reason())
        process.child.wait()
    if "error" in message:
        raise Failed(message["error"])
    return Measured(**message), peak


@contextmanager
def _sampling(read: Callable[[], int]) -> Generator[Callable[[], int]]:
    """Sample a number in the background. Yields a function that returns the largest so far."""
    done, peak = threading.Event(), [0]

    def sample() -> None:
        while not done.wait(EVERY_S):
            try:
                peak[0] = max(peak[0], read())
            except OSError:  # the process has ended
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield lambda: peak[0]
    finally:
        done.set()
        thread.join()


# --- the process that measures ---------------------------------------------------------------------------------------


def main() -> None:
    with at_work() as (work, answer):
        try:
            answer(asdict(measure(AblationWork(**work), on_loaded=lambda: answer({"loaded": True}))))
        except DualtuneError as error:
            answer({"error": str(error)})


def measure(work: AblationWork, on_loaded: Callable[[], None]) -> Measured:
    """Take the steps. Errors as those of `dualtune bench`."""
    config = load_config(Path(work.config), work.overrides)
    backend = open_backend(choose(work.platform))
    prepared = prepare(config, backend)
    kind = backend.devices()[0].kind
    with explained(backend, config, "in the measurement, which does not recover from it"):
        engine, policy = load_engine(prepared), prepared.make_policy(prepared.config)
        comparison = load_comparison(prepared, engine)  # before what is measured
        backend.synchronize()
        backend.reset_peak_memory()
        on_loaded()
        batches = [prepared.batches(step) for step in range(1 + work.steps)]
        clock = time.process_time if kind == "cpu" else time.perf_counter
        step_s: list[float] = []
        loss = 0.0
        for step, batches_of_step in enumerate(batches):
            interrupt.poll()
            start = clock()
            loss = _take(prepared, engine, policy, comparison, step, batches_of_step)
            step_s.append(clock() - start)
        all_batches = [batch for batches_of_step in batches for batch in batches_of_step]
        peak = _peak(prepared, all_batches, partial(_take, prepared, engine, policy, comparison, 0))
    sizes = sorted({size_of(batch) for batch in all_batches})
    return Measured(backend.name, kind, engine.description.dtype, sizes, peak, step_s[1:], loss)


def size_of(batch: Batch) -> tuple[int, int]:
    """Return the cells of a micro-batch, padding included, and the tokens of its longest document."""
    return batch.tokens_BT.size, int(document_lengths([batch]).max(initial=0))


def _take(
    prepared: Prepared, engine: Engine, policy: StepPolicy, comparison: AnswerComparison | None, step: int,
    batches: list[Batch],
) -> float:  # fmt: skip
    outcome = policy.take(TrainingStep(prepared, engine, step, lambda step: batches, comparison=comparison))
    loss = 0.0 if outcome.update is None else float(outcome.update.output.loss)
    prepared.backend.synchronize()
    return loss


def _peak(prepared: Prepared, batches: list[Batch], take: Callable[[list[Batch]], float]) -> int | None:
    """Return the allocator's peak of the steps so far; if it keeps none, that of one more, as its profiler counts it.

    An allocator that counts also knows what it keeps for later (`MemoryStats.cached_bytes`).
    """
    memory = prepared.backend.memory()
    if memory.cached_bytes is not None:
        return memory.peak_bytes
    largest = max(batches, key=size_of)
    with tempfile.TemporaryDirectory() as place:
        return prepared.backend.profile(lambda: take([largest]), Path(place)).peak_bytes


if __name__ == "__main__":
    main()
