"""The documents of a run: its sources are opened, duplicates left out, rows tokenized, and some of them held out."""

from __future__ import annotations

import copy
import functools
import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, DataError, DiskError
from dualtune.config import Config
from dualtune.config.data_section import Consecutive, DataConfig, SourceConfig
from dualtune.config.values import ON_POLICY, POLICY_OBJECTIVES
from dualtune.data.chat.examples import Example
from dualtune.data.chat.formats import detect_format, to_examples
from dualtune.data.chat.row_values import UNREAD, UNREAD_LABEL, Columns
from dualtune.data.similarity import NEAR, Repeat, Repeats
from dualtune.data.sources.readers import FileSource, HubSource, Role, has_role, open_source
from dualtune.data.sources.rows import BadRow, BadRows, RawRow, check_bad_rows
from dualtune.data.tokens.masks import check_lost_text, sentences
from dualtune.data.tokens.store import INDEX, Document, HiddenStates, TokenStore, Writer, open_store, stored_in_memory
from dualtune.data.tokens.tokenize import State, TokenizedRow, Tokens, tokenize_rows
from dualtune.data.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """A source that exists; nothing has been read from it yet."""

    source: SourceConfig  # `format` and `columns` are set; without `roles` and `consecutive` it has their defaults
    files: FileSource | HubSource

    def examples(self, tell: Callable[[float], None] = lambda share: None) -> Iterator[Example | BadRow]:
        return to_examples(self.files.rows(tell), *self.layout)

    def format(self) -> str:
        """Return the configured format, or the one detected from the first good row; "auto" if there is no good row."""
        named, columns, *_ = self.layout
        if named != "auto":
            return named
        first = next((row for row in self.files.rows() if isinstance(row, RawRow)), None)
        return detect_format(first, columns) if first else "auto"

    def suited(self, objective: str) -> Iterator[Example | BadRow]:
        """Yield the examples. Raises ConfigError if the objective does not learn from such rows."""
        for example in self.examples():
            if isinstance(example, Example):
                check_objective(objective, example)
            yield example

    @property
    def layout(self) -> tuple[str, Columns, Mapping[str, str], Consecutive]:
        """The format of its rows, which columns and roles have other names, and what becomes of turns in a row."""
        source = self.source
        assert source.format is not None and source.columns is not None  # filled in by DataConfig
        return source.format, source.columns, source.roles or {}, source.consecutive or "join"


def open_sources(config: Config, eval_path: str | None = None) -> tuple[list[OpenedSource], list[OpenedSource]]:
    """Open the training and evaluation sources. `eval_path` replaces the configured evaluation data."""
    data = config.data
    train = [open_one(source, "train") for source in data.sources()]
    if eval_path is not None:
        named = data.model_copy(update={"eval": SourceConfig(path=eval_path)}).eval_sources()
        return train, [open_one(source, "test") for source in named]
    return train, [open_one(source, "valid") for source in eval_sources(data)]


def eval_sources(data: DataConfig) -> tuple[SourceConfig, ...]:
    """Return the evaluation sources; none if a share of the training rows is held out.

    With data.eval: auto, the validation split of a directory or dataset takes precedence over a share.
    """
    return _with_valid(data) if data.eval == "auto" else data.eval_sources()


def unused_valid(data: DataConfig) -> list[str]:
    """Say which evaluation data beside the training data are not used, because data.eval names a share."""
    if data.eval == "auto" or not data.held_out_share:
        return []
    return [
        f"{source.path}: has evaluation data, which are not used: data.eval holds out {data.held_out_share:.0%} of the "
        "training rows. Set data.eval: auto to use them"
        for source in _with_valid(data)
    ]


def _with_valid(data: DataConfig) -> tuple[SourceConfig, ...]:
    return tuple(s for s in data.sources() if s.split is None and has_role(s.path, "valid", s.subset))


def open_one(source: SourceConfig, role: Role) -> OpenedSource:
    return OpenedSource(source, open_source(source.path, role=role, subset=source.subset, split=source.split))


# ----------------------------------------------------------------------------------------------------------------------
# data.dedup: the rows of the training sources that repeat another one, left out before any row is held out.


