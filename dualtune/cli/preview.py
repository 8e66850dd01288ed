"""`dualtune preview`: show what a run would train on. Neither a backend nor weights are loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dualtune.base import interrupt
from dualtune.base.errors import DataError
from dualtune.base.files import write_file
from dualtune.base.text import in_columns, side_by_side
from dualtune.cli.options import config_argument, json_option, say_json, set_option
from dualtune.cli.screen import phases, tell
from dualtune.cli.terminal import say, say_styled

if TYPE_CHECKING:
    from dualtune.config import Config
    from dualtune.data.documents import Data, Documents
    from dualtune.data.preview import ShownDocument
    from dualtune.data.survey import Bar
    from dualtune.data.tokens.tokenizer import Tokenizer

BAR_WIDTH = 40


@click.command("preview")
@config_argument
@click.option("--rows", type=click.IntRange(min=0), default=3, show_default=True, help="Number of documents to show.")
@click.option(
    "--html", "page", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help="Also write a page for a browser that shows every token to FILE.",
)  # fmt: skip
@set_option
@json_option
@interrupt.handled(interrupt.TERMINATION, interrupt.always, error=interrupt.Abandoned)  # Ctrl-C ends it at once
def command(config: Path, rows: int, page: Path | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show the documents that CONFIG would train on first, and statistics of its data. Nothing is trained.

    Targets are green, or between ⟦ and ⟧ where there are no colours. ×0.5 is the loss weight of a message.
    """
    with phases(err=as_json) as shown:
        shown.begin("reading", "the config")
        from dualtune.config import load_config
        from dualtune.data.order import Order
        from dualtune.data.preview import first_documents, samples
        from dualtune.data.survey import by_source, describe, survey, warnings
        from dualtune.show.report.preview_page import Page, preview_page
        from dualtune.train.evaluation import layout_of

        settings = load_config(config, overrides)
        data, tokenizer, train, eval_ = _read(settings, quiet=as_json)
        shown.begin("measuring", "the documents")
        order = Order(settings, train.lengths, train.sources, train.weights, train.answers)
        documents = first_documents(train, order, tokenizer, rows)
        statistics = survey(settings, train, eval_, order, layout_of(settings))
        notes = warnings(statistics, settings, data.train, train, tokenizer, eval_)
        notes += [f"evaluation data: {eval_.remark}"] * bool(eval_.remark)
        numbers = [*describe(statistics), ("template", _template(tokenizer))]
        if page:
            shown.begin("writing", "the page")
            shown_samples = samples(data, train, eval_, order, tokenizer, rows)
            title = f"{config.name}: training data"
            sources = by_source(data.train, train)
            write_file(page, preview_page(Page(title, statistics, numbers, notes, sources, shown_samples)))
    if as_json:
        markers = bool(tokenizer.template and tokenizer.template.marks_turns)
        template = {"hash": tokenizer.template_hash, "generation_markers": markers}
        first = [_as_json(document) for document in documents]
        return say_json({**asdict(statistics), "template": template, "warnings": notes, "shown": first})
    # Rows first and numbers last: on a terminal the last lines are seen.
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if statistics.pairs:
        for chosen, rejected in zip(documents[::2], documents[1::2], strict=True):
            _show_pair(chosen, rejected)
    else:
        for document in documents:
            _show(document, coloured)
    _tell(numbers, statistics.histogram)
    for note in notes:
        if coloured:
            say_styled([(f"warning     {note}", {"fg": "yellow"})])
        else:
            tell(f"warning     {note}")
    return tell(f"page        {page}") if page else None


def _read(settings: Config, *, quiet: bool) -> tuple[Data, Tokenizer, Documents, Documents]:
    """Read the data of a config. DataError if there is nothing to train on."""
    from dualtune.cli.progress import reading
    from dualtune.data.documents import Data
    from dualtune.data.tokens.tokenizer import Tokenizer
    from dualtune.model.base_model import resolve_model

    with reading() as show:
        data = Data(settings)
        tokenizer = Tokenizer.of(resolve_model(settings.model.name, weights=False), settings.data)
        train, eval_ = data.train_and_eval(tokenizer) if quiet else data.train_and_eval(tokenizer, show)
    if not len(train):
        raise DataError(
            f"data.train: nothing to train on: {train.summary()}. Check data.max_length, data.loss_on and the template"
        )
    return data, tokenizer, train, eval_


def _template(tokenizer: Tokenizer) -> str:
    if tokenizer.template is None:
        return "none: prompt and completion as they are"
    return f"{tokenizer.template_hash}, with{'' if tokenizer.template.marks_turns else 'out'} generation markers"


def _show(document: ShownDocument, coloured: bool) -> None:
    def run(weight: float, text: str) -> tuple[str, dict[str, Any]]:
        if coloured:
            return _weighted(weight, text), {"fg": "green"} if weight else {"dim": True}
        return _marked(weight, text), {}

    tell(f"document    {document.where}: {_counts(document)}")
    *runs, (weight, end) = document.runs()
    say_styled(run(weight, text) for weight, text in [*runs, (weight, end.removesuffix("\n"))])
    say("")


def _show_pair(chosen: ShownDocument, rejected: ShownDocument) -> None:
    """Show what both answers begin with once, and then both side by side, with marks instead of colours."""
    tell(f"pair        {chosen.where}: what both begin with, then chosen and rejected")
    both = zip(chosen.tokens, rejected.tokens, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1] and not pair[0].is_target, both))
    say(_all_marked(replace(chosen, tokens=chosen.tokens[:shared])))
    say(side_by_side(_counts(chosen), _counts(rejected)))
    left, right = (_all_marked(replace(d, tokens=d.tokens[shared:])) for d in (chosen, rejected))
    say(side_by_side(left, right))
    say("")


def _all_marked(document: ShownDocument) -> str:
    return "".join(_marked(weight, text) for weight, text in document.runs()).removesuffix("\n")


def _marked(weight: float, text: str) -> str:
    return f"⟦{_weighted(weight, text)}⟧" if weight else text


def _weighted(weight: float, text: str) -> str:
    return text if weight in (0, 1) else f"×{weight:g} {text}"


def _counts(document: ShownDocument) -> str:
    counts = f"{document.answer}, " if document.answer else ""
    counts += f"{len(document.tokens)} tokens, {document.num_targets} of them targets"
    return counts + ("; a control token in its own text" if document.has_control_text else "")


def _tell(numbers: Sequence[tuple[str, str]], histogram: Sequence[Bar]) -> None:
    for label, value in numbers:
        tell(f"{label:<12}{value}")
        if label == "lengths":
            most = max(bar.documents for bar in histogram)
            say(in_columns([_bar(bar, most) for bar in histogram]))


def _bar(bar: Bar, most: int) -> tuple[str, ...]:
    length = -(-BAR_WIDTH * bar.documents // most)
    return " " * 10, f"{bar.first} to {bar.last}", str(bar.documents), "#" * length


def _as_json(document: ShownDocument) -> dict[str, Any]:
    return {
        "where": document.where,
        **({"answer": document.answer} if document.answer else {}),
        "tokens": len(document.tokens),
        "trained_tokens": document.num_targets,
        "has_control_text": document.has_control_text,
        "runs": [_run_as_json(weight, text) for weight, text in document.runs()],
    }


def _run_as_json(weight: float, text: str) -> dict[str, Any]:
    run: dict[str, Any] = {"trained": weight > 0, "text": text}
    return run if weight in (0, 1) else run | {"weight": weight}
