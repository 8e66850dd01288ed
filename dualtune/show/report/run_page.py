"""The page of `dualtune report`: what one run did, or several runs beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dualtune.base.fields import number
from dualtune.show.report.answers import answers, samples
from dualtune.show.report.comparison import comparison, dashes_of, scatter
from dualtune.show.report.curves import OF_OBJECTIVES
from dualtune.show.report.page import asset, make_page
from dualtune.show.report.rollouts import rollouts
from dualtune.show.report.run_files import RunFiles, read_runs
from dualtune.show.report.run_sections import base_formats, sections_of


def run_page(paths: Sequence[Path], tell: Callable[[str], object] = lambda problem: None) -> str:
    """Return the page of these run directories. ConfigError or FormatError if none can be read.

    If one of several cannot be read, `tell` gets the reason, and the page shows it.
    """
    runs, problems = read_runs(paths)
    for problem in problems:
        tell(problem)
    # A page of several runs has the sections of each, folded, but none of its files of answers: they are large.
    sections, values = [sections_of(run) for run in runs], dict[str, Any]()
    if len(runs) == 1:
        (run,) = runs
        title = run.name
        sections[0] |= {
            "samples": samples(run.path), "rollouts": rollouts(run.path), "answers": answers(run.path),
            "formats": base_formats(run),
        }  # fmt: skip
    else:
        title = f"{len(runs)} runs"
        values = {"compared": comparison(runs), "pictures": scatter(runs)}
    curves = [_curves(run, index) for index, run in enumerate(runs)] if any(run.curves.steps for run in runs) else None
    measured = {name: text for name, text in OF_OBJECTIVES.items() if any(name in run.curves.measured for run in runs)}
    return make_page(
        "run.html", title, style="\n".join(asset(name) for name in ("uplot/uPlot.min.css", "switch.css", "run.css")),
        scripts=(asset("uplot/uPlot.iife.min.js"), asset("run.js")), license=asset("uplot/LICENSE"),
        runs=runs, left_out=problems, sections=sections, curves_json=curves, measured=measured, **values,
    )  # fmt: skip


def _curves(run: RunFiles, index: int) -> dict[str, Any]:
    """Return what the script draws of a run: its numbers, and the lines that they are compared with."""
    clip, plan = number(run.setting("train", "max_grad_norm")), run.against_plan
    mapped = plan.mapped_bytes if plan else 0  # the curve counts them, too
    planned = plan and plan.planned_bytes + mapped
    return {
        "name": run.name,
        "dash": dashes_of(index),
        **run.curves.as_json(),
        "clip": clip if clip and clip > 0 else None,
        "planned_bytes": planned if planned is not None and 0 < planned < 1 << 53 else None,
        "mapped_bytes": mapped,
    }
