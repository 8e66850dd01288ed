"""Teachers that answer while a run trains: another model, the run's own with other weights, or one on a server.

A teacher reads the student's tokens, so both need the same tokenizer. It may read more than the student: a system
message or a hint, with which the student then does without.

Shape suffixes: M targets of a micro-batch, k tokens at each.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from dualtune.base.errors import ConfigError, DataError
from dualtune.base.files import expanded
from dualtune.config import Config
from dualtune.config.schema import DistillConfig
from dualtune.config.values import ON_POLICY, SELF_TEACHER
from dualtune.data.batches import SequenceLayout, make_batch, micro_batches, share, sizes_of
from dualtune.data.chat.conversations import Message
from dualtune.data.chat.examples import Example
from dualtune.data.documents import Data, Documents, in_memory, tokenize
from dualtune.data.tokens.store import Document
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import Backend, Batch, Engine
from dualtune.model.adapter import AdapterSpec, Tensors
from dualtune.model.base_model import find_weights, resolve_model
from dualtune.model.config_file import position_table_size, read_config
from dualtune.model.fingerprint import fingerprint
from dualtune.model.formats.directory import Adapter, read_adapter
from dualtune.model.places import in_names_of
from dualtune.train.evaluation import using
from dualtune.train.generation.inference import fit, fits_in, load_model
from dualtune.train.hooks import EvalRecord
from dualtune.train.objectives.distillation import Distillation
from dualtune.train.objectives.served_teacher import ServedTeacher
from dualtune.train.recovery import Recovery
from dualtune.train.state.resume import TEACHER, TEACHER_PROMPTS
from dualtune.train.team import Team

TopLogprobs = Callable[[Batch, int], tuple[np.ndarray, np.ndarray]]
"""From a micro-batch and k to tokens int32 and ln q float32, [M, k]; for k = 0 those of the labels, [M, 1]."""


class Teacher(Protocol):
    """Answers with its most probable tokens, as `start` leaves it."""

    identity: str
    """What distinguishes it from other teachers, for a run that is resumed."""
    probe: np.ndarray | None
    """ln q of the tokens of fixed texts, if nothing else identifies its weights; None until it starts."""

    def start(self, student: Engine, spec: AdapterSpec) -> None:
        """Be ready to answer. `student`: the engine of the run, which is new; `spec`: what it trains."""
        ...

    def answering(self, student: Engine) -> contextlib.AbstractContextManager[TopLogprobs]: ...


def top_logprobs_of(engine: Engine) -> TopLogprobs:
    """Return the function that computes the most probable tokens with an engine's present weights."""

    def top_logprobs(batch: Batch, k: int) -> tuple[np.ndarray, np.ndarray]:
        if k:
            return engine.top_logprobs(batch, k)
        is_target_BT = batch.is_target_BT
        return batch.labels_BT[is_target_BT][:, None], engine.target_logprobs(batch)[is_target_BT][:, None]

    return top_logprobs


class ModelTeacher:
    """Another model, loaded beside the student."""

    probe: np.ndarray | None = None

    def __init__(self, backend: Backend, settings: DistillConfig, tokenizer: Tokenizer) -> None:
        """ConfigError for another tokenizer, or an adapter that is not there."""
        assert settings.teacher is not None
        self._backend, self._settings, self._name = backend, settings, settings.teacher
        for key in ("dtype", "quantization"):
            value, honoured = getattr(settings, f"teacher_{key}"), backend.capabilities().get(f"model.{key}", {"auto"})
            if value not in honoured:
                allowed = ", ".join(sorted(map(str, honoured)))
                raise ConfigError(f"distill.teacher_{key}: got {value}, the backend {backend.name} honours: {allowed}")
        self.directory = directory = resolve_model(self._name)
        if (other := tokenizer.first_difference(Tokenizer(directory, "none"))) is not None:
            raise ConfigError(
                f"distill.teacher: {self._name} has another tokenizer than the student: {other}. A teacher reads the "
                "student's tokens: choose one of the same family"
            )
        self._adapter = None if settings.teacher_adapter is None else expanded(settings.teacher_adapter)
        adapter = None if self._adapter is None else read_adapter(self._adapter)
        base = fingerprint(directory, find_weights(directory))["weights_sha256"][:16]
        form = f"{settings.teacher_dtype} {settings.teacher_quantization}"
        self.identity = f"sha256 {base}, {form}, {_identity(adapter)}"

    def start(self, student: Engine, spec: AdapterSpec) -> None:
        loaded = load_model(
            self._backend, self._name, self._adapter, dtype=self._settings.teacher_dtype,
            quantization=self._settings.teacher_quantization, template="none",
        )  # fmt: skip
        self._says = top_logprobs_of(loaded.engine)

    def answering(self, student: Engine) -> contextlib.AbstractContextManager[TopLogprobs]:
        return contextlib.nullcontext(self._says)


