"""`dualtune selftest`: the first command on a new GPU or Mac, and one archive to send back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dualtune.base import interrupt
from dualtune.base.checks import Check
from dualtune.base.files import free_name
from dualtune.base.text import in_columns, in_time
from dualtune.cli.options import json_file_option, platform_option, write_json
from dualtune.cli.screen import Phases, phases, tell


@click.command("selftest")
@platform_option
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="The archive to write the result to.  [default: dualtune-selftest-MACHINE-DATE.tar.gz]",
)  # fmt: skip
@json_file_option
@click.option(
    "--only", multiple=True, metavar="CHECK",
    help="Run only the checks whose names begin with this, such as kernels/lora. Repeatable.",
)  # fmt: skip
@click.option(
    "--show", type=click.Path(path_type=Path), metavar="ARCHIVE", help="Print the report of this archive and exit."
)
@click.option(
    "--compare", type=(click.Path(path_type=Path), click.Path(path_type=Path)), metavar="ARCHIVE ARCHIVE",
    help="Print two archives side by side and exit.",
)  # fmt: skip
@click.pass_context
@interrupt.handled(interrupt.TERMINATION, interrupt.always, error=interrupt.Abandoned)  # Ctrl-C ends it at once
def command(
    ctx: click.Context, platform: str, output: Path | None, json_file: Path | None, only: tuple[str, ...],
    show: Path | None, compare: tuple[Path, Path] | None,
) -> None:  # fmt: skip
    """Test what only a device can show: kernels, waits, memory, resumed runs, agreement with other machines, speed.

    Takes minutes, downloads nothing, and writes an archive that holds no names or paths of this machine. Exit code 0 if
    no check failed, 1 if one did, 4 if there is no such device. With --compare: 0 if the losses agree, otherwise 1.
    """
    if show and compare:
        raise click.UsageError("Give --show or --compare, not both.")
    if compare:
        ctx.exit(_compare(*compare))
    if show:
        ctx.exit(_show(show))
    results = run_selftest(platform, only)
    write_json(json_file, results)
    tell("\n" + "\n".join(results["verdict"]))
    _write(output, results)
    ctx.exit(results["exit_code"])


def run_selftest(platform: str, only: tuple[str, ...] = (), *, err: bool = False) -> dict[str, Any]:
    """Run the checks, those whose names begin with one of `only` or all, and return the report."""
    from dualtune.doctor.selftest.report import report
    from dualtune.doctor.selftest.run import run_checks, selected
    from dualtune.engine.choose import choose
    from dualtune.engine.detect import detect

    with phases(err=err) as shown:
        machine = detect()
        choice = choose(platform, machine)
        kind, checks = selected(choice, only)
        shown.tell(f"platform    {choice.platform}: {choice.reason}; {len(checks)} checks")
        shown.begin("testing", choice.backend)
        rows = run_checks(choice, kind, checks, lambda row: _tell(row, shown))
    return report(choice, kind, machine, rows)


def _tell(row: Check, shown: Phases) -> None:
    from dualtune.doctor.selftest.report import anonymous

    shown.tell(f"{row.verdict:<11} {row.name}: {anonymous(row.found)} ({in_time(row.seconds, 1)})")


def _write(output: Path | None, report: dict[str, Any]) -> None:
    from dualtune.doctor.selftest.report import default_name, write_archive

    path = output or free_name(Path(default_name(report)))
    write_archive(path, report)
    tell(f"archive     {path}: send it with the form for self-tests (docs/first_run_on_a_gpu.md)")


def _show(archive: Path) -> int:
    from dualtune.doctor.selftest.report import read_report

    report = read_report(archive)
    tell(in_columns([(str(row["result"]), str(row["name"]), str(row["words"])) for row in report["checks"]]))
    tell("\n" + "\n".join(map(str, report["verdict"])))
    return 0


def _compare(first: Path, second: Path) -> int:
    from dualtune.doctor.selftest.report import beside, read_report

    comparison = beside(read_report(first), read_report(second))
    tell("\n".join(comparison.lines))
    return 0 if comparison.agree else 1
