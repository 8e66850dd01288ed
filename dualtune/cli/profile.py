"""`dualtune profile`: where the memory of a run went."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dualtune.base.errors import FormatError
from dualtune.base.files import write_file
from dualtune.cli.options import json_option, say_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dualtune.train.profiler.analysis import AgainstPlan
    from dualtune.train.profiler.snapshot import Snapshot


@click.command("profile")
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--csv", "csv_file", type=click.Path(path_type=Path), help="Also write the snapshots to this file as CSV, in MB."
)
@click.option(
    "--html", "html_file", type=click.Path(path_type=Path), help="Also write a page with a plot to this file."
)
@click.option(
    "--spike", "threshold_mb", type=click.FloatRange(min=0), default=100.0, show_default=True, metavar="MB",
    help="Report an increase between two snapshots of more than this many MB.",
)  # fmt: skip
@json_option
def command(run_dir: Path, csv_file: Path | None, html_file: Path | None, threshold_mb: float, as_json: bool) -> None:
    """Show where the memory of the run directory RUN went: its peak, use by phase, spikes, and whether memory leaks.

    A run writes a snapshot at the end of each phase to memory.csv: data, micro-batch, optimizer, evaluation and save.
    The numbers are the allocator's at the time when the phase was queued on the device. 1 MB is 2**20 bytes.
    """
    from dualtune.cli.terminal import say
    from dualtune.show.report.memory_page import memory_page
    from dualtune.train.profiler.analysis import against_plan, report
    from dualtune.train.profiler.snapshot import read_timeline, to_csv
    from dualtune.train.state.run_dir import TIMELINE

    snapshots = read_timeline(run_dir / TIMELINE)
    recorded = recorded_memory(run_dir)
    planned = against_plan(snapshots, recorded)
    text = "\n\n".join([report(snapshots, threshold_mb), *([str(planned)] if planned else [])])
    if as_json:
        say_json(_as_json(snapshots, threshold_mb, recorded, planned))
    else:
        say(text)
    if csv_file is not None:
        write_file(csv_file, to_csv(snapshots))
    if html_file is not None:
        write_file(html_file, memory_page(f"Memory of {run_dir.name}", snapshots, text))


def recorded_memory(run_dir: Path) -> dict[str, Any]:
    """Return the entry "memory" of a run's environment.json, with the plan and its parts; empty if there is none."""
    from dualtune.show.report.run_files import as_table, recorded_environment

    try:
        return as_table(recorded_environment(run_dir).get("memory"))
    except FormatError:
        return {}


def _as_json(
    snapshots: Sequence[Snapshot], threshold_mb: float, recorded: dict[str, Any], planned: AgainstPlan | None
) -> dict[str, Any]:
    from dualtune.train.profiler.analysis import by_phase, find_leak, peak_of, spikes_in

    peak, leak = peak_of(snapshots), find_leak(snapshots)
    in_process = find_leak(snapshots, "process_bytes")
    return {
        "snapshots": len(snapshots),
        "peak": peak and asdict(peak),
        "initial_bytes": snapshots[0].used_bytes if snapshots else None,
        "final_bytes": snapshots[-1].used_bytes if snapshots else None,
        "total_bytes": snapshots[-1].total_bytes if snapshots else None,
        "planned_bytes": total if type(total := recorded.get("planned_bytes")) is int and total > 0 else None,
        "plan": planned and asdict(planned),
        "phases": {phase: asdict(use) for phase, use in by_phase(snapshots).items()},
        "spikes": [spike._asdict() for spike in spikes_in(snapshots, threshold_mb)],
        "leak": leak and asdict(leak),
        "process_leak": in_process and asdict(in_process),
    }
