"""The MLX engine: one model, one adapter, one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from dualtune.engine.adapter_bank import AdapterBank, check_base_alone
from dualtune.engine.backend import (
    FLOAT16_LOSS_SCALE,
    Batch,
    CannotShare,
    EngineDescription,
    LoadRequest,
    LossSum,
    OptimizerState,
    StepOutput,
    Weigh,
    check_mergeable,
    check_slots,
    check_state,
    merge_base,
    most_probable_first,
    needs_positions,
    weighed_in_two_passes,
)
from dualtune.engine.card import ActivationCheckpointing
from dualtune.engine.decoding import GenerationCache, continue_prompt
from dualtune.engine.documents import shared_tokens
from dualtune.model.adapter import AdapterSpec, Tensors, rank_axis
from dualtune.model.beside import check_resident, sizes_of
from dualtune.model.config_file import position_table_size, read_config
from dualtune.model.experts import gathered, layer_of, members, shapes_apart, shapes_of
from dualtune.model.formats.naming import canonical_name
from dualtune.model.merging import write_merged, write_trained
from dualtune.model.optimizer import OptimizerSpec
from dualtune.model.places import FilePlace, canonical_names, check_places, expert_stack
from dualtune.model.targets import adapted_as
from dualtune.model.update_rules import Settings
from dualtune_mlx.adapter import WholeModel
from dualtune_mlx.beside import train_beside
from dualtune_mlx.checkpointing import Recomputation
from dualtune_mlx.distributed import added_up
from dualtune_mlx.experts import expert_places, role_of
from dualtune_mlx.host.adapter_bank import BankedModel
from dualtune_mlx.host.generation import MlxDecoding, crop_on_device
from dualtune_mlx.host.hidden_states import FrozenLayers, to_mlx
from dualtune_mlx.host.places import find_places
from dualtune_mlx.kernels import cross_entropy
from dualtune_mlx.kernels.attention import pieces_of, reach_of
from dualtune_mlx.kernels.choose import choose
from dualtune_mlx.losses import loss_sum, target_logprobs
from dualtune_mlx.methods import (
    AdaptedLayer,
    AdaptedLayers,
    DropoutSeeds,
    adaptable_layers,
    add_layers,
    storage,
)
from dualtune_mlx.model import DTYPES, load_base, modules_with_modes
from dualtune_mlx.optimizer import Arrays, FlatLayout, FlatOptimizer, clip, clip_in_place, flat_optimizer
from dualtune_mlx.packing import SharedBeginnings, packed_cache, separate_documents
from dualtune_mlx.routing import Routing, find_routers
from dualtune_mlx.streaming import Residency, Streaming

DERIVED = "derived of "  # among the inputs of a function: what a layer derives from its parameters, by its path


class MlxEngine:
    """See `dualtune.engine.backend.Engine`. MLX is lazy: each method that changes state starts its evaluation."""

    def __init__(self, model: nn.Module, request: LoadRequest, description: Mapping[str, Any]) -> None:
        self.model = model
        self._request = request
        weights, resident = request.base_weights(), request.resident_layers
        self._residency = residency = Residency(model, weights.files, resident) if weights and resident else None
        self._dropout_seeds = DropoutSeeds()
        self._is_full = request.adapter.trains_model
        self._dtype = DTYPES[description["dtype"]]
        whole = WholeModel(model, weights, self._dropout_seeds, self._dtype) if self._is_full else None
        routers = find_routers(model)  # before any layer is wrapped
        self._layers, self._places, self._paths = _placed_layers(model, request, self._dropout_seeds)
        if resident:
            check_resident(request.adapter.beside)
        self._beside = train_beside(model, request.adapter.beside, weights, self._layers)
        for layer in self._layers.values():
            layer.moves = residency is not None
            if layer.reads_base:
                self._readable(layer).read_base()
        self._lay_out(whole)
        self._optimizer = self._optimizer_of(request.optimizer)
        slots = request.optimizer.slot_shapes(self._tensors.shapes)
        self._slot_layouts = {slot: FlatLayout(shapes) for slot, shapes in slots.items()}
        self._slots = self._optimizer.zero_slots()
        self._grads = mx.zeros(self._params.size)
        self._step = mx.array(0.0)  # on the device, which decides whether a step counts
        self._loss = mx.array(0.0)
        self._num_positions = position_table_size(read_config(request.model_dir))
        self._loss_scale = FLOAT16_LOSS_SCALE if description["dtype"] == "float16" else 1.0
        self._routing: Routing | None = None
        self._routed: Arrays = {}  # what it has added up since the last update
        if (coefficient := request.router_aux_loss_coef) is not None:
            self._routing = Routing(model, routers, read_config(request.model_dir), coefficient, self._loss_scale)
            self._routed = self._routing.nothing()
        self._adapter = whole or AdaptedLayers(self._layers, request.adapter, self._dropout_seeds, self._beside)
        self._derived: Arrays = {}
        self._bind_anew()
        trained = [*model.modules()] if whole else self._beside.modules
        self._frozen_layers = FrozenLayers(model, [*self._layers.values(), *trained])
        streaming = None
        if residency and isinstance(self._adapter, AdaptedLayers):  # the config streams no model that is trained
            streaming = Streaming(model, residency, self._adapter)
        self._kernels = choose(
            model, request.kernels, pieces=request.pieces, streams=residency is not None, trained=trained
        )
        self._kernels.follows_documents = separate_documents(model, self._dropout_seeds)
        self._with_modes = modules_with_modes(model)
        self._recomputation = streaming or Recomputation(model, self._adapter)
        # MLX compiles functions of arrays alone, so that all state of a step is passed in and returned.
        self._update = self._wrapped_update()
        self.description = self._describe(description)
        self.set_checkpointing(request.checkpointing)

    def _lay_out(self, whole: WholeModel | None) -> None:
        """Put what is trained into one flat array, which the optimizer updates as a whole or in runs."""
        request = self._request
        fresh, start = request.adapter.split(whole.state() if whole else self._initial(request.adapter))
        stacks = whole.stacks if whole else self._layers
        shapes = gathered({name: tensor.shape for name, tensor in fresh.items()}, stacks)
        order = sorted(shapes, key=request.optimizer.lr_factor) if request.optimizer.lr_factors else shapes
        self._layout = FlatLayout({name: shapes[name] for name in order})
        # A stack of experts is one array for its layer, and those of its experts for the optimizer and in states.
        self._tensors = FlatLayout(shapes_apart(self._layout.shapes))
        self.adapter_shapes = request.adapter.state_shapes(self._tensors.shapes)
        # A start that is kept lies in an array of its own.
        starts = {name: shape for name, shape in self._layout.shapes.items() if rank_axis(name) and start}
        self._start_layout, self._start_tensors = FlatLayout(starts), FlatLayout(shapes_apart(starts))
        self._start = from_numpy(start, self._start_tensors)
        self._masters = DTYPES[request.adapter.master_weights]
        self._params = from_numpy(fresh, self._tensors).astype(self._masters)
        mx.eval(self._params, self._start)

    def _describe(self, description: Mapping[str, Any]) -> EngineDescription:
        adapter, own = self._request.adapter, shapes_of(self._layers)
        return EngineDescription(
            **description,
            adapted_modules=None if self._is_full else len(own),
            adapted_as=adapted_as([*self._paths, *own], adapter.targets, experts=adapter.experts),
            adapted_weights=None if self._is_full else storage(self._layers.values()),
            trained_beside=None if self._is_full else sizes_of(self.adapter_shapes),
            trainable_parameters=self._params.size,
            layers_below_adapter=None if self._is_full else len(self._frozen_layers),
            kernels=str(self._kernels),
        )

    def set_checkpointing(self, checkpointing: ActivationCheckpointing) -> None:
        """Change which activations are recomputed, from the next micro-batch on. ConfigError if this engine cannot."""
        checkpointing = self._recomputation.choose(checkpointing)
        gradient = self._slopes if self._is_full else self._add_gradient
        self._accumulate = self._kernels.wrap(gradient)  # what was compiled before computes as before
        self.description = replace(
            self.description,
            checkpointing=checkpointing.describe(self._recomputation.num_layers),
            checkpointing_reason=checkpointing.reason,
        )

    def evaluate(self, batch: Batch) -> LossSum:
        inputs = self._inputs(batch)
        with self._evaluating(batch, inputs):
            loss = self._loss_sum(inputs, slopes=False)
        mx.async_eval(loss)
        return LossSum(loss, batch.num_targets)

    def forward_backward(self, batch: Batch, *, divisor: float) -> None:
        self._grads, self._loss, self._routed = self.traced(batch, divisor=divisor)
        mx.async_eval(self._grads, self._loss, self._routed)

    def traced(self, batch: Batch, *, divisor: float) -> tuple[mx.array, mx.array, Arrays]:
        """Return what `forward_backward` evaluates: the sums of gradients and losses with those of the micro-batch."""
        inputs = self._inputs(batch, dropout=True) | self._derived
        if self._routing is not None:
            inputs |= self._routing.inputs(batch, divisor) | self._routed
        factor = mx.array(self._loss_scale / divisor)
        with self._documents(batch), self._binding():
            if self._is_full:
                slopes, loss, routed = self._accumulate(self._params, self._start, self._loss, inputs, factor)
                return self._with_slopes(slopes), loss, routed
            return self._accumulate(self._params, self._start, self._grads, self._loss, inputs, factor)

    @contextmanager
    def _binding(self) -> Iterator[None]:
        """Let a function that is derived bind its own arguments in the block, and bind the present weights again.

        A kernel of Metal has no derivative, and mlx-lm's models leave theirs in training alone.
        """
        for module in self._with_modes:
            module.train()
        try:
            yield
        finally:
            for module in self._with_modes:
                module.eval()
            self._bind()
            self._bind_derived(self._derived)
            self._adapter.forget()

    def _with_slopes(self, slopes: Arrays) -> mx.array:
        """Return the gradients with these added: tensor by tensor, each in place, so that no second one is whole."""
        grads = self._grads
        for name, slope in slopes.items():
            grads = grads.at[self._layout.where(name)].add(slope.astype(grads.dtype).reshape(-1))
        return grads

    def forward_backward_of(self, batch: Batch, weigh: Weigh, *, divisor: float) -> np.ndarray:
        if not self._weighs_late(batch):
            return weighed_in_two_passes(self, batch, weigh, divisor)
        inputs = self._inputs(replace(batch, weights_BT=None), dropout=True) | self._derived
        logprobs_BT, weighted = np.zeros(batch.labels_BT.shape, np.float32), 0.0

        def weights_of(losses_N: mx.array) -> mx.array:
            nonlocal weighted
            is_target_BT, weights_N = batch.is_target_BT, np.zeros(losses_N.shape, np.float32)
            logprobs_BT[is_target_BT] = -np.array(losses_N)[: batch.num_targets]  # padding follows them
            weights_N[: batch.num_targets] = weights_BT = weigh(logprobs_BT)[is_target_BT]
            weighted = -float(weights_BT @ logprobs_BT[is_target_BT])
            return mx.array(weights_N)

        def loss_of(inputs: Arrays) -> mx.array:
            assert self._kernels.loss is not None
            return cross_entropy.weighed_loss(*self._at_targets(self._kernels.loss, inputs), weights_of)

        factor = mx.array(self._loss_scale / divisor)
        with self._documents(batch), self._binding():
            slopes, _, _ = self._slopes(self._params, self._start, self._loss, inputs, factor, loss_of)
        self._grads, self._loss = self._grads + self._layout.flat(slopes), self._loss + weighted / divisor
        mx.async_eval(self._grads, self._loss)
        return logprobs_BT

    def _weighs_late(self, batch: Batch) -> bool:
        """Return whether a backward pass can take loss weights that follow from its forward pass.

        Not those whose parts follow each other, nor where a weight is needed before: of what the head trains, of one
        among several labels.
        """
        if self._is_full or self._residency is not None or self._routing is not None or self._kernels.loss is None:
            return False
        is_plain = not self._kernels.loss[1].trained and not self._request.label_smoothing
        return is_plain and batch.labels_BT.ndim == 2 and batch.num_targets > 0

    def gradient(self) -> Tensors:
        return to_numpy(self._grads / self._loss_scale, self._tensors)

    def add_gradient(self, gradient: Tensors) -> None:
        check_state(self._tensors.shapes, gradient, "gradient")
        self._grads = self._grads + from_numpy(gradient, self._tensors) * self._loss_scale

    def target_logprobs(self, batch: Batch, *, dropout: bool = False) -> np.ndarray:
        inputs = self._inputs(batch, dropout=dropout)
        with self._evaluating(batch, inputs), self._dropout(inputs):
            if self._kernels.loss is None:
                return np.array(target_logprobs(self._logits(inputs), inputs["labels_BT"]))
            logprobs_N = cross_entropy.target_logprobs(*self._at_targets(self._kernels.loss, inputs))
        logprobs_BT = np.zeros(batch.labels_BT.shape, np.float32)
        logprobs_BT[batch.is_target_BT] = np.array(logprobs_N)[: batch.num_targets]  # padding follows them
        return logprobs_BT

    def top_logprobs(self, batch: Batch, k: int) -> tuple[np.ndarray, np.ndarray]:
        inputs, where = self._inputs(batch), np.arange(batch.num_targets)  # padding follows them
        with self._evaluating(batch, inputs):
            if self._kernels.loss is None:
                where = np.flatnonzero(batch.is_target_BT)
                top = cross_entropy.top_of_logits(self._logits(inputs).flatten(0, 1), k)
            else:
                top = cross_entropy.top_logprobs(*self._at_targets(self._kernels.loss, inputs), k)
        tokens_Nk, logprobs_Nk = map(np.array, top)
        return most_probable_first(tokens_Nk[where].astype(np.int32), logprobs_Nk[where])

    def most_probable(self, batch: Batch) -> np.ndarray:
        inputs, where = self._inputs(batch), np.flatnonzero(batch.is_target_BT)
        with self._evaluating(batch, inputs):
            if self._kernels.loss is None:
                ids_N = self._logits(inputs).argmax(axis=-1).flatten()[mx.array(where)]
            else:
                ids_N = cross_entropy.most_probable(*self._at_targets(self._kernels.loss, inputs))
        tokens_BT = np.full(batch.is_target_BT.shape, -1, np.int32)
        tokens_BT.flat[where] = np.array(ids_N)[: len(where)]  # padding follows them
        return tokens_BT

    def hidden_states(self, batch: Batch) -> np.ndarray:
        with self._documents(batch):
            return self._frozen_layers.computed(lambda: self._apply(self.model, self._inputs(batch)))

    def optim_step(self, *, lr: float, max_grad_norm: float | None) -> StepOutput:
        max_norm = math.inf if max_grad_norm is None else max_grad_norm
        rates = lr * self._optimizer.lr_factors
        shrink = 1 - rates * self._request.optimizer.settings["weight_decay"]
        numbers = (mx.array(np.asarray(number, np.float32)) for number in (rates, shrink, max_norm))
        state = (self._params, self._slots, self._step)
        loss, self._loss = added_up(self._loss), mx.array(0.0)
        metrics: dict[str, mx.array] = {}
        if self._routing is not None:
            sums, self._routed = {name: added_up(x) for name, x in self._routed.items()}, self._routing.nothing()
            metrics = self._routing.metrics(sums)
        if isinstance(self._adapter, WholeModel):
            self._adapter.release()
        try:
            *state, norm = self._update(*state, added_up(self._grads), loss, *numbers)
            self._params, self._slots, self._step = state
        finally:
            self._bind_anew()
        self._grads = mx.zeros(self._params.size)
        mx.async_eval(*state, self._grads, loss, norm, metrics)
        return StepOutput(loss, norm, metrics)

    def set_hyperparameters(self, changes: Settings) -> None:
        spec = replace(self._request.optimizer, changes=changes)
        self._optimizer = self._optimizer_of(spec)  # the slots are kept beside it
        self._request = replace(self._request, optimizer=spec)
        self._update = self._wrapped_update()

    def _optimizer_of(self, spec: OptimizerSpec) -> FlatOptimizer:
        seed = self._request.seed if self._masters == mx.bfloat16 else None
        return flat_optimizer(spec, self._tensors, in_place=self._is_full, rounding_seed=seed)

    def discard(self) -> None:
        self._grads, self._loss = mx.zeros(self._params.size), mx.array(0.0)
        self._routed = self._routing.nothing() if self._routing else {}
        self._adapter.forget()
        mx.clear_cache()

    def adapter_state(self) -> Tensors:
        start = to_numpy(self._start, self._start_tensors)
        return self._request.adapter.joined(to_numpy(self._params, self._tensors), start)

    def neutral_state(self) -> Tensors:
        if self._is_full:  # the base is in no other place than its files, or its seed
            model, weights = load_base(self._request)[0], self._request.base_weights()
            return WholeModel(model, weights, self._dropout_seeds, self._dtype).state()
        return self._initial(self._request.adapter.plain)

    def _initial(self, adapter: AdapterSpec) -> Tensors:
        return adapter.initial(shapes_of(self._layers), self._request.seed, self._frozen) | self._beside.neutral()

    def load_adapter_state(self, state: Tensors) -> None:
        check_state(self.adapter_shapes, state, "adapter")
        trained, start = self._request.adapter.split(state)
        self._params = from_numpy(trained, self._tensors).astype(self._masters)
        self._start = from_numpy(start, self._start_tensors)
        self._bind_anew()

    def optimizer_state(self) -> OptimizerState:
        step = int(cast(int, self._step.item()))
        slots = self._optimizer.read(self._slots)
        return OptimizerState(step, {slot: to_numpy(slots[slot], own) for slot, own in self._slot_layouts.items()})

    def load_optimizer_state(self, state: OptimizerState) -> None:
        check_slots(self._request.optimizer, self._tensors.shapes, state)
        self._step = mx.array(float(state.step))
        slots = {slot: from_numpy(state.slots.get(slot, {}), own) for slot, own in self._slot_layouts.items()}
        self._slots = self._optimizer.load(slots, state.step)

    def logprobs(self, batch: Batch) -> np.ndarray:
        logits_BTV = self._logits(self._inputs(batch)).astype(mx.float32)
        return np.array(logits_BTV - mx.logsumexp(logits_BTV, axis=-1, keepdims=True))

    def generate(
        self, prompt: np.ndarray, *, choose: Callable[[np.ndarray], int | None], cache: GenerationCache | None = None
    ) -> Iterator[int]:
        return continue_prompt(prompt, choose, cache, forward=self._next_logits, crop_on_device=crop_on_device)

    def decoding(self, bank: AdapterBank | None = None) -> MlxDecoding:
        return MlxDecoding(self.model, None if bank is None else self._banked(bank))

    @contextmanager
    def scoring(self, bank: AdapterBank, adapters: Sequence[int]) -> Iterator[None]:
        banked, own = self._banked(bank), self._kernels
        if own.loss and banked.adapts(own.loss[1].layer):  # whose weight the loss reads by itself
            self._kernels = replace(own, loss=None)
        try:
            with banked.rows(np.array(adapters, np.int32)):
                yield
        finally:
            self._kernels = own

    def _banked(self, bank: AdapterBank) -> BankedModel:
        """Return the model with a bank: the same one while it is referred to, with its numbers on the device."""
        banked = self._of_banks.get(bank)
        if banked is None:
            moves = self._request.resident_layers is not None
            check_base_alone(self._request.adapter, self._layers, moves_weights=moves)
            banked = BankedModel(self.model, self._paths, self._layers, bank, self._dtype)
            self._of_banks[bank] = banked
        return banked

    @cached_property
    def _of_banks(self) -> WeakValueDictionary[AdapterBank, BankedModel]:
        return WeakValueDictionary()

    def save_merged(self, path: Path) -> None:
        check_mergeable(self.description)
        if self._is_full:
            write_trained(self._request.model_dir, self._request.base_weights(), path, self.adapter_state())
            return
        base, dtype, edits = merge_base(self._request), self.description.dtype, self._beside.edits(self.adapter_state())

        def delta(module: str) -> np.ndarray:
            layer, number = layer_of(self._layers, module)
            return np.array(self._readable(layer).delta(number))

        write_merged(base, path, self._places, delta, dtype, edits)

    def _next_logits(self, tokens: list[int], cache: list[Any] | None) -> tuple[np.ndarray, list[Any]]:
        """Return the logits after the last of these tokens, float32 [V], and the cache with all of them."""
        cache = cache or make_prompt_cache(self.model)
        if len(tokens) > 1:
            self.model(mx.array([tokens[:-1]]), cache=cache)  # MLX is lazy: these logits are never computed
        return np.array(self.model(mx.array([tokens[-1:]]), cache=cache)[0, -1].astype(mx.float32)), cache

    # --- functions of arrays only, so that MLX can compile them -----------------------------------------------------

    def _add_gradient(
        self, params: mx.array, start: mx.array, grads: mx.array, loss: mx.array, inputs: Arrays, factor: mx.array
    ) -> tuple[mx.array, mx.array, Arrays]:
        """Return (gradients, loss, routing) with those of a micro-batch added, with its loss sum multiplied by
        `factor`."""
        slopes, loss, routed = self._slopes(params, start, loss, inputs, factor)
        return grads + self._layout.flat(slopes), loss, routed

    def _slopes(
        self, params: mx.array, start: mx.array, loss: mx.array, inputs: Arrays, factor: mx.array,
        loss_of: Callable[[Arrays], mx.array] | None = None,
    ) -> tuple[Arrays, mx.array, Arrays]:  # fmt: skip
        """Return the gradients of a micro-batch by name; the loss, and what routers do, with those of it added.

        `loss_of`: the sum of its losses, if it is not that of its own weights.
        """
        self._adapter.start = self._start_layout.named(start)

        def scaled_loss(params: Arrays) -> mx.array:
            self._adapter.bind(params)
            return (self._loss_sum(inputs, slopes=True) if loss_of is None else loss_of(inputs)) * factor

        self._bind_derived(inputs)
        named = self._computing(params)
        with self._dropout(inputs), self._replaced(inputs), self._watching(inputs):
            added, slopes = self._recomputation.value_and_grad(scaled_loss, named)
        return slopes, loss + added / self._loss_scale, self._routing.added(inputs) if self._routing else {}

    def _watching(self, inputs: Arrays) -> AbstractContextManager[None]:
        """Watch the routers in a micro-batch, if they are to be balanced."""
        return self._routing.watching(inputs) if self._routing else nullcontext()

    def _computing(self, params: mx.array) -> Arrays:
        """Return what the model computes with, by name.

        All at once: otherwise each factor of a product is cast in a kernel, and its gradient in another one. Vectors of
        an adapter, which are not factors of products, stay float32.
        """
        named = self._layout.named(params.astype(self._dtype))
        if not self._is_full:
            named |= {name: master for name, master in self._layout.named(params).items() if master.ndim == 1}
        return named

    def _bind(self) -> None:
        """Compute with the present weights. An adapter is bound in float32: its layers cast it."""
        self._adapter.start = self._start_layout.named(self._start)
        self._adapter.bind(self._computing(self._params) if self._is_full else self._layout.named(self._params))

    def _bind_anew(self) -> None:
        """Compute with weights that have changed, and with what follows from them."""
        self._bind()
        derived = {f"{DERIVED}{path}": layer.derived(self._dtype) for path, layer in self._layers.items()}
        self._derived = {name: array for name, array in derived.items() if array is not None}
        self._bind_derived(self._derived)
        mx.async_eval(self._derived)

    def _bind_derived(self, arrays: Arrays) -> None:
        for name in filter(arrays.__contains__, self._derived):
            self._layers[name.removeprefix(DERIVED)].bind_derived(arrays[name])

    def _updated(
        self, params: mx.array, slots: Arrays, step: mx.array, grads: mx.array, loss: mx.array,
        lr: mx.array, shrink: mx.array, max_norm: mx.array,
    ) -> tuple[mx.array, Arrays, mx.array, mx.array]:  # fmt: skip
        """Return (params, slots, step, gradient norm) after an update. A loss or norm that is not finite skips it."""
        if self._is_full:
            grads, norm = clip_in_place(grads, self._loss_scale, max_norm)
        else:
            grads, norm = clip(grads / self._loss_scale, max_norm)
        good = mx.isfinite(loss) & mx.isfinite(norm)
        new, slots = self._optimizer.update(params, slots, grads, step=step + 1, lr=lr, shrink=shrink, is_good=good)
        return new, slots, step + good, norm

    def _wrapped_update(self) -> Callable[..., Any]:
        """Return the update with the present hyperparameters, which are constants in compiled code.

        That of a whole model is not compiled: it is done in place.
        """
        return self._updated if self._is_full else self._kernels.wrap(self._updated)

    def _loss_sum(self, inputs: Arrays, *, slopes: bool) -> mx.array:
        smoothing = self._request.label_smoothing if slopes else 0.0  # an evaluation has none
        if self._kernels.loss is None:
            return loss_sum(self._logits(inputs), inputs["labels_BT"], inputs.get("weights_BT"), smoothing)
        return cross_entropy.target_loss(
            *self._at_targets(self._kernels.loss, inputs),
            weights_N=inputs.get("weights_N"), smoothing=smoothing, slopes=slopes,
        )  # fmt: skip

    def _at_targets(
        self, parts: tuple[Callable[..., mx.array], cross_entropy.Head], inputs: Arrays
    ) -> tuple[mx.array, mx.array, mx.array, cross_entropy.Head]:
        """Return what the fast loss is computed of: hidden states [B, T, H], targets, labels and the head."""
        body, head = parts
        return self._apply(body, inputs), inputs["index_N"], inputs["labels_N"], head.at(inputs.get("temperature"))

    def _logits(self, inputs: Arrays) -> mx.array:
        logits_BTV = self._apply(self.model, inputs)
        return logits_BTV.astype(mx.float32) / inputs["temperature"] if "temperature" in inputs else logits_BTV

    def _apply(self, model: Callable[..., mx.array], inputs: Arrays) -> mx.array:
        if "segments_BT" in inputs:
            shared = SharedBeginnings(inputs["parents_BT"], inputs["shared_BT"]) if "parents_BT" in inputs else None
            cache = packed_cache(self.model, inputs["segments_BT"], inputs["positions_BT"], shared)
            return model(inputs["tokens_BT"], cache=cache)
        # Rows are padded on the right and attention is causal, so no real token sees padding and no mask is needed.
        return model(inputs["tokens_BT"])

    # --- between the core's arrays and the device's -----------------------------------------------------------------

    def _inputs(self, batch: Batch, *, dropout: bool = False) -> Arrays:
        inputs, weights_BT = {"tokens_BT": batch.tokens_BT}, batch.target_weights_BT
        if needs_positions(batch, self._num_positions):
            inputs |= {"segments_BT": batch.segments_BT, "positions_BT": batch.positions_BT}
        if batch.parents_BT is not None:
            if self._kernels.follows_documents:
                raise CannotShare("the model has layers with a state, which goes on from one token to the next")
            inputs |= {
                "parents_BT": np.where(batch.parents_BT, batch.parents_BT, -1),
                "shared_BT": shared_tokens(batch),
            }
        if self._kernels.loss is None:
            inputs["labels_BT"] = batch.labels_BT
            if weights_BT is not None:
                inputs["weights_BT"] = weights_BT
        else:
            # If steps are compiled, pad the number of targets to one of eight sizes per batch shape.
            granule = -(-batch.tokens_BT.size // 8) if self._kernels.compiles else 1
            inputs["index_N"], inputs["labels_N"] = cross_entropy.targets(batch.labels_BT, granule)
            if weights_BT is not None:  # the padding has ignored labels: its weights matter to none but K labels
                weights = weights_BT.reshape(-1, *weights_BT.shape[2:])[inputs["index_N"]]
                weights[batch.num_targets :] = 0
                inputs["weights_N"] = weights
        if batch.temperature != 1:
            inputs["temperature"] = np.array(batch.temperature, np.float32)
        if dropout and (self._request.adapter.dropout or self._request.adapter.merge_for != "none"):
            inputs["dropout_seeds_BT"] = batch.dropout_seeds_BT
        arrays = {name: mx.array(values) for name, values in inputs.items()}
        return arrays if batch.hidden_BTD is None else arrays | {"hidden_BTD": to_mlx(batch.hidden_BTD)}

    @contextmanager
    def _evaluating(self, batch: Batch, inputs: Arrays) -> Iterator[None]:
        """Compute losses without gradients, from the hidden states among the inputs if there are any."""
        self._dropout_seeds.is_evaluated = True
        try:
            with self._documents(batch), self._replaced(inputs):
                yield
        finally:
            self._dropout_seeds.is_evaluated = False

    def _replaced(self, inputs: Arrays) -> AbstractContextManager[None]:
        """Use the hidden states among the inputs, if there are any."""
        return self._frozen_layers.replaced(inputs.get("hidden_BTD"))

    @contextmanager
    def _dropout(self, inputs: Arrays) -> Iterator[None]:
        """Enable dropout with the seeds among the inputs, if there are any."""
        self._dropout_seeds.seeds_BT = inputs.get("dropout_seeds_BT")
        try:
            yield
        finally:
            self._dropout_seeds.seeds_BT = None

    @contextmanager
    def _documents(self, batch: Batch) -> Iterator[None]:
        """Attend document by document; in compiled code, which must not depend on their layout, within their reach."""
        attention = self._kernels.attention
        if attention is None:
            yield
            return
        pieces = pieces_of(batch)
        if self._kernels.compiles:
            attention.reach = reach_of(pieces)
        else:
            attention.pieces = pieces
        try:
            yield
        finally:
            attention.pieces = attention.reach = None

    def _frozen(self, path: str) -> np.ndarray:
        """Return the frozen weight of an adapted layer, float32 [out, in]."""
        layer, number = layer_of(self._layers, path)
        return np.array(self._readable(layer).frozen(number))

    def _readable(self, layer: AdaptedLayer) -> AdaptedLayer:
        """Return a layer whose frozen weight is in memory until another one's is asked for."""
        if self._residency is not None:
            self._residency.bring(layer.base)
        return layer


