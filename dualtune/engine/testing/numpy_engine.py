"""A complete backend in NumPy: the example for authors of new ones, and an oracle in float64.

The model predicts the next token from the last: logits = head · tanh(mixer · embedding[token]), with LoRA or DoRA on
`mixer` and `head`, whole modules or rows of `embedding` and `head` beside them, and gradients written by hand. Master
weights and the optimizer's slots are float32, as in every engine; all arithmetic is float64.

Legend: N tokens of the micro-batch in one row, D hidden, V vocabulary, r rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
from safetensors.numpy import load_file, save_file  # pyright: ignore[reportUnknownVariableType]

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.base.world import Alone
from dualtune.engine.adapter_bank import AdapterBank, adapters_of, check_base_alone, kept_ranks
from dualtune.engine.backend import (
    CLIP_EPS,
    Batch,
    DeviceInfo,
    EngineDescription,
    LoadRequest,
    LossSum,
    MemoryStats,
    OptimizerState,
    Profile,
    StepOutput,
    Weigh,
    check_slots,
    check_state,
    most_probable_first,
    weighed_in_two_passes,
)
from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing
from dualtune.engine.decoding import GenerationCache, LikelyRow, likely_on_host
from dualtune.engine.testing.numpy_card import CARD
from dualtune.model.adapter import AdapterSpec, Tensors, owner_of, tensor_name
from dualtune.model.beside import Table, parameter_name, rows_name, sizes_of, trained_parameters, trained_rows
from dualtune.model.dropout import channel_keys, keep_mask
from dualtune.model.methods.dora import LEAST_NORM, row_norms
from dualtune.model.update_rules import Settings

MODEL_TYPE = "dualtune-softmax"


class NumpyBackend:
    """See `dualtune.engine.backend.Backend`."""

    name = CARD.name

    def __init__(self) -> None:
        self._process, self._total_bytes = psutil.Process(), psutil.virtual_memory().total

    def capabilities(self) -> Mapping[str, frozenset[Any]]:
        return CARD.capabilities()

    def devices(self) -> list[DeviceInfo]:
        return [DeviceInfo("NumPy", "cpu", self._total_bytes)]

    def memory(self) -> MemoryStats:
        used = self._process.memory_info().rss
        return MemoryStats(used, used, self._total_bytes)

    def reset_peak_memory(self) -> None:
        """Do nothing: the peak is not tracked."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def is_device_fault(self, error: BaseException) -> bool:
        return False  # its device is the CPU that runs this

    def load(self, request: LoadRequest) -> NumpyEngine:
        config = json.loads((request.model_dir / "config.json").read_text(encoding="utf-8"))
        if config["model_type"] != MODEL_TYPE:
            raise EnvironmentFault(f"{request.model_dir}: got model_type {config['model_type']}, allowed: {MODEL_TYPE}")
        return NumpyEngine(request.shared(lambda: load_file(request.model_dir / "model.safetensors")), request)

    def world(self) -> Alone:
        return Alone()

    def synchronize(self) -> None:
        """Do nothing: NumPy is done when it returns."""

    def matmul(self, size: int, dtype: str) -> Callable[[], object]:
        a, b, c = (np.ones((size, size), dtype) for _ in range(3))
        return lambda: np.matmul(a, b, out=c)

    def profile(self, work: Callable[[], object], directory: Path) -> Profile:
        return Profile(None, "NumPy has no profiler", {})


def backend(device: str = "auto") -> NumpyBackend:
    """Build the backend: the entry point."""
    return NumpyBackend()


