"""`dualtune config`: the commented default, generated from the schema, or an example for a kind of machine."""

from __future__ import annotations

import click

from dualtune.cli.terminal import pass_on, say


@click.command("config")
@click.argument("name", required=False)
@click.option("--list", "as_list", is_flag=True, help="List the examples, each with what it is for.")
@click.option("--schema", is_flag=True, help="Print the JSON schema instead, for editors and other programs.")
def command(name: str | None, as_list: bool, schema: bool) -> None:
    """Print a commented config with every key and its default: dualtune config > config.yaml

    With NAME, print an example instead: dualtune config training_config_h100 > config.yaml
    """
    import json

    from dualtune.config import default_yaml, json_schema
    from dualtune.config.examples import example_names, example_path, title
    from dualtune.show import in_columns

    if sum((name is not None, as_list, schema)) > 1:
        raise click.UsageError("Give a NAME, --list or --schema, one of them.")
    if name is not None:
        pass_on(example_path(name).read_text(encoding="utf-8"))
    elif as_list:
        say(in_columns([(name, title(example_path(name))) for name in example_names()]))
    elif schema:
        say(json.dumps(json_schema(), indent=2))
    else:
        pass_on(default_yaml())
