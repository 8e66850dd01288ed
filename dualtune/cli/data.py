"""`dualtune data`: what is done to data sets before a run.

Its command `clean` leaves out rows that repeat others; `environment` writes the rows of an environment.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune.base import interrupt
from dualtune.base.text import in_columns, one_line
from dualtune.cli.check_data import column_option, format_option, named_columns
from dualtune.cli.options import config_argument, directory_name, json_option, say_json, set_option
from dualtune.cli.screen import phases
from dualtune.cli.suggest import SuggestingGroup
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.data.cleaning import Cleaned
    from dualtune.data.documents import OpenedSource
    from dualtune.data.sources.readers import Role

ROLES: tuple[Role, ...] = ("test", "valid", "train")  # in this order, so that a held-out row is kept


@click.group("data", cls=SuggestingGroup)
def command() -> None:
    """Clean data sets, and write those of an environment for reinforcement learning."""


@command.command("clean")
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option(
    "--out", callback=directory_name, type=click.Path(path_type=Path), required=True,
    help="The new directory for the cleaned files.",
)  # fmt: skip
@click.option(
    "--near", type=click.FloatRange(0.7, 1),
    help="The least similarity of near duplicates: the Jaccard similarity of their sets of 5 characters in sequence."
    "  [default: 0.8]",
)  # fmt: skip
@click.option("--exact", is_flag=True, help="Remove only rows that are equal, not near duplicates.")
@click.option(
    "--keep", type=click.Choice(["first", "longest"]), default="first", show_default=True,
    help="Which of several duplicate rows to keep.",
)  # fmt: skip
@click.option("--pii", is_flag=True, help="List personal data in the rows that are kept (needs presidio-analyzer).")
@format_option
@column_option
@json_option
@interrupt.handled(interrupt.TERMINATION, interrupt.always, error=interrupt.Abandoned)
def clean_command(
    sources: tuple[str, ...], out: Path, near: float | None, exact: bool, keep: str, pii: bool, format: str,
    columns: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Write the rows of each SOURCE (a file, directory or dataset name) without duplicates to --out, as JSON lines.

    Values and order stay the same. left_out.jsonl lists every removed row with its file, line and reason: which row it
    duplicates and how similar it is, or why it cannot be used. In a directory, a row of the test or valid files is kept
    rather than its duplicate in train. --pii writes personal.jsonl, with masked mail addresses, phone and card numbers
    and the like; it removes no row.
    """
    from typing import cast

    from dualtune.data.cleaning import clean, recognizer
    from dualtune.data.similarity import NEAR, Keep

    if exact and near is not None:
        raise click.UsageError("Give --exact or --near, not both: --exact looks for no near duplicates.")
    with phases(err=as_json) as shown:
        shown.begin("reading", "the rows")
        recognize = recognizer() if pii else None
        opened = _opened(sources, format, named_columns(format, columns))
        cleaned = clean(opened, out, None if exact else near or NEAR, cast(Keep, keep), recognize)
    return say_json(asdict(cleaned)) if as_json else say(_in_words(cleaned, out))


@command.command("environment")
@config_argument
@set_option
@json_option
@interrupt.handled(interrupt.TERMINATION, interrupt.always, error=interrupt.Abandoned)
def environment_command(config: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Write the rows of the environment in CONFIG (rollouts.environment: verifiers:NAME) to its data files.

    data.train gets the rows to train on, and data.eval, if it is a file, those to evaluate with: JSON lines with the
    prompt of each row and what the environment needs beside it. A file that is there stays as it is, and is an error.
    The code of the environment runs with your rights.
    """
    from dualtune.base.errors import ConfigError
    from dualtune.base.files import expanded, new_file
    from dualtune.config.load import load_config
    from dualtune.train.rl.environments import KEY
    from dualtune.train.rl.package_environments import environment_rows

    loaded = load_config(config, overrides)
    settings, named = loaded.rollouts, {"train": loaded.data.sources(), "eval": loaded.data.eval_sources()}
    if settings.environment is None:
        raise ConfigError(f"{KEY}: is not set in {config}; it names the environment, as verifiers:NAME")
    targets = dict[str, Path]()
    for role, sources in named.items():
        for source in sources:
            path = targets[role] = expanded(source.path)
            if len(sources) > 1 or path.suffix != ".jsonl":
                raise ConfigError(f"data.{role}: got {source.path}, allowed here: one file that ends with .jsonl")
            if path.exists():
                raise ConfigError(f"data.{role}: {path} is there already. Remove it to write the rows anew")
    counts = dict[str, int]()
    with phases(err=as_json) as shown:
        for role, path in targets.items():
            shown.begin("reading", f"the {role} rows of {settings.environment}")
            rows = environment_rows(settings.environment, settings.environment_args, held_out=role == "eval")
            path.parent.mkdir(parents=True, exist_ok=True)
            with new_file(path) as file:
                file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
            counts[str(path)] = len(rows)
    if as_json:
        return say_json({"rows": counts})
    return say(in_columns([("written", f"{path}: {number} rows") for path, number in counts.items()]))


def _opened(paths: tuple[str, ...], format: str, columns: dict[str, str | None]) -> dict[str, OpenedSource]:
    """Return the sources by the name of their new file; of a directory one for each role, held-out rows first."""
    from itertools import chain, count

    from dualtune.config.data_section import SourceConfig
    from dualtune.data.cleaning import LEFT_OUT, PERSONAL
    from dualtune.data.documents import open_one
    from dualtune.data.sources.readers import has_role, kind_of

    opened: dict[str, OpenedSource] = {}
    for path in paths:
        source, name = SourceConfig.model_construct(path=path, format=format, columns=columns), Path(path).name
        kind = kind_of(Path(path))
        stem = name[: name.lower().rindex(kind)] if kind else name
        roles: list[Role] = [role for role in ROLES if has_role(path, role)] if Path(path).is_dir() else []
        for role in roles or ("train",):
            new = role if roles else stem
            names = chain([f"{new}.jsonl"], (f"{new}-{number}.jsonl" for number in count(2)))
            free = next(candidate for candidate in names if candidate not in (LEFT_OUT, PERSONAL, *opened))
            opened[free] = open_one(source, role)
    return opened


def _in_words(cleaned: Cleaned, out: Path) -> str:
    from dualtune.data.cleaning import LEFT_OUT, PERSONAL

    rows, num_kept = (sum(getattr(source, name) for source in cleaned.sources) for name in ("rows", "kept"))
    parts = [
        f"{number} {why}{'' if why == 'unusable' or number == 1 else 's'}" for why, number in cleaned.left_out.items()
    ]
    files = [f"{out / s.file}: {s.kept} of the {s.rows} rows of {s.path}" for s in cleaned.sources]
    lines = [
        ("rows", f"{rows} read, {num_kept} kept, {rows - num_kept} left out{': ' if parts else ''}{', '.join(parts)}"),
        *zip(["written", *("" for _ in files)], [*files, f"{out / LEFT_OUT}: what was left out, and why"], strict=True),
    ]
    if cleaned.personal is not None:
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(cleaned.personal.items())) or "none found"
        lines.append(("personal", f"{kinds}; in {cleaned.personal_rows} of the rows, listed in {out / PERSONAL}"))
        lines.append(("", "names and addresses of people are not looked for: that needs a language model"))
    return in_columns([(label, one_line(text)) for label, text in lines])
