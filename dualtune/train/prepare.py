"""Checks before a run: every error in a config is found here, before a model is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from dualtune.base.errors import ConfigError, DataError, FormatError
from dualtune.base.files import expanded
from dualtune.config import Config
from dualtune.config.schema import AdapterConfig
from dualtune.config.values import ON_POLICY, POLICY_OBJECTIVES
from dualtune.data.batches import SequenceLayout, micro_batches
from dualtune.data.chat.template import NAMES
from dualtune.data.documents import Data, Documents, Show, probe_documents
from dualtune.data.order import Order, without
from dualtune.data.row_fields import RowFields
from dualtune.data.system_message import shared_system_message
from dualtune.data.tokens.new_tokens import with_new_tokens
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import Backend, Batch
from dualtune.engine.capabilities import check_capabilities
from dualtune.engine.memory.shapes import UnknownShape, decoder_of
from dualtune.engine.routing import experts_of_token
from dualtune.model.adapter import AdapterSpec, is_of_base, modules_of
from dualtune.model.base_model import find_weights, model_here, resolve_model
from dualtune.model.beside import NOTHING, BesideAdapter, beside_of
from dualtune.model.config_file import decoder_table, position_table_size, read_config
from dualtune.model.embeddings import tied_head
from dualtune.model.fingerprint import fingerprint
from dualtune.model.formats.chat_template import TEMPLATE_FILE
from dualtune.model.formats.directory import Adapter, adapter_directory, read_adapter
from dualtune.model.optimizer import OptimizerSpec, is_of_a_table
from dualtune.model.places import in_names_of
from dualtune.model.targets import ALL_LINEAR, is_embedding, is_head
from dualtune.model.weight_files import BaseWeights
from dualtune.train.activation_cache import layers_below
from dualtune.train.evaluation import layout_of
from dualtune.train.memory import RunMemory, largest_micro_batch, plan_memory, remembered_layout
from dualtune.train.objective import optimizer_spec, with_intervals
from dualtune.train.objectives.comparison import check_answers, configured_objective
from dualtune.train.objectives.distillation import Distillation, RecordedTargets, configured_distillation
from dualtune.train.objectives.preference import Objective
from dualtune.train.objectives.teachers import Teaching, configured_teaching
from dualtune.train.policies import MakePolicy, policy_of
from dualtune.train.rl.on_policy import OnPolicy
from dualtune.train.rl.rollouts import Rollouts, policy_objective
from dualtune.train.samples import check_samples
from dualtune.train.state import checkpoint
from dualtune.train.state.checkpoint import Checkpoint
from dualtune.train.state.resume import (
    DISTRIBUTIONS,
    EVAL_DOCUMENTS,
    TRAIN_DOCUMENTS,
    Change,
    as_recorded,
    check_config,
    check_end,
    check_fingerprints,
    check_position,
    has_ended,
    with_tokens,
)
from dualtune.train.state.run_dir import CHECKPOINTS
from dualtune.train.team import Team

DOWNLOAD, UNPACKED = "the download of the base model", "the base model's GGUF file"  # as `show` names them
FINGERPRINT = "the fingerprint of the base model"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of the base model."""

    directory: Path
    tokenizer: Tokenizer
    weights: BaseWeights | None  # None: random weights
    identity: dict[str, Any]  # what identifies the base model, in dualtune.json


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The documents of a run, and which of them each step uses."""

    train: Documents
    eval: Documents
    order: Order
    layout: SequenceLayout
    probes: list[int]  # the training documents that no step uses, because the policy evaluates on them
    sampled: int = 0  # the most tokens that a step may add to a document

    @property
    def longest(self) -> int:
        """The tokens of the longest document."""
        return max(self.train.longest, self.eval.longest) + self.sampled


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run resumes from."""

    checkpoint: Checkpoint
    changes: list[Change]  # of the config since then; all are allowed
    without_effect: list[Change] | None  # if no step is left: the changes that come too late


