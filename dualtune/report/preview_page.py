"""The page of `dualtune preview --html`: numbers on the data, and rows as conversations with their loss mask.

One file without scripts that may not load anything. All data is escaped as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dualtune.data.preview.samples import Kind, Sample, kinds_of
from dualtune.data.preview.survey import Bar, ShownToken, SourceNumbers, Survey
from dualtune.data.preview.turns import Turn, TurnPart
from dualtune.report.page import as_text as _text
from dualtune.report.page import asset, histogram, scrolling, whole_page
from dualtune.report.preview_style import STYLE, filter_style

FOLDED = 600  # tokens: longer rows are collapsed
TAGS = {
    "cut": "cut",
    "duplicate": "duplicate",
    "longest": "among the longest",
    "control": "control token in text",
    "evaluation": "evaluation",
}


@dataclass(frozen=True, slots=True)
class Page:
    """The content of the page. `numbers` are those of the survey, as (name, value) texts."""

    title: str
    found: Survey
    numbers: Sequence[tuple[str, str]]
    warnings: Sequence[str]
    sources: Sequence[SourceNumbers]
    samples: Sequence[Sample]


def preview_page(page: Page) -> str:
    """Return the whole page."""
    kinds = kinds_of(page.found)
    style = STYLE + asset("switch.css") + filter_style([kind.name for kind in kinds])
    body = "".join(
        [
            *(f'<p class="notice"><b>Warning:</b> {_text(warning)}</p>\n' for warning in page.warnings),
            '<ul class="tiles">\n',
            *(f"<li><b>{_text(number)}</b> {_text(what)}</li>\n" for what, number in _tiles(page.found)),
            "</ul>\n<h2>Numbers</h2>\n<dl>\n",
            *(f"<dt>{_text(what)}</dt><dd>{_text(number)}</dd>\n" for what, number in page.numbers if what),
            "</dl>\n<h2>Lengths</h2>\n",
            _histogram(page.found.histogram),
            _sources(page.sources),
            "<h2>Rows</h2>\n",
            _filters(page, kinds),
            _LEGEND,
            *(_sample(sample, number) for number, sample in enumerate(page.samples, start=1)),
            *(
                f'<article class="row bad"><p class="reason">{_text(reason)}</p></article>\n'
                for reason in page.found.first_bad_rows
            ),
        ]
    )
    return whole_page(page.title, style, body)


def _tiles(found: Survey) -> list[tuple[str, str]]:
    """Return the most important numbers."""
    return [
        ("documents to train on", f"{found.documents:,}"),
        ("tokens", f"{found.tokens:,}"),
        ("of them targets", f"{found.trained_share:.1%}"),
        ("tokens of the median document", f"{found.lengths.median:,g}"),
        ("steps", f"{found.steps:,}"),
        ("bad rows left out", f"{found.bad_rows:,}"),
    ]


def _histogram(bars: Sequence[Bar]) -> str:
    usual, last = bars[0].last - bars[0].first + 1, bars[-1]
    is_wider = last.last - last.first + 1 > usual
    return histogram(
        ((bar.first, bar.last, bar.documents) for bar in bars),
        late=len(bars) - 1 if is_wider else None, note=" The last bar is wider than the others." * is_wider,
    )  # fmt: skip


def _sources(sources: Sequence[SourceNumbers]) -> str:
    heads = ("source", "documents", "tokens", "targets", "median length", "90 % up to", "longest")
    table = scrolling("Numbers by source", heads, "".join(map(_source, sources)), kind="sources")
    return f"<h2>Sources</h2>\n{table}"


def _source(source: SourceNumbers) -> str:
    cells = [f"{source.documents:,}", f"{source.tokens:,}"]
    if lengths := source.lengths:
        cells += [
            f"{source.trained_tokens / source.tokens:.0%}", f"{lengths.median:,g}", f"{lengths.p90:,}",
            f"{lengths.max:,}",
        ]  # fmt: skip
    else:
        cells += ["–"] * 4
    return f"<tr><th scope=row>{_text(source.path)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"


def _filters(page: Page, kinds: Sequence[Kind]) -> str:
    shown = {kind.name: sum(kind.name in sample.kinds for sample in page.samples) for kind in kinds}
    shown["bad"] = len(page.found.first_bad_rows)
    choices = [("all", f"All ({len(page.samples) + len(page.found.first_bad_rows)})")]
    choices += [(kind.name, f"{kind.title} ({_of(shown[kind.name], kind.total)})") for kind in kinds]
    labels = "".join(
        f'<label><input type="radio" name="show" id="show-{name}"{" checked" * (name == "all")}> {text}</label>\n'
        for name, text in choices
        if name == "all" or shown[name]
    )
    return f"<fieldset>\n<legend>Show these rows</legend>\n{labels}</fieldset>\n"


def _of(shown: int, total: int) -> str:
    return f"{shown:,}" if shown == total else f"{shown:,} of {total:,}"


_LEGEND = (
    '<p class="legend part"><span><span class="target">underlined, on green</span> is a target</span>'
    "<span>the rest is context</span>"
    '<span><span class="special">token</span> is a special token</span></p>\n'
)


def _sample(sample: Sample, number: int) -> str:
    kinds = " ".join(sorted(sample.kinds))
    tags = "".join(f'<span class="tag {name}">{text}</span>' for name, text in TAGS.items() if name in sample.kinds)
    original = f"; the same as {_text(sample.original)}" if sample.original else ""
    turns = f'<div class="turns">\n{"".join(map(_turn, sample.turns))}</div>\n'
    if sample.num_tokens > FOLDED:
        turns = f"<details><summary>Show {sample.num_tokens:,} tokens</summary>\n{turns}</details>\n"
    cut = f"cut at {sample.num_tokens:,} tokens: {sample.lost:,} more are lost" if sample.lost else ""
    return (
        f'<article class="row {kinds}" aria-labelledby="row-{number}">\n'
        f'<header><h3 id="row-{number}">{_location(sample.where)}</h3>{tags}'
        f"<p>{sample.num_tokens:,} tokens, {sample.num_targets:,} of them targets{original}</p></header>\n"
        f"{turns}{f'<p class=cutmark>✂ {cut}</p>' if cut else ''}</article>\n"
    )


def _location(where: str) -> str:
    """Return path:line, with the directory dimmed."""
    directory, slash, name = where.rpartition("/")
    return f'<span class="dim">{_text(directory + slash)}</span>{_text(name)}'


def _turn(turn: Turn) -> str:
    role, parts = _text(turn.role), "".join(map(_part, turn.parts))
    return f'<section class="turn {role}"><h4>{role}</h4>\n{parts}</section>\n'


def _part(part: TurnPart) -> str:
    """Return a part as a block, or within the line if it is a frame, because frames are short."""
    tag = "span" if part.kind == "frame" else "div"
    return f'<{tag} class="part {part.kind}" dir="auto">{"".join(map(_token, part.tokens))}</{tag}>\n'


def _token(token: ShownToken) -> str:
    kinds = " ".join(name for name, holds in (("special", token.special), ("target", token.is_target)) if holds)
    weight = f", weight {token.weight:g}" if token.is_target and token.weight != 1 else ""
    return f'<span title="token {token.id}{weight}"{f" class={kinds!r}" if kinds else ""}>{_text(token.text)}</span>'
