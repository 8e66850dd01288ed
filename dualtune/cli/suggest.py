"""Words of the command line: did you mean …? for unknown commands, and config keys as options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click

from dualtune.base.text import closest, did_you_mean

CONFIG_KEY = re.compile(r"--[a-z]\w*(\.\w+)+(=|$)")
# The name in other tools -> the command here, or a sentence if there is none.
WORDS = {
    word: answer
    for answer, words in {
        "train": "finetune fine-tune tune fit learn sft lora qlora run start resume continue",
        "chat": "talk repl converse interactive",
        "serve": "api server openai endpoint",
        "sweep": "grid search tune-hyperparameters hyperparameter-search hpo optuna halving lr-finder find-lr",
        "generate": "infer inference predict complete completion prompt ask sample",
        "eval": "evaluate evaluation score perplexity ppl test accuracy",
        "preview": "show view look inspect-data tokenize dry-run",
        "runs": "ls list status history experiments logs curves clean gc",
        "watch": "follow monitor tail live attach progress",
        "track": "wandb trackio mlflow tensorboard sync",
        "report": "plot curves graph chart dashboard html",
        "config": "init new template defaults schema example",
        "check-gpu": "gpu gpus device devices info machine",
        "check-env": "doctor env environment setup diagnose",
        "check-data": "dataset datasets lint",
        "data clean": "dedup deduplicate dedupe",
        "selftest": "self-test burn-in diagnostics",
        "check-config": "check estimate fits",
        "bench": "benchmark speed",
        "launch": "distributed torchrun accelerate slurm sbatch mpirun multi-gpu",
        "tunnel": "ssh forward port-forward remote",
        "push": "upload publish share",
        "pull": "download fetch",
        "adapter merge": "fuse merge merge-lora merge-adapter",
        "adapter convert": "convert to-peft to-mlx",
        "export": "gguf ollama lmstudio lm-studio llama.cpp llama-cpp",
        "adapter inspect": "inspect",
        "adapter import": "import",
        "adapter diff": "diff compare",
        "bundle pack": "pack package archive zip",
        "bundle unpack": "unpack unzip",
        "Preferences are learned by `dualtune train` with train.objective: dpo, orpo, simpo, cpo or kto": (
            "dpo orpo simpo cpo kto preference preferences"
        ),
        "Rewards are learned from by `dualtune train` with train.objective: grpo": (
            "grpo rloo ppo rl rlhf reward rewards"
        ),
        "distill record": "kd gkd distillation record teacher",
        "quantize": "quantise quantization bnb",
    }.items()
    for word in words.split()
}


def advice(name: str, commands: list[str], group: str) -> str:
    """Return advice for an unknown command. `commands` are those of `group`, such as "dualtune adapter"."""
    word = name.lower().replace("_", "-")
    close = closest(word, commands, cutoff=0.7)
    similar = closest(word, WORDS, cutoff=0.75)
    if close and word not in WORDS:  # `export` is not a typo of `report`
        return did_you_mean(f"{group} {close}")
    if similar is None:
        return f"There are: {', '.join(commands)}."
    answer = WORDS[similar]
    return f"{answer}." if answer[0].isupper() else did_you_mean(f"dualtune {answer}")


def with_keys_as_set(args: Sequence[str]) -> list[str]:
    """Write --section.key VALUE and --section.key=VALUE, options by the names of config keys, as --set.

    UsageError if another option stands where the value should.
    """
    words: list[str] = []
    rest = iter(args)
    for word in rest:
        if word == "--":
            return [*words, word, *rest]
        if not CONFIG_KEY.match(word):
            words.append(word)
        elif "=" in word:
            words += ["--set", word.removeprefix("--")]
        elif (value := next(rest, "--")).startswith("--"):
            raise click.UsageError(f"{word} needs a value. One that begins with -- is given as {word}=--…")
        else:
            words += ["--set", f"{word.removeprefix('--')}={value}"]
    return words


class SuggestingGroup(click.Group):
    """A group of commands that suggests the right name for a wrong one, and takes config keys as options."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command '{name}'. {advice(name, self.list_commands(ctx), ctx.command_path)}")
        name, command, rest = super().resolve_command(ctx, args)
        takes_keys = command is not None and any(param.name == "overrides" for param in command.params)
        return name, command, with_keys_as_set(rest) if takes_keys else rest


class CommandWithOthers(click.Command):
    """A command with an argument of its own, and with others below it, each a command: `runs DIR`, `runs clean DIR`.

    A directory with the name of one of them is given as ./clean.
    """

    def __init__(self, *args: Any, others: Sequence[click.Command] = (), **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.others = {other.name: other for other in others}

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and (other := self.others.get(args[0])) is not None:
            return other.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)