class OwnTeacher:
    """The student's engine: without its adapter, with another one, or as it is."""

    probe: np.ndarray | None = None

    def __init__(self, settings: DistillConfig, model_dir: Path) -> None:
        self._is_self = settings.teacher == SELF_TEACHER
        self._tensors: Tensors = {}
        self._adapter: Adapter | None = None
        if settings.teacher_adapter is not None:
            self._adapter = in_names_of(read_adapter(expanded(settings.teacher_adapter)), model_dir)
        self.identity = "self" if self._is_self else f"base, {_identity(self._adapter)}"

    def start(self, student: Engine, spec: AdapterSpec) -> None:
        if not self._is_self:
            self._tensors = student.neutral_state()
        if self._adapter is not None:
            self._tensors = _fitted(self._adapter, spec, student.adapter_shapes, self._tensors)

    @contextlib.contextmanager
    def answering(self, student: Engine) -> Generator[TopLogprobs]:
        with contextlib.nullcontext() if self._is_self else using(student, self._tensors):
            yield top_logprobs_of(student)


def _fitted(adapter: Adapter, spec: AdapterSpec, shapes: Mapping[str, tuple[int, ...]], neutral: Tensors) -> Tensors:
    """Return the tensors of an adapter in place of those that are trained. ConfigError if they do not fit."""
    fits = adapter.spec.method == spec.method
    if not fits or not all(fits_in(x.shape, shapes.get(name), spec.rank) for name, x in adapter.tensors.items()):
        raise ConfigError(
            f"distill.teacher_adapter: it does not fit into what is trained: got {adapter.spec.method} of rank "
            f"{adapter.spec.rank}, allowed: {spec.method} of modules of this run, of rank {spec.rank} at most. Or name "
            "the model in distill.teacher: it is then loaded a second time"
        )
    return fit(adapter, spec, neutral)


def _identity(adapter: Adapter | None) -> str:
    if adapter is None:
        return "no adapter"
    digest = hashlib.sha256()
    for name, tensor in sorted(adapter.tensors.items()):
        digest.update(name.encode() + tensor.tobytes())
    return f"adapter sha256 {digest.hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Teaching:
    """The teacher of a run that answers while it trains, and the run's documents as it reads them."""

    teacher: Teacher
    train: Documents
    eval: Documents
    has_context: bool
    """Whether it reads more than the student."""

    @property
    def model_dir(self) -> Path | None:
        """The directory of a model that is loaded beside the student."""
        return self.teacher.directory if isinstance(self.teacher, ModelTeacher) else None

    @property
    def identities(self) -> dict[str, str]:
        """What a run that is resumed compares."""
        if not self.has_context:
            return {TEACHER: self.teacher.identity}
        read = "; ".join(documents.fingerprint() for documents in (self.train, self.eval))
        return {TEACHER: self.teacher.identity, TEACHER_PROMPTS: read}


def configured_teaching(
    config: Config, backend: Backend, tokenizer: Tokenizer, model_dir: Path, data: Data,
    parts: tuple[Documents, Documents],
) -> Teaching | None:  # fmt: skip
    """Return the teacher that answers while a config trains; None if it has none. `parts`: of training, evaluation."""
    settings = config.distill
    if settings.teacher is None:
        return None
    if settings.is_served:
        teacher = ServedTeacher(settings, tokenizer)
    elif not settings.loads_model:
        teacher = OwnTeacher(settings, model_dir)
    else:
        teacher = ModelTeacher(backend, settings, tokenizer)
    train, eval_ = parts
    if settings.has_context:
        examples = data.training_examples(eval_), data.held_out_examples(eval_)
        parts = with_context(train, examples[0], tokenizer, config), with_context(eval_, examples[1], tokenizer, config)
    teaching = Teaching(teacher, *parts, settings.has_context)
    if not settings.is_served:
        _check_positions(config, teaching, position_table_size(read_config(teaching.model_dir or model_dir)))
    return teaching


def _check_positions(config: Config, teaching: Teaching, positions: int | None) -> None:
    """Raise ConfigError if the teacher may read more tokens than it has positions for."""
    if positions is None or not (teaching.has_context or teaching.model_dir):
        return
    parts = [part for part in (teaching.train, teaching.eval) if len(part)]
    longest = max(int(part.lengths.max()) for part in parts)
    if config.train.objective == ON_POLICY:
        longest = max(int((part.lengths - part.targets).max()) for part in parts) + config.rollouts.max_tokens
    if longest > positions:
        raise ConfigError(
            f"distill.teacher: it may read {longest} tokens, and has positions up to {positions}. Shorten "
            "distill.teacher_system, data.max_length or rollouts.max_tokens"
        )