class Dedup:
    """Which rows of the training sources repeat a row of the evaluation sources, or an earlier one of their own.

    Evaluation sources stay whole. The rows are read and compared when this is first asked for: with the tokenized data
    in the cache, never. Whatever process asks, the answer is the same.
    """

    def __init__(
        self, mode: str, training: Sequence[OpenedSource], evaluation: Callable[[], Sequence[OpenedSource]]
    ) -> None:
        """`mode` is the value of data.dedup. `evaluation` opens the evaluation sources of the config."""
        self._mode, self._training, self._evaluation = mode, training, evaluation

    def key(self, source: int) -> dict[str, Any]:
        """Return what, besides its own content, decides which rows of this training source are left out."""
        return {} if self._mode == "off" else {"dedup": self._mode, "source": source, "beside": self._beside}

    def sift(
        self, source: int, examples: Iterable[Example | BadRow], counts: Counter[str] | None = None
    ) -> Iterator[Example | BadRow]:
        """Yield the rows of this training source without those to leave out, which are counted by kind."""
        if self._mode == "off":
            yield from examples
            return
        left_out, number = self._left_out[source], 0
        for example in examples:
            if isinstance(example, Example):
                repeat = left_out.get(number)
                number += 1
                if repeat is not None:
                    if counts is not None:
                        counts["exact" if repeat.is_exact else "near"] += 1
                    continue
            yield example

    @functools.cached_property
    def _sources(self) -> list[OpenedSource]:
        return [*self._evaluation(), *self._training]

    @functools.cached_property
    def _beside(self) -> list[Any]:
        return [[o.files.identity(), o.source.format, o.source.columns] for o in self._sources]

    @functools.cached_property
    def _left_out(self) -> list[dict[int, Repeat]]:
        """For each training source, its rows to leave out by their number among the good ones."""
        starts: list[int] = []
        try:
            with Repeats(NEAR if self._mode == "near" else None) as repeats:
                for opened in self._sources:
                    starts.append(len(repeats))
                    for example in opened.examples():
                        interrupt.poll()
                        if isinstance(example, Example):
                            repeats.add(example)
                starts = starts[len(self._sources) - len(self._training) :]
                repeated = repeats.find(protected=starts[0])
        except OSError as error:
            raise DiskError(
                f"data.dedup: the texts to compare cannot be kept in a temporary file: {error.strerror or error}. "
                "Free disk space, or set TMPDIR to a directory on another disk"
            ) from error
        left_out: list[dict[int, Repeat]] = [{} for _ in starts]
        for row, repeat in repeated.items():
            source = bisect_right(starts, row) - 1  # a source may have no row
            left_out[source][row - starts[source]] = repeat
        return left_out


# ----------------------------------------------------------------------------------------------------------------------
# Which rows are held out for evaluation: a function of the seed, the share and the rows' token counts.

FAR = 2.0  # factor by which the held-out share of the tokens may differ from the requested share


def held_out(num_rows: int, share: float, seed: int) -> np.ndarray:
    """Return bool [num_rows], the held-out rows: for `share` > 0 at least one, but never all.

    Depends only on the arguments.
    """
    number = min(max(1, round(share * num_rows)), num_rows - 1) if share else 0
    chosen = np.zeros(num_rows, bool)
    chosen[np.random.default_rng([seed, 0]).permutation(num_rows)[:number]] = True
    return chosen


def probe_documents(num_documents: int, number: int, seed: int) -> list[int]:
    """Return the indices of the training documents held out to probe a step. Raises DataError if there are too few.

    Depends only on the arguments.
    """
    if number and number >= num_documents:
        raise DataError(
            f"{number} training documents are needed as probes, but there are only {num_documents}. Use more data"
        )
    return sorted(np.random.default_rng([seed, 5]).permutation(num_documents)[:number].tolist())


