"""`dualtune config`: the commented default, generated from the schema."""

from __future__ import annotations

import click


@click.command("config")
@click.option("--schema", is_flag=True, help="Print the JSON schema instead, for editors and other programs.")
def command(schema: bool) -> None:
    """Print a commented config with every key and its default: dualtune config > config.yaml"""
    import json

    from dualtune.config import default_yaml, json_schema

    click.echo(json.dumps(json_schema(), indent=2) if schema else default_yaml(), nl=schema)
