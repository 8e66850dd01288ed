"""The torch engine: one model, one adapter, one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualtune.engine.adapter_bank import AdapterBank, check_base_alone
from dualtune.engine.backend import (
    FLOAT16_LOSS_SCALE,
    IGNORE_INDEX,
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
    with_weights,
)
from dualtune.engine.card import ActivationCheckpointing
from dualtune.engine.decoding import GenerationCache, continue_prompt
from dualtune.engine.documents import branches_of
from dualtune.engine.routing import document_shares
from dualtune.model.adapter import AdapterSpec, Tensors
from dualtune.model.beside import check_resident, sizes_of
from dualtune.model.config_file import position_table_size, read_config
from dualtune.model.experts import layer_of, members, shapes_of
from dualtune.model.merging import write_merged
from dualtune.model.optimizer import OptimizerSpec
from dualtune.model.places import FilePlace, canonical_names, check_places, expert_stack
from dualtune.model.targets import adapted_as
from dualtune.model.update_rules import Settings
from dualtune_torch.adapter import adapter_buffer, fill, model_buffer, to_numpy, values_of
from dualtune_torch.beside import TrainedBeside, train_beside
from dualtune_torch.checkpointing import Recomputation
from dualtune_torch.distributed import add_up
from dualtune_torch.documents import SeparateDocuments
from dualtune_torch.host.adapter_bank import BankedModel
from dualtune_torch.host.generation import TextContinuation, TorchDecoding, crop_on_device
from dualtune_torch.host.hidden_states import FrozenLayers
from dualtune_torch.host.inputs import Inputs, arrays_of, padded, to_device
from dualtune_torch.host.streaming import StreamedLayers
from dualtune_torch.host.transfers import ParkedState, Transfers
from dualtune_torch.kernels import allocator, compiled, cross_entropy
from dualtune_torch.kernels.attention import DocumentBorders, GatheredKeys
from dualtune_torch.kernels.choose import choose, own_attention, trial_run
from dualtune_torch.kernels.graphs import MicroStepGraphs, check_offload, check_recordable
from dualtune_torch.kernels.lora import add_groups, forget_outputs
from dualtune_torch.kernels.products import ProductsOfFewRows, widen_layers
from dualtune_torch.kernels.trial import document_masks, needs_masks
from dualtune_torch.losses import by_rows, loss_sum, target_logprobs, top_of_logits
from dualtune_torch.methods import AdaptedLayer, DropoutSeeds, adaptable_layers, add_layers, storage
from dualtune_torch.model import DTYPES, load_base
from dualtune_torch.optimizer import FlatOptimizer, flat_optimizer, take_state
from dualtune_torch.routing import Routing
from dualtune_torch.sharding import check_whole, group_of, is_split, whole
from dualtune_torch.weights.frozen import compute_dtype, shape_of, weight_of
from dualtune_torch.weights.places import expert_places, find_places, trained_parts, write_trained


class TorchEngine:
    """See `dualtune.engine.backend.Engine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        request: LoadRequest,
        description: Mapping[str, Any],
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`together` is a context manager for all computation with the model."""
        self.model = model
        self._together = together
        self._request = request
        self._dropout_seeds = DropoutSeeds()
        self._num_positions = position_table_size(read_config(request.model_dir))
        self._is_full = request.adapter.trains_model
        # Layers are adapted before they are streamed, and streamed before the adapter's buffer is made on the device of
        # the rest of the model.
        self._streamed: StreamedLayers | None = None
        self._graphs: MicroStepGraphs | None = None
        if self._is_full:
            self._layers, self._beside = dict[str, AdaptedLayer](), TrainedBeside()
            masters = DTYPES[request.adapter.master_weights]
            weights = request.base_weights()
            parts = trained_parts(model, weights) if weights else {}
            self._adapter = model_buffer(model, DTYPES[description["dtype"]], masters, parts)
        else:
            self._layers, self._places, self._paths = _placed_layers(model, request, self._dropout_seeds)
            self._beside = train_beside(model, request.adapter.beside, request.base_weights(), self._layers)
            if request.resident_layers is not None:
                check_resident(request.adapter.beside)
                device = torch.device(description["device"])
                self._streamed = StreamedLayers(model, device, request.resident_layers)
            dtype, method = compute_dtype(model), request.adapter.method
            starts = request.adapter.keeps_start
            self._adapter = adapter_buffer(self._layers, model.device, dtype, method, self._beside, starts=starts)
        self.adapter_shapes = request.adapter.state_shapes(self._adapter.shapes)
        for layer in self._layers.values():
            layer.moves = self._moves_weights
            if layer.reads_base:
                with self._reading(layer):
                    layer.read_base()
        # Kernels are tried with an adapter that has its start. Full fine-tuning has its masters from the base already.
        if not self._is_full:
            self.load_adapter_state(self._initial(request.adapter))
        if request.kernels != "reference":
            widen_layers(model)
        # Documents are separated before kernels are tried, because the trials read packed rows.
        self._separate = SeparateDocuments(model, self._dropout_seeds)
        largest_kept = _largest_kept(model, request, description)
        self._kernels = choose(model, request.kernels, pieces=request.pieces, largest_kept=largest_kept)
        fuse = self._kernels.maybe_compile
        groups = add_groups(self._layers, self._adapter, fuse, self._kernels.lora) if self._kernels.groups else []
        # What changes how layers are called comes after the kernels, whose trials compare with the plain calls.
        self._recomputation = Recomputation(model, groups)
        self._frozen_layers = FrozenLayers(model, [*self._layers.values(), *self._beside.modules])
        self._loss_scale = FLOAT16_LOSS_SCALE if description["dtype"] == "float16" else 1.0
        self._loss = torch.zeros((), device=model.device)
        self._routing: Routing | None = None
        if (coefficient := request.router_aux_loss_coef) is not None:
            self._routing = Routing(model, read_config(request.model_dir), coefficient, self._loss_scale)
        if request.kernels == "graph":
            check_recordable(self._kernels, request.adapter, model, moves_weights=self._moves_weights)
            self._graphs = MicroStepGraphs(model.device)
            self._prepare()
        self._parked = ParkedState(Transfers(model.device))
        self.description = self._describe(description)
        self.set_checkpointing(request.checkpointing)

    def _describe(self, description: Mapping[str, Any]) -> EngineDescription:
        adapter, own, device = self._request.adapter, shapes_of(self._layers), self.model.device
        return EngineDescription(
            **description,
            adapted_modules=None if self._is_full else len(own),
            adapted_as=adapted_as(own, adapter.targets, experts=adapter.experts),
            adapted_weights=None if self._is_full else storage(self._layers.values()),
            trained_beside=None if self._is_full else sizes_of(self.adapter_shapes),
            trainable_parameters=self._adapter.flat.numel(),
            kernels=str(self._kernels),
            layers_below_adapter=None if self._is_full else len(self._frozen_layers),
            streaming=self._streamed.describe() if self._streamed else None,
            threads=torch.get_num_threads() if device.type == "cpu" else None,
        )

    @cached_property
    def _new_optimizer(self) -> FlatOptimizer:
        """Created on first use: torch refuses to optimize zero parameters, and an engine without adapter is valid."""
        return self._optimizer_of(self._request.optimizer)

    def _optimizer_of(self, spec: OptimizerSpec) -> FlatOptimizer:
        return flat_optimizer(self._adapter.flat, self._adapter.shapes, spec, self._request.seed)

    @property
    def _optimizer(self) -> FlatOptimizer:
        self._parked.wait()
        return self._new_optimizer

    @cached_property
    def _head_gradient(self) -> Tensor | None:
        """The gradient of an output head that is computed together with the loss; None if it is frozen."""
        weight = getattr(self._kernels.head, "weight", None)
        if weight is None or not weight.requires_grad:
            return None
        return next(self._adapter.grads[name] for name, p in self._adapter.of_base.items() if p is weight)

    @cached_property
    def _needs_masks(self) -> bool:
        with self._together():
            return needs_masks(self.model)

    def evaluate(self, batch: Batch) -> LossSum:
        inputs = self._inputs(batch)
        with self._evaluating(batch):
            return LossSum(self._loss_sum(inputs), batch.num_targets)

    def forward_backward(self, batch: Batch, *, divisor: float) -> None:
        if self._graphs is None or batch.hidden_BTD is not None:
            with self._frozen_layers.replaced(batch.hidden_BTD), self._watching(batch, divisor):
                self._micro_step(self._inputs(batch), divisor)
            return
        if batch.parents_BT is not None:
            self._check_sharing()
        arrays = {**padded(self._arrays(batch)), "divisor": np.array([divisor], np.float32)}
        self._graphs.run(arrays, self._recordable_step)

    def _watching(self, batch: Batch, divisor: float) -> AbstractContextManager[None]:
        """Watch the routers in a micro-batch, if they are to be balanced."""
        return self._routing.watching(document_shares(batch, divisor)) if self._routing else nullcontext()

    def _recordable_step(self, sent: Mapping[str, Tensor]) -> None:
        """Do a micro-step that launches the same for all arrays of these shapes."""
        longest = sent["tokens"].shape[1]
        documents = DocumentBorders.on_device(longest, sent["borders"], self._kernels.maybe_compile)
        self._micro_step(Inputs.of(sent, documents), sent["divisor"][0])

    def _micro_step(self, inputs: Inputs, divisor: float | Tensor) -> None:
        with self._dropout(inputs), self._together():
            self._backward(self._loss_sum(inputs, self._request.label_smoothing), divisor)

    def _backward(self, loss_sum: Tensor, divisor: float | Tensor) -> None:
        loss = loss_sum / divisor
        if loss.requires_grad:  # else the micro-batch has no target
            (loss * self._loss_scale).backward()
        self._loss += loss.detach()

    def forward_backward_of(self, batch: Batch, weigh: Weigh, *, divisor: float) -> np.ndarray:
        if self._graphs is not None or self._routing is not None:  # which need the whole step, or all weights, first
            return weighed_in_two_passes(self, batch, weigh, divisor)
        inputs = self._inputs(batch)
        with self._frozen_layers.replaced(batch.hidden_BTD), self._dropout(inputs), self._together():
            output = self._output(inputs)
            logprobs_M, may_BT = self._logprobs_with_gradient(output, batch)
            # Also where no label is left: a sharded head is gathered in all processes alike.
            others = replace(batch, labels_BT=_labels_at(batch, ~may_BT))
            with torch.no_grad():
                logprobs_BT = self._logprobs_of(output, self._inputs(others), others)
            if logprobs_M is not None:
                logprobs_BT[may_BT] = _numpy(logprobs_M.detach())
            weights_BT = weigh(logprobs_BT)
            if logprobs_M is not None and not weights_BT[~may_BT].any():
                weights_M = torch.from_numpy(weights_BT[may_BT]).to(logprobs_M.device)
                loss_sum = -(logprobs_M * weights_M).sum()
            else:
                weighted = self._inputs(with_weights(batch, weights_BT))
                loss_sum = self._loss_of(output, weighted, self._request.label_smoothing)
            self._backward(loss_sum, divisor)
        return logprobs_BT

    def _logprobs_with_gradient(self, output: Tensor, batch: Batch) -> tuple[Tensor | None, np.ndarray]:
        """Return log p with a gradient of the labels that may have a weight, as far as the batch says, and which.

        None, and no label: this loss cannot take weights that come later.
        """
        head, weights_BT = self._kernels.head, batch.target_weights_BT
        may_BT = batch.is_target_BT if weights_BT is None or batch.labels_BT.ndim == 3 else weights_BT != 0
        is_plain = self._head_gradient is None and self._kernels.rows is None and not self._request.label_smoothing
        if head is None or batch.labels_BT.ndim == 3 or not is_plain or not may_BT.any():
            return None, np.zeros_like(may_BT)
        chosen = self._inputs(replace(batch, labels_BT=_labels_at(batch, may_BT), weights_BT=None))
        hidden_MD = self._target_states(output, chosen)
        with whole(head):
            logprobs_M = cross_entropy.LinearLogprobs.apply(
                hidden_MD, weight_of(head, hidden_MD.dtype).detach(), head.bias, chosen.labels_M, self._scaling(chosen),
                self._kernels.maybe_compile,
            )  # fmt: skip
        return logprobs_M, may_BT

    def gradient(self) -> Tensors:
        assert self._adapter.flat.grad is not None
        return self._adapter.to_numpy(self._adapter.flat.grad / self._loss_scale)

    def add_gradient(self, gradient: Tensors) -> None:
        assert self._adapter.flat.grad is not None
        check_state(self._adapter.shapes, gradient, "gradient")
        added = torch.empty(self._adapter.flat.numel())
        fill(added, self._adapter.shapes, gradient)
        self._adapter.flat.grad.add_(added.to(self._adapter.flat.device), alpha=self._loss_scale)

    def target_logprobs(self, batch: Batch, *, dropout: bool = False) -> np.ndarray:
        inputs = self._inputs(batch)
        dropout_ = self._dropout(inputs) if dropout else nullcontext()
        with self._evaluating(batch), dropout_:
            return self._logprobs_of(self._output(inputs), inputs, batch)

    def _logprobs_of(self, output: Tensor, inputs: Inputs, batch: Batch) -> np.ndarray:
        """Return log p of every label, of its shape, from the `_output` of a micro-batch."""
        head = self._kernels.head
        if head is None:
            return _numpy(target_logprobs(output, inputs.labels_BT))
        hidden_MD = self._target_states(output, inputs)
        with whole(head):
            logprobs_M = cross_entropy.target_logprobs(
                hidden_MD, weight_of(head, hidden_MD.dtype), head.bias, inputs.labels_M, self._scaling(inputs),
                self._kernels.maybe_compile, self._kernels.rows,
            )  # fmt: skip
        logprobs_BT = np.zeros(batch.labels_BT.shape, np.float32)
        logprobs_BT[batch.is_target_BT] = _numpy(logprobs_M)
        return logprobs_BT

    def most_probable(self, batch: Batch) -> np.ndarray:
        tokens_BT = np.full(batch.is_target_BT.shape, -1, np.int32)
        tokens_BT[batch.is_target_BT] = _numpy(self._of_target_logits(batch, lambda logits_RV: logits_RV.argmax(-1)))
        return tokens_BT

    def top_logprobs(self, batch: Batch, k: int) -> tuple[np.ndarray, np.ndarray]:
        top_M2k = _numpy(self._of_target_logits(batch, partial(top_of_logits, k=k)))
        return most_probable_first(top_M2k[:, 1].astype(np.int32), top_M2k[:, 0].astype(np.float32))

    def _of_target_logits(self, batch: Batch, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a function of the float32 logits [R, V] of the targets, [M, …]; the logits of a few rows at a time."""
        inputs = self._inputs(batch)
        with self._evaluating(batch):
            head = self._kernels.head
            if head is None:
                return function(self._logits(inputs).flatten(0, 1).index_select(0, inputs.where_M).float())
            hidden_MD, kernels = self._target_states(self._output(inputs), inputs), self._kernels
            with whole(head):
                weight_VD = weight_of(head, hidden_MD.dtype)
                return by_rows(function, hidden_MD, weight_VD, head.bias, self._scaling(inputs), kernels.rows)

    def hidden_states(self, batch: Batch) -> np.ndarray:
        inputs = self._inputs(batch)
        with torch.no_grad(), self._together():
            return self._frozen_layers.computed(lambda: self._run(self.model.base_model, inputs))

    def optim_step(self, *, lr: float, max_grad_norm: float | None) -> StepOutput:
        flat = self._adapter.flat
        assert flat.grad is not None
        if self._loss_scale != 1.0:
            flat.grad /= self._loss_scale
        add_up([flat.grad, self._loss, *(self._routing.sums() if self._routing else ())])
        norm = nn.utils.clip_grad_norm_([flat], math.inf if max_grad_norm is None else max_grad_norm)
        loss = self._loss.clone()
        self._loss.zero_()
        self._optimizer.step(lr, loss.isfinite() & norm.isfinite())
        self._refresh()
        return StepOutput(loss, norm, self._routing.metrics() if self._routing else {})

    def set_hyperparameters(self, changes: Settings) -> None:
        spec = replace(self._request.optimizer, changes=changes)
        optimizer = self._optimizer_of(spec)
        take_state(optimizer, self._optimizer, spec.slots)
        self._new_optimizer, self._request = optimizer, replace(self._request, optimizer=spec)

    def offloaded_optimizer(self) -> AbstractContextManager[None]:
        """See `dualtune.train.hybrid.step`."""
        return self._parked.parked(self._optimizer.tensors())

    def set_checkpointing(self, checkpointing: ActivationCheckpointing) -> None:
        if self._streamed:
            self._streamed.check(checkpointing)
        if self._graphs is not None:
            check_offload(checkpointing)
            self._graphs.forget()
        text = self._recomputation.set(checkpointing, self._trial_run)
        self.description = replace(self.description, checkpointing=text, checkpointing_reason=checkpointing.reason)

    def discard(self) -> None:
        assert self._adapter.flat.grad is not None
        self._adapter.flat.grad.zero_()
        self._loss.zero_()
        if self._routing is not None:
            self._routing.forget()
        if self._graphs is not None:
            self._graphs.forget()
        forget_outputs(self._layers.values())
        allocator.free_memory()

    def adapter_state(self) -> Tensors:
        return self._request.adapter.joined(*self._adapter.state())

    def neutral_state(self) -> Tensors:
        if self._is_full:  # the base is in no other place than its files, or its seed
            return self._adapter.apart(values_of(load_base(self._request, self.model.device)[0]))
        return self._initial(self._request.adapter.plain)

    def _initial(self, adapter: AdapterSpec) -> Tensors:
        initial = adapter.initial(shapes_of(self._layers), self._request.seed, self._frozen)
        return initial | {name: values.copy() for name, values in self._beside.start.items()}

    def load_adapter_state(self, state: Tensors) -> None:
        state = self._adapter.apart(state)  # earlier versions had the names of parameters
        check_state(self.adapter_shapes, state, "adapter")
        self._adapter.load(*self._request.adapter.split(state))
        self._refresh()

    def _refresh(self) -> None:
        """Update what follows from the trained numbers, which have changed."""
        self._adapter.refresh()
        for layer in self._layers.values():
            layer.refresh()
        if self._graphs is not None:
            self._prepare()

    def _prepare(self) -> None:
        """Compute what no graph may hold, because only the first micro-batch of a step does it."""
        for layer in self._layers.values():
            layer.prepare(compute_dtype(self.model))

    def optimizer_state(self) -> OptimizerState:
        optimizer, slots = self._optimizer, self._request.optimizer.slot_shapes(self._adapter.shapes)
        state = {slot: to_numpy(optimizer.read(slot), shapes) for slot, shapes in slots.items()}
        return OptimizerState(int(optimizer.count), state)

    def load_optimizer_state(self, state: OptimizerState) -> None:
        state = replace(state, slots={slot: self._adapter.apart(own) for slot, own in state.slots.items()})
        check_slots(self._request.optimizer, self._adapter.shapes, state)
        self._optimizer.count.fill_(state.step)
        for slot, shapes in self._request.optimizer.slot_shapes(self._adapter.shapes).items():
            self._optimizer.load(slot, partial(fill, shapes=shapes, state=state.slots.get(slot, {})))

    def logprobs(self, batch: Batch) -> np.ndarray:
        with torch.no_grad(), self._together():
            return _numpy(self._logits(self._inputs(batch)).float().log_softmax(-1))

    def generate(
        self, prompt: np.ndarray, *, choose: Callable[[np.ndarray], int | None], cache: GenerationCache | None = None
    ) -> Iterator[int]:
        forward = self._continuation.next_logits
        return continue_prompt(prompt, choose, cache, forward=forward, crop_on_device=crop_on_device)

    @cached_property
    def _continuation(self) -> TextContinuation:
        return TextContinuation(self.model, self._generating)

    def decoding(self, bank: AdapterBank | None = None) -> TorchDecoding:
        self._continuation.check_batchable()
        return TorchDecoding(self.model, self._generating, None if bank is None else self._banked(bank))

    @contextmanager
    def scoring(self, bank: AdapterBank, adapters: Sequence[int]) -> Iterator[None]:
        banked, own = self._banked(bank), self._kernels
        if banked.adapts(own.head):  # whose weight the loss reads by itself
            self._kernels = replace(own, head=None)
        try:
            with compiled.plain(), banked.rows(np.array(adapters, np.int32)):
                yield
        finally:
            self._kernels = own

    def _banked(self, bank: AdapterBank) -> BankedModel:
        """Return the model with a bank: the same one while it is referred to, with its numbers on the device."""
        banked = self._of_banks.get(bank)
        if banked is None:
            check_base_alone(self._request.adapter, self._layers, moves_weights=self._moves_weights)
            banked = self._of_banks[bank] = BankedModel(self.model, self._paths, self._layers, bank)
        return banked

    @cached_property
    def _of_banks(self) -> WeakValueDictionary[AdapterBank, BankedModel]:
        return WeakValueDictionary()

    def save_merged(self, path: Path) -> None:
        check_mergeable(self.description)
        check_whole(self.description)
        if self._is_full:
            base = self._request.base_weights()
            write_trained(path, self._request.model_dir, base, self.model, self._adapter.masters)
            return
        base, dtype = merge_base(self._request), self.description.dtype
        edits = self._beside.edits(lambda name: _numpy(self._adapter.masters[name]))

        def delta(module: str) -> np.ndarray:
            layer, number = layer_of(self._layers, module)
            with self._reading(layer):
                return _numpy(layer.delta(number))

        write_merged(base, path, self._places, delta, dtype, edits)

    @contextmanager
    def _generating(self) -> Iterator[None]:
        few_rows = self._few_rows.used() if self._few_rows else nullcontext()
        with torch.no_grad(), self._together(), own_attention(self.model, self._kernels), compiled.plain(), few_rows:
            yield

    @cached_property
    def _few_rows(self) -> ProductsOfFewRows | None:
        return None if self._request.kernels == "reference" else ProductsOfFewRows(self.model)

    def _trial_run(self) -> None:
        with self._together():
            trial_run(self.model, self._kernels)

    def _inputs(self, batch: Batch) -> Inputs:
        arrays = self._arrays(batch)
        sent = dict(zip(arrays, to_device([*arrays.values()], self.model.device), strict=True))
        maybe_compile, branches, keys = self._kernels.maybe_compile, branches_of(batch), None
        if branches:
            self._check_sharing()
            longest = int(np.diff(arrays["key borders"]).max())
            keys = GatheredKeys(sent["keys"], sent["key uses"], sent["key borders"], longest)
        documents = DocumentBorders.of(batch.segments_BT, sent["borders"], maybe_compile, branches, keys)
        inputs = Inputs.of(sent, documents)
        if inputs.positions_BT is None or self._kernels.attention or not self._needs_masks:
            return inputs
        return replace(inputs, masks=document_masks(self.model, inputs.positions_BT))

    def _check_sharing(self) -> None:
        """Raise CannotShare unless each layer computes documents that have a parent."""
        if not self._kernels.attention:
            raise CannotShare("transformers' own attention has no mask for it")
        if self._separate.has_layers:
            raise CannotShare("the model has layers with a state, which goes on from one token to the next")
        if self._graphs is not None:
            raise CannotShare("model.kernels: graph records one layout of keys")

    def _arrays(self, batch: Batch) -> dict[str, np.ndarray]:
        # Rows that share their positions would have their cosines copied for each row, in every layer.
        shares_positions = self._kernels.attention and len(batch.tokens_BT) > 1
        return arrays_of(batch, positions=shares_positions or needs_positions(batch, self._num_positions))

    @contextmanager
    def _evaluating(self, batch: Batch) -> Iterator[None]:
        """Compute losses without gradients, from the hidden states of the batch if it has them."""
        with torch.no_grad(), self._together(), self._frozen_layers.replaced(batch.hidden_BTD):
            self._dropout_seeds.is_evaluated = True
            try:
                yield
            finally:
                self._dropout_seeds.is_evaluated = False

    @contextmanager
    def _dropout(self, inputs: Inputs) -> Iterator[None]:
        """Enable dropout with the seeds of this micro-batch."""
        self._dropout_seeds.seeds_BT = inputs.seeds_BT
        try:
            yield
        finally:
            self._dropout_seeds.seeds_BT = None

    def _frozen(self, path: str) -> np.ndarray:
        """Return the frozen weight of an adapted layer, float32 [out, in]."""
        layer, number = layer_of(self._layers, path)
        with self._reading(layer):
            return _numpy(layer.frozen(number, torch.float32).float())

    @property
    def _moves_weights(self) -> bool:
        """Whether weights of the base come to the device as they are needed."""
        return self._streamed is not None or is_split(self.model)

    @contextmanager
    def _reading(self, layer: AdaptedLayer) -> Iterator[None]:
        """Have the frozen weight of a layer on the device, to read its numbers without calling the layer."""
        if self._streamed:
            self._streamed.bring(layer.base)
        with self._together(), whole(group_of(self.model, layer.base)):
            yield

    def _loss_sum(self, inputs: Inputs, smoothing: float = 0.0) -> Tensor:
        """Σ −w·log p(label) over the targets, float32; with `smoothing` as in `losses.loss_sum`."""
        return self._loss_of(self._output(inputs), inputs, smoothing)

    def _loss_of(self, output: Tensor, inputs: Inputs, smoothing: float = 0.0) -> Tensor:
        """The same from the `_output` of a micro-batch, for the labels and weights of these inputs."""
        head = self._kernels.head
        if head is None:
            return loss_sum(output, inputs.labels_BT, inputs.weights_BT, smoothing)
        hidden_MD, rows = self._target_states(output, inputs), self._kernels.rows
        with whole(head):
            return cross_entropy.LinearCrossEntropy.apply(
                hidden_MD, weight_of(head, hidden_MD.dtype).detach(), head.bias, inputs.labels_M, self._scaling(inputs),
                self._kernels.maybe_compile, inputs.weights_M, self._head_gradient, smoothing, *(rows or ()),
            )  # fmt: skip

    def _target_states(self, hidden_BTD: Tensor, inputs: Inputs) -> Tensor:
        """Return the last hidden states at the targets, [M, D]."""
        return cross_entropy.TargetRows.apply(hidden_BTD.flatten(0, 1), inputs.where_M)

    def _output(self, inputs: Inputs) -> Tensor:
        """Return what losses are computed from: the last hidden states [B, T, D], or without a fast loss the logits."""
        if self._kernels.head is None:
            return self._logits(inputs)
        return self._run(self.model.base_model, inputs).last_hidden_state

    def _logits(self, inputs: Inputs) -> Tensor:
        logits_BTV = self._run(self.model, inputs).logits
        return logits_BTV if inputs.temperature is None else logits_BTV.float() / inputs.temperature

    def _scaling(self, inputs: Inputs) -> cross_entropy.Scaling:
        return cross_entropy.Scaling(self._kernels.cap, inputs.temperature)

    def _run(self, model: nn.Module, inputs: Inputs) -> Any:
        """transformers' output of a model for the rows of a micro-batch."""
        options: dict[str, Any] = {"use_cache": False}
        if inputs.positions_BT is not None:
            # Without a mask or a cache, transformers starts a new document wherever the position ids do not increase
            # by one, and masks the other documents (`masking_utils.find_packed_sequence_indices`).
            options["position_ids"] = inputs.positions_BT
        if self._kernels.attention:
            options["documents"] = inputs.documents
        elif inputs.masks is not None:
            options["attention_mask"] = inputs.masks
        # Rows are padded on the right and attention is causal, so no real token sees padding and no mask is needed.
        return model(inputs.tokens_BT, **options)


def _largest_kept(model: PreTrainedModel, request: LoadRequest, description: Mapping[str, Any]) -> int:
    """Return the size up to which freed blocks are kept, for speed; 0 if memory is short: a split or streamed base."""
    if is_split(model) or request.resident_layers is not None:
        return 0
    is_packed = description["quantization"] != "none" and description["num_parameters"] >= allocator.LARGE
    return allocator.LARGEST_KEPT_PACKED if is_packed else allocator.LARGEST_KEPT


def _placed_layers(
    model: PreTrainedModel, request: LoadRequest, seeds: DropoutSeeds
) -> tuple[dict[str, AdaptedLayer], dict[str, FilePlace], dict[str, str]]:
    """Wrap the adapted layers, named after the base's files.

    Return them, their places in the files, and the paths of all layers that could be adapted, by name.
    """
    weights = request.base_weights()
    shapes = {path: shape_of(layer) for path, layer in adaptable_layers(model).items()}
    places = find_places(model, weights, shapes) if weights is not None else {}
    names = canonical_names(places)
    of_stacks = expert_places(model, weights) if weights is not None and request.adapter.names_experts else {}
    names |= {path: expert_stack(own_places, path.rpartition(".")[2]) for path, own_places in of_stacks.items()}
    layers = add_layers(model, request.adapter, seeds, names)
    placed = {names[path]: place for path, place in places.items() if names[path] in layers}
    for path, own_places in of_stacks.items():
        if names[path] in layers:
            placed |= dict(zip(members(names[path], len(own_places)), own_places, strict=True))
    if weights is not None:
        known_paths = {path for path in layers if path in placed or path in names.values()}
        check_places(layers, known_paths, "transformers")
    return layers, placed, {names.get(path, path): path for path in shapes}


def _labels_at(batch: Batch, is_BT: np.ndarray) -> np.ndarray:
    """Return the labels of a micro-batch at these places, and none elsewhere."""
    return np.where(is_BT if batch.labels_BT.ndim == 2 else is_BT[..., None], batch.labels_BT, IGNORE_INDEX)


def _numpy(tensor: Tensor) -> np.ndarray:
    # Copied before NumPy sees it: torch frees no storage that NumPy has seen, and a gathered weight has to be freed.
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format).numpy()