def held_out_tokens(tokens: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, str]:
    """Return bool [rows], the held-out rows, and a remark if the share cannot be met in tokens, or not in rows.

    `tokens` is the number of tokens of each row. The rows are those of `held_out`, unless their share of the tokens
    is less than half or more than twice `share`: then rows are chosen by their token counts.
    """
    chosen = held_out(len(tokens), share, seed)
    if not share or _is_near(tokens, chosen, share):
        return chosen, ""
    usual = int(chosen.sum())
    order = np.random.default_rng([seed, 0]).permutation(len(tokens))
    order = order[tokens[order] > 0]
    if len(order) < 2:
        return np.zeros(len(tokens), bool), (
            f"none: data.eval is {share:.0%} of the rows, but only one row can be trained on. "
            "Split the row, name evaluation data in data.eval, or set it to 0"
        )
    # In this order, each row that brings the sum of tokens closer to the share: at least one, never all.
    missing, rows = share * float(tokens.sum()), list[int]()
    for row in order.tolist():
        if tokens[row] < 2 * missing:
            rows.append(row)
            missing -= float(tokens[row])
    chosen = np.zeros(len(tokens), bool)
    chosen[rows[: len(order) - 1] or order[np.argmin(tokens[order])]] = True
    if _is_near(tokens, chosen, share):
        number, longest = int(chosen.sum()), float(tokens.max() / tokens.sum())
        if usual <= FAR * number <= FAR * FAR * usual:
            return chosen, ""
        return chosen, (
            f"{number} of the {len(tokens)} rows are held out to have {share:.0%} of the tokens (data.eval), because "
            f"lengths differ much: the longest row has {longest:.0%} of them. Split long rows, or name evaluation data "
            "in data.eval"
        )
    problem = f"{_share(tokens, chosen):.0%} of the tokens are held out, but data.eval is {share:.0%}"
    if FAR * share * len(order) < 1:  # even if all rows had the same length
        advice = "Add rows, name evaluation data in data.eval, or set it to 0"
        return chosen, f"{problem}: the least is one of the {len(order)} rows. {advice}"
    return chosen, f"{problem}: there are too few rows, and their lengths differ too much. Split the longest rows"


def _share(tokens: np.ndarray, chosen: np.ndarray) -> float:
    return float(tokens[chosen].sum() / max(1, tokens.sum()))


def _is_near(tokens: np.ndarray, chosen: np.ndarray, share: float) -> bool:
    actual = _share(tokens, chosen)
    return share / FAR <= actual <= share * FAR and actual < 1


# ----------------------------------------------------------------------------------------------------------------------
# The tokenized rows of sources as documents.

# The rows that an objective learns from, and how to get others. An installed objective checks them itself.
PLAIN = "prompts with answers"
PROMPT = "prompts alone (data.format: prompt)"
PAIR = "pairs of answers (data.format: preference)"
LABELLED = "answers with a label (data.format: unpaired_preference)"
NEEDED = {
    "sft": (PLAIN,),
    "distill": (PLAIN,),
    **dict.fromkeys((ON_POLICY, *POLICY_OBJECTIVES), (PLAIN, PROMPT)),
    **dict.fromkeys(("dpo", "orpo", "simpo", "cpo"), (PAIR,)),
    "kto": (LABELLED, PAIR),
}
_ADVICE = {
    PLAIN: "sft and distill learn them, grpo and its variants draw others to their prompts",
    PROMPT: "grpo and its variants draw answers to them",
    PAIR: "dpo, orpo, simpo, cpo and kto learn them", LABELLED: "kto learns them",
}  # fmt: skip
_FOR_SFT = {
    PROMPT: ". For sft name the column of the answers: data.columns: {completion: NAME}",
    PAIR: ". For sft on the chosen answers alone set data.columns: {rejected: null}",
    LABELLED: ". For sft on all answers, also undesirable ones, set data.columns: {label: null}",
}


def takes_apart(objective: str) -> bool:
    """Return whether the objective learns from the answers of a pair one by one."""
    return LABELLED in NEEDED.get(objective, ())


def check_objective(objective: str, example: Example) -> None:
    """Raise ConfigError if the objective does not learn from rows like this one."""
    kind = PAIR if example.rejected is not None else LABELLED if example.label else PLAIN
    kind = PROMPT if example.is_prompt else kind
    needed = NEEDED.get(objective, (kind,))
    if example.is_text and objective in (ON_POLICY, *POLICY_OBJECTIVES):
        raise ConfigError(
            f"train.objective: {objective} needs {' or '.join(needed)}, but {example.where} is plain text, in which "
            'nothing is asked; write prompts, such as {"prompt": …} with data.format: prompt'
        )
    if kind in needed:
        return
    advice = _ADVICE[kind] + (_FOR_SFT.get(kind, "") if objective == "sft" else "")
    if LABELLED in needed and any(notice.startswith(UNREAD_LABEL) for notice in example.notices):
        advice = "a label that is not true or false is read where data.format: unpaired_preference says so"
    raise ConfigError(
        f"train.objective: {objective} needs {' or '.join(needed)}, but {example.where} has {kind}; {advice}"
    )


