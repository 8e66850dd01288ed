"""Measure what a config costs on this machine, with the same steps as the training loop.

No run directory is used. The results are in `BenchResult`, and in a trace with one time axis.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dualtune import interrupt
from dualtune.backend import Backend, Batch, Engine
from dualtune.bench.flops import NoFormula, document_lengths, read_shape, training_flops
from dualtune.data.batching.prefetch import Ahead
from dualtune.errors import DiskError
from dualtune.evaluate.shortage import explained
from dualtune.io.disk import write_file
from dualtune.text.show import in_short_time
from dualtune.train.prepare import Prepared
from dualtune.train.run import load_engine
from dualtune.train.state.records import environment
from dualtune.train.step import DATA, GRADIENT, OPTIMIZER, TrainingStep

RESULT, TRACE = "result.json", "trace.json"
# Sizes of the matrix products that measure the machine: increasing, until one takes longer than this.
SMALLEST, LARGEST, LONGEST_S, REPEATS = 512, 8192, 0.25, 8


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Model FLOPs, by the formula of `flops.py`, as a share of the machine's peak."""

    flops_per_token: float
    flops_per_s: float
    peak_flops_per_s: float  # of a large matrix product in the model's dtype, just measured on this machine
    utilisation: float


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """One extra step, with a single micro-batch, under the framework's profiler."""

    trace: str | None
    note: str
    step_s: float | None  # the profiler slows it down
    operations_s: float  # the sum of the operations
    shares: Mapping[str, float]  # by kind of operation; they sum up to 1


@dataclass(frozen=True, slots=True)
class BenchResult:
    environment: Mapping[str, Any]
    model: str
    load_s: float
    first_step_s: float
    warmup: int  # steps before the measured ones
    step_s: Sequence[float]
    num_tokens: int  # of the measured steps, without padding
    num_targets: int
    fill: float  # the share of the cells of all micro-batches that hold a token of a document
    tokens_per_s: float
    target_tokens_per_s: float
    # Mean seconds of a step; they sum up to it. "data" is how long the step waits for its batches, which are built
    # while the previous step runs; "forward" is `Engine.evaluate` on the same batches: without dropout, and without
    # keeping anything for the backward pass, which is the rest of `Engine.forward_backward`.
    phases_s: Mapping[str, float]
    making_data_s: float  # to make a step's batches, with nothing else running
    loaded_bytes: int
    peak_bytes: int
    total_bytes: int
    utilisation: Utilisation | None
    no_utilisation: str | None  # why
    profile: ProfiledStep


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    step: int
    start_s: float
    end_s: float


class Spans:
    """Named time intervals: what ran, and when."""

    def __init__(self) -> None:
        self.all: list[Span] = []
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, name: str, step: int = 0) -> Generator[None]:
        start = time.perf_counter()
        yield
        self.all.append(Span(name, step, start - self._start, time.perf_counter() - self._start))

    def seconds(self, name: str, first_step: int = 0) -> list[float]:
        return [span.end_s - span.start_s for span in self.all if span.name == name and span.step >= first_step]

    def trace(self) -> str:
        """Chrome's trace format, readable by ui.perfetto.dev: a complete event ("X") per interval, in microseconds."""
        events = [
            {"name": span.name, "ph": "X", "ts": 1e6 * span.start_s, "dur": 1e6 * (span.end_s - span.start_s),
             "pid": 0, "tid": 0, "args": {"step": span.step}}
            for span in self.all
        ]  # fmt: skip
        return json.dumps({"traceEvents": events}) + "\n"


