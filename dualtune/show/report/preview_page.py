"""The page of `dualtune preview --html`: numbers on the data, and rows as conversations with their loss mask.

One file without scripts that may not load anything. All data is escaped as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dualtune.data.preview import Sample, SampleKind, ShownToken, Turn, TurnPart, kinds_of
from dualtune.data.survey import Bar, SourceNumbers, Survey
from dualtune.show.report.page import as_text as _text
from dualtune.show.report.page import asset, histogram, scrolling, whole_page

# ----------------------------------------------------------------------------------------------------------------------
# The style of the preview page: light and dark, for narrow and wide screens. The filters need no script.

STYLE = """
:root { color-scheme: light dark; --text: #1d2127; --dim: #59616c; --page: #f6f7f9; --card: #fff; --line: #d9dde3;
  --target: #c6efce; --target-line: #1f7a3a; --chip: #e6e9ee; --bar: #2f7d4a; --late: #b3661a; --accent: #1d5fbf;
  --warn: #fff3cf; --warn-line: #7d5c00; --bad: #fde3e1; --bad-line: #b3261e; --assistant: #eef7f0; --user: #edf3fc;
  --system: #f3f0f8; --tool: #fbf4e6 }
@media (prefers-color-scheme: dark) { :root { --text: #e7e9ec; --dim: #a3abb6; --page: #121417; --card: #1b1e23;
  --line: #363c45; --target: #1d4a2b; --target-line: #6fce8d; --chip: #2e343d; --bar: #5cb87a; --late: #e0a05c;
  --accent: #8ab8ff; --warn: #3d330f; --warn-line: #e0bb4a; --bad: #42201e; --bad-line: #ff9d95; --assistant: #17251c;
  --user: #172335; --system: #231f2e; --tool: #2b2415 } }
* { box-sizing: border-box }
body { margin: 0; color: var(--text); background: var(--page); font: 1rem/1.5 system-ui, sans-serif }
main { max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 4rem }
h1 { margin: 0 0 .25rem; font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere }
h2 { margin: 2.25rem 0 .75rem; font-size: 1.15rem }
h3 { margin: 0; font-size: .95rem; overflow-wrap: anywhere }
p { margin: .25rem 0 }
h3 .dim { font-weight: normal; font-size: .85rem }
.dim, dt, caption, th, .axis { color: var(--dim) }
.notice { margin: .75rem 0; padding: .6rem .9rem; border-left: .25rem solid var(--warn-line); border-radius: .25rem;
  background: var(--warn); overflow-wrap: anywhere }

.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .75rem; margin: 1.25rem 0;
  padding: 0; list-style: none }
.tiles li { padding: .75rem 1rem; border: 1px solid var(--line); border-radius: .5rem; background: var(--card) }
.tiles b { display: block; font-size: 1.4rem; line-height: 1.2; font-variant-numeric: tabular-nums }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .3rem 1.25rem; margin: 0 }
dd { margin: 0; overflow-wrap: anywhere }

.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
caption { padding-bottom: .35rem; text-align: left; font-size: .9rem }
th, td { padding: .2rem .75rem .2rem 0; text-align: right; vertical-align: middle; font-weight: normal;
  white-space: nowrap }
th:first-child { text-align: left }
thead th { border-bottom: 1px solid var(--line); font-size: .85rem }
.sources th[scope=row] { min-width: 11rem; white-space: normal; overflow-wrap: anywhere; color: var(--text) }
.bars td:last-child { width: 100%; padding-right: 0 }
.bars svg { display: block; width: 100%; height: 1rem }
rect { fill: var(--bar) } .late rect { fill: var(--late) }

.legend { display: flex; flex-wrap: wrap; gap: .35rem 1.1rem; margin-bottom: 1rem; font-size: .875rem }
.legend span span { font: .85rem/1.6 ui-monospace, monospace }

.row { margin: 0 0 1rem; border: 1px solid var(--line); border-radius: .6rem; background: var(--card);
  overflow: hidden }
.row > header { display: flex; flex-wrap: wrap; align-items: baseline; gap: .3rem .75rem; padding: .6rem .9rem;
  border-bottom: 1px solid var(--line) }
.row > header p { margin: 0; color: var(--dim); font-size: .875rem; overflow-wrap: anywhere }
.tag { display: inline-block; padding: 0 .55rem; border: 1px solid currentColor; border-radius: 1rem; color: var(--dim);
  font-size: .8rem; white-space: nowrap }
.tag.cut, .tag.duplicate { color: var(--warn-line) } .tag.bad { color: var(--bad-line) }
.row.bad p.reason { margin: 0; padding: .6rem .9rem; background: var(--bad); overflow-wrap: anywhere }
summary { padding: .5rem .9rem; color: var(--accent); cursor: pointer }
summary:focus-visible { outline: 3px solid var(--accent); outline-offset: -3px }
.turns { display: flex; flex-direction: column; gap: .6rem; padding: .9rem }
.turn { max-width: 88%; padding: .45rem .75rem .6rem; border: 1px solid var(--line); border-radius: .6rem;
  background: var(--user) }
.turn.assistant, .turn.completion { align-self: flex-end; background: var(--assistant) }
.turn.system, .turn.template, .turn.text { max-width: none; background: var(--system) }
.turn.tool { background: var(--tool) }
.turn h4 { margin: 0 0 .2rem; color: var(--dim); font-size: .78rem; font-weight: 600; letter-spacing: .02em }
.part { font: .875rem/1.65 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.part span { color: var(--dim) }
.frame { white-space: normal; font-size: .8rem; line-height: 1.5 }
.content span { color: var(--text) }
.call, .tools { margin: .4rem 0; padding: .35rem .6rem; border-left: .2rem solid var(--accent); background: var(--card);
  border-radius: .25rem }
.call::before, .tools::before { display: block; color: var(--accent); font: 600 .78rem/1.6 system-ui, sans-serif }
.call::before { content: "tool call" } .tools::before { content: "tools on offer" }
.part .target { color: var(--text); background: var(--target);
  box-shadow: inset 0 -2px var(--target-line) }
.part .special { padding: 0 .3rem; border: 1px solid var(--line); border-radius: .3rem; background: var(--chip);
  font-size: .78rem }
.part .special.target { background: var(--target); border-color: var(--target-line) }
.part span:hover { outline: 1px solid currentColor }
.cutmark { margin: 0 .9rem .9rem; padding: .35rem .75rem; border: 1px dashed var(--warn-line); border-radius: .4rem;
  color: var(--warn-line); font-size: .875rem }
@media (max-width: 40rem) {
  dl { grid-template-columns: 1fr; gap: 0 } dd { margin-bottom: .5rem }
  .turn { max-width: 96% } .turns { padding: .6rem } }
"""


def filter_style(kinds: list[str]) -> str:
    """Return the style that hides rows by the chosen filter. A browser without :has shows all rows."""
    return "".join(f"main:has(#show-{kind}:checked) .row:not(.{kind}) {{ display: none }}\n" for kind in kinds)


# ----------------------------------------------------------------------------------------------------------------------
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
    survey: Survey
    numbers: Sequence[tuple[str, str]]
    warnings: Sequence[str]
    sources: Sequence[SourceNumbers]
    samples: Sequence[Sample]


def preview_page(page: Page) -> str:
    """Return the whole page."""
    kinds = kinds_of(page.survey)
    style = STYLE + asset("switch.css") + filter_style([kind.name for kind in kinds])
    body = "".join(
        [
            *(f'<p class="notice"><b>Warning:</b> {_text(warning)}</p>\n' for warning in page.warnings),
            '<ul class="tiles">\n',
            *(f"<li><b>{_text(number)}</b> {_text(label)}</li>\n" for label, number in _tiles(page.survey)),
            "</ul>\n<h2>Numbers</h2>\n<dl>\n",
            *(f"<dt>{_text(label)}</dt><dd>{_text(number)}</dd>\n" for label, number in page.numbers if label),
            "</dl>\n<h2>Lengths</h2>\n",
            _histogram(page.survey.histogram),
            _sources(page.sources),
            "<h2>Rows</h2>\n",
            _filters(page, kinds),
            _LEGEND,
            *(_sample(sample, number) for number, sample in enumerate(page.samples, start=1)),
            *(
                f'<article class="row bad"><p class="reason">{_text(reason)}</p></article>\n'
                for reason in page.survey.first_bad_rows
            ),
        ]
    )
    return whole_page(page.title, style, body)


def _tiles(survey: Survey) -> list[tuple[str, str]]:
    """Return the most important numbers."""
    return [
        ("documents to train on", f"{survey.documents:,}"),
        ("tokens", f"{survey.tokens:,}"),
        ("of them targets", f"{survey.trained_share:.1%}"),
        ("tokens of the median document", f"{survey.lengths.median:,g}"),
        ("steps", f"{survey.steps:,}"),
        ("bad rows left out", f"{survey.bad_rows:,}"),
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


def _filters(page: Page, kinds: Sequence[SampleKind]) -> str:
    shown = {kind.name: sum(kind.name in sample.kinds for sample in page.samples) for kind in kinds}
    shown["bad"] = len(page.survey.first_bad_rows)
    choices = [("all", f"All ({len(page.samples) + len(page.survey.first_bad_rows)})")]
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