Show = Callable[[str, float], None]  # (what is being read, fraction done)
REPEATS, TIES = ("exact", "near"), "ties"  # kinds of rows that are left out
REASONS = {  # also keys in `--json`, so these words stay
    State.NO_TARGET: "no token to learn",
    State.TOO_LONG: "no trainable token within max_length",
}


class Documents:
    """Documents of one or several stores, with statistics about the rows they come from.

    `lengths` int64 [N] is the number of tokens of each document, `sources` int64 [N] the index of its store, and
    `weights` how often the documents of each store occur in an epoch.
    """

    def __init__(self, stores: Sequence[TokenStore], rows: Sequence[np.ndarray], weights: Sequence[float] = ()) -> None:
        """Select the rows `rows[s]`, bool [num_rows of store s], from each store."""
        self.stores = tuple(stores)
        self.weights = tuple(weights) or (1.0,) * len(stores)
        self.num_rows = sum(int(chosen.sum()) for chosen in rows)
        self.num_bad = sum(store.num_bad for store in stores)
        # Duplicates and ties, by kind.
        self.left_out = sum((Counter(store.left_out) for store in stores), Counter[str]())
        self.hidden: HiddenStates | None = None  # what need not be computed of these documents, by index
        self.shares = False  # whether the engine computes a beginning once that the answers of a row have in common…
        self.why_not_shared = ""  # …and if it cannot, why
        self.remark = ""  # a note if the held-out share differs from the requested one
        # The index entries of these rows, including dropped rows.
        self._entries = [np.flatnonzero(mine[store.index["row"]]) for store, mine in zip(stores, rows, strict=True)]
        self._states: Counter[int] = Counter()
        sources, indices, lengths, targets = ([np.zeros(0, np.int64)] for _ in range(4))
        for s, (store, entries) in enumerate(zip(stores, self._entries, strict=True)):
            # Count a split row once.
            first = entries[np.diff(store.index["row"][entries], prepend=-1) != 0]
            self._states.update(store.index["state"][first].tolist())
            documents = entries[store.index["length"][entries] > 0]
            sources.append(np.full(len(documents), s, np.int64))
            indices.append(documents)
            lengths.append(store.index["length"][documents].astype(np.int64))
            targets.append(store.index["num_targets"][documents].astype(np.int64))
        self.sources, self._indices, self.lengths, self.targets = map(
            np.concatenate, (sources, indices, lengths, targets)
        )

    def __len__(self) -> int:
        return len(self._indices)

    @functools.cached_property
    def answers(self) -> int:
        """How many documents in a row belong together: 2 where answers are compared, or 1.

        Raises ConfigError if some sources have rows to compare and others not.
        """
        kinds = {store.answers: ", ".join(store.files) for store in self.stores if (store.index["length"] > 0).any()}
        if len(kinds) > 1:
            raise ConfigError(f"data: {kinds[2]} has answers to compare, {kinds[1]} has not; train on one kind of rows")
        return next(iter(kinds), 1)

    def desirable(self) -> Documents:
        """Return the documents of the answers that are to be learned: the chosen ones, or those labelled desirable."""
        documents, is_desirable = copy.copy(self), np.arange(len(self)) % self.answers == 0
        is_desirable &= self.labels >= 0
        for name in ("sources", "_indices", "lengths", "targets", "labels"):
            setattr(documents, name, getattr(self, name)[is_desirable])
        documents.answers, documents.beginnings = 1, None
        return documents

    @functools.cached_property
    def beginnings(self) -> np.ndarray | None:
        """How many tokens at the beginning of each document the first answer of its row has, too, int64 [N].

        0 for a first answer; None: no answers are compared.
        """
        return None if self.answers == 1 else self._column("beginning").astype(np.int64)

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """Return int64 [N]: 1 for a document of a desirable answer, -1 of an undesirable one, else 0."""
        return self._column("label").astype(np.int64)

    @property
    def has_labels(self) -> bool:
        """Whether rows of these sources have labels. The second document of each row then answers another prompt."""
        return any((store.index["label"] != 0).any() for store in self.stores)

    def __getitem__(self, index: int) -> Document:
        return self.stores[int(self.sources[index])].document(int(self._indices[index]))

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_targets(self) -> int:
        return int(self.targets.sum())

    @property
    def has_message_weights(self) -> bool:
        """Whether a message in these sources has a weight that is neither 0 nor 1."""
        return any(store.weights is not None for store in self.stores)

    @property
    def num_truncated(self) -> int:
        return self._states[State.CUT]

    @property
    def num_split(self) -> int:
        return self._states[State.SPLIT]

    @property
    def dropped(self) -> dict[str, int]:
        """The number of dropped rows for each reason."""
        return {reason: self._states[state] for state, reason in REASONS.items() if self._states[state]}

    @property
    def shortest_without_target(self) -> int:
        """The number of tokens of the shortest row that has targets, but none within max_length; 0 if there is none."""
        indices = (store.index[entries] for store, entries in zip(self.stores, self._entries, strict=True))
        lengths = [index["row_length"][index["state"] == State.TOO_LONG] for index in indices]
        return min((int(each.min()) for each in lengths if each.size), default=0)

    @property
    def longest(self) -> int:
        return int(self.lengths.max(initial=0))

    def digests(self) -> np.ndarray:
        """Return V16 [N]: a digest of each document. Equal documents have equal digests."""
        return self._column("digest")

    def rows(self) -> np.ndarray:
        """Return int64 [N]: the number of each document's row in its source."""
        return self._column("row")

    def row_length(self, index: int) -> int:
        """Return the number of tokens of a document before truncation; of a split text, those of the whole text."""
        return int(self.stores[int(self.sources[index])].index["row_length"][int(self._indices[index])])

    def is_cut(self) -> np.ndarray:
        """Return bool [N]: whether the document was truncated."""
        return (self._column("state") == State.CUT) & (self._column("row_length") > self.lengths)

    def row_lengths(self) -> np.ndarray:
        """Return int64 [N]: `row_length` of each document."""
        return self._column("row_length").astype(np.int64)

    def unit_digests(self) -> np.ndarray:
        """Return a digest of each row: of its document, of both answers of a pair, or of an answer with a label."""
        digests = self.digests()
        if self.answers == 1:
            return digests
        return digests[::2] if self.has_labels else digests.view("V32")

    def has_control_text(self) -> np.ndarray:
        """Return bool [N]: whether the row's content contains a control token."""
        return self._column("control") > 0

    def _column(self, name: str) -> np.ndarray:
        """Return a field of the index for each document."""
        parts = [store.index[name][self._indices[self.sources == s]] for s, store in enumerate(self.stores)]
        return np.concatenate(parts) if parts else np.zeros(0, INDEX[name])

    def fingerprint(self) -> str:
        """Return the number of documents and a hash of all tokens and targets in order."""
        digest = hashlib.sha256(self.digests().tobytes()).hexdigest()[:16]
        return f"{len(self)} documents, sha256 {digest}"

    @property
    def names(self) -> list[str]:
        """The files that the documents come from."""
        return [name for store in self.stores for name in store.files]

    def lines(self) -> set[tuple[str, int]]:
        """Return (path, line) of the rows that the documents come from, including dropped rows."""
        lines: set[tuple[str, int]] = set()
        for store, mine in zip(self.stores, self._entries, strict=True):
            entries = store.index[mine]
            files: list[int] = entries["file"].tolist()
            lines.update(zip((store.files[file] for file in files), entries["line"].tolist(), strict=True))
        return lines

    def with_control_text(self) -> list[str]:
        """Return path:line of the rows with a control token in their content."""
        places: dict[str, None] = {}
        for store, mine in zip(self.stores, self._entries, strict=True):
            for entry in store.index[mine[store.index["control"][mine] > 0]]:
                places[f"{store.files[entry['file']]}:{entry['line']}"] = None
        return list(places)

    def counted(self, number: int) -> str:
        """Return a number with the unit that a step counts, such as rows, in words."""
        one, more = "document", "documents"
        if self.answers > 1:
            one, more = ("answer with a label", "answers with a label") if self.has_labels else ("pair", "pairs")
        return f"{number} {one if number == 1 else more}"

    def summary(self) -> str:
        share = self.num_targets / max(1, self.num_tokens)
        text = f"{self.counted(len(self) // self.answers)}, {self.num_tokens} tokens"
        text += f", {self.num_targets} of them targets ({share:.0%})"
        if self.num_truncated:
            text += f"; {self.num_truncated} cut to max_length"
        if self.num_split:
            text += f"; {self.num_split} text{'' if self.num_split == 1 else 's'} split at max_length"
        for reason, number in self.dropped.items():
            text += f"; {number} dropped: {reason}"
        if self.num_bad:
            text += f"; {self.num_bad} bad row{'' if self.num_bad == 1 else 's'} left out"
        if self.left_out:
            text += f"; {describe_left_out(self.left_out)}"
        return f"{text}; {self.remark}" if self.remark else text


