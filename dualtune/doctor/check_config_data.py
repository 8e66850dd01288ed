"""Checks of the data of a config and of its steps, from a quick look at the files."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from dualtune.base.checks import Check
from dualtune.base.errors import DataError, DualtuneError
from dualtune.base.files import expanded
from dualtune.config import Config
from dualtune.config.data_section import SourceConfig
from dualtune.data.batches import RowSizes, plan, step_documents
from dualtune.data.chat.examples import Example
from dualtune.data.documents import OpenedSource, eval_sources, held_out, open_one, takes_apart
from dualtune.data.order import MOST_TOKENS, Order
from dualtune.data.sources.readers import Role, is_hub_name, kind_of
from dualtune.data.sources.rows import BadRow, RawRow, Tie
from dualtune.data.tokens.store import common_beginning
from dualtune.data.tokens.tokenize import State, TokenizedRow, tokenize_rows
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.doctor.check_config_model import failure, find_model, load_tokenizer
from dualtune.engine.step_time import StepDocuments
from dualtune.train.evaluation import layout_of
from dualtune.train.generation.sampling_cost import samples_of
from dualtune.train.memory import largest_micro_batch, with_real_lengths

FIRST_ROWS = 100  # rows to read, and to tokenize if the tokenizer is here; dualtune check-data takes all
KEYS: dict[Role, str] = {"train": "train", "valid": "eval"}  # role -> the key of the config's section `data`
CHEAP_BYTES = 16 << 20  # files up to this size are read completely to count their rows
LONGEST_ROWS = 20  # by characters: the one with the most tokens is among them
FEW_STEPS = 50  # fewer steps train little
SEEN_STEPS = 100  # of which one of usual size is chosen


@dataclass(frozen=True, slots=True)
class SourceSample:
    """The facts of a source of training data, as far as they are known."""

    weight: float
    num_rows: int | None = None  # two for a pair from which kto learns; None: not counted
    lengths: tuple[int, ...] = ()  # tokens of its first documents
    shared: tuple[int, ...] = ()  # of each, how many tokens the first answer of its row begins with, too
    targets: int = 0  # in these
    longest: int | None = None  # tokens of its longest document; None: not known
    answers: int = 1  # documents of a row: 2 if answers are compared
    is_evaluated: bool = False  # data to evaluate on, not to train on


def answers_in(samples: list[SourceSample]) -> int:
    """Return the number of documents of a row: 2 if answers are compared."""
    return max((sample.answers for sample in samples), default=1)


def check_sources(config: Config, tokenizer: Tokenizer | None) -> tuple[list[Check], list[SourceSample]]:
    """Return a row for each source, and its facts."""
    rows: list[Check] = []
    samples: list[SourceSample] = []
    for source in config.data.sources():
        row, sample = _look(config, source, "train", tokenizer)
        rows.append(row)
        samples.append(sample)
    # A dataset of the hub may include validation data, which only a download shows.
    local = not any(is_of_hub(source) for source in config.data.sources())
    own = eval_sources(config.data) if local else config.data.eval_sources()
    for source in own:
        row, sample = _look(config, source, "valid", tokenizer)
        rows.append(row)
        samples.append(replace(sample, is_evaluated=True))
    if config.data.held_out_share and not own and [sample.num_rows for sample in samples] == [1]:
        text = f"none: data.eval holds out {config.data.held_out_share:.0%} of the rows, but there is only one"
        rows.append(Check("eval data", "advice", text, "Split the row, or name evaluation data in data.eval"))
    return rows, samples


def is_of_hub(source: SourceConfig) -> bool:
    """Return whether the source names a dataset of the hub, by the rule of `open_source`."""
    return is_hub_name(source.path) and not kind_of(Path(source.path)) and not expanded(source.path).exists()


def _look(config: Config, source: SourceConfig, role: Role, tokenizer: Tokenizer | None) -> tuple[Check, SourceSample]:
    name = "data" if role == "train" else "eval data"
    nothing = SourceSample(source.weight)
    if is_of_hub(source):
        return Check(name, "skipped", f"{source.path}: a dataset of the hub; it is not downloaded now"), nothing
    try:
        opened = open_one(source, role)
        first = list(_first(config, opened, tokenizer))
        num_rows = _count(opened)
        longest = _longest(config, opened, tokenizer) if tokenizer and num_rows else None
    except DualtuneError as error:
        fix = None if Path(source.path).exists() else f"Put the data there, or name other data.{KEYS[role]}"
        return replace(failure(name, error), fix=fix), nothing
    # What the sample says of the source is known also where its row is a failure.
    bad = [row for row in first if isinstance(row, BadRow) and not isinstance(row, Tie)]
    tokenized = [row for row in first if isinstance(row, TokenizedRow)]
    num_first = len(first) - len(tokenized) + len({row.number for row in tokenized})  # kto learns two from a pair
    whole = num_rows == num_first
    text = f"{source.path}: {'all' if whole else 'the first'} {num_first} rows can be read"
    text += f", {num_rows} in all" if num_rows is not None and not whole else ""
    fix = f"dualtune check-data {source.path}"
    documents = [document for row in tokenized for document in row.documents]
    targets = sum(int(mask[1:].sum()) for _, mask in documents)
    answers = max((row.answers for row in tokenized), default=1)
    num_units = num_rows and num_rows * len(first) // max(1, num_first)
    lengths = tuple(len(ids) for ids, _ in documents)
    shared = tuple(
        common_beginning(row.documents[0], other) if i and row.answers > 1 else 0
        for row in tokenized for i, other in enumerate(row.documents)
    )  # fmt: skip
    sample = SourceSample(source.weight, num_units, lengths, shared, targets, longest, answers)
    # One bad row ends a run, unless the config says otherwise; only good rows have tokens to speak of.
    if bad and config.data.on_bad_row == "error":
        text = f"{bad[0]}" + (f", and {len(bad) - 1} more of the first {num_first} rows" if len(bad) > 1 else "")
        return Check(name, "fail", text, fix, DataError.exit_code), sample
    if bad:
        return Check(name, "advice", f"{source.path}: {len(bad)} of the first {num_first} rows left out", fix), sample
    row = Check(name, "ok", text)
    return _tokens_row(config, row, tokenized, sample.lengths, whole=whole) if tokenized else row, sample


def _first(config: Config, opened: OpenedSource, tokenizer: Tokenizer | None) -> Iterator[object]:
    objective, data = config.train.objective, config.data
    examples = islice(opened.suited(objective), FIRST_ROWS)
    if tokenizer is None:
        return examples
    return tokenize_rows(examples, tokenizer, data.loss_on, data.max_length, unpaired=takes_apart(objective))


def _longest(config: Config, opened: OpenedSource, tokenizer: Tokenizer) -> int | None:
    """Return the tokens of the longest document, by tokenizing the rows with the most characters."""
    examples = (example for example in opened.examples() if isinstance(example, Example))
    rows = heapq.nlargest(LONGEST_ROWS, examples, key=lambda example: len(repr(example)))
    tokenized = tokenize_rows(iter(rows), tokenizer, config.data.loss_on, config.data.max_length)
    return max(
        (len(ids) for row in tokenized if isinstance(row, TokenizedRow) for ids, _ in row.documents), default=None
    )


def _count(opened: OpenedSource) -> int | None:
    """Count the rows of files that are small enough to read; None for others."""
    if sum(path.stat().st_size for path in opened.files.files) > CHEAP_BYTES:
        return None
    return sum(isinstance(row, RawRow) for row in opened.files.rows())


def _tokens_row(
    config: Config, row: Check, tokenized: list[TokenizedRow], lengths: tuple[int, ...], *, whole: bool
) -> Check:
    """Add to the row what tokenizing the first rows showed."""
    states = Counter(row.state for row in tokenized)
    if not lengths:
        text = f"{row.found}, but none has a target within data.max_length = {config.data.max_length}"
        fix = "Raise data.max_length, or check data.loss_on"
        return Check(row.name, "fail" if whole else "advice", text, fix, DataError.exit_code)
    text = f"{row.found}; up to {max(lengths)} tokens, {sum(lengths) / len(lengths):.0f} on average"
    cut, dropped = states[State.CUT], states[State.NO_TARGET] + states[State.TOO_LONG]
    if not cut + dropped:
        return Check(row.name, "ok", text)
    text += f"; {cut} cut to data.max_length, {dropped} without a target"
    return Check(row.name, "advice", text, "dualtune preview shows the targets")


# --- steps -----------------------------------------------------------------------------------------------------------


def step_rows(config: Config, samples: list[SourceSample]) -> list[Check]:
    """Return rows on the size of an optimizer step and on the number of steps."""
    order, lengths = _estimated(config, samples)
    return [
        Check("step", "ok", _step(config, order, lengths, answers_in(samples))),
        _steps(config, samples, order, lengths),
    ]


def _estimated(config: Config, samples: list[SourceSample]) -> tuple[Order | None, np.ndarray]:
    """Return the order of the rows to train on, and their lengths in tokens, as if all were like the first ones.

    The order is None if rows are not counted, or if they are not tokenized and the step size is in tokens.
    """
    samples = [sample for sample in samples if not sample.is_evaluated]
    counts = [sample.num_rows for sample in samples]
    lengths = [length for sample in samples for length in sample.lengths]
    if None in counts or (config.train.documents_per_step is None and not lengths):
        return None, np.array(lengths)
    sizes = [count or 0 for count in counts]
    chosen = held_out(sum(sizes), config.data.held_out_share, config.run.seed)
    sources = np.repeat(np.arange(len(sizes)), sizes)[~chosen]
    if not len(sources):
        return None, np.array(lengths)
    answers = answers_in(samples)
    documents = np.resize(np.array(lengths or [config.data.max_length]), answers * len(sources))
    weights = [sample.weight for sample in samples]
    return Order(config, documents, np.repeat(sources, answers), weights, answers), documents


def _step(config: Config, order: Order | None, lengths: np.ndarray, answers: int) -> str:
    """Describe one optimizer step: with the known lengths of documents, or else with the longest that are allowed."""
    train, length, layout = config.train, config.data.max_length, layout_of(config)
    tokens = MOST_TOKENS if train.tokens_per_step == "auto" else train.tokens_per_step
    tokens = order.tokens_per_step if order else tokens
    limit = "" if train.documents_per_step else f"up to {tokens} tokens: "
    if order and lengths.max() < length:
        ids = order.step(0).documents.tolist()
        text = f"about {_counted(len(ids), 'document')} of {lengths.mean():.0f} tokens on average"
        micro_batches, condition = len(plan(RowSizes(lengths), ids, layout)), ""
    else:
        number = (train.documents_per_step or 0) * answers or max(1, tokens // length)
        more = "" if train.documents_per_step else " or more"
        text = f"{_counted(number, 'document')}{more} of at most {length} tokens"
        sizes, condition = RowSizes(np.full(number, length)), " if all are that long"
        micro_batches = len(plan(sizes, range(number), layout))
    return f"{limit}{text}, in {_counted(micro_batches, 'micro-batch')} of up to {layout.max_tokens} tokens{condition}"


def look_at_data(config: Config) -> list[SourceSample]:
    """Return what a quick look shows of each source."""
    tokenizer, _ = load_tokenizer(config, find_model(config)[0])
    return check_sources(config, tokenizer)[1]


def with_lengths_of(config: Config, samples: list[SourceSample]) -> tuple[Config, Config]:
    """Return the config with the lengths of the data, as a run plans its memory; unchanged if one is not known.

    The first is for the steps, the second for the evaluation, whose micro-batches may be larger.
    """
    longest = [sample.longest for sample in samples if sample.longest is not None]
    order, lengths = _estimated(config, samples)
    if order is None or len(longest) < len(samples):
        return config, config
    own = [sample for sample in samples if sample.is_evaluated]
    num_rows = answers_in(samples) * sum(sample.num_rows or 0 for sample in samples if not sample.is_evaluated)
    eval_tokens = (num_rows - len(lengths)) * lengths.mean()
    for sample in own:
        eval_tokens += sample.answers * (sample.num_rows or 0) * sum(sample.lengths) / max(1, len(sample.lengths))
    cells = largest_micro_batch(order, lengths, layout_of(config))
    evaluated = with_real_lengths(config, max(longest), max(cells, math.ceil(eval_tokens)))
    return with_real_lengths(config, max(longest), cells), evaluated


def typical_step(config: Config, samples: list[SourceSample]) -> StepDocuments:
    """Return the documents of a step of usual size, as if all rows were like the first ones; else the longest allowed.

    It stands for every step of the run, so it is the one, of the first steps, whose tokens are nearest to their mean.
    Samples that it draws are as long as they may be.
    """
    order, lengths = _estimated(config, samples)
    longest = config.data.max_length
    samples = [sample for sample in samples if not sample.is_evaluated]
    num_known = sum(len(sample.lengths) for sample in samples)
    if order is None or not num_known:
        tokens = MOST_TOKENS if config.train.tokens_per_step == "auto" else config.train.tokens_per_step
        number = (config.train.documents_per_step or 0) * answers_in(samples) or max(1, tokens // longest)
        source = f"data.max_length, {longest} tokens for every document, because the data are not known"
        return _laid_out(config, np.full(number, longest), None, source, 0.0 if samples_of(config) else 1.0)
    steps = [order.step(index).documents for index in range(min(order.num_steps, SEEN_STEPS))]
    tokens = np.array([lengths[ids].sum() for ids in steps])
    ids = steps[int(np.argmin(abs(tokens - tokens.mean())))]
    all_targets = sum(length - 1 for sample in samples for length in sample.lengths)
    share = sum(sample.targets for sample in samples) / max(1, all_targets)
    shared = np.resize([number for sample in samples for number in sample.shared] or [0], len(lengths))
    source = f"the first {_counted(num_known, 'document')} of the data"
    return _laid_out(config, lengths[ids], shared[ids] if shared.any() else None, source, share)


def _laid_out(
    config: Config, lengths: np.ndarray, shared: np.ndarray | None, source: str, share: float
) -> StepDocuments:
    """Return these documents of a step, or its samples of their prompts. `share`: of their tokens, that are targets."""
    if samples := samples_of(config):
        prompts = np.maximum(np.round(lengths - share * (lengths - 1)), 1).astype(np.int64)
        longest = prompts + config.rollouts.max_tokens
        if config.rollouts.environment is not None:  # a conversation goes on up to that length
            longest = np.maximum(prompts + 1, config.data.max_length)
        lengths, share = np.repeat(longest, samples), float((longest - prompts).sum() / (longest - 1).sum())
        # The last token of a prompt is computed for each of its samples: it predicts another one in each.
        shared = np.where(np.arange(len(lengths)) % samples, np.repeat(prompts - 1, samples), 0)
    if not config.data.packing or config.model.kernels not in ("auto", "fused"):
        shared = None
    return step_documents(lengths, layout_of(config), source, share, shared)


def steps_of_run(config: Config, samples: list[SourceSample]) -> int | None:
    """Return the number of steps, as if all rows were like the first ones; None if it is not known."""
    order, _ = _estimated(config, samples)
    return config.train.steps or (order.num_steps if order else None)


def _counted(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def _steps(config: Config, samples: list[SourceSample], order: Order | None, lengths: np.ndarray) -> Check:
    train = config.train
    if train.steps is not None:
        return Check("steps", "ok", f"{train.steps}, set by train.steps")
    if order is None:
        return Check("steps", "skipped", "not known until the data are tokenized: dualtune preview")
    number = order.num_steps
    num_rows = len(lengths) // answers_in(samples)
    held_out_rows = sum(sample.num_rows or 0 for sample in samples if not sample.is_evaluated) - num_rows
    held_out_text = f", {_counted(held_out_rows, 'row')} held out" if held_out_rows else ""
    whole = "" if config.data.dedup == "off" else ", before duplicates are left out"
    epochs = "1 epoch" if train.epochs == 1 else f"{train.epochs:g} epochs"
    text = f"about {number}: {epochs} of {_counted(num_rows, 'row')}{held_out_text}{whole}"
    if train.warmup >= number:
        fix = f"--set train.warmup={max(1, number // 10)}"
        return Check("steps", "advice", f"{text}, but train.warmup takes {train.warmup}", fix)
    if number < FEW_STEPS:
        return Check("steps", "advice", f"{text}; so few steps train little", _more_steps(config, number))
    return Check("steps", "ok", text)


def _more_steps(config: Config, number: int) -> str:
    train = config.train
    if train.documents_per_step is not None and train.documents_per_step > 1:
        return "--set train.documents_per_step=null, which takes fewer documents a step if there are few"
    if train.documents_per_step is None and train.tokens_per_step != "auto":
        return "--set train.tokens_per_step=auto, which takes fewer tokens a step if there are few"
    return f"More rows, or --set train.epochs={math.ceil(FEW_STEPS / number * train.epochs)}"
