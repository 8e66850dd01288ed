"""The input of a conformance check, and the measurements and comparisons that the checks use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file  # pyright: ignore[reportUnknownVariableType]

from dualtune.engine.backend import Backend, Batch, Engine, LoadRequest, OptimizerState, SharedBase
from dualtune.engine.card import NUMBER
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.oracles import Oracle, llama_oracle, softmax_oracle
from dualtune.engine.testing.tiny_models import random_batch, write_softmax_model, write_tiny_llama
from dualtune.model.adapter import AdapterSpec, Tensors, modules_of, tensor_name
from dualtune.model.beside import BesideAdapter
from dualtune.model.methods import METHODS
from dualtune.model.optimizer import OPTIMIZERS, Averaging, OptimizerSpec, RuleName
from dualtune.model.update_rules import Settings

SPEC = AdapterSpec(rank=4, alpha=6.0, dropout=0.0, targets=("all-linear",))  # a scale that is not an integer
DECAY = 0.1
CHANGES: dict[RuleName, Settings] = {"schedule_free": {"warmup_steps": 1.0}}  # so that the shares are not 1 / step
# Averages that begin in the first three updates, each on another optimizer.
AVERAGES: dict[RuleName, tuple[str, Averaging]] = {
    "adamw": ("tail", Averaging(start=1)), "adamw_8bit": ("ema", Averaging(least=0.6)),
    "sgd": ("ema", Averaging(least=0.4)),
}  # fmt: skip
TOGETHER = {*AVERAGES, "schedule_free", "muon"}  # checked with LoRA+ too: one of each kind of update
PLAIN = {"adamw", "muon"}  # beside the plain code of layers, because an optimizer is the same code beside either
LORA_PLUS = {"lora_B.weight": 3.0}  # learning-rate factors
CODES_APART = 2e-3  # share of the values


@dataclass(frozen=True)
class Case:
    """A backend with a model to check it on, and an oracle for that model."""

    backend: Backend
    model_dir: Path
    oracle: Oracle
    vocab: int
    spec: AdapterSpec = field(default=SPEC)
    kernels: str = "auto"
    dtype: str = "auto"
    optimizer: RuleName = "adamw"
    average: Averaging | None = None
    lr_factors: Mapping[str, float] = field(default_factory=dict[str, float])
    changes: Settings | None = None  # of hyperparameters; None: those of CHANGES
    shared_base: SharedBase | None = None  # of all engines, if those of the backend can use one at the same time
    # Names in the model: embedding and output head, norms, and linear layers other than the head.
    tables: tuple[str, str] = ("model.embed_tokens", "lm_head")
    norms: tuple[str, ...] = ("model.norm", "input_layernorm")
    inner: tuple[str, ...] = ("q_proj", "v_proj", "down_proj")

    def oracle_with(self, beside: BesideAdapter) -> Oracle:
        """Return the oracle for a state with what is trained beside the adapter."""
        return (softmax_oracle if self.tables[0] == "embedding" else llama_oracle)(self.model_dir, beside.rows)

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        changes = self.changes or {"weight_decay": DECAY, **CHANGES.get(self.optimizer, {})}
        return OptimizerSpec(self.optimizer, changes, self.average, self.lr_factors)

    def engine(self, *, model_dir: Path | None = None, trained: bool = True, **changes: object) -> Engine:
        """Return a float32 engine; with `trained` the adapter's B is not zero. `changes` are fields of the spec."""
        request = LoadRequest(
            model_dir or self.model_dir, self.dtype, "auto", "pretrained", replace(self.spec, **changes),
            self.optimizer_spec, seed=7, kernels=self.kernels, shared_base=self.shared_base,
        )  # fmt: skip
        engine = self.backend.load(request)
        if trained:
            engine.load_adapter_state(random_adapter(engine.adapter_state()))
        return engine

    def batch(self, **options: int) -> Batch:
        return random_batch([9, 16, 5, 12], self.vocab, **options)


def llama_case(backend: Backend, directory: Path, **changes: Any) -> Case:
    """Return a case with a tiny Llama. `changes` are keys of the model's config."""
    path = write_tiny_llama(directory / "tiny-llama", **changes)
    return Case(backend, path, llama_oracle(path), vocab=96)


def softmax_case(backend: Backend, directory: Path) -> Case:
    path = write_softmax_model(directory / "softmax")
    return Case(backend, path, softmax_oracle(path), vocab=31, tables=("embedding", "head"), norms=(), inner=("mixer",))


def random_adapter(like: Tensors, seed: int = 3) -> Tensors:
    """Return random matrices, and vectors that are multiples of those of `like`: lengths stay lengths."""
    rng = np.random.default_rng(seed)
    noise = {n: 0.3 * rng.normal(size=w.shape) for n, w in like.items()}
    random = {n: x / np.sqrt(x.shape[-1]) if x.ndim > 1 else like[n] * (1 + x) for n, x in noise.items()}
    return {n: x.astype(np.float32) for n, x in random.items()}