def notices(*parts: Documents, all_columns_used: bool = False) -> list[str]:
    """Say how many rows of these documents' sources are not learned as they stand there, by kind.

    `all_columns_used`: columns outside of the text are for rewards and environments, and not lost.
    """
    stores = {id(store): store for documents in parts for store in documents.stores}.values()
    counts = sum((Counter(store.notices) for store in stores), Counter[str]())
    if all_columns_used:
        counts = {kind: number for kind, number in counts.items() if not kind.startswith(f"{UNREAD}: ")}
    return sentences(counts, sum(store.num_rows for store in stores))


def describe_left_out(left_out: Mapping[str, int]) -> str:
    """Say how many rows data.dedup has left out, by kind, and how many ties."""
    kinds = ", ".join(f"{left_out[kind]} {kind}" for kind in REPEATS if left_out.get(kind))
    total, ties = sum(left_out.get(kind, 0) for kind in REPEATS), left_out.get(TIES, 0)
    texts = [f"{total} duplicate{'' if total == 1 else 's'} left out ({kinds})"] if total else []
    texts += [f"{ties} tie{'' if ties == 1 else 's'} left out: neither answer is better"] if ties else []
    return "; ".join(texts)


# ----------------------------------------------------------------------------------------------------------------------
# From the sources of a config to its documents.


