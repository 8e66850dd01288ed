"""`dualtune launch`: start a run in several processes, on one or several machines, or as a Slurm job."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dualtune.cli.options import config_argument, platform_option, resume_option, set_option
from dualtune.cli.terminal import say

if TYPE_CHECKING:
    from dualtune.train.launch.supervise import Launcher, Work

LAUNCHERS = ("local", "mlx", "slurm")
# Option -> values of --on that it is for. With others it is refused, not ignored.
MEANT_FOR = {
    "procs": LAUNCHERS, "max_restarts": LAUNCHERS, "nodes": ("local", "slurm"), "node_rank": ("local",),
    "rendezvous": ("local",), "hosts": ("mlx",), "hostfile": ("mlx",), "gpus_per_node": ("slurm",), "time": ("slurm",),
    "partition": ("slurm",), "account": ("slurm",), "array": ("slurm",), "grace_s": ("slurm",), "options": ("slurm",),
    "script": ("slurm",),
}  # fmt: skip
MAX_RESTARTS = 3

_count = click.IntRange(min=1)


@click.command("launch")
@config_argument
@click.option(
    "--on", "place", type=click.Choice(LAUNCHERS), required=True,
    help="Where to run: torchrun on this machine or several (local), mlx.launch (mlx), or a Slurm job (slurm).",
)  # fmt: skip
@click.option("--procs", type=_count, help="Number of processes on each machine.  [default: one per GPU, else 1]")
@platform_option
@set_option
@resume_option
@click.option(
    "--max-restarts", type=click.IntRange(min=0),
    help=f"Maximum number of restarts of all processes after one dies.  [default: {MAX_RESTARTS}; 0 with --rendezvous]",
)  # fmt: skip
@click.option("--print", "is_shown", is_flag=True, help="Print the command or the batch script, and exit.")
@click.option("--nodes", type=_count, help="local, slurm: the number of machines.")
@click.option("--node-rank", type=click.IntRange(min=0), help="local: the rank of this machine, from 0.")
@click.option(
    "--rendezvous", metavar="HOST:PORT",
    help="local: the address of the machine with --node-rank 0, where all machines connect.",
)  # fmt: skip
@click.option("--hosts", metavar="IP,IP…", help="mlx: comma-separated addresses of the machines, for ssh.")
@click.option(
    "--hostfile", type=click.Path(path_type=Path), help="mlx: a file with the machines, in mlx.launch's format."
)
@click.option("--gpus-per-node", type=_count, help="slurm: the number of GPUs of each machine; each has a process.")
@click.option("--time", metavar="D-HH:MM:SS", help="slurm: the time limit of the job.")
@click.option("--partition", help="slurm: the partition that the job is submitted to.")
@click.option("--account", help="slurm: the account that the job is charged to.")
@click.option(
    "--array", metavar="0-9",
    help="slurm: the indices of a job array, one run each; %a in --set is replaced by the index.",
)  # fmt: skip
@click.option(
    "--grace", "grace_s", type=click.IntRange(min=1), default=120, show_default=True,
    help="slurm: how many seconds before the end of --time the run is saved and requeued.",
)  # fmt: skip
@click.option(
    "--sbatch-option", "options", multiple=True, metavar="KEY[=VALUE]",
    help="slurm: another option of sbatch. Repeatable.",
)  # fmt: skip
@click.option(
    "--script", type=click.Path(path_type=Path),
    help="slurm: the file for the batch script. Default: beside the run directory.",
)  # fmt: skip
@click.pass_context
def command(
    ctx: click.Context, config: Path, place: str, platform: str, overrides: tuple[str, ...], resume: str,
    is_shown: bool, **options: Any,
) -> None:  # fmt: skip
    """Train from CONFIG in several processes, with the same result as in one.

    Exit code 75 if the run was preempted and saved, otherwise that of `dualtune train`.
    """
    from dualtune.config import load_config
    from dualtune.train.launch.supervise import Work
    from dualtune.train.state.run_dir import path_of

    _refuse_other_options(ctx, place)
    tried = [override.replace("%a", "0") for override in overrides] if options["array"] else overrides
    run_dir = path_of(load_config(config, tried))
    work = Work(config.absolute(), run_dir, platform, overrides, resume)
    own_options = {name: value for name, value in options.items() if place in MEANT_FOR[name]}
    match place:
        case "local":
            code = _local(work, is_shown, **own_options)
        case "mlx":
            code = _mlx(work, is_shown, **own_options)
        case _:
            code = _slurm(work, is_shown, **own_options)
    ctx.exit(code)


def _refuse_other_options(ctx: click.Context, place: str) -> None:
    """Raise UsageError for an option that belongs to another --on."""
    for parameter in ctx.command.params:
        meant_for = MEANT_FOR.get(parameter.name or "", LAUNCHERS)
        is_given = ctx.get_parameter_source(parameter.name or "") != ParameterSource.DEFAULT
        if is_given and place not in meant_for:
            raise click.UsageError(f"{parameter.opts[0]} is for --on {' and '.join(meant_for)}, not for --on {place}.")


def _local(
    work: Work, is_shown: bool, *, procs: int | None, max_restarts: int | None, nodes: int | None,
    node_rank: int | None, rendezvous: str | None,
) -> int:  # fmt: skip
    from dualtune.engine.choose import choose
    from dualtune.engine.detect import detect
    from dualtune.train.launch import torchrun

    several = None
    if node_rank is not None or rendezvous is not None or (nodes or 1) > 1:
        if nodes is None or node_rank is None or rendezvous is None:
            raise click.UsageError("Give --nodes, --node-rank and --rendezvous together, on each of the machines.")
        if max_restarts:
            raise click.UsageError(
                "--max-restarts is for one machine: several would restart at different times. Run the command again "
                "on all of them, or let Slurm do it: --on slurm."
            )
        several, max_restarts = torchrun.Nodes.parse(nodes, node_rank, rendezvous), 0
    machine = detect()
    choice = choose(work.platform, machine)
    here = torchrun.Here(machine.cores, len(machine.gpus), machine.gpu_problem)
    launcher, chosen = here.launcher(choice.platform, procs, several)
    where = f", machine {several.rank} of {several.count}" if several else ""
    say(f"platform    {choice.platform}: {choice.reason}", err=True)
    say(f"launch      torchrun: {chosen}{where}", err=True)
    return _start(launcher, replace(work, platform=choice.platform), max_restarts, is_shown)


def _mlx(
    work: Work, is_shown: bool, *, procs: int | None, max_restarts: int | None, hosts: str | None, hostfile: Path | None
) -> int:
    from dualtune.engine.card import launch_on
    from dualtune.train.launch import mlx

    if hostfile is not None and (hosts is not None or procs is not None):
        raise click.UsageError("--hostfile names every process: give neither --hosts nor --procs with it.")
    launcher, chosen = mlx.launcher(work.platform, procs, hosts, hostfile)
    _, launch = launch_on("mlx", work.platform)
    say(f"launch      {launch.program}: {chosen}", err=True)
    return _start(launcher, replace(work, platform=launch.platforms[0]), max_restarts, is_shown)


def _start(launcher: Launcher, work: Work, max_restarts: int | None, is_shown: bool) -> int:
    from dualtune.train.launch.supervise import supervise

    if is_shown:
        words = [f"{name}={value}" for name, value in launcher.environment.items()]
        say(shlex.join([*words, *launcher.command(work.command(work.first_resume()))]))
        return 0
    restarts = MAX_RESTARTS if max_restarts is None else max_restarts
    return supervise(launcher, work, max_restarts=restarts, tell=lambda text: say(text, err=True))


def _slurm(
    work: Work, is_shown: bool, *, procs: int | None, max_restarts: int | None, nodes: int | None,
    gpus_per_node: int | None, script: Path | None, **limits: Any,
) -> int:  # fmt: skip
    from dualtune.train.launch import slurm

    if procs is None and gpus_per_node is None:
        raise click.UsageError("--on slurm needs --gpus-per-node, or --procs: how many processes run on each node.")
    restarts = MAX_RESTARTS if max_restarts is None else max_restarts
    job = slurm.Slurm(nodes or 1, procs or gpus_per_node or 1, gpus_per_node, max_restarts=restarts, **limits)
    text = slurm.batch_script(job, job.adapt(work), Path.cwd())
    if is_shown:
        say(text.rstrip("\n"))
        return 0
    path = script or slurm.place_of_script(work.run_dir)
    slurm.write_script(path, text, work)
    number = slurm.submit(path)
    say(f"script      {path}")
    say(f"job         {number}: {job.nodes} × {job.procs_per_node} processes; log {slurm.log_of(job, work)}")
    return 0
