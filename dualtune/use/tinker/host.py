"""Training runs over one base model, driven from outside a call at a time: what is behind `dualtune serve --train`.

No HTTP here, and no protocol. A host belongs to one thread. A call that cannot be honoured raises ConfigError, which
says what is allowed, and leaves the run as it was.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.base.errors import ConfigError, FormatError, NonFiniteError
from dualtune.data.batches import SequenceLayout
from dualtune.engine.backend import Backend, Batch, Engine, SharedBase, StepOutput, check_state
from dualtune.engine.memory.estimate import AUTO_MICRO_BATCH_TOKENS
from dualtune.engine.peft_trial import named
from dualtune.model.adapter import AdapterSpec, exact_targets, modules_of
from dualtune.model.base_model import find_weights, resolve_model
from dualtune.model.config_file import longest_text, read_config
from dualtune.model.fingerprint import fingerprint
from dualtune.model.formats.directory import Adapter, read_adapter
from dualtune.model.formats.naming import Naming, is_fan_in_fan_out
from dualtune.train.fingerprints import fingerprints, plain_batch
from dualtune.train.generation.inference import BASE_ONLY, LoadedModel, inference_spec, load_model
from dualtune.train.hooks import Event, Watchers
from dualtune.train.model_checks import check_causality, check_packing, why_not_shared
from dualtune.train.recovery import Recovery
from dualtune.train.state import checkpoint
from dualtune.train.state.checkpoint import Checkpoint
from dualtune.train.state.lock import Lock
from dualtune.train.state.metrics import Metrics
from dualtune.train.state.run_dir import METRICS
from dualtune.use.tinker.adapters import section_of, spec_in, spec_of, trains_head
from dualtune.use.tinker.checkpoints import (
    RunDirectory,
    check_name,
    find_checkpoint,
    read_run,
    read_state,
)
from dualtune.use.tinker.gradients import ClientData, LossSums
from dualtune.use.tinker.losses import check_inputs, check_loss
from dualtune.use.tinker.messages import (
    AdamSettings,
    Cancelled,
    CheckpointInfo,
    Datum,
    LoraSettings,
    LossResult,
    SampleRequest,
    SampleResult,
    ServedRun,
)
from dualtune.use.tinker.sample_batches import SampleBatches, SampledSource
from dualtune.use.tinker.samples import SampleLimits, admitted, check_tokens
from dualtune.use.tinker.seat import OPTIMIZER, Seat, TrainingState, Weights, restored

USUAL_CONTEXT = 4096  # tokens, of a model that does not say how many it takes
SAMPLERS_KEPT = 8  # in memory: of each run those without a name, and of all that are on disk
UNNAMED = "memory:"  # begins the path of a sampler without a name


class TrainingHost:
    """Runs over one base model, each with its adapter, gradient and optimizer."""

    def __init__(
        self, backend: Backend, base: str, runs_dir: Path, *, dtype: str = "auto", quantization: str = "auto",
        micro_batch_tokens: int = AUTO_MICRO_BATCH_TOKENS, tell: Callable[[str], object] = lambda text: None,
    ) -> None:  # fmt: skip
        """Load the base, a directory or a hub id. `micro_batch_tokens`: how many go through the model at once."""
        self.base, self.runs_dir, self.backend = base, runs_dir, backend
        self.directory = resolve_model(base)
        config = read_config(self.directory)
        self.max_length = longest_text(config) or USUAL_CONTEXT
        self._form = {"dtype": dtype, "quantization": quantization}
        self._shared_base = SharedBase()
        self._layout, self._shares = SequenceLayout(micro_batch_tokens), False
        self._runs: dict[str, OpenRun] = {}
        self._samplers: dict[str, Weights] = {}
        self._model: LoadedModel | None = None  # without its engine, which is the seat's
        self._namings: dict[AdapterSpec, Naming] = {}
        self._seat = Seat(self._load)
        self._sample_batches = SampleBatches(self._seat, backend, tell)
        engine = self._seat.use(None, BASE_ONLY)
        self._try_model(engine)
        self.vocab = engine.logprobs(plain_batch(np.zeros(1, np.int32))).shape[-1]
        self._base_prints = fingerprints(engine, self._loaded(engine).tokenizer)

    def close(self) -> None:
        """Free the model, and the directories of the runs. What was not saved is lost."""
        for name in [*self._runs]:
            self.unload(name)
        self._samplers.clear()
        self._seat.close()

    # --- runs -------------------------------------------------------------------------------------------------------

    def create_run(self, name: str, settings: LoraSettings) -> ServedRun:
        """Create a run with a new adapter. ConfigError for a name that is taken, or an adapter that does not fit."""
        seed = secrets.randbelow(1 << 31) if settings.seed is None else settings.seed
        if not 0 <= seed < 1 << 63:
            raise ConfigError(f"lora_config: seed: got {seed}, allowed: 0 to {(1 << 63) - 1}")
        spec = spec_of(settings, self.directory)
        flags = settings.train_attn, settings.train_mlp, trains_head(spec)
        return self._open(
            ServedRun(name, self.base, settings.rank, seed, *flags, time.time()), self._seat.new_run(spec, seed)
        )

    def create_run_from(self, name: str, source: str, *, optimizer: bool) -> ServedRun:
        """Create a run from a state `tinker://RUN/weights/NAME`, of this host, one before it, or `dualtune train`."""
        info, saved = self._read_state(source, optimizer=optimizer)
        state = self._seat.new_run(self._spec(info), info.seed)
        adapter = self._seat.fetch(state.weights)
        saved = checkpoint.in_names_of(adapter, saved)
        try:
            check_state({n: x.shape for n, x in adapter.items()}, saved.adapter, "adapter")
        except ValueError as error:
            raise FormatError(f"{source}: {error}. It was changed after it was saved") from None
        state = restored(state.weights.spec, saved, optimizer=optimizer)
        return self._open(replace(info, name=name, base=self.base, created=time.time(), steps=0), state)

    def run_info(self, name: str) -> ServedRun:
        """Return the facts of a run in memory, or of one that `runs_dir` has."""
        own = self._runs.get(name)
        return read_run(self.runs_dir / check_name("run", name)) if own is None else replace(own.info, steps=own.steps)

    def unload(self, name: str) -> None:
        """Free the memory of a run. What it has saved stays."""
        run = self._run(name)
        self._seat.forget(run.state)
        del self._runs[name]
        for path in [path for path in self._samplers if path.startswith(f"{UNNAMED}{name}/")]:
            del self._samplers[path]
        run.close()

    def _open(self, info: ServedRun, state: TrainingState) -> ServedRun:
        directory = RunDirectory.create(self.runs_dir, info, self._config(state.weights.spec, info))
        self._runs[info.name] = OpenRun(info, directory, state, self.backend)
        return info

    def _config(self, spec: AdapterSpec, info: ServedRun) -> dict[str, Any]:
        """Return what config.yaml says of a run, and the state of its checkpoints."""
        return {
            "model": {"name": self.base, **self._form},
            "adapter": section_of(spec),
            "train": {"optimizer": "adamw", "schedule": "constant", "average": "none"},
            "run": {"dir": str(self.runs_dir / info.name), "seed": info.seed},
        }

    def _run(self, name: str) -> OpenRun:
        if name not in self._runs:
            raise ConfigError(
                f"model_id: there is no run '{name[:100]}' in memory. Create one from its last checkpoint"
            )
        return self._runs[name]

    # --- training ---------------------------------------------------------------------------------------------------

    def forward(
        self, run: str, data: Sequence[Datum], loss: str, config: Mapping[str, float | str],
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> LossResult:  # fmt: skip
        """Return the loss of the data, and what the model says of their targets.

        `is_cancelled` is asked before each micro-batch: then Cancelled, and the run is as it was.
        """
        return self._computed(self._run(run), data, loss, config, is_cancelled, has_gradient=False)

    def forward_backward(
        self, run: str, data: Sequence[Datum], loss: str, config: Mapping[str, float | str],
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> LossResult:  # fmt: skip
        """Do the same, and add the gradient of the loss to that of the next update."""
        return self._computed(self._run(run), data, loss, config, is_cancelled, has_gradient=True)

    def optim_step(self, run: str, settings: AdamSettings) -> Mapping[str, float]:
        """Update the adapter by AdamW with the gradient since the last update; return metrics.

        NonFiniteError if the gradient is not finite: then nothing is updated, and the gradient is dropped.
        """
        check_adam(settings)
        own = self._run(run)
        constants = {name: getattr(settings, name) for name in ("beta1", "beta2", "eps", "weight_decay")}
        engine = self._seat.update(own.state, constants)
        clip = settings.grad_clip_norm if settings.grad_clip_norm > 0 else None
        output = engine.optim_step(lr=settings.learning_rate, max_grad_norm=clip)
        own.state.has_gradient = False
        own.state.updates = {**constants, "max_grad_norm": clip}
        norm = float(output.grad_norm)
        own.write_step(output, settings.learning_rate)
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"optim_step: the norm of the gradient is {norm}, so nothing was updated, and the gradient is dropped. "
                "Lower the learning rate, or look for weights or advantages that are too large"
            )
        return {"grad_norm:mean": norm}

    def _computed(
        self, run: OpenRun, data: Sequence[Datum], loss: str, config: Mapping[str, float | str],
        is_cancelled: Callable[[], bool], *, has_gradient: bool,
    ) -> LossResult:  # fmt: skip
        check_loss(loss, config)
        self._check_data(data, loss)
        engine = self._seat.train(run.state)
        before = engine.gradient() if run.state.has_gradient else None  # a shortage of memory drops it
        longest = max(len(datum.tokens) for datum in data)
        recovery = Recovery(self.backend, engine, self._layout, longest)
        placed = ClientData(data, shares=self._shares)

        def work(sums: LossSums, batch: Batch) -> None:
            if is_cancelled():
                raise Cancelled
            (sums.forward_backward if has_gradient else sums.forward)(engine, batch)

        try:
            while True:
                sums = LossSums(loss, config, placed)
                if recovery.attempt(0, placed.micro_batches(recovery.layout), partial(work, sums)):
                    break
                self._layout = recovery.layout
                if before is not None:
                    engine.add_gradient(before)
        except BaseException:
            engine.discard()  # what was added of this call
            if before is not None:
                engine.add_gradient(before)
            raise
        if has_gradient:
            run.state.has_gradient = True
            run.note(sums, data)
        outputs = [{"logprobs": sums.logprobs[i]} for i in range(len(data))]
        return LossResult(outputs, {"loss:sum": sums.total})

    def _check_data(self, data: Sequence[Datum], loss: str) -> None:
        if not data:
            raise ConfigError("data: is empty, give at least one datum")
        for i, datum in enumerate(data):
            check_inputs(loss, i, datum.inputs)
            targets = datum.inputs["target_tokens"]
            check_tokens(f"data[{i}].model_input", datum.tokens, self.max_length, self.vocab)
            check_tokens(f"data[{i}].loss_fn_inputs: target_tokens", targets, self.max_length, self.vocab)
            if len(targets) != len(datum.tokens):
                raise ConfigError(
                    f"data[{i}]: model_input has {len(datum.tokens)} tokens, target_tokens {len(targets)}"
                )
            if targets.ndim == 2 and targets.shape[1] > self.vocab:
                raise ConfigError(
                    f"data[{i}]: got {targets.shape[1]} targets in a place, the vocabulary has {self.vocab}"
                )

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save_state(self, run: str, name: str, *, overwrite: bool = False) -> CheckpointInfo:
        """Save what a run needs to continue. The gradient of the next update is not part of it."""
        own = self._run(run)
        engine = self._seat.train(own.state)
        spec = own.state.weights.spec
        entries = {
            "config": self._config(spec, own.info), "place": {}, "schedule": {}, "guards": {},
            "fingerprints": self._fingerprints, "updates": own.state.updates,
        }  # fmt: skip
        self._samplers.pop(f"tinker://{run}/weights/{name}", None)
        return own.directory.save(
            "weights", name, self._adapter(own.state.weights), self._record(own, engine), overwrite=overwrite,
            state=(engine, own.steps, entries),
        )  # fmt: skip

    def load_state(self, run: str, source: str, *, optimizer: bool) -> None:
        """Give a run the adapter of a state, and its optimizer or a new one. Its gradient is dropped."""
        own = self._run(run)
        info, saved = self._read_state(source, optimizer=optimizer)
        weights, spec = own.state.weights, self._spec(info)
        adapter = self._seat.fetch(weights)
        saved = checkpoint.in_names_of(adapter, saved)
        is_same = {n: x.shape for n, x in adapter.items()} == {n: x.shape for n, x in saved.adapter.items()}
        if not is_same or any(spec.scale_of(module) != weights.spec.scale_of(module) for module in modules_of(adapter)):
            raise ConfigError(
                f"path: {source} has an adapter of rank {info.rank}, of another scale or for other layers than this "
                "run. Create a training client from it"
            )
        self._seat.forget(own.state)
        own.state = restored(weights.spec, saved, optimizer=optimizer)

    def save_sampler(self, run: str, name: str | None) -> str:
        """Keep the present weights to sample from, and return their path.

        Without a name they stay in memory: the newest SAMPLERS_KEPT of each run.
        """
        own = self._run(run)
        engine = self._seat.train(own.state)
        if name is not None:
            saved = own.directory.save(
                "sampler_weights", name, self._adapter(own.state.weights), self._record(own, engine)
            )
            path = saved.path
        else:
            own.num_samplers += 1
            path = f"{UNNAMED}{run}/{own.num_samplers}"
            self._samplers.pop(f"{UNNAMED}{run}/{own.num_samplers - SAMPLERS_KEPT}", None)
        self._seat.fetch(own.state.weights)
        self._keep(path, own.state.weights)
        return path

    def _keep(self, path: str, weights: Weights) -> None:
        """Keep a sampler in memory. The least recently used of those that are on disk too leaves."""
        self._samplers.pop(path, None)
        self._samplers[path] = weights
        on_disk = [each for each in self._samplers if not each.startswith(UNNAMED)]
        for each in on_disk[:-SAMPLERS_KEPT]:
            del self._samplers[each]

    def _read_state(self, source: str, *, optimizer: bool) -> tuple[ServedRun, Checkpoint]:
        """Return the run of a state, and the state. ConfigError if its base model or its optimizer is another one."""
        info, saved = read_state(self.runs_dir, source)
        for what in ("base model's config", "base model's tensors"):
            if saved.state["fingerprints"].get(what) != self._fingerprints[what]:
                raise ConfigError(f"path: {source} is of another base model ({info.base}), and this is {self.base}")
        name, slots = checkpoint.optimizer_of(saved.state), (*saved.optimizer.slots,)
        if optimizer and (name, slots) != (OPTIMIZER.name, OPTIMIZER.slots):
            raise ConfigError(
                f"path: {source} has the state of {name} ({', '.join(slots) or 'none'}), and served is AdamW "
                f"({', '.join(OPTIMIZER.slots)}). Load it without its optimizer, or continue with `dualtune train`"
            )
        return info, saved

    def _spec(self, info: ServedRun) -> AdapterSpec:
        if info.adapter is not None:
            return spec_in(info.adapter, info.name)
        return spec_of(
            LoraSettings(info.rank, info.seed, info.train_attn, info.train_mlp, info.train_unembed), self.directory
        )

    def _adapter(self, weights: Weights) -> Adapter:
        """Return weights with what their files say."""
        spec, tensors = weights.spec, self._seat.fetch(weights)
        modules = modules_of(tensors)
        is_transposed = is_fan_in_fan_out(read_config(self.directory))
        adapter = Adapter(
            replace(spec, targets=exact_targets(modules, spec.targets)), tensors, self.base,
            fan_in_fan_out=is_transposed,
        )  # fmt: skip
        if spec not in self._namings:
            self._namings[spec] = named(adapter, self.directory).naming
        return replace(adapter, naming=self._namings[spec])

    def _record(self, run: OpenRun, engine: Engine) -> dict[str, Any]:
        """Return what dualtune.json says of base and training, with what the model computes now and without it."""
        tokenizer = self._loaded(engine).tokenizer
        prints = {"base": self._base_prints, "adapter": fingerprints(engine, tokenizer)}
        return {
            "base": {**self._identity, "name": self.base, "loaded_as": engine.description.quantization,
                     "init": "pretrained"},
            "training": {"backend": self.backend.name, "steps": run.steps, "seed": run.info.seed},
            "fingerprints": prints,
        }  # fmt: skip

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return fingerprint(self.directory, find_weights(self.directory))

    @cached_property
    def _fingerprints(self) -> dict[str, str]:
        """What a state is compared with before it is loaded; there are no documents."""
        base = self._identity
        tensors = f"sha256 {base['weights_sha256'][:16]}"
        return {
            "base model's config": f"sha256 {base['config_sha256'][:16]}", "base model's weights": tensors,
            "base model's tensors": tensors, "tokenizer": f"sha256 {str(base['tokenizer_sha256'])[:16]}",
            "chat template": "none", "train documents": "none", "eval documents": "none",
        }  # fmt: skip

    # --- sampling ---------------------------------------------------------------------------------------------------

    def sample(
        self, requests: Sequence[SampleRequest], is_cancelled: Callable[[int], bool] = lambda index: False
    ) -> Iterator[tuple[int, SampleResult | Exception]]:
        """Yield each request's index and its result, or what refuses it, as they end.

        `is_cancelled` is asked of a request after each token: then its result is Cancelled. Requests of one source are
        continued in one batch, and so are those of several whose adapters form a bank; the others follow each other.
        """
        indices = dict[str | None, list[int]]()
        for i, request in enumerate(requests):
            indices.setdefault(request.source, []).append(i)
        sources, limits = list[SampledSource](), SampleLimits(self.max_length, self.vocab)
        model = self._loaded(self._seat.present(BASE_ONLY))
        for source, own in indices.items():
            try:
                weights = self._weights(source)
            except ConfigError as error:
                yield from ((i, error) for i in own)
                continue
            pending, refused = admitted(model, requests, own, limits, is_cancelled)
            yield from refused
            if pending:
                sources.append(SampledSource(weights, pending))
        for i, result in self._sample_batches.results(sources):
            yield i, Cancelled() if is_cancelled(i) else result

    def _weights(self, source: str | None) -> Weights | None:
        """Return the weights of a source; None for the base."""
        if source is None:
            return None
        if source.startswith(UNNAMED):
            if source not in self._samplers:
                raise ConfigError(
                    f"sampler: {source} is not kept any more: of each run the newest {SAMPLERS_KEPT} without a name "
                    "are. Sample from a newer one, or save it with a name"
                )
            return self._samplers[source]
        info = find_checkpoint(self.runs_dir, source)  # it may have been deleted
        weights = self._samplers.get(source)
        if weights is None:
            spec, adapter = self._spec(read_run(self.runs_dir / info.run)), read_adapter(info.directory)
            if adapter.spec.alpha != spec.alpha:  # the files have an integer
                spec = inference_spec(adapter)
            weights = Weights(spec, adapter.tensors)
        self._keep(source, weights)
        return weights

    # --- the model --------------------------------------------------------------------------------------------------

    def _load(self, spec: AdapterSpec) -> Engine:
        self._model = None
        model = load_model(
            self.backend, str(self.directory), dtype=self._form["dtype"], quantization=self._form["quantization"],
            spec=spec, shared_base=self._shared_base,
        )  # fmt: skip
        self._model = model
        return model.engine

    def _loaded(self, engine: Engine) -> LoadedModel:
        assert self._model is not None and self._model.engine is engine
        return self._model

    def _try_model(self, engine: Engine) -> None:
        """Raise ConfigError for a model that is not causal.

        Data share rows where it keeps documents apart in one, and a common beginning where it can compute that once.
        """
        check_causality(engine)
        if True in self.backend.capabilities().get("data.packing", ()):
            with contextlib.suppress(ConfigError):
                check_packing(engine, self.backend)
                self._layout = replace(self._layout, row_length=self._layout.max_tokens)
                self._shares = why_not_shared(engine, self.backend) is None


# ----------------------------------------------------------------------------------------------------------------------
# A run in memory.


class OpenRun:
    """A run: what it trains, its directory, which is locked, and what it did since its last update."""

    def __init__(self, info: ServedRun, directory: RunDirectory, state: TrainingState, backend: Backend) -> None:
        self.info, self.directory, self.state = info, directory, state
        self.steps = self.num_samplers = 0
        self._lock = Lock(directory.path)
        self._metrics = Metrics(directory.path / METRICS, backend, Watchers([]))
        self._updates: Mapping[str, float | None] = {}  # the constants that the last row of them has
        self._since = [0.0, 0, 0, 0]  # loss, targets with a weight, tokens and data since the last update

    def note(self, sums: LossSums, data: Sequence[Datum]) -> None:
        """Record a contribution to the gradient."""
        added = sums.total, sums.num_weighted, sum(len(datum.tokens) for datum in data), len(data)
        self._since = [before + more for before, more in zip(self._since, added, strict=True)]

    def write_step(self, output: StepOutput, lr: float) -> None:
        """Write the row of an update. Its loss is the mean over the targets that have a weight.

        Before it one of the constants, where they are not those of the update before.
        """
        if self.state.updates != self._updates:
            self._updates = self.state.updates
            text = ", ".join(f"{name} {json.dumps(value)}" for name, value in self._updates.items())
            self._metrics.event(Event(self.steps, "updates", f"AdamW with {text}", self._updates))
        self.steps += 1
        (loss, targets, tokens, documents), self._since = self._since, [0.0, 0, 0, 0]
        self._metrics.step(
            StepOutput(loss / max(1, targets), output.grad_norm), int(documents), step=self.steps, epoch=0.0, lr=lr,
            num_targets=int(targets), num_tokens=int(tokens), metrics={},
        )  # fmt: skip
        self._metrics.flush()

    def close(self) -> None:
        self._metrics.close()
        self._lock.release("done")


def check_adam(settings: AdamSettings) -> None:
    """Raise ConfigError for constants with which no update can be computed."""
    for name, allowed, is_allowed in (
        ("learning_rate", "0 or more", settings.learning_rate >= 0),
        ("beta1", "0 to below 1", 0 <= settings.beta1 < 1),
        ("beta2", "0 to below 1", 0 <= settings.beta2 < 1),
        ("eps", "above 0", settings.eps > 0),
        ("weight_decay", "0 or more", settings.weight_decay >= 0),
        ("grad_clip_norm", "a number, 0 means no clipping", True),
    ):
        if not (is_allowed and math.isfinite(getattr(settings, name))):
            raise ConfigError(f"adam_params: {name}: got {getattr(settings, name)}, allowed: {allowed}")