class Data:
    """The data sources of a config, to be tokenized into documents.

    Raises DataError or ConfigError for early failures: missing files, keys that match no format.
    """

    def __init__(self, config: Config, eval_path: str | None = None) -> None:
        self._config = config
        self.train, self._eval = open_sources(config, eval_path)
        for opened in (*self.train, *self._eval):
            # The first good row shows the format of all.
            next((row for row in opened.suited(config.train.objective) if isinstance(row, Example)), None)
        # The evaluation data of the run, whatever data are evaluated now.
        self._dedup = Dedup(config.data.dedup, self.train, lambda: open_sources(config)[1])

    @property
    def sources(self) -> list[OpenedSource]:
        """All sources, evaluation sources last."""
        return [*self.train, *self._eval]

    def train_and_eval(
        self, tokenizer: Tokenizer, show: Show = lambda name, share: None
    ) -> tuple[Documents, Documents]:
        """Return the training and evaluation documents.

        `data.eval` names separate data, a share of the training rows to hold out (chosen by the seed), or nothing.
        """
        stores = [self._store(opened, tokenizer, show, number) for number, opened in enumerate(self.train)]
        weights = [opened.source.weight for opened in self.train]
        if self._eval:
            return _whole(stores, weights), _whole([self._store(opened, tokenizer, show) for opened in self._eval])
        share = self._config.data.held_out_share
        tokens = [store.tokens_of_rows() for store in stores]
        chosen, remark = held_out_tokens(np.concatenate(tokens), share, self._config.run.seed)
        eval_rows = np.split(chosen, np.cumsum([len(rows) for rows in tokens])[:-1])
        train_rows = [~rows for rows in eval_rows]
        eval_ = Documents(stores, eval_rows)
        eval_.num_bad = 0  # bad rows and duplicates belong to neither part and are reported once
        eval_.left_out = Counter()
        eval_.remark = remark
        return Documents(stores, train_rows, weights), eval_

    def held_out_only(self, tokenizer: Tokenizer) -> Documents:
        """Return the held-out documents, and read training data only if they are part of it."""
        if not self._eval:
            return self.train_and_eval(tokenizer)[1]
        return _whole([self._store(opened, tokenizer) for opened in self._eval])

    def held_out_examples(self, documents: Documents) -> list[Example]:
        """Return the examples that these held-out documents come from, in order."""
        lines = documents.lines()
        rows = chain.from_iterable(opened.examples() for opened in self._eval) if self._eval else self._training()
        return [e for e in rows if isinstance(e, Example) and (e.path, e.line) in lines]

    def training_examples(self, held_out: Documents) -> Iterator[Example]:
        """Yield the examples to train on: without those of `held_out`, if a share of the same rows is held out."""
        left_out: set[tuple[str, int]] = set() if self._eval else held_out.lines()
        for example in self._training():
            if isinstance(example, Example) and (example.path, example.line) not in left_out:
                yield example

    def _training(self) -> Iterator[Example | BadRow]:
        for number, opened in enumerate(self.train):
            yield from self._dedup.sift(number, opened.examples())

    def _store(
        self, opened: OpenedSource, tokenizer: Tokenizer, show: Show = lambda name, share: None,
        number: int | None = None,
    ) -> TokenStore:  # fmt: skip
        """Return the tokenized rows of a source. `number` is that of a training source, None for evaluation data."""
        source, files = opened.source, opened.files
        data, unpaired = self._config.data, takes_apart(self._config.train.objective)
        # All that the tokens depend on, and nothing else, so that a run with another learning rate finds them.
        key = {
            "content": files.identity(),
            "names": [str(path) for path in files.files] or [files.name],
            "format": source.format,
            "columns": source.columns,
            "roles": source.roles,
            "consecutive": source.consecutive,
            "system": data.system,
            "loss_on": data.loss_on,
            "special_tokens_in_text": data.special_tokens_in_text,
            "max_length": data.max_length,
            "tokenizer": tokenizer.fingerprint(),
            **({"unpaired": True} if unpaired else {}),
            **({} if number is None else self._dedup.key(number)),
        }

        def build(writer: Writer, bad: BadRows) -> None:
            examples = opened.examples(lambda share: show(files.name, min(share, 0.99)))
            if number is not None:
                examples = self._dedup.sift(number, examples, writer.left_out)
            rows = tokenize_rows(examples, tokenizer, data.loss_on, data.max_length, unpaired=unpaired)
            for row in bad.sift(rows):
                writer.add(row)
            writer.left_out += Counter({TIES: bad.num_ties})
            show(files.name, 1.0)
            check(bad.count, bad.first, writer.num_rows, writer.notices)  # what is refused is not kept

        def check(num_bad: int, first: Sequence[str], num_good: int, kinds: Mapping[str, int]) -> None:
            check_bad_rows(num_bad, first, num_good, skip=data.on_bad_row == "skip", limit=data.max_bad_rows)
            check_lost_text(kinds, num_good, files.name, accept=data.on_lost_text == "accept")

        # A store that another run has made may have more bad rows than this config allows.
        store = open_store(key, build)
        check(store.num_bad, store.bad, store.num_rows, store.notices)
        return store


