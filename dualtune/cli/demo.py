"""`dualtune train --demo`: a complete training, on a tiny model and data that come with dualtune."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from dualtune.base.files import free_name
from dualtune.cli.program import in_lines, program, quoted
from dualtune.cli.progress import progress_hook, reading
from dualtune.cli.screen import is_live, phases, tell, width
from dualtune.cli.terminal import say
from dualtune.config import Config, load_config
from dualtune.data.chat.formats import Example
from dualtune.data.documents import Data
from dualtune.engine.backend import Backend
from dualtune.show.run import execute
from dualtune.show.summary import summary
from dualtune.train.evaluation import exact_match
from dualtune.train.inference import answer, load_model
from dualtune.train.prepare import prepare
from dualtune.train.state.run_dir import check_usable, open_run, path_of

ASSETS = Path(__file__).parents[1] / "demo"
CONFIG = ASSETS / "config.yaml"
SHOWN = 2  # answers to print, before and after


def demo_config(overrides: Sequence[str]) -> Config:
    """Return the demo's config, with the paths of its files and a run directory that is still free."""
    return load_config(CONFIG, [*places(), f"run.dir={free_name(Path('runs/demo'))}", *overrides])


def places() -> list[str]:
    """Return where the demo's model and data are, as overrides of its config."""
    data = ASSETS / "data"
    paths = {"model.name": ASSETS / "model", "data.train": data / "train.jsonl", "data.eval": data / "heldout.jsonl"}
    return [f"{key}={path}" for key, path in paths.items()]


def show_demo(config: Config, backend: Backend, *, dry_run: bool) -> None:
    """Show answers before, the training, answers after, and what to do next."""
    check_usable(path_of(config), "never")
    with reading() as show:
        prepared = prepare(config, backend, show=show)
    tell("\n".join(summary(prepared)))
    if dry_run:
        return tell("dry run     nothing was loaded or written")
    held_out = Data(config).held_out_examples(prepared.data.eval)

    with open_run(config, "never") as run_dir:
        before = _show("Before: the base model", config, backend, None, held_out)
        with progress_hook(config, backend) as hook:
            hook.begin_loading(prepared.config.run)
            result = execute(prepared, run_dir, [hook])
        after = _show("After: the base model with the adapter", config, backend, result.adapter_dir, held_out)

    tell(f"\nexact match on {len(held_out)} held-out rows: {before:.1%} before, {after:.1%} after")
    tell(f"adapter     {result.adapter_dir}\n")
    tell("Next:")
    for line in _next_steps(config, result.run_dir, held_out[0]):
        say(f"  {line}")
    if result.report is not None:
        tell(f"\nreport      {result.report}")
    return None


def _show(title: str, config: Config, backend: Backend, adapter: Path | None, examples: Sequence[Example]) -> float:
    """Print the first answers; return the share of exact ones."""
    with phases() as shown:
        shown.begin("loading", "the base model" if adapter is None else "the adapter")
        model = load_model(backend, config.model.name, adapter)
        tell(f"\n{title}")
        shown.begin("generating", "answers")
        for example in examples[:SHOWN]:
            result = answer(model, example, max_tokens=64)
            tell(f"  asked     {result.prompt}\n  answered  {result.got}\n  expected  {result.expected}\n")
        shown.begin("evaluating", "exact match")
        return exact_match(model, examples, config.data.max_length, shown.update)


def _next_steps(config: Config, run_dir: Path, example: Example) -> list[str]:
    """Return commands that work unchanged in this directory."""
    call, adapter = program(), quoted(run_dir / "adapter")
    prompt = shlex.quote(example.messages[-2].content)
    room = width() - 4 if is_live(sys.stdout) else sys.maxsize
    commands = [
        [call, "generate", quoted(config.model.name), f"--adapter {adapter}", f"--prompt {prompt}"],
        [call, "adapter", "inspect", adapter],
        [call, "config", "> config.yaml"],
        ["# name your model and data in it, then"],
        [call, "train", "config.yaml"],
    ]
    return [in_lines(words, room).replace("\n", "\n  ") for words in commands]