@dataclass(frozen=True, slots=True)
class Prepared:
    """A config, checked against the backend, the model's tokenizer and the data. Nothing is loaded yet."""

    config: Config
    backend: Backend
    team: Team  # the processes of the run
    model: ModelFiles
    data: TrainingData
    spec: AdapterSpec
    start: Adapter | None  # the adapter that training starts from
    start_state: Checkpoint | None  # whose optimizer a new run continues with; None: a new one
    make_policy: MakePolicy  # what decides each step; it is made where the run is executed
    objective: Objective | None  # of preference training; None: no answers are compared
    distillation: Distillation | None  # None: there is no teacher
    teaching: Teaching | None  # None: none that answers while the run trains
    rollouts: Rollouts | OnPolicy | None  # None: the run learns from its data, not from samples
    resumed: Resumed | None  # None: a new run
    fingerprints: dict[str, str]  # of base model, tokenizer and data
    memory: RunMemory  # what it takes by plan, and what is recomputed to save it
    system_message: str | None = None  # that nearly all rows share

    @property
    def optimizer(self) -> OptimizerSpec:
        """What updates the weights, and which weights are the result."""
        return optimizer_spec(self.config, self.data.order.num_steps)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint that the run resumes from."""
        return self.resumed.checkpoint if self.resumed else None

    def batches(self, step: int, layout: SequenceLayout | None = None, answers: int | None = None) -> list[Batch]:
        """Return this process's micro-batches of a step, counted from 0: a pure function.

        `layout`: that of the run at present, if memory ran out; None: that of the config. `answers`: only so many, the
        first ones, of those that are compared.
        """
        ids: list[int] = self.data.order.step(step).documents.tolist()
        if answers is not None:
            ids = [i for i in ids if i % self.data.train.answers < answers]
        return micro_batches(
            self.data.train, ids, layout or self.data.layout,
            seed=self.config.run.seed, step=step, rank=self.team.rank, size=self.team.size,
        )  # fmt: skip

    def batches_of(self, ids: Sequence[int], layout: SequenceLayout) -> list[Batch]:
        """Return this process's micro-batches of these training documents."""
        return micro_batches(self.data.train, ids, layout, seed=0, step=0, rank=self.team.rank, size=self.team.size)


def prepare(
    config: Config, backend: Backend, saved: Checkpoint | None = None, show: Show = lambda what, share: None,
    team: Team | None = None, policy: MakePolicy | None = None,
) -> Prepared:  # fmt: skip
    """Check a config in the order of cost: capabilities of the backend, data files, tokenizer, weights.

    With a checkpoint, also check whether the run may resume from it. `show` reports the progress of tokenizing a file,
    and when FINGERPRINT begins and ends, and DOWNLOAD or UNPACKED where such a model is used for the first time. With
    several processes the first one runs first, and the others reuse its tokenized data. `policy` makes the step policy;
    None: that which the config chooses. Raises ConfigError, DataError, FormatError (of `adapter.init_from`),
    EnvironmentFault (of the model), or Preempted.
    """
    team = team or Team()
    make_policy = policy or policy_of(config)
    with team.in_turn():
        check_capabilities(backend, config)
        _check_sharding(config, team)
        settled, start, start_state, changes = _settled(config, saved)

        # The data before the weights, which take longest: only the model's small files are downloaded for them.
        sources = Data(settled)
        model_dir = _files_for_data(settled, show)
        _check_model(settled, start, model_dir)
        tokenizer = Tokenizer.of(model_dir, settled.data, template_of(settled, saved))
        train, eval_ = sources.train_and_eval(tokenizer, show)
        _check_targets(settled, train, eval_)
        objective = configured_objective(settled)
        check_answers(objective, train, eval_)
        distillation = configured_distillation(settled, train, eval_, tokenizer)
        policy_loss = policy_objective(settled)
        system = shared_system_message(sources.train) if tokenizer.template and team.is_first else None
        positions = position_table_size(read_config(model_dir))
        check_samples(settled.run.sample_prompts, tokenizer, positions, len(eval_), system)

        # The documents decide the number of steps, and the steps decide what the config leaves open.
        probes = probe_documents(len(train), make_policy(settled).num_probes, settled.run.seed)
        order = Order(settled, train.lengths, without(train.sources, probes), train.weights, train.answers)
        planned = with_tokens(settled, order.tokens_per_step)
        planned = with_intervals(planned, order.num_steps, saved and saved.state["config"].get("run"))
        _check_steps(planned, order.num_steps)
        sampled = _sampled_tokens(planned, max(train.longest, eval_.longest))
        data = TrainingData(train, eval_, order, remembered_layout(planned, saved), probes, sampled)

        # Config and data are in order, so the weights are worth their download.
        model = _with_weights(planned, tokenizer, show)
        teaching = configured_teaching(planned, backend, tokenizer, model.directory, sources, (train, eval_))
        fingerprints = _fingerprints(model, data, distillation) | (teaching.identities if teaching else {})
        layout = layout_of(planned)
        cells = layout.max_tokens if probes else largest_micro_batch(order, train.lengths, layout)
        memory = plan_memory(
            planned, backend, model.directory, data.longest, team.size, cells=cells,
            eval_tokens=int(eval_.lengths.sum()), teacher_dir=teaching and teaching.model_dir,
        )  # fmt: skip
        resumed = None if saved is None else _resumed(saved, changes, planned, order, fingerprints)
        if start is not None and model.weights is not None:
            start = in_names_of(start, model.directory)  # which may have been downloaded since
        spec = _spec(planned, start, model)
        rollouts = None
        if policy_loss:
            rollouts = Rollouts(planned, backend, policy_loss, tokenizer, positions, RowFields(sources.sources))
        elif sampled and distillation and teaching:
            rollouts = OnPolicy(planned, backend, distillation, teaching, tokenizer, positions)
    return Prepared(
        planned, backend, team, model, data, spec, start, start_state, make_policy, objective, distillation, teaching,
        rollouts, resumed, fingerprints, memory, system,
    )  # fmt: skip