class NumpyEngine:
    """See `dualtune.engine.backend.Engine`. All arithmetic is float64."""

    def __init__(self, weights: Tensors, request: LoadRequest) -> None:
        self._weights = {name: w.astype(np.float64) for name, w in weights.items()}
        self._request = request
        available = {m: (w.shape[0], w.shape[1]) for m in ("mixer", "head") for w in [weights[f"{m}.weight"]]}
        self._shapes = shapes = request.adapter.select(available)
        self._beside = _trained_beside(request, self._weights, shapes)
        self._keys = {m: channel_keys(m, in_dim) for m, (_, in_dim) in shapes.items()}
        self._params, self._start = request.adapter.split(self._initial(request.adapter))
        slots = request.optimizer.slot_shapes(self._trained_shapes)
        self._slots = {s: {n: np.zeros(shape, np.float32) for n, shape in own.items()} for s, own in slots.items()}
        self._step = 0
        self._grads = {name: np.zeros(w.shape) for name, w in self._params.items()}
        self._loss = 0.0
        self._scoring: tuple[AdapterBank, np.ndarray] | None = None  # the adapters of rows that are scored
        self.description = EngineDescription(
            device="cpu",
            dtype="float64",
            dtype_reason="an oracle should be exact",
            quantization="none",
            quantization_reason="as stored",
            num_parameters=sum(w.size for w in self._weights.values()),
            trained_beside=sizes_of(self.adapter_shapes),
            trainable_parameters=sum(w.size for w in self._params.values()),
            layers_below_adapter=int("mixer" not in shapes and not any("head" not in name for name in self._beside)),
            checkpointing=KEEP_ALL.describe(num_layers=0),
            checkpointing_reason=KEEP_ALL.reason,
        )
        self.set_checkpointing(request.checkpointing)

    # --- forward and backward -------------------------------------------------------------------------------------

    def _weight(self, module: str) -> np.ndarray:
        """Return the weight of a module, with what is trained of it beside the adapter, float64."""
        weight = self._weights[f"{module}.weight"]
        if (name := parameter_name(f"{module}.weight")) in self._beside:
            return self._params[name].astype(np.float64)
        if (name := rows_name(module)) in self._beside:
            weight = weight.copy()
            weight[self._beside[name]] = self._params[name]
        return weight

    def _add_slope(self, module: str, slope: np.ndarray) -> None:
        """Add the gradient of a whole weight to that of what is trained of it."""
        for name in (parameter_name(f"{module}.weight"), rows_name(module)):
            if name in self._beside:
                self._grads[name] += slope[self._beside[name]]

    def _parts(self, module: str) -> dict[str, np.ndarray]:
        """Return the parts of a module, float64, with a start that is kept."""
        parts, method = self._request.adapter.method_spec.parts, self._request.adapter.method
        names = {part: tensor_name(module, part, method) for part in parts}
        own, start = (
            {n: tensors[n] for n in names.values() if n in tensors} for tensors in (self._params, self._start)
        )
        state = self._request.adapter.joined(own, start)
        return {part: state[name].astype(np.float64) for part, name in names.items()}

    def _norms(self, module: str, parts: dict[str, np.ndarray]) -> np.ndarray | float:
        """Return DoRA's divisor of the magnitudes; for LoRA, whose magnitudes are 1, also 1."""
        if "m" not in parts:
            return 1.0
        scale = self._request.adapter.scale_of(module)
        return row_norms(self._weights[f"{module}.weight"] + scale * parts["B"] @ parts["A"]).clip(LEAST_NORM)

    def _linear(self, module: str, x_NI: np.ndarray, seeds_N: np.ndarray | None) -> np.ndarray:
        """Return g ∘ z, where z = W x + scale · B (A x̃) and x̃ is x after dropout. For LoRA g is 1."""
        z_NO = x_NI @ self._weight(module).T
        if module not in self._keys:
            return z_NO
        parts, scale = self._parts(module), self._request.adapter.scale_of(module)
        z_NO = z_NO + scale * (self._after_dropout(module, x_NI, seeds_N) @ parts["A"].T) @ parts["B"].T
        return z_NO * (parts.get("m", 1.0) / self._norms(module, parts))

    def _linear_backward(
        self, module: str, g_NO: np.ndarray, x_NI: np.ndarray, seeds_N: np.ndarray | None
    ) -> np.ndarray:
        """Add the gradients of the parts for the output gradient g, and return the gradient of the layer's input."""
        W_OI = self._weight(module)
        if module not in self._keys:
            self._add_slope(module, g_NO.T @ x_NI)
            return g_NO @ W_OI
        spec, parts = self._request.adapter, self._parts(module)
        slopes: dict[str, np.ndarray] = {}
        scale, dropped_NI = spec.scale_of(module), self._after_dropout(module, x_NI, seeds_N)
        u_Nr = dropped_NI @ parts["A"].T
        if "m" in parts:
            norms_O = self._norms(module, parts)
            slopes["m"] = (g_NO * (x_NI @ W_OI.T + scale * u_Nr @ parts["B"].T)).sum(0) / norms_O
            g_NO = g_NO * (parts["m"] / norms_O)
        v_Nr = scale * g_NO @ parts["B"]
        slopes |= {"A": v_Nr.T @ dropped_NI, "B": scale * g_NO.T @ u_Nr}
        trained, _ = spec.split({tensor_name(module, part, spec.method): slope for part, slope in slopes.items()})
        for name, slope in trained.items():
            self._grads[name] += slope
        return g_NO @ W_OI + self._after_dropout(module, v_Nr @ parts["A"], seeds_N)

    def _after_dropout(self, module: str, x_NI: np.ndarray, seeds_N: np.ndarray | None) -> np.ndarray:
        p = self._request.adapter.dropout
        if seeds_N is None or not p:
            return x_NI
        return x_NI * keep_mask(seeds_N, self._keys[module], p) / (1 - p)

    def _forward(
        self, tokens_N: np.ndarray, seeds_N: np.ndarray | None = None, hidden_ND: np.ndarray | None = None,
        temperature: float = 1.0,
    ) -> dict[str, np.ndarray]:  # fmt: skip
        x = self._weight("embedding")[tokens_N]
        if hidden_ND is None:
            hidden_ND = np.tanh(self._linear("mixer", x, seeds_N))
        logits = self._linear("head", hidden_ND, seeds_N) / temperature
        return {"x": x, "h": hidden_ND, "logp": _log_softmax(logits)}

    def evaluate(self, batch: Batch) -> LossSum:
        tokens_N, labels_N, _ = _targets(batch)
        logp_N = _at(self._forward(tokens_N, None, _hidden(batch), batch.temperature)["logp"], labels_N)
        return LossSum(float(-_weighted(logp_N, batch).sum()), batch.num_targets)

    def top_logprobs(self, batch: Batch, k: int) -> tuple[np.ndarray, np.ndarray]:
        logp_NV = self._logp_at_targets(batch)
        top_Nk = np.argsort(-logp_NV, axis=-1, kind="stable")[:, :k].astype(np.int32)
        return most_probable_first(top_Nk, _at(logp_NV, top_Nk).astype(np.float32))

    def target_logprobs(self, batch: Batch, *, dropout: bool = False) -> np.ndarray:
        logprobs_BT = np.zeros(batch.labels_BT.shape, np.float32)
        logprobs_BT[batch.is_target_BT] = _at(self._logp_at_targets(batch, dropout=dropout), _targets(batch)[1])
        return logprobs_BT

    def _logp_at_targets(self, batch: Batch, *, dropout: bool = False) -> np.ndarray:
        """Return log p of the whole vocabulary at the targets, [N, V]; with the adapters of `scoring` in its block."""
        tokens_N, _, seeds_N = _targets(batch)
        if self._scoring is None:
            return self._forward(tokens_N, seeds_N if dropout else None, _hidden(batch), batch.temperature)["logp"]
        bank, adapters_B = self._scoring
        adapters_N = adapters_B[np.nonzero(batch.is_target_BT)[0]]
        return _log_softmax(self._logits_of(bank, tokens_N, adapters_N) / batch.temperature)

    def forward_backward(self, batch: Batch, *, divisor: float) -> None:
        tokens_N, labels_N, seeds_N = _targets(batch)
        f = self._forward(tokens_N, seeds_N, _hidden(batch), batch.temperature)
        self._loss += float(-_weighted(_at(f["logp"], labels_N), batch).sum()) / divisor
        # Of several labels, each has a weight of its own: Σ w · (p − onehot(label)).
        weights_NK, labels_NK = _weighted(np.ones(labels_N.shape), batch), labels_N
        if labels_N.ndim == 1:
            weights_NK, labels_NK = weights_NK[:, None], labels_N[:, None]
        g_NV = np.exp(f["logp"]) * weights_NK.sum(-1, keepdims=True)
        np.add.at(g_NV, (np.arange(len(labels_N))[:, None], labels_NK), -weights_NK)
        g_NV /= divisor * batch.temperature
        g_ND = self._linear_backward("head", g_NV, f["h"], seeds_N)
        g_ND = self._linear_backward("mixer", g_ND * (1 - f["h"] ** 2), f["x"], seeds_N)
        slope_VD = np.zeros_like(self._weights["embedding.weight"])
        np.add.at(slope_VD, tokens_N, g_ND)
        self._add_slope("embedding", slope_VD)

    def forward_backward_of(self, batch: Batch, weigh: Weigh, *, divisor: float) -> np.ndarray:
        return weighed_in_two_passes(self, batch, weigh, divisor)

    def gradient(self) -> Tensors:
        return {name: g.astype(np.float32) for name, g in self._grads.items()}

    def add_gradient(self, gradient: Tensors) -> None:
        check_state(self._trained_shapes, gradient, "gradient")
        for name, g in gradient.items():
            self._grads[name] += g

    def hidden_states(self, batch: Batch) -> np.ndarray:
        h_ND = self._forward(batch.tokens_BT.ravel())["h"]
        return h_ND.reshape(*batch.tokens_BT.shape, -1)

    # --- optimizer ------------------------------------------------------------------------------------------------

    def optim_step(self, *, lr: float, max_grad_norm: float | None) -> StepOutput:
        norm = float(np.sqrt(sum((g**2).sum() for g in self._grads.values())))
        clip = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + CLIP_EPS))
        loss, self._loss = self._loss, 0.0
        if math.isfinite(loss) and math.isfinite(norm):
            self._update(lr, clip)
        self.discard()
        return StepOutput(loss, norm)

    def discard(self) -> None:
        self._loss = 0.0
        for g in self._grads.values():
            g[:] = 0

    def set_hyperparameters(self, changes: Settings) -> None:
        self._request = replace(self._request, optimizer=replace(self._request.optimizer, changes=changes))

    def _update(self, lr: float, clip: float) -> None:
        optimizer = self._request.optimizer
        self._step += 1
        for name, w in self._params.items():
            slots = {slot: tensors[name] for slot, tensors in self._slots.items() if name in tensors}
            own_lr = lr * optimizer.lr_factor(name)
            w, after = optimizer.update(w, self._grads[name] * clip, slots, step=self._step, lr=own_lr)
            self._params[name] = w.astype(np.float32)
            for slot, array in after.items():
                self._slots[slot][name] = array.astype(np.float32)

    def set_checkpointing(self, checkpointing: ActivationCheckpointing) -> None:
        if checkpointing != KEEP_ALL:
            raise ConfigError("memory.checkpointing: this engine recomputes nothing; allowed: auto, none")

    # --- states ---------------------------------------------------------------------------------------------------

    @property
    def adapter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._request.adapter.state_shapes(self._trained_shapes)

    @property
    def _trained_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: w.shape for name, w in self._params.items()}

    def adapter_state(self) -> Tensors:
        state = self._request.adapter.joined(self._params, self._start)
        return {name: w.copy() for name, w in state.items()}

    def neutral_state(self) -> Tensors:
        return self._initial(self._request.adapter.plain)

    def _initial(self, adapter: AdapterSpec) -> Tensors:
        own = {
            name: self._frozen(cast(str, owner_of(name)))[rows].astype(np.float32)
            for name, rows in self._beside.items()
        }
        return adapter.initial(self._shapes, self._request.seed, self._frozen) | own

    def _frozen(self, module: str) -> np.ndarray:
        return self._weights[f"{module}.weight"].astype(np.float32)

    def load_adapter_state(self, state: Tensors) -> None:
        check_state(self.adapter_shapes, state, "adapter")
        self._params, self._start = self._request.adapter.split({n: state[n].copy() for n in self._params})

    def optimizer_state(self) -> OptimizerState:
        return OptimizerState(self._step, {slot: dict(tensors) for slot, tensors in self._slots.items()})

    def load_optimizer_state(self, state: OptimizerState) -> None:
        check_slots(self._request.optimizer, self._trained_shapes, state)
        self._step, self._slots = state.step, {slot: dict(tensors) for slot, tensors in state.slots.items()}

    # --- use ------------------------------------------------------------------------------------------------------

    def most_probable(self, batch: Batch) -> np.ndarray:
        tokens_BT = self.logprobs(batch).argmax(-1)
        return np.where(batch.is_target_BT, tokens_BT, -1).astype(np.int32)

    def logprobs(self, batch: Batch) -> np.ndarray:
        logp = self._forward(batch.tokens_BT.ravel(), temperature=batch.temperature)["logp"]
        return logp.reshape(*batch.tokens_BT.shape, -1).astype(np.float32)

    def generate(
        self, prompt: np.ndarray, *, choose: Callable[[np.ndarray], int | None], cache: GenerationCache | None = None
    ) -> Iterator[int]:
        last = int(prompt[-1])  # on which alone the next token depends: there is nothing to cache
        while (token := choose(self._forward(np.array([last]))["logp"][0].astype(np.float32))) is not None:
            yield token
            last = token

    def decoding(self, bank: AdapterBank | None = None) -> NumpyDecoding:
        if bank is None:
            return NumpyDecoding(lambda tokens_B, adapters_B: self._forward(tokens_B)["logp"])
        check_base_alone(self._request.adapter, self._shapes)
        bank.check_fits({module: self._weights[f"{module}.weight"].shape for module in ("mixer", "head")})
        return NumpyDecoding(partial(self._logits_of, bank))

    @contextmanager
    def scoring(self, bank: AdapterBank, adapters: Sequence[int]) -> Generator[None]:
        self.decoding(bank)  # tells whether these adapters fit
        self._scoring = bank, np.array(adapters)
        try:
            yield
        finally:
            self._scoring = None

    def _logits_of(self, bank: AdapterBank, tokens_B: np.ndarray, adapters_B: np.ndarray) -> np.ndarray:
        """Return the logits after tokens, each computed with an adapter of a bank in place of the engine's own."""

        def linear(module: str, x_BI: np.ndarray) -> np.ndarray:
            y_BO = x_BI @ self._weights[f"{module}.weight"].T
            if module not in bank.ranks:
                return y_BO
            A_SI, B_OS = (factor.astype(np.float64) for factor in bank.factors(module))
            return y_BO + np.where(kept_ranks(bank.layout([module]), adapters_B), x_BI @ A_SI.T, 0) @ B_OS.T

        return linear("head", np.tanh(linear("mixer", self._weights["embedding.weight"][tokens_B])))

    def save_merged(self, path: Path) -> None:
        merged = {name: self._weight(name.removesuffix(".weight")).copy() for name in self._weights}
        for module in self._keys:
            spec, frozen = self._request.adapter, partial(self._frozen, module)
            merged[f"{module}.weight"] += spec.method_spec.delta(self._parts(module), spec.scale_of(module), frozen)
        path.mkdir(parents=True)
        (path / "config.json").write_bytes((self._request.model_dir / "config.json").read_bytes())
        save_file({n: w.astype(np.float32) for n, w in merged.items()}, path / "model.safetensors")