def moved(case: Case, state: Tensors, direction: Tensors, step: float) -> Tensors:
    """Return the state after a step, float64.

    With DoRA a magnitude also keeps its ratio to the norm of its row, which is a constant in the gradient (arXiv
    2402.09353, section 4.3).
    """
    after = {n: w + step * direction[n].astype(np.float64) for n, w in state.items()}
    for module in modules_of(state) if case.spec.method == "dora" else ():
        A, B, m = (tensor_name(module, part, "dora") for part in ("A", "B", "m"))
        weight_OI = load_file(case.model_dir / "model.safetensors")[f"{module}.weight"].astype(np.float64)
        before, now = (np.linalg.norm(weight_OI + case.spec.scale * w[B] @ w[A], axis=1) for w in (state, after))
        after[m] *= now / before
    return after


def with_each_method(check: Callable[[Case], None]) -> Callable[[Case], None]:
    """Repeat a check with each method of adapters that the backend honours."""

    @wraps(check)
    def check_each(case: Case) -> None:
        for method in sorted(case.backend.capabilities().get("adapter.method", {"lora"}) & METHODS.keys()):
            try:
                check(replace(case, spec=replace(case.spec, method=method)))
            except AssertionError as error:
                error.add_note(f"with the method {method}")
                raise

    return check_each


def with_each_optimizer(check: Callable[[Case], None]) -> Callable[[Case], None]:
    """Repeat a check with each optimizer that the backend honours, and with averages and LoRA+ on top of them."""

    @wraps(check)
    def check_each(case: Case) -> None:
        for options in optimizers_of(case):
            try:
                check(replace(case, **options))
            except AssertionError as error:
                error.add_note(f"with {options}")
                raise

    return check_each


def optimizers_of(case: Case) -> Iterator[dict[str, Any]]:
    """Yield what the backend honours of the table of optimizers, plain and with the rest on top, as fields of a case.

    An average and LoRA+ come together, so that the second pass has both.
    """
    honoured = case.backend.capabilities()
    factors = LORA_PLUS if NUMBER in honoured.get("train.lora_plus_ratio", ()) else {}
    for name in OPTIMIZERS:
        key, default = ("train.schedule", "cosine") if name == "schedule_free" else ("train.optimizer", "adamw")
        if name not in honoured.get(key, {default}) or (case.kernels == "reference" and name not in PLAIN):
            continue
        yield {"optimizer": name}
        kind, average = AVERAGES.get(name, ("none", None))
        if kind not in honoured.get("train.average", ()):
            average = None
        if name in TOGETHER and (average is not None or factors):
            yield {"optimizer": name, "average": average, "lr_factors": factors}


def gradient(engine: Engine, *batches: Batch) -> Tensors:
    """Return the gradient of the mean loss over all targets of the batches. The engine has AdamW and changes state."""
    num_targets = sum(batch.num_targets for batch in batches)
    for batch in batches:
        engine.forward_backward(batch, divisor=num_targets)
    engine.optim_step(lr=0.0, max_grad_norm=None)
    return gradient_in(engine.optimizer_state())


def gradient_in(state: OptimizerState) -> Tensors:
    """Return the clipped gradient of the only step so far: AdamW's m is then (1 − β1) · g."""
    beta1 = np.float32(1 - OPTIMIZERS["adamw"].defaults["beta1"])
    return {n: m / beta1 for n, m in state.slots["m"].items()}


def in_float64(tensors: Tensors) -> Tensors:
    return {n: w.astype(np.float64) for n, w in tensors.items()}


def norm_of(tensors: Tensors) -> float:
    return float(np.sqrt(sum((w.astype(np.float64) ** 2).sum() for w in tensors.values())))


def assert_close(a: Tensors, b: Tensors, tolerance: float) -> None:
    """Assert that the relative difference, by the norm of all tensors together, is small."""
    assert a.keys() == b.keys()
    difference, size = norm_of({n: a[n].astype(np.float64) - b[n] for n in a}), norm_of(b)
    gap = difference / size if size else difference
    assert gap <= tolerance, f"relative difference {gap:.2e}, allowed {tolerance:.0e}"


def assert_close_codes(a: Tensors, b: Tensors, tolerance: float) -> None:
    """Like `assert_close` for slots in 8 bits: a few values, where a tiny difference decides, have the next code."""
    assert a.keys() == b.keys()
    actual, expected = (np.concatenate([tensors[n].ravel() for n in a]).astype(np.float64) for tensors in (a, b))
    difference, size = np.abs(actual - expected), np.maximum(np.abs(actual), np.abs(expected))
    share = float((difference > tolerance * size).mean())
    assert share <= CODES_APART, f"{share:.2%} of the values have another code, allowed {CODES_APART:.1%}"
    assert (difference <= size / 8 + size.max() * 2.0**-15).all(), "a value is more than one code away"


def assert_equal(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys()
    unequal = [n for n in a if not np.array_equal(a[n], b[n])]
    assert not unequal, f"differ: {unequal}"


def assert_same_loss_and_gradient(case: Case, a: Batch, b: Batch, *, dropout: float = 0.0) -> None:
    """Assert that both batches have the same loss and the same gradient."""
    losses = [case.engine().evaluate(batch) for batch in (a, b)]
    assert losses[0].num_targets == losses[1].num_targets
    assert abs(losses[0].loss_sum - losses[1].loss_sum) <= tolerances.LOGPROBS * losses[0].num_targets
    grads = [gradient(case.engine(dropout=dropout), batch) for batch in (a, b)]
    assert_close(grads[0], grads[1], tolerances.GRADIENT)
