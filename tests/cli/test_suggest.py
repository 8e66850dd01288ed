"""Wrong names of commands: what other tools call them, and slips of the finger."""

import click
import pytest

from dualtune.cli.main import COMMANDS, cli
from dualtune.cli.suggest import WORDS


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("trian", "dualtune train"),
        ("Train", "dualtune train"),
        ("check_config", "dualtune check-config"),
        ("fuse", "dualtune adapter merge"),
        ("mrege", "dualtune adapter merge"),
        ("talk", "dualtune chat"),
        ("finetune", "dualtune train"),
        ("gguf", "dualtune export"),
        ("doctor", "dualtune check-env"),
        ("adapter mrege", "dualtune adapter merge"),
        ("bundle pak", "dualtune bundle pack"),
    ],
)
def test_a_wrong_command_leads_to_the_right_one(dualtune_main, typed, meant):
    result = dualtune_main(*typed.split())
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == f"Error: No such command '{typed.split()[-1]}'. Did you mean '{meant}'?"


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("dpo", "Preferences are learned by `dualtune train` with train.objective: dpo, orpo, simpo, cpo or kto."),
        ("grpo", "Rewards are learned from by `dualtune train` with train.objective: grpo."),
        ("zzzzzz", f"There are: {', '.join(COMMANDS)}."),
    ],
)
def test_where_there_is_no_such_command_that_is_said(dualtune_main, typed, answer):
    assert dualtune_main(typed).stderr.splitlines()[-1] == f"Error: No such command '{typed}'. {answer}"


def test_every_word_leads_to_a_command_that_exists():
    context = click.Context(cli)
    for answer in set(WORDS.values()):
        if answer[0].isupper():
            continue  # a sentence
        group = cli
        for name in answer.split():
            group = group.get_command(context, name)
            assert group is not None, answer
    assert not WORDS.keys() & COMMANDS.keys()


def test_the_module_is_the_command_line(python):
    result = python("-m", "dualtune", "--version")
    assert (result.returncode, result.stdout[:18]) == (0, "dualtune, version ")
    assert python("-m", "dualtune", "trian").stderr == python("-m", "dualtune.cli.main", "trian").stderr
