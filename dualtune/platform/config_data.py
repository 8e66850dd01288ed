"""The data of a config, and the steps they make, as far as a look at the files tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from dualtune.checks import Check
from dualtune.config import Config
from dualtune.config.schema import SourceConfig
from dualtune.data.batches import plan
from dualtune.data.documents import Opened, eval_sources, held_out, open_one
from dualtune.data.hub import is_hub_name
from dualtune.data.kinds import kind_of
from dualtune.data.order import Order
from dualtune.data.readers import Role
from dualtune.data.rows import BadRow, RawRow
from dualtune.data.tokenize import State, TokenizedRow, tokenize_rows
from dualtune.data.tokenizer import Tokenizer
from dualtune.errors import DataError, DualtuneError
from dualtune.platform.config_model import failure
from dualtune.train.evaluation import layout_of

FIRST_ROWS = 100  # that are read, and tokenized where the tokenizer is here; all of them: dualtune check-data
KEYS: dict[Role, str] = {"train": "train", "valid": "eval"}  # role -> the key of the config's section `data`
CHEAP_BYTES = 16 << 20  # files up to this size are read through to count their rows


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of a source to train on."""

    weight: float
    num_rows: int | None = None  # None: not counted
    lengths: tuple[int, ...] = ()  # tokens of its first documents


def look_at_data(config: Config, tokenizer: Tokenizer | None) -> tuple[list[Check], list[Seen]]:
    """A row for each source, and what was seen of those to train on."""
    rows: list[Check] = []
    seen: list[Seen] = []
    for source in config.data.sources():
        row, found = _look(config, source, "train", tokenizer)
        rows.append(row)
        seen.append(found)
    # A dataset of the hub may have validation data of its own, which only a download shows.
    local = not any(is_of_hub(source) for source in config.data.sources())
    for source in eval_sources(config.data) if local else config.data.eval_sources():
        rows.append(_look(config, source, "valid", tokenizer)[0])
    return rows, seen


def is_of_hub(source: SourceConfig) -> bool:
    """Whether the name is taken for a dataset of the hub: as `open_source` decides it."""
    return is_hub_name(source.path) and not kind_of(Path(source.path)) and not Path(source.path).expanduser().exists()


def _look(config: Config, source: SourceConfig, role: Role, tokenizer: Tokenizer | None) -> tuple[Check, Seen]:
    name = "data" if role == "train" else "eval data"
    nothing = Seen(source.weight)
    if is_of_hub(source):
        return Check(name, "skipped", f"{source.path}: a dataset of the hub, which is not asked"), nothing
    try:
        opened = open_one(source, role)
        first = list(islice(_first(config, opened, tokenizer), FIRST_ROWS))
        num_rows = _count(opened)
    except DualtuneError as error:
        mend = None if Path(source.path).exists() else f"Put the data there, or name other data.{KEYS[role]}"
        return replace(failure(name, error), mend=mend), nothing
    bad = [row for row in first if isinstance(row, BadRow)]
    whole = num_rows == len(first)
    found = f"{source.path}: {'all' if whole else 'the first'} {len(first)} rows can be read"
    found += f", {num_rows} in all" if num_rows is not None and not whole else ""
    mend = f"dualtune check-data {source.path}"
    tokenized = [row for row in first if isinstance(row, TokenizedRow)]
    seen = Seen(source.weight, num_rows, tuple(len(ids) for row in tokenized for ids, _ in row.documents))
    if bad and config.data.on_bad_row == "error":
        found = f"{bad[0]}" + (f", and {len(bad) - 1} more of the first {len(first)} rows" if len(bad) > 1 else "")
        return Check(name, "fail", found, mend, DataError.exit_code), seen
    if bad:
        return Check(name, "advice", f"{source.path}: {len(bad)} of the first {len(first)} rows left out", mend), seen
    row = Check(name, "ok", found)
    return _judge_tokens(config, row, tokenized, seen.lengths, whole=whole) if tokenized else row, seen


def _first(config: Config, opened: Opened, tokenizer: Tokenizer | None) -> Iterator[object]:
    examples = islice(opened.trainable(), FIRST_ROWS)
    if tokenizer is None:
        return examples
    return tokenize_rows(examples, tokenizer, config.data.loss_on, config.data.max_length)


def _count(opened: Opened) -> int | None:
    """The rows of files that are small enough to be read for it."""
    if sum(path.stat().st_size for path in opened.files.files) > CHEAP_BYTES:
        return None
    return sum(isinstance(row, RawRow) for row in opened.files.rows())


def _judge_tokens(
    config: Config, row: Check, tokenized: list[TokenizedRow], lengths: tuple[int, ...], *, whole: bool
) -> Check:
    """What tokenizing the first rows showed."""
    states = Counter(found.state for found in tokenized)
    if not lengths:
        found = f"{row.found}, and none has a token to learn within data.max_length = {config.data.max_length}"
        mend = "Raise data.max_length, or check data.loss_on"
        return Check(row.name, "fail" if whole else "advice", found, mend, DataError.exit_code)
    text = f"{row.found}; up to {max(lengths)} tokens, {sum(lengths) / len(lengths):.0f} on average"
    cut, dropped = states[State.CUT], states[State.UNTRAINED] + states[State.TOO_LONG]
    if not cut + dropped:
        return Check(row.name, "ok", text)
    text += f"; {cut} cut to data.max_length, {dropped} without a token to learn"
    return Check(row.name, "advice", text, "dualtune preview shows what is trained")


# --- steps -----------------------------------------------------------------------------------------------------------


def step_rows(config: Config, seen: list[Seen]) -> list[Check]:
    """What an optimizer step takes, and how many there will be."""
    return [Check("step", "ok", _step(config)), _steps(config, seen)]


def _step(config: Config) -> str:
    """One optimizer step in words, for documents that are as long as they may be."""
    train, length, layout = config.train, config.data.max_length, layout_of(config)
    number = train.documents_per_step or max(1, train.tokens_per_step // length)
    micro_batches = len(plan(np.full(number, length), range(number), layout))
    limit = "" if train.documents_per_step else f"up to {train.tokens_per_step} tokens: "
    return (
        f"{limit}{_counted(number, 'document')} of at most {length} tokens, "
        f"in {_counted(micro_batches, 'micro-batch')} of up to {layout.max_tokens} tokens if all are that long"
    )


def _counted(number: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{number} {what}{'' if number == 1 else plural}"


def _steps(config: Config, seen: list[Seen]) -> Check:
    train = config.train
    counts = [found.num_rows for found in seen]
    lengths = [length for found in seen for length in found.lengths]
    if train.steps is not None:
        return Check("steps", "ok", f"{train.steps}, as train.steps says")
    if None in counts or (train.documents_per_step is None and not lengths):
        return Check("steps", "skipped", "their number shows when the data are tokenized: dualtune preview")
    sizes = [count or 0 for count in counts]
    share = config.data.eval
    chosen = held_out(sum(sizes), share if isinstance(share, int | float) else 0.0, config.run.seed)
    sources = np.repeat(np.arange(len(sizes)), sizes)[~chosen]
    documents = np.resize(np.array(lengths or [1]), len(sources))
    number = Order(config, documents, sources, [found.weight for found in seen]).num_steps
    held = f", {int(chosen.sum())} rows held out" if chosen.any() else ""
    found = f"about {number}: {train.epochs:g} epochs of {len(sources)} rows{held}"
    if train.warmup >= number:
        mend = f"--set train.warmup={max(1, number // 10)}"
        return Check("steps", "advice", f"{found}, and train.warmup takes {train.warmup} of them", mend)
    return Check("steps", "ok", found)
