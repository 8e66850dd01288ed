"""What a config costs on this machine: its operations by formula, the limits of the machine, and measured steps.

The steps are those of the training loop, without a run directory. The results are in `BenchResult`, and in a trace with
one time axis.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.base import interrupt
from dualtune.base.errors import DiskError
from dualtune.base.files import write_file
from dualtune.base.text import in_short_time
from dualtune.data.batches import Ahead
from dualtune.engine.backend import Backend, Batch, Engine
from dualtune.engine.card import card_of
from dualtune.engine.choose import PlatformChoice, open_backend
from dualtune.engine.machine import Machine
from dualtune.engine.machines import CPU_ELEMENTWISE, CPU_LAUNCH_S, CPU_SIDE_SHARES, MachineLimits, published
from dualtune.engine.memory.shapes import UnknownShape, any_decoder
from dualtune.train.objectives.comparison import AnswerComparison
from dualtune.train.policy import StepPolicy
from dualtune.train.prepare import Prepared
from dualtune.train.recovery import explained
from dualtune.train.start import load_comparison, load_engine
from dualtune.train.state.records import environment
from dualtune.train.step import DATA, GRADIENT, OPTIMIZER, TrainingStep

# ----------------------------------------------------------------------------------------------------------------------
# The floating-point operations of training a LoRA adapter, by formula.
#
# PaLM's model FLOPs (Chowdhery et al., arXiv 2204.02311, appendix B), for a frozen base: 2 per token and parameter of a
# matrix product in the forward pass, as many in the backward pass for the gradient of its input, and the gradient of
# the weight only for the adapter. Attention is counted for the tokens that a token may see; its backward pass has 5
# matrix products for the forward pass's 2, as FlashAttention computes it (Dao, arXiv 2307.08691, section 4.1).
#
# Operations that an implementation skips (output rows of tokens that are not targets) or repeats (activation
# checkpointing) change its speed, not this count.

TOLERANCE = 0.02  # of the parameters: norms, biases, position embeddings


class NoFormula(Exception):
    """The formula does not cover the model, or its config is incomplete. The message says which."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder-only transformer and its adapter."""

    matmul_parameters: int  # N: of all matrix products, with the output head; the input embedding is only a look-up
    adapter_parameters: int  # P
    attention_width: int  # heads · head size
    windows: tuple[int | None, ...]  # per layer, how many tokens a token sees; None: itself and all before it
    is_trained: bool = False  # whether the model itself is trained; it has no adapter then


@dataclass(frozen=True, slots=True)
class Flops:
    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def training_flops(shape: Shape, lengths: np.ndarray, shared: np.ndarray | int = 0) -> Flops:
    """Return the FLOPs for documents of these lengths in tokens, int [documents], each of which sees only itself.

    `shared`: tokens at the beginning of each that are computed with another one, which it sees.
    """
    shared = np.broadcast_to(np.asarray(shared), lengths.shape)
    tokens = float((lengths - shared).sum())
    base, adapter = 2 * shape.matmul_parameters * tokens, 2 * shape.adapter_parameters * tokens
    # q·k and the weighted sum of v: one multiplication and one addition each, for every pair of tokens.
    attention = (
        4
        * shape.attention_width
        * float(sum(_pairs(lengths, window) - _pairs(shared, window) for window in shape.windows))
    )
    of_base = (2 if shape.is_trained else 1) * base  # gradients of the inputs, and of the weights
    return Flops(forward=base + adapter + attention, backward=of_base + 2 * adapter + 2.5 * attention)


