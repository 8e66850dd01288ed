"""`dualtune train --demo`: the main job from end to end, on a tiny model and data that come with dualtune."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import dualtune
from dualtune.backend import Backend
from dualtune.cli.progress import progress_hook
from dualtune.cli.terminal import say
from dualtune.config import Config, load_config
from dualtune.data.documents import Data
from dualtune.data.formats import Example
from dualtune.train.evaluation import exact_match
from dualtune.train.inference import Model, answer, load_model
from dualtune.train.prepare import prepare
from dualtune.train.run import execute
from dualtune.train.run_dir import check_usable, open_run, path_of

ASSETS = Path(dualtune.__file__).parent / "demo"
SHOWN = 2  # answers on the screen, before and after


def demo_config(overrides: Sequence[str]) -> Config:
    """The demo's config, with the places of its files filled in and a run directory that is still free."""
    places = {
        "model.name": ASSETS / "model",
        "data.train": ASSETS / "data" / "train.jsonl",
        "data.eval": ASSETS / "data" / "heldout.jsonl",
        "run.dir": _free("runs/demo"),
    }
    return load_config(ASSETS / "config.yaml", [*(f"{key}={place}" for key, place in places.items()), *overrides])


def _free(name: str) -> Path:
    path, number = Path(name), 1
    while path.exists():
        number += 1
        path = Path(f"{name}-{number}")
    return path


def show_demo(config: Config, backend: Backend, *, dry_run: bool) -> None:
    """Answers before, training, answers after, and what to do next."""
    check_usable(path_of(config), "never")
    prepared = prepare(config, backend)
    say("\n".join(prepared.summary()))
    if dry_run:
        return say("dry run     nothing was loaded or written")
    held_out = Data(config).held_out_examples(prepared.eval)

    with open_run(config, "never") as place:
        before = _show("Before: the base model", load_model(backend, config.model.name), config, held_out)
        result = execute(prepared, place, [progress_hook(config.run.log_every)])
        tuned = load_model(backend, config.model.name, result.adapter_dir)
        after = _show("After: the base model with the adapter", tuned, config, held_out)

    say(f"\nexact match on {len(held_out)} held-out rows: {before:.1%} before, {after:.1%} after")
    say(f"adapter     {result.adapter_dir}\n")
    say("Next:")
    for line in _next_steps(config, result.run_dir, held_out[0]):
        say(f"  {line}")
    return None


def _show(title: str, model: Model, config: Config, examples: Sequence[Example]) -> float:
    """Print the first answers; return the share of exact ones."""
    say(f"\n{title}")
    for example in examples[:SHOWN]:
        shown = answer(model, example, max_tokens=64)
        say(f"  asked     {shown.prompt}\n  answered  {shown.got}\n  expected  {shown.expected}\n")
    return exact_match(model, examples, config.data.max_length)


def _next_steps(config: Config, run_dir: Path, example: Example) -> list[str]:
    prompt = example.messages[-2].content.replace("'", "'\\''")
    return [
        f"dualtune generate {config.model.name} --adapter {run_dir}/adapter --prompt '{prompt}'",
        f"dualtune adapter inspect {run_dir}/adapter",
        "dualtune config > config.yaml    # then name your model and data in it: dualtune train config.yaml",
    ]
