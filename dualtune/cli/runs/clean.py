"""`dualtune runs clean`: delete what is not needed any more of runs that are over."""

from __future__ import annotations

from pathlib import Path

import click

from dualtune.cli.options import json_option


@click.command("clean")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--yes", is_flag=True, help="Delete without asking.")
@json_option
def command(directory: Path, yes: bool, as_json: bool) -> None:
    """List what can be deleted of the runs at or below DIRECTORY, with sizes, ask, and delete it.

    These are the checkpoints of finished runs, but never the last and the best one, and failed runs without a
    checkpoint. A run that is running, killed or preempted is left alone, and so are caches, adapters and links. Without
    a terminal, or with --json, nothing is deleted unless --yes is given.
    """
    import json
    import sys
    from dataclasses import asdict

    from dualtune.cli.output.terminal import say
    from dualtune.text.show import in_bytes, in_columns
    from dualtune.train.state.cleaning import deletable, delete

    found = deletable(directory)
    total = f"{len(found)} directories, {in_bytes(sum(entry.num_bytes for entry in found))}"
    if not as_json:
        if not found:
            return say(f"there is nothing to delete in {directory}")
        say(in_columns([(in_bytes(entry.num_bytes), entry.path, entry.why) for entry in found]))
        if not yes and not sys.stdin.isatty():
            return say(f"{total}. Nothing was deleted: give --yes to delete them")
    if not yes and (as_json or not click.confirm(f"Delete these {total}?")):
        return say(json.dumps({"found": [asdict(entry) for entry in found], "deleted": [], "left": []}, indent=2)
                   if as_json else "nothing was deleted")  # fmt: skip
    deleted, left = delete(found)
    if as_json:
        tables = {
            name: [asdict(entry) for entry in entries] for name, entries in (("found", found), ("deleted", deleted))
        }
        return say(json.dumps(tables | {"left": left}, indent=2))
    for reason in left:
        say(f"left alone  {reason}")
    return say(f"deleted     {len(deleted)} directories, {in_bytes(sum(entry.num_bytes for entry in deleted))}")