def _settled(
    config: Config, saved: Checkpoint | None
) -> tuple[Config, Adapter | None, Checkpoint | None, list[Change]]:
    """Return the config with what its adapter to start from, or the checkpoint that is resumed, decides.

    Besides, that adapter; the checkpoint with the optimizer of a new run; and the changes since the resumed one.
    """
    start = start_of(config)
    settled = with_adapter_of(config, start)
    if saved is None:
        return settled, start, state_of_start(settled, start), []
    settled = as_recorded(saved, settled)
    return settled, start, None, check_config(saved, settled)


def _files_for_data(config: Config, show: Show) -> Path:
    """Return a directory with the model's config and tokenizer; with its weights if they are here, or get new rows."""
    is_here = model_here(config.model.name, partial(show, UNPACKED)) is not None
    new_tokens = config.data.added_tokens  # rows are added to the weights for them
    has_weights = config.model.init == "pretrained" and (is_here or bool(new_tokens))
    return with_new_tokens(resolve_model(config.model.name, weights=has_weights), new_tokens)


def _with_weights(config: Config, tokenizer: Tokenizer, show: Show) -> ModelFiles:
    """Return the files of the base model; with its weights, which may be downloaded, unless they are random."""
    is_pretrained = config.model.init == "pretrained"
    directory = resolve_model(config.model.name, weights=is_pretrained, tell=partial(show, DOWNLOAD))
    directory = with_new_tokens(directory, config.data.added_tokens)
    weights = find_weights(directory) if is_pretrained else None
    show(FINGERPRINT, 0.0)
    model = ModelFiles(directory, tokenizer, weights, fingerprint(directory, weights))
    show(FINGERPRINT, 1.0)
    return model


def _sampled_tokens(config: Config, longest: int) -> int:
    """Return the most tokens that a step may add to a document by sampling. `longest`: the longest document."""
    if config.train.objective not in (*POLICY_OBJECTIVES, ON_POLICY):
        return 0
    answer = config.rollouts.max_tokens
    if config.rollouts.environment is None:
        return answer
    return answer + config.data.max_length - longest  # a conversation goes on up to that length


