"""The page of `dualtune preview --html`: numbers on the data, and rows as conversations with their loss mask.

One file without scripts that may not load anything. All data is escaped as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dualtune.data.preview import Sample, kinds_of
from dualtune.data.survey import SourceNumbers, Survey
from dualtune.show.report.page import asset, make_page

FOLDED = 600  # tokens: longer rows are collapsed
TAGS = (
    ("cut", "cut"),
    ("duplicate", "duplicate"),
    ("longest", "among the longest"),
    ("control", "control token in text"),
    ("evaluation", "evaluation"),
)


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
    survey, bars = page.survey, page.survey.histogram
    # The style hides rows by the chosen filter. A browser without :has shows all rows.
    hiding = [
        f"main:has(#show-{kind.name}:checked) .row:not(.{kind.name}) {{ display: none }}\n" for kind in kinds_of(survey)
    ]
    tiles = [
        (f"{survey.documents:,}", "documents to train on"),
        (f"{survey.tokens:,}", "tokens"),
        (f"{survey.trained_share:.1%}", "of them targets"),
        (f"{survey.lengths.median:,g}", "tokens of the median document"),
        (f"{survey.steps:,}", "steps"),
        (f"{survey.bad_rows:,}", "bad rows left out"),
    ]
    is_last_wider = bars[-1].last - bars[-1].first > bars[0].last - bars[0].first
    return make_page(
        "preview.html", page.title, style="".join([asset("preview.css"), asset("switch.css"), *hiding]), page=page,
        tiles=tiles, late=len(bars) - 1 if is_last_wider else None, filters=[*_filters(page)], tags=TAGS, folded=FOLDED,
        sources=[(source.path, _cells(source)) for source in page.sources],
    )  # fmt: skip


def _cells(source: SourceNumbers) -> list[str]:
    cells = [f"{source.documents:,}", f"{source.tokens:,}"]
    if (lengths := source.lengths) is None:
        return [*cells, *["–"] * 4]
    share = f"{source.trained_tokens / source.tokens:.0%}"
    return [*cells, share, f"{lengths.median:,g}", f"{lengths.p90:,}", f"{lengths.max:,}"]


def _filters(page: Page) -> Iterator[tuple[str, str]]:
    """Yield the id of each filter that shows a row, and its label: how many rows of how many."""
    yield "show-all", f"All ({len(page.samples) + len(page.survey.first_bad_rows)})"
    for kind in kinds_of(page.survey):
        shown = sum(kind.name in sample.kinds for sample in page.samples)
        if kind.name == "bad":
            shown = len(page.survey.first_bad_rows)
        if shown:
            of = "" if shown == kind.total else f" of {kind.total:,}"
            yield f"show-{kind.name}", f"{kind.title} ({shown:,}{of})"
