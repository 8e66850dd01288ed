"""`dualtune check-gpu`: what this machine is, and a verdict."""

from __future__ import annotations

from dataclasses import asdict

import click

from dualtune.cli.options import json_option


@click.command("check-gpu")
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Say what this machine is and whether it can train.

    Exit code 0 if there is a GPU or Apple silicon with enough memory and the packages that drive it, otherwise 4.
    """
    import json

    from dualtune.errors import EnvironmentFault
    from dualtune.platform.choose import GIB, choose, verdict
    from dualtune.platform.detect import detect

    machine = detect()
    result = verdict(machine)
    try:
        choice = choose("auto", machine)
        platform, reason = choice.platform, choice.reason
    except EnvironmentFault as error:
        platform, reason = "none", str(error)
    if as_json:
        report = {"ok": result.ok, "verdict": result.text, "platform": platform, "reason": reason}
        click.echo(json.dumps(report | {"machine": asdict(machine)}, indent=2))
    else:
        click.echo(f"system     {machine.system} {machine.arch}, Python {machine.python}")
        click.echo(f"cpu        {machine.cpu}, {machine.cores} cores")
        free, total = machine.available_bytes / GIB, machine.memory_bytes / GIB
        click.echo(f"memory     {total:.1f} GiB, {free:.1f} GiB of it available")
        for gpu in machine.gpus:
            click.echo(
                f"gpu        {gpu.name}, {gpu.total_bytes / GIB:.1f} GiB, {gpu.free_bytes / GIB:.1f} GiB of it free, "
                f"compute capability {gpu.compute_capability}"
            )
        if machine.driver:
            click.echo(f"driver     {machine.driver}, CUDA up to {machine.cuda}")
        click.echo(f"packages   {', '.join(f'{n} {v}' for n, v in machine.packages.items()) or 'none'}")
        click.echo(f"platform   {platform}: {reason}")
        click.echo(f"verdict    {'ok' if result.ok else 'not ok'}: {result.text}")
    ctx.exit(0 if result.ok else EnvironmentFault.exit_code)