def _check_sharding(config: Config, team: Team) -> None:
    if config.memory.sharding == "full" and team.size == 1:
        raise ConfigError(
            "memory.sharding: got full, but this run has one process; allowed: auto or none. For several processes: "
            "dualtune launch --on local --procs N"
        )


def _check_steps(config: Config, num_steps: int) -> None:
    if config.train.warmup >= num_steps:
        raise ConfigError(f"train.warmup: got {config.train.warmup} steps, but the run has {num_steps}")
    if config.train.average_over > num_steps:
        raise ConfigError(f"train.average_over: got {config.train.average_over} steps, but the run has {num_steps}")


def _check_targets(config: Config, *parts: Documents) -> None:
    for documents in parts:
        if documents.num_rows and not len(documents):
            total = documents.num_rows
            reasons = ", ".join(f"{number} of {total} rows have {why}" for why, number in documents.dropped.items())
            shortest = documents.shortest_without_target
            advice = "Check data.loss_on and data.template"
            if shortest:
                advice = f"Raise data.max_length = {config.data.max_length}: the shortest of them has {shortest} tokens"
            raise DataError(f"{', '.join(documents.names)}: no targets: {reasons}. {advice}.")


def _resumed(
    saved: Checkpoint, changes: list[Change], config: Config, order: Order, fingerprints: dict[str, str]
) -> Resumed:
    """Return what the run resumes from. ConfigError if the base model, the data or the position in them differ."""
    check_fingerprints(saved, fingerprints)
    without_effect = check_end(saved, config, order) if has_ended(saved, config, order) else None
    check_position(saved, position_of(order, saved.step))
    return Resumed(saved, changes, without_effect)


def _check_model(config: Config, start: Adapter | None, model_dir: Path) -> None:
    """Raise ConfigError if the model, by its config.json, cannot be trained as the config says."""
    _check_length(config, model_dir)
    _check_activation_cache(config, start, model_dir)
    if (coefficient := config.train.router_aux_loss_coef) is not None:
        experts_of_token(read_config(model_dir), coefficient)


def _check_length(config: Config, model_dir: Path) -> None:
    described = read_config(model_dir)
    positions = position_table_size(described)
    if positions is not None and config.data.max_length > positions:
        raise ConfigError(
            f"data.max_length: got {config.data.max_length}, but this model has only {positions} positions. "
            f"Use --set data.max_length={positions}"
        )
    chosen = decoder_table(described).get("index_topk")
    if chosen is not None and config.data.max_length > chosen:
        raise ConfigError(
            f"data.max_length: got {config.data.max_length}, but beyond {chosen} tokens (index_topk) this model "
            "attends to a choice of them, which depends on later tokens in transformers, and is another one in mlx-lm. "
            f"Use --set data.max_length={chosen}"
        )


def _check_activation_cache(config: Config, start: Adapter | None, model_dir: Path) -> None:
    """Raise ConfigError if the model is known to have no layer below the adapter. Else it is seen when it is loaded."""
    if config.train.activation_cache == "none":
        return
    try:
        decoder = decoder_of(read_config(model_dir))
    except UnknownShape:
        return
    spec = _spec(config, start)
    layers_below(decoder, spec.targets, spec.layers, spec.experts)


def template_of(config: Config, saved: Checkpoint | None) -> str:
    """Return data.template; if it names a missing file, the copy stored with the checkpoint."""
    choice = config.data.template
    if saved is None or choice in ("auto", "none", *NAMES) or expanded(choice).is_file():
        return choice
    copy = saved.path.parent.parent / TEMPLATE_FILE
    return str(copy) if copy.is_file() else choice


def position_of(order: Order, step: int) -> dict[str, Any]:
    """Return the run's position in the data: a function of the step, recorded for comparison on another machine."""
    ids = order.step(step).documents
    digest = hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()[:16]
    return {"epoch": order.step(step - 1).epoch if step else 0.0, "next_documents": f"{len(ids)}, sha256 {digest}"}