def ask(
    teacher: Teacher, student: Engine, documents: Documents, ids: Iterable[int], k: int, recovery: Recovery,
    step: int = 0, team: Team | None = None,
) -> dict[int, tuple[np.ndarray, np.ndarray]] | None:  # fmt: skip
    """Return the teacher's soft targets of these documents, by index. None if memory ran out: try again, smaller.

    `documents`: as the teacher reads them. Each process asks for its own.
    """
    logprobs = dict[int, tuple[np.ndarray, np.ndarray]]()
    # Each document has a row for itself: what a teacher can pack is not known.
    batches = micro_batches(documents, ids, SequenceLayout(recovery.layout.max_tokens), seed=0, step=step)
    # All processes ask equally often, because a teacher may be sharded.
    missing = (team or Team()).most(len(batches)) - len(batches)
    batches += [make_batch(documents, [], seed=0, step=step)] * missing
    if not batches:
        return logprobs
    with teacher.answering(student) as top_logprobs:

        def add(batch: Batch) -> None:
            ends = np.cumsum(batch.is_target_BT.sum(1))[:-1]
            parts = (np.split(values_Mk, ends) for values_Mk in top_logprobs(replace(batch, hidden_BTD=None), k))
            if batch.documents:
                logprobs.update(
                    zip((document for (document,) in batch.documents), zip(*parts, strict=True), strict=True)
                )

        return logprobs if recovery.attempt(step, batches, add) else None


def evaluate_taught(
    distillation: Distillation, teacher: Teacher, read: Documents, engine: Engine, documents: Documents,
    recovery: Recovery, step: int = 0, show: Callable[[int, int], None] = lambda done, total: None,
    team: Team | None = None,
) -> EvalRecord:  # fmt: skip
    """Evaluate against the teacher as it answers now. `read`: the documents as it reads them."""
    team, soft_targets = team or Team(), dict[int, tuple[np.ndarray, np.ndarray]]()

    def ask_teacher() -> bool:
        # Which documents this process measures depends on the layout, which a lack of memory changes.
        mine = share(sizes_of(documents), range(len(documents)), recovery.layout, team.rank, team.size)
        ids = [i for rows in mine for row in rows for i in row if i not in soft_targets]
        new = ask(teacher, engine, read, ids, distillation.k, recovery, step, team)
        soft_targets.update(new or {})
        return new is not None

    return distillation.evaluate(
        engine, documents, recovery, step, show, team, soft_targets=soft_targets, before=ask_teacher
    )


# ----------------------------------------------------------------------------------------------------------------------
# What the teacher reads beyond what the student reads.


def in_context(example: Example, system: str | None, hint: str | None) -> Example:
    """Return an example with a system message in place of its own, and with a hint after its last question.

    DataError if it has no question.
    """
    expected = example.messages[-1].content if example.messages else example.completion or ""
    hint = hint and hint.replace("{expected}", expected.strip())
    prompt = "\n\n".join(part for part in (system, example.prompt, hint) if part)
    if not example.messages:
        if example.is_text:
            raise DataError(f"{example.where}: is a plain text without a question, and the teacher's context needs one")
        return replace(example, prompt=prompt)
    messages = [*example.messages]
    if hint is not None:
        at = next((i for i in reversed(range(len(messages))) if messages[i].role == "user"), None)
        if at is None:
            raise DataError(f"{example.where}: has no question before its last answer, and distill.hint follows one")
        messages[at] = replace(messages[at], content=f"{messages[at].content}\n\n{hint}")
    if system is not None:
        others = messages[1:] if messages[0].role == "system" else messages
        messages = [Message("system", system), *others]
    return replace(example, messages=tuple(messages), prompt=prompt)


def with_context(documents: Documents, examples: Iterable[Example], tokenizer: Tokenizer, config: Config) -> Documents:
    """Return documents as the teacher reads them, in the same order, with the same targets. DataError if it cannot."""
    if not len(documents):
        return documents
    settings = config.distill
    read = [in_context(example, settings.teacher_system, settings.hint) for example in examples]
    teacher_documents = tokenize(read, tokenizer, config.data.loss_on, max_length=1 << 30)
    place_of = {teacher_documents[i].where: i for i in range(len(teacher_documents))}
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for i in range(len(documents)):
        own, place = documents[i], place_of.get(documents[i].where)
        pair = None if place is None or own.loss_mask[0] else _same_targets(teacher_documents[place], own)
        if pair is None:
            raise DataError(
                f"{own.where}: with distill.teacher_system or distill.hint before it the answer has other tokens, so "
                "that the teacher cannot judge those of the student. Leave the row out"
            )
        pairs.append(pair)
    return in_memory(pairs)


def _same_targets(read: Document, own: Document) -> tuple[np.ndarray, np.ndarray] | None:
    """Return what the teacher reads up to the last target of a document, and its targets; None if these differ.

    The document may have been cut.
    """
    targets, expected = np.flatnonzero(read.loss_mask)[: own.num_targets], own.tokens[own.loss_mask]
    if not np.array_equal(read.tokens[targets], expected):
        return None
    end = int(targets[-1]) + 1
    return read.tokens[:end], read.loss_mask[:end]
