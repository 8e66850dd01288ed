"""`dualtune check-env`: check that everything is here that a kind of machine needs."""

from __future__ import annotations

from pathlib import Path

import click

from dualtune.base.checks import exit_code
from dualtune.cli.options import json_option, say_json
from dualtune.cli.screen import check_table, phases, tell

KINDS = ("auto", "h100", "m4", "rtx", "cpu")  # those of `environment.TARGETS`, which --help does not import
METAVAR = "|".join((*KINDS, "BACKEND"))


@click.command("check-env")
@click.option(
    "--for", "target", metavar=METAVAR, default="auto", show_default=True,
    help="The kind of machine to check for, or the name of a backend.",
)  # fmt: skip
@click.option("--config", type=click.Path(path_type=Path), help="Also check the model and data of this config.")
@json_option
@click.pass_context
def command(ctx: click.Context, target: str, config: Path | None, as_json: bool) -> None:
    """Check Python, packages, driver, GPU, memory, disk, directories, data, model and hub token; download nothing.

    Exit code 0 if nothing is missing, otherwise 4; advice does not count.
    """
    with phases(err=as_json) as shown:
        shown.begin("checking", "the machine")
        from dualtune.config import load_config
        from dualtune.doctor.check_env import check_environment, suited_target
        from dualtune.engine.detect import detect

        settings = load_config(config) if config else None
        machine = detect()
        name = suited_target(machine) if target == "auto" else target
        checks = check_environment(name, machine, settings)
    code = exit_code(checks)
    if as_json:
        say_json({"ok": code == 0, "for": name, "checks": [check.to_json() for check in checks]})
    else:
        tell(check_table(checks))
        failed = sum(check.level == "fail" for check in checks)
        tell(
            f"\nfor {name}: " + (f"{failed} of {len(checks)} checks failed" if failed else "everything needed is here")
        )
    ctx.exit(code)