def _placed_layers(
    model: nn.Module, request: LoadRequest, seeds: DropoutSeeds
) -> tuple[dict[str, AdaptedLayer], dict[str, FilePlace], dict[str, str]]:
    """Wrap the adapted layers, named after the base's files; none if the whole model is trained.

    Return them, their places in the files, and the paths of all layers that could be adapted, by name.
    """
    if request.adapter.trains_model:
        return {}, {}, {}
    # Layers get their names before any is wrapped: wrapping changes the paths of what is inside.
    weights, paths = request.base_weights(), adaptable_layers(model)
    places = find_places(model, weights, paths) if weights is not None else {}
    names = canonical_names(places)
    path_of = {names.get(path, canonical_name(path)): path for path in paths}
    of_stacks = expert_places(model, weights) if weights is not None and request.adapter.names_experts else {}
    names |= {path: expert_stack(own_places, role_of(path)) for path, own_places in of_stacks.items()}
    groups = request.kernels != "reference" and (request.pieces is None or "lora" in request.pieces)
    layers = add_layers(model, request.adapter, seeds, group=groups, names=names)
    placed = {names[path]: place for path, place in places.items() if names[path] in layers}
    for path, own_places in of_stacks.items():
        if names[path] in layers:
            placed |= dict(zip(members(names[path], len(own_places)), own_places, strict=True))
    if weights is not None:
        check_places(layers, {*placed, *(names[path] for path in of_stacks)}, "mlx-lm")
    return layers, placed, path_of


def to_numpy(flat: mx.array, layout: FlatLayout) -> Tensors:
    return {name: np.array(array) for name, array in sorted(layout.named(flat.astype(mx.float32)).items())}


def from_numpy(tensors: Tensors, layout: FlatLayout) -> mx.array:
    return layout.flat({name: mx.array(tensor) for name, tensor in tensors.items()})