def bench(
    prepared: Prepared, out: Path, *, steps: int, warmup: int, tell: Callable[[str], None] = lambda text: None
) -> BenchResult:
    """Measure `steps` steps after `warmup` others, and write result and traces into the directory `out`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"{out}: cannot be created: {error.strerror}") from error
    backend, spans = prepared.backend, Spans()
    with explained(backend, prepared.config, "in the benchmark, which does not recover from it"):
        with spans("load"):
            engine = load_engine(prepared)
            backend.synchronize()
        loaded_bytes = backend.memory().used_bytes
        _train(prepared, engine, spans, warmup + steps, tell)
    memory = backend.memory()
    batches = _forward_only(prepared, engine, spans, range(warmup, warmup + steps))
    profile = _profile(prepared, engine, out)

    step_s = spans.seconds("step", warmup)
    means = {name: sum(spans.seconds(name, warmup)) / steps for name in (DATA, GRADIENT, OPTIMIZER)}
    forward_s = sum(spans.seconds("forward alone")) / steps
    phases_s = {
        "data": means[DATA],
        "forward": forward_s,
        "backward": means[GRADIENT] - forward_s,
        "optimizer": means[OPTIMIZER],
    }
    num_tokens, num_targets = sum(b.num_tokens for b in batches), sum(b.num_targets for b in batches)
    utilisation, no_utilisation = _utilisation(prepared, engine, batches, sum(step_s))
    result = BenchResult(
        environment=environment(backend, engine.description.as_json()),
        model=prepared.config.model.name,
        load_s=spans.seconds("load")[0],
        first_step_s=spans.seconds("step")[0],
        warmup=warmup,
        step_s=step_s,
        num_tokens=num_tokens,
        num_targets=num_targets,
        fill=num_tokens / sum(b.tokens_BT.size for b in batches),
        tokens_per_s=num_tokens / sum(step_s),
        target_tokens_per_s=num_targets / sum(step_s),
        phases_s=phases_s,
        making_data_s=sum(spans.seconds("making data")) / steps,
        loaded_bytes=loaded_bytes,
        peak_bytes=memory.peak_bytes,
        total_bytes=memory.total_bytes,
        utilisation=utilisation,
        no_utilisation=no_utilisation,
        profile=profile,
    )
    write_file(out / TRACE, spans.trace())
    write_file(out / RESULT, json.dumps(asdict(result), indent=2) + "\n")
    return result


def _train(prepared: Prepared, engine: Engine, spans: Spans, num_steps: int, tell: Callable[[str], None]) -> None:
    """Take training steps, but synchronize after each phase, unlike the training loop.

    So steps of a few milliseconds are measured slightly too slow.
    """
    prepared.backend.reset_peak_memory()
    with Ahead(prepared.batches, num_steps) as batches_of:
        for step in range(num_steps):
            with spans("step", step):
                _take(prepared, engine, spans, step, batches_of)
            if step == 0:
                tell(f"the first step took {in_short_time(spans.seconds('step')[0])}; measuring {num_steps - 1} more")


def _take(
    prepared: Prepared, engine: Engine, spans: Spans, step: int, batches_of: Callable[[int], list[Batch]]
) -> None:
    @contextmanager
    def phase(name: str) -> Generator[None]:
        with spans(name, step):
            yield
            prepared.backend.synchronize()

    outcome = prepared.policy.take(TrainingStep(prepared, engine, step, batches_of, phase=phase))
    if outcome.update is not None:
        float(outcome.update.output.loss)  # reading it synchronizes the device


def _forward_only(prepared: Prepared, engine: Engine, spans: Spans, steps: range) -> list[Batch]:
    """Make the steps' micro-batches again, with nothing else running, and evaluate them."""
    all_batches: list[Batch] = []
    seen: set[tuple[int, ...]] = set()  # shapes: the first batch of a shape may compile
    for step in steps:
        with spans("making data", step):
            batches = prepared.batches(step)
        for batch in batches:
            interrupt.poll()
            if batch.tokens_BT.shape not in seen:
                seen.add(batch.tokens_BT.shape)
                engine.evaluate(batch)
                prepared.backend.synchronize()
            with spans("forward alone", step):
                engine.evaluate(batch)
                prepared.backend.synchronize()
        all_batches += batches
    return all_batches


def _profile(prepared: Prepared, engine: Engine, out: Path) -> ProfiledStep:
    batches, spans = prepared.batches(0)[:1], Spans()  # a trace takes megabytes per micro-batch

    def step() -> None:
        with spans("step"):
            _take(prepared, engine, spans, 0, lambda step: batches)

    found = prepared.backend.profile(step, out)
    total = sum(found.seconds.values())
    shares = {kind: s / total for kind, s in sorted(found.seconds.items(), key=lambda item: -item[1])} if total else {}
    trace = str(found.trace) if found.trace else None
    return ProfiledStep(trace, found.note, next(iter(spans.seconds("step")), None), total, shares)


def _utilisation(
    prepared: Prepared, engine: Engine, batches: list[Batch], seconds: float
) -> tuple[Utilisation | None, str | None]:
    """Return the utilisation, or the reason why there is none."""
    try:
        found = engine.description
        num_parameters, adapter_parameters = found.num_parameters, found.trainable_parameters
        shape = read_shape(
            prepared.model.directory, num_parameters=num_parameters, adapter_parameters=adapter_parameters
        )
    except NoFormula as error:
        return None, str(error)
    lengths = document_lengths(batches)
    flops = training_flops(shape, lengths).total
    peak = peak_flops(prepared.backend, engine.description.dtype)
    return Utilisation(flops / float(lengths.sum()), flops / seconds, peak, flops / seconds / peak), None


def peak_flops(backend: Backend, dtype: str) -> float:
    """Return the highest FLOP/s of a product of two square matrices. It takes about a second on a CPU."""
    best, size, seconds = 0.0, SMALLEST, 0.0
    while size <= LARGEST and 8 * seconds <= LONGEST_S:  # twice the size is eight times the operations
        product = backend.matmul(size, dtype)
        product()
        seconds = min(_timed(product) for _ in range(REPEATS))
        best, size = max(best, 2 * size**3 / seconds), 2 * size
    return best


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