def _fingerprints(model: ModelFiles, data: TrainingData, distillation: Distillation | None) -> dict[str, str]:
    base, recorded = model.identity, distillation and distillation.train
    weights = hashlib.sha256(json.dumps(base["tensors"]).encode()).hexdigest()  # as in every dualtune so far
    prints = {
        "base model's config": f"sha256 {base['config_sha256'][:16]}",
        "base model's weights": f"sha256 {weights[:16]}",
        "base model's tensors": f"sha256 {base['weights_sha256'][:16]}",
        "tokenizer": f"sha256 {str(base['tokenizer_sha256'])[:16]}",
        "chat template": model.tokenizer.template_hash,
        TRAIN_DOCUMENTS: data.train.fingerprint(),
        EVAL_DOCUMENTS: data.eval.fingerprint(),
    }
    if isinstance(recorded, RecordedTargets):
        prints[DISTRIBUTIONS] = f"sha256 {recorded.distributions.content[:16]}"
    return prints


def start_of(config: Config) -> Adapter | None:
    """Return the adapter that training starts from, in the names of its model where that is on this machine."""
    if config.adapter.init_from is None:
        return None
    start, directory = read_adapter(expanded(config.adapter.init_from)), model_here(config.model.name)
    is_random = config.model.init == "random"  # its layers have no names in files
    return start if directory is None or is_random else in_names_of(start, directory)


def state_of_start(config: Config, start: Adapter | None) -> Checkpoint | None:
    """Return the checkpoint whose optimizer a new run continues with: the one that has the weights of its start.

    ConfigError if there is none, or if its optimizer is another one.
    """
    if start is None or config.adapter.init_from is None or not config.adapter.init_optimizer:
        return None
    directory = adapter_directory(expanded(config.adapter.init_from)).parent / CHECKPOINTS
    remedy = "or set adapter.init_optimizer: false for a new optimizer"
    try:
        saved = checkpoint.holding(directory, start.tensors)
    except FormatError as problem:
        raise ConfigError(
            f"adapter.init_optimizer: got true, but no checkpoint in {directory} has the weights of the adapter in "
            f"adapter.init_from:\n{problem}\nAn average and a start by pissa or olora are written as other weights; "
            "`dualtune serve --train` keeps the states of a run in its weights/NAME. Set adapter.init_from to a run "
            f"with such a checkpoint, {remedy}"
        ) from None
    theirs = {"optimizer": "adamw", "schedule": "cosine", "average": "none"} | saved.state["config"].get("train", {})
    for key, is_other in (
        ("optimizer", theirs["optimizer"] != config.train.optimizer),
        ("schedule", (theirs["schedule"] == "schedule_free") != (config.train.schedule == "schedule_free")),
        ("average", theirs["average"] != config.train.average),
    ):
        if is_other:
            raise ConfigError(
                f"train.{key}: got {getattr(config.train, key)}, but the optimizer's state in {saved.path}, which "
                f"adapter.init_optimizer takes, was made with {theirs[key]}. Set train.{key}: {theirs[key]}, {remedy}"
            )
    return saved


def with_adapter_of(config: Config, start: Adapter | None) -> Config:
    """Return the config with method, ranks, alphas, scaling and targets of the adapter that training starts from.

    ConfigError if the config sets others: an adapter cannot change its shape. Whether its modules are "all-linear" is
    known only when the model is loaded.
    """
    if start is None:
        return config
    keys = ("method", "rank", "alpha", "scaling", "targets", "experts")
    values: dict[str, Any] = {key: getattr(start.spec, key) for key in keys}
    values |= {key: dict(getattr(start.spec, key)) for key in ("rank_pattern", "alpha_pattern")}
    values["bias"] = start.spec.beside.bias
    if config.adapter.targets == ALL_LINEAR:
        del values["targets"]
    rate = config.train.embedding_learning_rate
    if rate is not None and not any(map(is_of_a_table, start.tensors)):
        raise ConfigError(
            f"train.embedding_learning_rate: got {rate:g}, but the adapter in adapter.init_from trains neither "
            "embedding nor output head. Remove the key"
        )
    problems = [
        f"adapter.{key}: got {getattr(config.adapter, key)}, but the adapter in adapter.init_from has {value}"
        for key, value in values.items()
        if key in config.adapter.model_fields_set and _unordered(getattr(config.adapter, key)) != _unordered(value)
    ]
    tokens = {"new_tokens": False, "new_special_tokens": True}  # whether they are special
    texts = {key: tuple(t.text for t in start.new_tokens if t.special == special) for key, special in tokens.items()}
    for key, theirs in texts.items():
        if (ours := getattr(config.data, key)) not in ((), theirs):
            got, has = (", ".join(map(repr, tokens)) or "none" for tokens in (ours, theirs))
            problems.append(f"data.{key}: got {got}, but the adapter in adapter.init_from has {has}")
    if problems:
        raise ConfigError("\n".join(problems) + "\nRemove these keys, or set them to the adapter's values.")
    data = config.data.model_copy(update=texts)
    return config.model_copy(update={"adapter": config.adapter.model_copy(update=values), "data": data})


