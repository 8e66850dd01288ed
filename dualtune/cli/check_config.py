"""`dualtune check-config`: what is wrong with a config, before anything is downloaded or loaded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualtune.base.checks import exit_code
from dualtune.base.redaction import redact
from dualtune.base.text import in_bytes, in_columns
from dualtune.cli.options import config_argument, json_option, platform_option, set_option, to_json
from dualtune.cli.screen import check_table, phases, tell
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.engine.memory.plan import MemoryPlan


@click.command("check-config")
@config_argument
@platform_option
@click.option("--machine", metavar="NAME", help="A machine to check instead of this one, such as h100-80 or m4-32.")
@set_option
@json_option
@click.pass_context
def command(
    ctx: click.Context, config: Path, platform: str, machine: str | None, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Check CONFIG against the machine, the model and the data, before any download. No model is loaded.

    Exit code 0 if nothing prevents a run, otherwise 2 (the config), 3 (the data), 4 (the machine or the model) or 5
    (the disk): the lowest of the problems found.
    """
    with phases(err=as_json) as shown:
        shown.begin("checking", "config, machine, model and data")
        from dualtune.doctor.check_config import check_config

        report = check_config(config, overrides, platform=platform, machine_name=machine)
    code = exit_code(report.checks)
    if as_json:
        checks = [check.to_json() for check in report.checks]
        memory = report.memory and {
            "total_bytes": report.memory.estimate.total_bytes,
            "parts": [asdict(part) for part in report.memory.estimate.parts],
            "budget_bytes": report.memory.budget.bytes,
            "budget": report.memory.budget.reason,
        }
        say(redact(to_json({"ok": code == 0, "checks": checks, "memory": memory})))
    else:
        tell(redact(check_table(report.checks)))
        if report.memory:
            tell(f"\n{_by_part(report.memory)}")
    ctx.exit(code)


def _by_part(plan: MemoryPlan) -> str:
    parts = [("memory", in_bytes(part.bytes).rjust(10), part.name, part.formula) for part in plan.estimate.parts]
    remark = "an estimate; see docs/MEMORY_OPTIMIZATION_GUIDE.md"
    total = ("", in_bytes(plan.estimate.total_bytes).rjust(10), "in all", remark)
    return in_columns([*parts, total])