def _trained_beside(request: LoadRequest, weights: Tensors, adapted: Collection[str]) -> dict[str, Any]:
    """Return which rows of a weight are trained, by the name in a state; all of a module that is trained whole."""
    beside = request.adapter.beside
    whole = trained_parameters(beside, weights, adapted)
    head = None if "head" in adapted else Table("head", len(weights["head.weight"]))
    modules = [name.removesuffix(".weight") for name in whole]
    rows = trained_rows(beside, Table("embedding", len(weights["embedding.weight"])), head, modules)
    chosen: dict[str, Any] = {parameter_name(name): slice(None) for name in whole}
    return chosen | {rows_name(module): [*beside.rows] for module in rows}


class NumpyDecoding:
    """See `dualtune.engine.decoding.Decoding`. The next token depends on the last one alone: nothing is cached."""

    def __init__(self, logits: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
        """`logits`: after tokens (int32 [B]) by the adapters of their rows."""
        self._logits = logits
        self._adapters_B = np.zeros(0, np.int32)

    def enter(
        self, texts: Sequence[np.ndarray], text_of: Sequence[int] | None = None,
        *, adapters: Sequence[int] | None = None, caches: Sequence[GenerationCache | None] | None = None,
    ) -> NumpyNextLogits:  # fmt: skip
        rows = [*range(len(texts))] if text_of is None else [*text_of]
        adapters_B = adapters_of(texts, adapters)[rows]
        self._adapters_B = np.concatenate([self._adapters_B, adapters_B])
        return self._after(np.array([texts[row][-1] for row in rows]), adapters_B)

    def advance(self, tokens_B: np.ndarray) -> NumpyNextLogits:
        if len(tokens_B) != len(self._adapters_B):
            raise ValueError(f"got {len(tokens_B)} tokens for {len(self._adapters_B)} rows")
        return self._after(tokens_B, self._adapters_B)

    def hold(self, row: int, text: np.ndarray, cache: GenerationCache) -> None:
        pass  # there is nothing to hold

    def leave(self, staying: Sequence[int]) -> None:
        self._adapters_B = self._adapters_B[list(staying)]

    def _after(self, tokens_B: np.ndarray, adapters_B: np.ndarray) -> NumpyNextLogits:
        return NumpyNextLogits(self._logits(tokens_B, adapters_B).astype(np.float32))


class NumpyNextLogits:
    def __init__(self, logits_BV: np.ndarray) -> None:
        self._logits_BV = logits_BV

    def most_probable(self, *, is_last: bool = False) -> np.ndarray:
        return self._logits_BV.argmax(-1).astype(np.int32)

    def likely(self, most: int, temperatures_B: np.ndarray) -> list[LikelyRow]:
        return likely_on_host(self._logits_BV, most, temperatures_B)

    def rows(self, indices: Sequence[int] | None = None) -> np.ndarray:
        return self._logits_BV if indices is None else self._logits_BV[list(indices)]


def _targets(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, labels and dropout seeds of the targets. In this model a prediction depends only on its token."""
    where = batch.is_target_BT
    return batch.tokens_BT[where], batch.labels_BT[where], batch.dropout_seeds_BT[where]


def _at(logp_NV: np.ndarray, labels_N: np.ndarray) -> np.ndarray:
    """Return log p of the labels, of their shape: [N] or [N, K]."""
    labels_NK = labels_N if labels_N.ndim == 2 else labels_N[:, None]
    return np.take_along_axis(logp_NV, labels_NK, -1).reshape(labels_N.shape)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _hidden(batch: Batch) -> np.ndarray | None:
    """Return the given hidden states of the targets."""
    return None if batch.hidden_BTD is None else batch.hidden_BTD[batch.is_target_BT]


def _weighted(values: np.ndarray, batch: Batch) -> np.ndarray:
    """Return the values of the labels, [N] or [N, K], each times its loss weight."""
    return values if batch.weights_BT is None else values * batch.weights_BT[batch.is_target_BT].astype(np.float64)