def _pairs(lengths: np.ndarray, window: int | None) -> int:
    """Return the number of pairs (a token, a token that it sees) in the documents."""
    n = lengths.astype(np.int64)
    reach = n if window is None else np.minimum(n, window)
    return int((reach * (reach + 1) // 2 + (n - reach) * reach).sum())


def document_lengths(batches: Iterable[Batch]) -> np.ndarray:
    """Return the tokens of every document in the micro-batches, int64 [documents]."""
    return document_sizes(batches)[0]


def document_sizes(batches: Iterable[Batch]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of every document in the micro-batches, and how many of them are computed with another one."""
    rows = [pair for batch in batches for pair in zip(batch.segments_BT, batch.positions_BT, strict=True)]
    own = [np.bincount(segments_T)[1:] for segments_T, _ in rows]
    # Positions begin after what is shared.
    shared = [positions_T[np.diff(segments_T, prepend=0) > 0] for segments_T, positions_T in rows]
    if not rows:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.concatenate(own) + np.concatenate(shared), np.concatenate(shared).astype(np.int64)


def read_shape(model_dir: Path, *, num_parameters: int, adapter_parameters: int) -> Shape:
    """Return the shape from config.json, checked against the engine's number of parameters.

    `adapter_parameters`: those that are trained; all of the model's if it is trained whole.

    That number decides whether the feed-forward block has two matrices or three, and whether the output head is the
    embedding. NoFormula if no combination fits: then the model has other parts.
    """
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    try:
        decoder = any_decoder(config)
    except UnknownShape as error:
        raise NoFormula(str(error)) from None
    tied = [decoder.tied] if "tie_word_embeddings" in config else [True, False]
    # GPT-2's feed-forward block has two matrices, SwiGLU's three.
    shapes = [replace(decoder, tied=is_tied, gated=is_gated) for is_tied in tied for is_gated in (False, True)]
    gap, shape = min(
        ((abs(num_parameters - s.linear_parameters - s.table_parameters), s) for s in shapes), key=lambda pair: pair[0]
    )
    if gap > TOLERANCE * num_parameters:
        raise NoFormula(
            f"its {num_parameters:,} parameters do not match a dense decoder with the shapes in config.json"
        )
    matmul_parameters = shape.linear_parameters + shape.vocab * shape.hidden
    windows = _windows(config, shape.layers)
    if adapter_parameters == num_parameters:
        return Shape(matmul_parameters, 0, shape.width, windows, is_trained=True)
    return Shape(matmul_parameters, adapter_parameters, shape.width, windows)


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    types = config.get("layer_types") or ["sliding_attention" if window else "full_attention"] * layers
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise NoFormula(f"it has layers of type {', '.join(sorted(unknown))}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


# ----------------------------------------------------------------------------------------------------------------------
# The limits of this machine for a prediction: published ones for its GPU or chip, measured ones for its CPU.

NUMBERS, LIMIT_REPEATS = 1 << 24, 5  # of an array in float32 that no cache holds


def limits_here(choice: PlatformChoice, machine: Machine, dtype: str) -> MachineLimits | None:
    """Return the limits of this machine for the device that was chosen; None if they are not known."""
    if card_of(choice.backend).kind_for(choice.platform, machine.kinds) == "cpu":
        return measured_limits(open_backend(choice), dtype)
    return published(machine)


def measured_limits(backend: Backend, dtype: str) -> MachineLimits:
    """Measure this CPU: products in a dtype, by the backend, and a copy in memory. It takes about two seconds.

    Narrow products, elementwise code and the call of an operator keep the proportions that benchmarks/predict.py found.
    """
    products = peak_flops(backend, dtype)
    plain = products if dtype == "float32" else peak_flops(backend, "float32")
    return MachineLimits(
        "measured just now", {dtype: products}, CPU_ELEMENTWISE * plain, _copied_bytes_per_s(), None, CPU_LAUNCH_S, 0.0,
        side_shares=CPU_SIDE_SHARES, is_asynchronous=False,
    )  # fmt: skip


def _copied_bytes_per_s() -> float:
    """Return the rate at which an array is copied, read and written bytes together."""
    source, target = np.ones(NUMBERS, np.float32), np.empty(NUMBERS, np.float32)
    seconds: list[float] = []
    for _ in range(LIMIT_REPEATS):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return 2 * source.nbytes / min(seconds)


# ----------------------------------------------------------------------------------------------------------------------
# Steps as the training loop takes them, each part of a step timed.

RESULT, TRACE = "result.json", "trace.json"
# Sizes of the matrix products that measure the machine: increasing, until one takes longer than this.
SMALLEST, LARGEST, LONGEST_S, REPEATS = 512, 8192, 0.25, 8


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Model FLOPs, by the formula above, as a share of the machine's peak."""

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
    """The measured steps of `dualtune bench`."""

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
            comparison = load_comparison(prepared, engine)
            backend.synchronize()
        loaded_bytes = backend.memory().used_bytes
        policy = prepared.make_policy(prepared.config)
        take = partial(_take, prepared, engine, policy, comparison)
        _train(prepared, take, spans, warmup + steps, tell)
    # The peak is read before the extra passes, which need memory of their own.
    memory = backend.memory()
    batches = _forward_only(prepared, engine, spans, range(warmup, warmup + steps))
    profile = _profile(prepared, take, out)

    # The backward pass cannot be timed alone: it is what forward and backward take beyond a forward pass.
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
        fill=sum(b.num_computed for b in batches) / sum(b.tokens_BT.size for b in batches),
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
    # The trace first: a result says that the measurement is complete.
    write_file(out / TRACE, spans.trace())
    write_file(out / RESULT, json.dumps(asdict(result), indent=2) + "\n")
    return result


Take = Callable[[Spans, int, Callable[[int], list[Batch]]], None]


def _train(prepared: Prepared, take: Take, spans: Spans, num_steps: int, tell: Callable[[str], None]) -> None:
    """Take training steps, but synchronize after each phase, unlike the training loop.

    So steps of a few milliseconds are measured slightly too slow.
    """
    prepared.backend.reset_peak_memory()
    with Ahead(prepared.batches, num_steps) as batches_of:
        for step in range(num_steps):
            with spans("step", step):
                take(spans, step, batches_of)
            if step == 0:
                tell(f"the first step took {in_short_time(spans.seconds('step')[0])}; measuring {num_steps - 1} more")


def _take(
    prepared: Prepared, engine: Engine, policy: StepPolicy, comparison: AnswerComparison | None, spans: Spans,
    step: int, batches_of: Callable[[int], list[Batch]],
) -> None:  # fmt: skip
    @contextmanager
    def phase(name: str) -> Generator[None]:
        with spans(name, step):
            yield
            prepared.backend.synchronize()

    outcome = policy.take(TrainingStep(prepared, engine, step, batches_of, phase=phase, comparison=comparison))
    if outcome.update is not None:
        float(outcome.update.output.loss)  # reading it synchronizes the device


def _forward_only(prepared: Prepared, engine: Engine, spans: Spans, steps: range) -> list[Batch]:
    """Make the steps' micro-batches again, with nothing else running, and evaluate them."""
    all_batches: list[Batch] = []
    shapes: set[tuple[int, ...]] = set()  # shapes: the first batch of a shape may compile
    for step in steps:
        with spans("making data", step):
            batches = prepared.batches(step)
        for batch in batches:
            interrupt.poll()
            if batch.tokens_BT.shape not in shapes:
                shapes.add(batch.tokens_BT.shape)
                engine.evaluate(batch)
                prepared.backend.synchronize()
            with spans("forward alone", step):
                engine.evaluate(batch)
                prepared.backend.synchronize()
        all_batches += batches
    return all_batches


def _profile(prepared: Prepared, take: Take, out: Path) -> ProfiledStep:
    batches, spans = prepared.batches(0)[:1], Spans()  # a trace takes megabytes per micro-batch

    def step() -> None:
        with spans("step"):
            take(spans, 0, lambda step: batches)

    profile = prepared.backend.profile(step, out)
    total = sum(profile.seconds.values())
    shares = (
        {kind: s / total for kind, s in sorted(profile.seconds.items(), key=lambda item: -item[1])} if total else {}
    )
    trace = str(profile.trace) if profile.trace else None
    return ProfiledStep(trace, profile.note, next(iter(spans.seconds("step")), None), total, shares)


def _utilisation(
    prepared: Prepared, engine: Engine, batches: list[Batch], seconds: float
) -> tuple[Utilisation | None, str | None]:
    """Return the utilisation, or the reason why there is none."""
    try:
        description = engine.description
        num_parameters, adapter_parameters = description.num_parameters, description.trainable_parameters
        if prepared.config.adapter.method == "full":  # less than all where a model has constants
            adapter_parameters = num_parameters
        shape = read_shape(
            prepared.model.directory, num_parameters=num_parameters, adapter_parameters=adapter_parameters
        )
    except NoFormula as error:
        return None, str(error)
    lengths, shared = document_sizes(batches)
    flops = training_flops(shape, lengths, shared).total
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