def in_memory(documents: Iterable[Tokens]) -> Documents:
    """Build documents from pairs of (token ids int32 [T], loss mask bool [T] or float32 [T])."""
    return units_in_memory([[document] for document in documents])


def units_in_memory(units: Iterable[list[Tokens]]) -> Documents:
    """Build documents that are compared: each unit has as many answers, each a pair as in `in_memory`."""
    rows = [
        TokenizedRow("", n, n, tuple(len(tokens) for tokens, _ in unit), State.WHOLE, unit, len(unit))
        for n, unit in enumerate(units)
    ]
    return _whole([stored_in_memory(rows)])


def tokenize(examples: Iterable[Example], tokenizer: Tokenizer, loss_on: str, max_length: int) -> Documents:
    """Tokenize examples in memory. Raises DataError that lists the rows the template rejects."""
    bad = BadRows()
    store = stored_in_memory(list(bad.sift(tokenize_rows(examples, tokenizer, loss_on, max_length))))
    check_bad_rows(bad.count, bad.first, store.num_rows, skip=False, limit=0)
    return _whole([store])


def _whole(stores: Sequence[TokenStore], weights: Sequence[float] = ()) -> Documents:
    """Return the documents of all rows of these stores."""
    return Documents(stores, [np.ones(store.num_rows, bool) for store in stores], weights)
