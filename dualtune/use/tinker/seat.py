"""One base model for many runs: an engine that computes for one run at a time, and the states of the others.

What a run has — adapter, optimizer, gradient — is in the engine while it is seated there, else in host memory, in
NumPy. A run that is seated again continues bitwise. Runs with another rank or other modules need another engine over
the same base, which is then made anew; the base is loaded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dualtune.engine.backend import Engine, OptimizerState
from dualtune.model.adapter import AdapterSpec, Tensors, init_adapter, modules_of, tensor_name
from dualtune.model.optimizer import OptimizerSpec, Shapes
from dualtune.model.update_rules import Settings
from dualtune.train.generation.batched import RowBatch
from dualtune.train.state.checkpoint import Checkpoint

OPTIMIZER = OptimizerSpec("adamw")


@dataclass(eq=False, slots=True)
class Weights:
    """The weights of an adapter at one moment. They never change: an update makes others."""

    spec: AdapterSpec
    tensors: Tensors | None = None  # None: only the engine has them


@dataclass(frozen=True, slots=True)
class BankedWeights:
    """Weights in a bank, by number, and the batch into which rows with them enter: it has them on the device."""

    weights: Sequence[Weights]
    batch: RowBatch


@dataclass(eq=False, slots=True)
class TrainingState:
    """What a run trains."""

    weights: Weights
    optimizer: OptimizerState | None  # None: only the engine has it
    gradient: Tensors | None = None  # None: there is none, or only the engine has it
    has_gradient: bool = False
    updates: Mapping[str, float | None] = field(default_factory=dict[str, float | None])  # constants of the last one


class Seat:
    """The engine, and who is seated in it."""

    def __init__(self, load: Callable[[AdapterSpec], Engine]) -> None:
        """`load` returns an engine for a spec, with the base that the one before had."""
        self._load = load
        self._engine: Engine | None = None
        self._spec: AdapterSpec | None = None
        self._neutral: Weights | None = None  # of this engine: the base without an adapter
        self._run: TrainingState | None = None  # whose optimizer and gradient are in the engine
        self._weights: Weights | None = None  # which are in the engine
        self._settings: Settings = {}  # those of the engine's optimizer
        self.banked: BankedWeights | None = None  # of the last samples; memory for training is worth more

    def new_run(self, spec: AdapterSpec, seed: int) -> TrainingState:
        """Return what a run with this seed starts from. ConfigError if the model has nothing that the spec adapts."""
        shapes = self._engine_of(spec).adapter_shapes
        return TrainingState(Weights(spec, initial_adapter(spec, shapes, seed)), no_updates(shapes))

    def train(self, run: TrainingState) -> Engine:
        """Return the engine with all that a run has."""
        self.banked = None
        engine = self._engine_of(run.weights.spec)
        if self._run is not run:
            self._unseat()
            assert run.optimizer is not None
            engine.load_optimizer_state(run.optimizer)
            if run.gradient is not None:
                engine.add_gradient(run.gradient)
            self._run, run.optimizer, run.gradient = run, None, None
        self._use(engine, run.weights)
        return engine

    def use(self, weights: Weights | None, default: AdapterSpec) -> Engine:
        """Return the engine with these weights to sample, or None: the base alone, in the engine of `present`."""
        engine = self.present(default) if weights is None else self._sampling(weights.spec)
        if weights is None:
            weights = self._neutral = self._neutral or Weights(self._spec or default, engine.neutral_state())
        self._use(engine, weights)
        return engine

    def present(self, default: AdapterSpec) -> Engine:
        """Return the engine that is there, or the default, to sample with other adapters than its own."""
        return self._sampling(self._spec or default)

    def lacks(self, weights: Weights | None) -> bool:
        """Return whether an engine for these weights would have to be made."""
        return weights is not None and weights.spec != self._spec

    def _sampling(self, spec: AdapterSpec) -> Engine:
        """Return the engine of a spec. A gradient leaves it before: sampling drops it where memory runs out."""
        if self._run is not None and self._run.has_gradient:
            self._unseat()
        return self._engine_of(spec)

    def update(self, run: TrainingState, settings: Settings) -> Engine:
        """Return the engine of a run, about to update its weights with these hyperparameters. They become others."""
        engine = self.train(run)
        if settings != self._settings:
            engine.set_hyperparameters(settings)
            self._settings = settings
        run.weights = self._weights = Weights(run.weights.spec)
        return engine

    def fetch(self, weights: Weights) -> Tensors:
        """Return the tensors of weights, which stay in the host's memory from now on."""
        if weights.tensors is None:
            assert self._engine is not None and self._weights is weights
            weights.tensors = self._engine.adapter_state()
        return weights.tensors

    def optimizer_state(self, run: TrainingState) -> OptimizerState:
        """Return a copy of the optimizer's state of a run."""
        if run.optimizer is None:
            assert self._engine is not None and self._run is run
            return self._engine.optimizer_state()
        return run.optimizer

    def forget(self, run: TrainingState) -> None:
        """Drop what the engine has of a run."""
        if self._run is run and self._engine is not None:
            self._engine.discard()
            self._run = None
        if self._weights is run.weights:
            self._weights = None

    def close(self) -> None:
        """Free the engine. Runs that are seated lose what only it has."""
        self._engine = self._spec = self._run = self._weights = self._neutral = self.banked = None

    def _engine_of(self, spec: AdapterSpec) -> Engine:
        if self._engine is None or spec != self._spec:
            self._unseat()
            self._keep_weights()
            self.close()
            self._engine, self._spec, self._settings = self._load(spec), spec, {}
        return self._engine

    def _use(self, engine: Engine, weights: Weights) -> None:
        if self._weights is weights:
            return
        self._keep_weights()
        assert weights.tensors is not None
        engine.load_adapter_state(weights.tensors)
        self._weights = weights

    def _unseat(self) -> None:
        """Copy to the host what only the engine has of the run that is seated."""
        run, engine = self._run, self._engine
        if run is None or engine is None:
            return
        run.optimizer = engine.optimizer_state()
        if run.has_gradient:
            run.gradient = engine.gradient()
            engine.discard()
        self._run = None

    def _keep_weights(self) -> None:
        """Copy the engine's weights to the host, before others replace them."""
        if self._weights is not None and self._engine is not None:
            self.fetch(self._weights)


def initial_adapter(spec: AdapterSpec, shapes: Shapes, seed: int) -> Tensors:
    """Return a new adapter with tensors of these shapes: the same on every backend, whatever an engine had before."""
    modules: dict[str, tuple[int, int]] = {}
    for module in modules_of(shapes):
        modules[module] = shapes[tensor_name(module, "B")][0], shapes[tensor_name(module, "A")][1]
    return init_adapter(modules, spec.rank_of, seed)


def no_updates(shapes: Shapes) -> OptimizerState:
    """Return the state of the optimizer before the first update."""
    slots = OPTIMIZER.slot_shapes(shapes)
    return OptimizerState(
        0, {slot: {n: np.zeros(s, np.float32) for n, s in own.items()} for slot, own in slots.items()}
    )


def restored(spec: AdapterSpec, saved: Checkpoint, *, optimizer: bool) -> TrainingState:
    """Return the state of a checkpoint, with its optimizer or a new one."""
    shapes = {name: x.shape for name, x in saved.adapter.items()}
    if not optimizer:
        return TrainingState(Weights(spec, saved.adapter), no_updates(shapes))
    return TrainingState(Weights(spec, saved.adapter), saved.optimizer, updates=saved.state.get("updates", {}))
