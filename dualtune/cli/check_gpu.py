"""`dualtune check-gpu`: what this machine is, what fits on it, what is missing, and how to fix it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dualtune.cli.options import json_option, say_json
from dualtune.cli.screen import check_table, phases, tell

if TYPE_CHECKING:
    from dualtune.doctor.check_gpu import MachineReport
    from dualtune.engine.machine import Machine


@click.command("check-gpu")
@click.option(
    "--require-memory", "memory", metavar="SIZE", help="Check only whether the GPU has this much memory, such as 12GB."
)
@click.option("--for", "config", type=click.Path(path_type=Path), help="Check only whether a run of this config fits.")
@click.option(
    "--machine", "name", metavar="NAME", help="A machine to check instead of this one, such as h100-80 or m4-32."
)
@click.option(
    "--probe", "is_probed", is_flag=True, help="Import the framework, and multiply two matrices on the device."
)
@json_option
@click.pass_context
def command(
    ctx: click.Context, memory: str | None, config: Path | None, name: str | None, is_probed: bool, as_json: bool
) -> None:
    """Show what this machine is, and whether it can train a 7B model.

    Exit code 0 if there is a GPU or Apple silicon with enough memory and its framework is installed, otherwise 4.
    With --require-memory or --for: 0 if that fits, otherwise 4.
    """
    if memory and config:
        raise click.UsageError("Give --require-memory or --for, not both.")
    if is_probed and name:
        raise click.UsageError("--probe works only on this machine: leave out --machine.")
    with phases(err=as_json) as shown:
        shown.begin("checking", "the machine")
        from dualtune.doctor.check_gpu import about_config, about_memory, judge, probe
        from dualtune.engine.detect import detect
        from dualtune.engine.machines import named

        machine = named(name) if name else detect()
        question = about_memory(machine, memory) if memory else about_config(machine, config) if config else None
        report = judge(machine, question, probe(machine) if is_probed else None)
    if as_json:
        say_json(_described(report, machine))
    else:
        tell(check_table(report.checks))
        tell(f"\nverdict: {'ok' if report.exit_code == 0 else 'not ok'}: {report.sentence}")
    ctx.exit(report.exit_code)


def _described(report: MachineReport, machine: Machine) -> dict[str, Any]:
    largest, question = report.largest, report.question
    return {
        "ok": report.exit_code == 0,
        "label": report.label,
        "verdict": report.sentence,
        "platform": report.platform,
        "reason": report.reason,
        "config": report.config,
        "largest_model": largest and asdict(largest) | {"total_bytes": largest.estimate.total_bytes},
        "budget": asdict(report.budget),
        "question": question  # `mend`: the old name, as in a check
        and asdict(question) | {"fits": question.fits, "fix": question.fix, "mend": question.fix},
        "checks": [check.to_json() for check in report.checks],
        "machine": asdict(machine),
    }
