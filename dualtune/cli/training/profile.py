"""`dualtune profile`: where the memory of a run went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dualtune.cli.options import json_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dualtune.profiler.snapshot import Snapshot


@click.command("profile")
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--csv", "csv_file", type=click.Path(path_type=Path), help="Also write the snapshots as CSV, in MB.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), help="Also write a page with a plot.")
@click.option(
    "--spike", "threshold_mb", type=click.FloatRange(min=0), default=100.0, show_default=True, metavar="MB",
    help="Report increases from one snapshot to the next above this.",
)  # fmt: skip
@json_option
def command(run_dir: Path, csv_file: Path | None, html_file: Path | None, threshold_mb: float, as_json: bool) -> None:
    """Show where the memory of the run directory RUN went: its peak, use by phase, spikes, and whether memory leaks.

    A run writes a snapshot at the end of each phase to memory.csv: data, micro-batch, optimizer, evaluation and save.
    A number is that of the allocator when the phase was queued on the device. 1 MB is 2**20 bytes.
    """
    import json

    from dualtune.cli.output.terminal import say
    from dualtune.io.disk import write_file
    from dualtune.profiler.snapshot import read_timeline, to_csv
    from dualtune.profiler.text import report
    from dualtune.report.memory_page import memory_page
    from dualtune.train.state.run_dir import TIMELINE

    snapshots = read_timeline(run_dir / TIMELINE)
    planned = planned_bytes(run_dir)
    text = "\n\n".join([report(snapshots, threshold_mb), *_against_plan(snapshots, planned)])
    say(json.dumps(_as_json(snapshots, threshold_mb, planned), indent=2) if as_json else text)
    if csv_file is not None:
        write_file(csv_file, to_csv(snapshots))
    if html_file is not None:
        write_file(html_file, memory_page(f"Memory of {run_dir.name}", snapshots, text))


def planned_bytes(run_dir: Path) -> int | None:
    """Return the bytes that were planned for a run: `memory.planned_bytes` of its environment.json, if recorded."""
    from dualtune.errors import FormatError
    from dualtune.report.run_files import recorded_environment

    try:
        total: Any = recorded_environment(run_dir)["memory"]["planned_bytes"]
    except (FormatError, KeyError, TypeError):
        return None
    return total if type(total) is int and total > 0 else None


def _against_plan(snapshots: Sequence[Snapshot], planned: int | None) -> list[str]:
    from dualtune.profiler.analysis import peak_of
    from dualtune.text.show import in_bytes

    peak = peak_of(snapshots)
    if planned is None or peak is None:
        return []
    deviation = 100 * (planned / peak.bytes - 1)
    return [f"plan: {in_bytes(planned)}, measured peak: {in_bytes(peak.bytes)} (plan {deviation:+.1f} %)"]


def _as_json(snapshots: Sequence[Snapshot], threshold_mb: float, planned: int | None) -> dict[str, Any]:
    from dataclasses import asdict

    from dualtune.profiler.analysis import by_phase, find_leak, peak_of, spikes_in

    peak, leak = peak_of(snapshots), find_leak(snapshots)
    in_process = find_leak(snapshots, lambda snapshot: snapshot.process_bytes)
    return {
        "snapshots": len(snapshots),
        "peak": peak and asdict(peak),
        "initial_bytes": snapshots[0].used_bytes if snapshots else None,
        "final_bytes": snapshots[-1].used_bytes if snapshots else None,
        "total_bytes": snapshots[-1].total_bytes if snapshots else None,
        "planned_bytes": planned,
        "phases": {phase: asdict(found) for phase, found in by_phase(snapshots).items()},
        "spikes": [spike._asdict() for spike in spikes_in(snapshots, threshold_mb)],
        "leak": leak and asdict(leak),
        "process_leak": in_process and asdict(in_process),
    }