def _unordered(value: Any) -> Any:
    return frozenset(cast(tuple[str, ...], value)) if isinstance(value, tuple) else value


def _spec(config: Config, start: Adapter | None, model: ModelFiles | None = None) -> AdapterSpec:
    """Return what is trained; without the files of the model, as far as the config says it."""
    targets = config.adapter.targets
    if config.adapter.trains_model:
        adapter = config.adapter
        return AdapterSpec(1, 1.0, 0.0, (), method=adapter.method, master_weights=adapter.master_weights)
    if targets == ALL_LINEAR:
        targets = (ALL_LINEAR,)
    elif start is not None:
        targets = tuple(modules_of(start.tensors))  # exactly these modules, even if the targets would select others
    return spec_of_section(config.adapter, tuple(targets), _beside(config, start, model))


def spec_of_section(adapter: AdapterConfig, targets: tuple[str, ...], beside: BesideAdapter = NOTHING) -> AdapterSpec:
    """Return what the section of a config says of an adapter on these targets, with what is trained beside it."""
    return AdapterSpec(
        adapter.rank, adapter.alpha, adapter.dropout, targets, adapter.scaling, adapter.method, adapter.init,
        adapter.layers, (*adapter.rank_pattern.items(),), (*adapter.alpha_pattern.items(),), beside, adapter.experts,
        adapter.merge_for,
    )  # fmt: skip


def _beside(config: Config, start: Adapter | None, model: ModelFiles | None) -> BesideAdapter:
    if start is not None:  # exactly its tensors
        return beside_of(filter(is_of_base, start.tensors), start.spec.beside)
    adapter, tokens = config.adapter, [token.text for token in config.data.added_tokens]
    if model is None:
        return BesideAdapter(adapter.train_modules, bias=adapter.bias)
    tables = [name for name in adapter.train_modules if is_embedding(f"{name}.weight") or is_head(f"{name}.weight")]
    if tokens and len(tables) == 1 and tied_head(model.directory) is None:
        raise ConfigError(
            f"adapter.train_modules: got {tables[0]} alone, but data.new_tokens adds rows to embedding and output "
            "head. Name both, or none: then only the new rows are trained"
        )
    if tables and adapter.train_rows == "new":
        raise ConfigError(
            f"adapter.train_rows: got new, but adapter.train_modules trains all rows of {tables[0]}. Remove one"
        )
    named = adapter.rows if tables else (*adapter.rows, *tokens)
    return BesideAdapter(adapter.train_modules, trained_tokens(named, model.tokenizer), bias=adapter.bias)


def trained_tokens(tokens: Sequence[int | str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the sorted ids of adapter.train_rows. ConfigError for a text that is not one token of the tokenizer."""
    ids = {token: token if isinstance(token, int) else tokenizer.id_of(token) for token in tokens}
    if unknown := [token for token, id in ids.items() if id is None]:
        raise ConfigError(
            f"adapter.train_rows: got {unknown[0]!r}, which is not a token of this model's tokenizer. data.new_tokens "
            "adds tokens"
        )
    return tuple(sorted({id for id in ids.values() if id is not None}))
