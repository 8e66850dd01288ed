"""`dualtune check-data`: every row that cannot be used, at once, where a run shows the first few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from dualtune.cli.options import json_option
from dualtune.cli.terminal import say
from dualtune.redaction import redact

if TYPE_CHECKING:
    from dualtune.config.schema import SourceConfig
    from dualtune.data.formats import Example
    from dualtune.data.readers import Role
    from dualtune.data.rows import BadRow
    from dualtune.data.tokenize import TokenizedRow

MOST_IN_JSON = 1000  # problems of a source; as text there are all of them


class Stream(NamedTuple):
    """The rows of a source, not yet opened; tokenized where a config says how."""

    path: str
    role: Role
    rows: Iterator[Example | TokenizedRow | BadRow]

    @property
    def name(self) -> str:
        from dualtune.data.kinds import kind_of

        return self.path if kind_of(Path(self.path)) else f"{self.path} ({self.role})"


@click.command("check-data")
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True)
@click.option("--format", "format", default="auto", show_default=True, help="How rows are laid out, as in data.format.")
@click.option(
    "--column", "columns", multiple=True, metavar="OURS=YOURS", help="A column of another name: prompt=question."
)
@json_option
@click.pass_context
def command(ctx: click.Context, targets: tuple[str, ...], format: str, columns: tuple[str, ...], as_json: bool) -> None:
    """List every row of TARGET that cannot be used. TARGET is a config, or data: a file, directory or dataset name.

    Of a config, the rows are also put through its template and length limit. Exit code 3 if a row cannot be used.
    """
    import json

    from dualtune.data.formats import FORMATS
    from dualtune.errors import DataError

    configs = [target for target in targets if target.lower().endswith((".yaml", ".yml"))]
    if configs and (format != "auto" or columns):
        raise click.UsageError(f"--format and --column are for data; {configs[0]} says its own.")
    if format not in ("auto", *FORMATS):
        raise click.UsageError(f"--format: got '{format}', allowed: {', '.join(('auto', *FORMATS))}")
    names = dict(map(_column, columns))
    reports: list[dict[str, Any]] = []
    for target in targets:
        for stream in _of_config(Path(target)) if target in configs else _of_data(target, format, names):
            report = _check(stream, silent=as_json)
            reports.append(report)
            if not as_json:
                say(f"{stream.name}: {_summary(report)}")
    if as_json:
        say(json.dumps({"sources": reports}, indent=2))
    ctx.exit(DataError.exit_code if any(report["bad"] or report["error"] for report in reports) else 0)


def _column(text: str) -> tuple[str, str]:
    ours, equals, yours = text.partition("=")
    if not (ours and equals and yours):
        raise click.UsageError(f"--column: got '{text}', needed: our name = yours, such as prompt=question")
    return ours, yours


def _of_data(path: str, format: str, columns: Mapping[str, str]) -> list[Stream]:
    """The data itself; of a directory, those of every role."""
    from dualtune.config.schema import SourceConfig
    from dualtune.data.readers import ROLE_NAMES, has_role

    source = SourceConfig.model_construct(path=path, format=format, columns=dict(columns))
    roles: list[Role] = [role for role in ROLE_NAMES if has_role(path, role)] if Path(path).is_dir() else []
    return [Stream(path, role, _examples(source, role)) for role in roles or ["train"]]


def _of_config(path: Path) -> list[Stream]:
    from dualtune.base_model import resolve_model
    from dualtune.config import load_config
    from dualtune.data.documents import eval_sources
    from dualtune.data.tokenize import tokenize_rows
    from dualtune.data.tokenizer import Tokenizer

    settings = load_config(path)
    data = settings.data
    tokenizer = Tokenizer(resolve_model(settings.model.name, weights=False), data.template)

    def stream(role: Role, source: SourceConfig) -> Stream:
        examples = _examples(source, role)
        return Stream(source.path, role, tokenize_rows(examples, tokenizer, data.loss_on, data.max_length))

    chosen: dict[Role, tuple[SourceConfig, ...]] = {"train": data.sources(), "valid": eval_sources(data)}
    return [stream(role, source) for role, sources in chosen.items() for source in sources]


def _examples(source: SourceConfig, role: Role) -> Iterator[Example | BadRow]:
    """Opened when the first one is asked for, so that what is wrong with one source does not hide the others."""
    from dualtune.data.documents import open_one

    yield from open_one(source, role).examples()


def _check(stream: Stream, *, silent: bool) -> dict[str, Any]:
    """Go through the rows. What ends them early is told with them."""
    from dualtune.data.documents import REASONS
    from dualtune.data.rows import BadRow
    from dualtune.data.tokenize import State, TokenizedRow
    from dualtune.errors import DataError

    num_rows = num_bad = 0
    problems: list[dict[str, Any]] = []
    states: Counter[State] = Counter()
    failure: str | None = None
    try:
        for row in stream.rows:
            num_rows += 1
            if isinstance(row, TokenizedRow):
                states[row.state] += 1
            elif isinstance(row, BadRow):
                num_bad += 1
                if not silent:
                    say(redact(str(row)))
                elif len(problems) < MOST_IN_JSON:
                    problems.append({"path": row.path, "line": row.line, "reason": redact(row.reason)})
    except DataError as error:
        failure = redact(str(error))
        if not silent:
            say(failure)
    return {
        "path": stream.path,
        "role": stream.role,
        "rows": num_rows,
        "bad": num_bad,
        "problems": problems,
        "error": failure,
        "cut": states[State.CUT],
        "split": states[State.SPLIT],
        "dropped": {reason: states[state] for state, reason in REASONS.items() if states[state]},
    }


def _summary(report: Mapping[str, Any]) -> str:
    parts = [f"{report['rows']} rows, {report['bad']} cannot be used"]
    parts += [f"{report[state]} {state} at max_length" for state in ("cut", "split") if report[state]]
    parts += [f"{number} dropped: {reason}" for reason, number in report["dropped"].items()]
    parts += ["not read to the end"] if report["error"] else []
    return "; ".join(parts)
