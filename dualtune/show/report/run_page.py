"""The page of `dualtune report`: what one run did, or several runs beside each other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from dualtune.base.fields import number
from dualtune.show.report.answers import answers, samples
from dualtune.show.report.comparison import comparison, dashes_of, scatter
from dualtune.show.report.page import as_data, asset, notice, scrolling, whole_page
from dualtune.show.report.page import as_text as _text
from dualtune.show.report.run_files import RunFiles, read_runs
from dualtune.show.report.run_sections import base_formats, data, headline, next_commands, reproduce

# The plots: name of the element, what it shows. `run.js` has the same names.
PLOTS = (
    ("loss", "Loss"),
    ("lr", "Learning rate"),
    ("grad_norm", "Gradient norm, before clipping"),
    ("tokens_per_s", "Tokens per second"),
    ("memory", "Memory: the highest so far, in MiB"),
)


def run_page(paths: Sequence[Path], tell: Callable[[str], object] = lambda problem: None) -> str:
    """Return the page of these run directories. ConfigError or FormatError if none can be read.

    Of several, `tell` gets why one cannot, and the page says so.
    """
    runs, problems = read_runs(paths)
    for problem in problems:
        tell(problem)
    left_out = "".join(notice(f"Left out: {problem}") for problem in problems)
    if len(runs) == 1:
        (run,) = runs
        title, body = run.name, headline(run) + _curves(runs) + samples(run.path) + answers(run.path) + data(run)
        body += base_formats(run) + reproduce(run) + next_commands(run)
    else:
        title = f"{len(runs)} runs"
        body = comparison(runs) + scatter(runs) + _curves(runs) + "".join(map(_folded, runs))
    style, scripts = _style(), (asset("uplot/uPlot.iife.min.js"), asset("run.js"))
    return whole_page(title, style, f"{left_out}{body}{_license()}", scripts)


def _curves(runs: Sequence[RunFiles]) -> str:
    """Return the places of the plots, the switch of their axis, the events, and the numbers that the script draws."""
    if not any(run.curves.steps for run in runs):
        return '<h2>Curves</h2>\n<p class="notice">No step has been recorded.</p>\n'
    switch = "".join(
        f'<label><input type="radio" name="x" value="{name}"{" checked" * (name == "step")}> {text}</label>\n'
        for name, text in (("step", "step"), ("tokens", "tokens"), ("seconds", "wall-clock time"))
    )
    plots = "".join(
        f'<figure id="figure-{name}"><figcaption id="caption-{name}">{text}</figcaption>'
        f'<div class="plot" id="plot-{name}" role="img" aria-labelledby="caption-{name}" tabindex="0"></div></figure>\n'
        for name, text in PLOTS
    )
    numbers = [
        {"name": run.name, "dash": dashes_of(index), **run.curves.as_json(), **_limits(run)}
        for index, run in enumerate(runs)
    ]
    return (
        f'<h2 id="curves">Curves</h2>\n<fieldset>\n<legend>Over</legend>\n{switch}</fieldset>\n'
        '<p class="hint">Drag to zoom, double-click to return. With the keyboard: arrows move the cursor.</p>\n'
        f'<div class="plots">\n{plots}</div>\n<noscript><p class="notice">The curves need JavaScript.</p></noscript>\n'
        f"{''.join(_events(run, index) for index, run in enumerate(runs))}{as_data('numbers', numbers)}"
    )


def _limits(run: RunFiles) -> dict[str, float | None]:
    """Return the lines that a curve is compared with."""
    clip, plan, peak = number(run.setting("train", "max_grad_norm")), run.against_plan, run.curves.peak_bytes
    # The curve counts mapped files, too.
    planned = plan and plan.planned_bytes + max(0, int(peak or 0) - plan.measured_bytes)
    return {
        "clip": clip if clip and clip > 0 else None,
        "planned_bytes": planned if planned is not None and 0 < planned < 1 << 53 else None,
    }


def _events(run: RunFiles, index: int) -> str:
    """Return the events of a run as a folded list."""
    curves = run.curves
    if not curves.events:
        return ""
    rows = "".join(
        f"<tr><td>{mark.step:,}</td><th scope=row>{_text(mark.kind)}</th><td>{_text(mark.text)}</td></tr>\n"
        for mark in curves.events
    )
    some = f"the last {len(curves.events)} of {curves.num_events:,}" if curves.num_events > len(curves.events) else ""
    return (
        f'<details class=events id="events-{index}">'
        f"<summary>Events of {_text(run.name)}: {some or len(curves.events)}</summary>\n"
        f"{scrolling('Events', ('step', 'event', 'what'), rows)}</details>\n"
    )


def _folded(run: RunFiles) -> str:
    """Return what a page of its own would say of one of several runs."""
    inner = headline(run) + data(run) + reproduce(run) + next_commands(run)
    return f'<details class="run"><summary>{_text(run.name)}</summary>\n{inner}</details>\n'


@functools.cache
def _style() -> str:
    return "\n".join(asset(name) for name in ("uplot/uPlot.min.css", "switch.css", "run.css"))


@functools.cache
def _license() -> str:
    text = _text(asset("uplot/LICENSE"))
    return f"<footer><details><summary>The curves are drawn by uPlot</summary><pre>{text}</pre></details></footer>\n"
