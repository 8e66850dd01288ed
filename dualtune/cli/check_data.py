"""`dualtune check-data`: all rows that cannot be used, grouped by reason; a run shows only the first few."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import click

from dualtune.base.errors import ConfigError, DataError
from dualtune.base.redaction import redact
from dualtune.base.text import one_line, side_by_side
from dualtune.cli.options import json_option, say_json
from dualtune.cli.screen import tell
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.config.data_section import SourceConfig
    from dualtune.data.chat.examples import Example
    from dualtune.data.preferences import PreferenceCounts
    from dualtune.data.sources.readers import Role
    from dualtune.data.sources.rows import BadRow
    from dualtune.data.tokens.tokenize import State, TokenizedRow

MOST_CONTROL_TEXT = 20  # rows of a source listed for a control token in their text
MOST_IN_JSON = 1000  # problems of a source
MOST_OF_A_KIND = 20  # rows of a source shown with similar reasons; --list has all of them
MOST_KINDS = 50
OTHER_KINDS = "other reasons"
_DETAIL = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")  # the parts that differ between similar reasons


class Stream(NamedTuple):
    """The rows of a source that is not opened yet; tokenized if there is a config."""

    path: str
    role: Role
    rows: Iterator[Example | TokenizedRow | BadRow]
    preferences: PreferenceCounts  # of its rows, counted as they come
    accepts_lost_text: bool = False

    @property
    def name(self) -> str:
        from dualtune.data.sources.readers import kind_of

        return self.path if kind_of(Path(self.path)) else f"{self.path} ({self.role})"


format_option = click.option(
    "--format", "format", default="auto", show_default=True, help="The format of the rows, a value of data.format."
)
column_option = click.option(
    "--column", "columns", multiple=True, metavar="OURS=YOURS",
    help="Rename a column of the data, such as prompt=question; OURS= ignores one. Repeatable.",
)  # fmt: skip


@click.command("check-data")
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True)
@format_option
@column_option
@click.option(
    "--list", "listing", metavar="FILE", type=click.File("w", encoding="utf-8"),
    help="Write every row that cannot be used to FILE; the screen shows only the first of each kind.",
)  # fmt: skip
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    targets: tuple[str, ...],
    format: str,
    columns: tuple[str, ...],
    listing: TextIO | None,
    as_json: bool,
) -> None:
    """Find the rows of TARGET that cannot be used. TARGET is a config, or data: a file, a directory or a dataset name.

    With a config, its template and length limit are checked too. Exit code 3 if a row cannot be used.
    """

    configs = [target for target in targets if target.lower().endswith((".yaml", ".yml"))]
    if configs and (format != "auto" or columns):
        raise click.UsageError(f"--format and --column are for data; {configs[0]} sets its own.")
    names = named_columns(format, columns)
    reports: list[dict[str, Any]] = []
    for target in targets:
        for stream in _of_config(Path(target)) if target in configs else _of_data(target, format, names):
            report = _check(stream, listing, silent=as_json)
            reports.append(report)
            if not as_json:
                say("\n".join([*report["control_text"]["first"], f"{stream.name}: {_summary(report)}"]))
                _say_preferences(stream.preferences)
    if as_json:
        say_json({"sources": reports})
    ctx.exit(
        DataError.exit_code if any(report[key] for report in reports for key in ("bad", "error", "refused")) else 0
    )


def named_columns(format: str, columns: tuple[str, ...]) -> dict[str, str | None]:
    """Return the options --column as data.columns. UsageError for one of another form, or an unknown --format."""
    from dualtune.data.chat.formats import FORMATS

    if format not in ("auto", *FORMATS):
        raise click.UsageError(f"--format: got '{format}', allowed: {', '.join(('auto', *FORMATS))}")
    return dict(map(_column, columns))


def _column(text: str) -> tuple[str, str | None]:
    ours, equals, yours = text.partition("=")
    if not (ours and equals):
        raise click.UsageError(
            f"--column: got '{text}', allowed: OURS=YOURS, such as prompt=question, and OURS= to leave one out"
        )
    return ours, yours or None


def _of_data(path: str, format: str, columns: Mapping[str, str | None]) -> list[Stream]:
    """Return the streams of a data path; of a directory, those of every role."""
    from dualtune.config.data_section import SourceConfig
    from dualtune.data.preferences import PreferenceCounts
    from dualtune.data.sources.readers import ROLE_NAMES, has_role

    source = SourceConfig.model_construct(path=path, format=format, columns=dict(columns))
    roles: list[Role] = [role for role in ROLE_NAMES if has_role(path, role)] if Path(path).is_dir() else []

    def stream(role: Role) -> Stream:
        preferences = PreferenceCounts()
        return Stream(path, role, preferences.examples(_examples(source, role)), preferences)

    return [stream(role) for role in roles or ["train"]]


def _of_config(path: Path) -> list[Stream]:
    from dualtune.config import load_config
    from dualtune.data.documents import eval_sources
    from dualtune.data.preferences import PreferenceCounts
    from dualtune.data.tokens.tokenize import tokenize_rows
    from dualtune.data.tokens.tokenizer import Tokenizer
    from dualtune.model.base_model import resolve_model

    settings = load_config(path)
    data = settings.data
    tokenizer = Tokenizer.of(resolve_model(settings.model.name, weights=False), data)
    weights = settings.preference.desirable_weight, settings.preference.undesirable_weight

    def stream(role: Role, source: SourceConfig) -> Stream:
        preferences = PreferenceCounts(data.max_length, weights)
        examples = preferences.examples(_examples(source, role, settings.train.objective))
        rows = preferences.rows(tokenize_rows(examples, tokenizer, data.loss_on, data.max_length))
        return Stream(source.path, role, rows, preferences, data.on_lost_text == "accept")

    sources_by_role: dict[Role, tuple[SourceConfig, ...]] = {"train": data.sources(), "valid": eval_sources(data)}
    return [stream(role, source) for role, sources in sources_by_role.items() for source in sources]


def _examples(source: SourceConfig, role: Role, objective: str | None = None) -> Iterator[Example | BadRow]:
    """Yield the examples. The source is opened with the first one, so that its errors do not hide other sources."""
    from dualtune.data.documents import open_one

    opened = open_one(source, role)
    yield from opened.examples() if objective is None else opened.suited(objective)


@dataclass
class Findings:
    """What the rows of a source are, counted as they come: a file may have millions of them."""

    num_rows: int = 0
    num_bad: int = 0
    problems: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    kinds: Counter[str] = field(default_factory=Counter[str])  # of problems
    states: Counter[State] = field(default_factory=Counter["State"])
    num_control: int = 0
    control: list[str] = field(default_factory=list[str])
    notices: Counter[str] = field(default_factory=Counter[str])

    @property
    def num_good(self) -> int:
        return self.num_rows - self.num_bad

    def add_tokens(self, row: TokenizedRow) -> None:
        self.states[row.state] += 1
        if row.control_token is not None:
            self.num_control += 1
            if self.num_control <= MOST_CONTROL_TEXT:
                self.control.append(redact(f"{row.path}:{row.line}: {row.control_token} in its own text"))

    def add_bad(self, row: BadRow) -> bool:
        """Return whether the row is one of the first of its kind, which are shown."""
        self.num_bad += 1
        kind = _DETAIL.sub("…", row.reason)[:200]
        self.kinds[kind if kind in self.kinds or len(self.kinds) < MOST_KINDS else OTHER_KINDS] += 1
        if len(self.problems) < MOST_IN_JSON:
            self.problems.append({"path": row.path, "line": row.line, "reason": redact(row.reason)})
        return kind in self.kinds and self.kinds[kind] <= MOST_OF_A_KIND


def _check(stream: Stream, listing: TextIO | None, *, silent: bool) -> dict[str, Any]:
    """Check all rows. An error that ends them early is reported with them."""
    from dualtune.data.chat.examples import Example
    from dualtune.data.sources.rows import BadRow, Tie
    from dualtune.data.tokens.masks import check_lost_text
    from dualtune.data.tokens.tokenize import TokenizedRow

    findings = Findings()
    failure: str | None = None
    refusal: str | None = None
    try:
        for row in stream.rows:
            findings.num_rows += 1
            if isinstance(row, TokenizedRow | Example):
                findings.notices.update(row.notices)
            if isinstance(row, TokenizedRow):
                findings.add_tokens(row)
            elif isinstance(row, BadRow) and not isinstance(row, Tie):
                text, is_shown = one_line(redact(str(row))), findings.add_bad(row)
                if listing:
                    listing.write(f"{text}\n")
                if is_shown and not silent:
                    say(text)
    except (ConfigError, DataError) as error:
        failure = redact(str(error))
        if not silent:
            say("\n".join(map(one_line, failure.split("\n"))))
    # Text that is lost everywhere is the fault of the format, not of a row: it is judged over all rows.
    try:
        check_lost_text(findings.notices, findings.num_good, stream.name, accept=stream.accepts_lost_text)
    except DataError as error:
        refusal = redact(str(error))
    if not silent:
        _say_what_repeats(findings, refusal, listing)
    return _report(stream, findings, failure, refusal)


def _say_what_repeats(findings: Findings, refusal: str | None, listing: TextIO | None) -> None:
    """Say once what many rows have, after the first rows of each kind."""
    from dualtune.data.sources.rows import advice_for
    from dualtune.data.tokens.masks import sentences

    _say_kinds(findings.kinds, listing)
    messages = [*sentences(findings.notices, findings.num_good), *([refusal] if refusal else [])]
    if messages:
        say("\n".join(map(one_line, messages)))
    if way := advice_for(findings.kinds):
        say(way)


def _report(stream: Stream, findings: Findings, failure: str | None, refusal: str | None) -> dict[str, Any]:
    """Return what --json has of a source."""
    from dualtune.data.documents import REASONS
    from dualtune.data.tokens.masks import LOST, TOLD
    from dualtune.data.tokens.tokenize import State

    return {
        "path": stream.path,
        "role": stream.role,
        "rows": findings.num_rows,
        "bad": findings.num_bad,
        "problems": findings.problems,
        "error": failure,
        "cut": findings.states[State.CUT],
        "split": findings.states[State.SPLIT],
        "control_text": {"rows": findings.num_control, "first": findings.control},
        "lost_text": {kind: number for kind, number in findings.notices.items() if kind in LOST | TOLD},
        "notices": {kind: number for kind, number in findings.notices.items() if kind not in LOST | TOLD},
        "refused": refusal,
        "dropped": {reason: findings.states[state] for state, reason in REASONS.items() if findings.states[state]},
        "preferences": _preferences(stream.preferences),
    }


def _preferences(counts: PreferenceCounts) -> dict[str, Any] | None:
    """Return the numbers of preferences as JSON has them; None if there are none."""
    from dualtune.data.preferences import difference

    if not (counts.num_rows or counts.num_equal or counts.num_ties):
        return None
    first = asdict(difference(counts.first)) if counts.first else None
    return {
        "prompts": counts.num_prompts,
        "equal_pairs": counts.num_equal,
        "ties": counts.num_ties,
        "pairs": asdict(counts.pairs) if counts.pairs else None,
        "labels": asdict(counts.labels) if counts.labels else None,
        "first_pair": first and {key: redact(text) if isinstance(text, str) else text for key, text in first.items()},
    }


def _say_preferences(counts: PreferenceCounts) -> None:
    from dualtune.data.preferences import (
        describe_labels,
        describe_pairs,
        difference,
        from_difference,
        preference_warnings,
    )

    pairs, labels = counts.pairs, counts.labels
    if pairs:
        equal = f"; {counts.num_equal} more have equal answers" if counts.num_equal else ""
        ties = f"; {counts.num_ties} ties are left out" if counts.num_ties else ""
        tell(f"pairs       {pairs.pairs}, of {counts.num_prompts} different prompts{equal}{ties}")
        for name, text in describe_pairs(pairs):
            tell(f"{name:<12}{text}")
    if labels:
        tell(f"labels      {describe_labels(labels)} to {counts.num_prompts} different prompts")
    for warning in preference_warnings(pairs, labels):
        tell(f"warning     {warning}")
    if counts.first:
        first = difference(counts.first)
        tell(f"first pair  {first.where}: they begin to differ in message {first.message}, character {first.character}")
        say(side_by_side("chosen", "rejected"))
        say(side_by_side(*from_difference(redact(first.chosen), redact(first.rejected))))


def _say_kinds(kinds: Counter[str], listing: TextIO | None) -> None:
    """Print how many rows of each kind were not shown."""
    hidden = {kind: number - (0 if kind == OTHER_KINDS else MOST_OF_A_KIND) for kind, number in kinds.items()}
    for kind, number in hidden.items():
        if number > 0:
            say(f"… and {number} more rows: {one_line(redact(kind))}")
    if max(hidden.values(), default=0) > 0 and listing is None:
        say("--list FILE writes all of them to a file")


def _summary(report: Mapping[str, Any]) -> str:
    if report["error"] and not report["rows"]:
        return "cannot be read"
    parts = [f"{report['rows']} rows, {report['bad']} cannot be used"]
    parts += [f"{report[state]} {state} at max_length" for state in ("cut", "split") if report[state]]
    parts += [f"{number} dropped: {reason}" for reason, number in report["dropped"].items()]
    if number := report["control_text"]["rows"]:
        parts.append(f"with a control token in their own text (data.special_tokens_in_text): {number}")
    parts += ["not read to the end"] if report["error"] else []
    return "; ".join(parts)
