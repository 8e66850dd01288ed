"""`dualtune train --demo`: a complete training, of a tiny model that comes with dualtune or of a real one."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from dualtune.base.files import free_name, numbered
from dualtune.cli.program import in_lines, program, quoted
from dualtune.cli.progress import progress_hook, reading
from dualtune.cli.screen import is_live, phases, tell, width
from dualtune.cli.terminal import say
from dualtune.config import Config, load_config
from dualtune.data.chat.examples import Example
from dualtune.data.documents import Data
from dualtune.engine.backend import Backend, SharedBase
from dualtune.model import package
from dualtune.show.run import execute, summary
from dualtune.train.evaluation import exact_match
from dualtune.train.generation.batched import continue_all
from dualtune.train.generation.inference import LoadedModel, answer, load_model, question
from dualtune.train.generation.sampling import Sampling
from dualtune.train.prepare import prepare
from dualtune.train.rl.sql import SqlJudge
from dualtune.train.state.run_dir import ADAPTER, CHECKPOINTS, open_run

ASSETS = Path(__file__).parents[1] / "demo"
SHOWN = 2  # answers to print, before and after
MAX_TOKENS = 64  # of an answer


@dataclass(frozen=True, slots=True)
class Demo:
    """A demo: its config and data come with dualtune, its model may have to be fetched."""

    name: str
    config: Path
    data: Path  # the folder of train.jsonl and heldout.jsonl
    model: Path
    fetch: Callable[[], object] = lambda: None  # what makes the model be there
    score: Callable[[str, str], bool] | None = None  # whether an answer is as good as the expected one
    score_is: str = ""
    result: Callable[[str], str] = lambda answer: ""  # what an answer does, in a line

    def places(self) -> list[str]:
        """Return where the demo's model and data are, as overrides of its config."""
        data = {"data.train": self.data / "train.jsonl", "data.eval": self.data / "heldout.jsonl"}
        return [f"{key}={path}" for key, path in ({"model.name": self.model} | data).items()]


SQL = SqlJudge(ASSETS / "smollm2" / "world.sql")
TINY = Demo("demo", ASSETS / "config.yaml", ASSETS / "data", ASSETS / "model")
SMOLLM2 = Demo(
    "demo-smollm2", ASSETS / "smollm2" / "config.yaml", ASSETS / "smollm2", package.model_path(), package.fetch_model,
    SQL.score, "queries that give the right rows", SQL.in_words,
)  # fmt: skip
DEMOS = {"tiny": TINY, "smollm2": SMOLLM2}


def demo_config(demo: Demo, overrides: Sequence[str]) -> Config:
    """Return the demo's config, with the paths of its files and its run directory."""
    return load_config(demo.config, [*demo.places(), f"run.dir={_run_dir(Path('runs') / demo.name)}", *overrides])


def _run_dir(path: Path) -> Path:
    """Return the directory of the last demo if that was stopped, which is resumed, or else the first free one."""
    used = [*takewhile(os.path.lexists, numbered(path))]
    was_stopped = used and (used[-1] / CHECKPOINTS).is_dir() and not (used[-1] / ADAPTER).exists()
    return used[-1] if was_stopped else free_name(path)


def show_demo(demo: Demo, config: Config, backend: Backend) -> None:
    """Show answers before, the training, answers after, and what to do next."""
    base = SharedBase()  # loaded once, which also saves the memory of a second one
    with open_run(config) as run_dir:
        with reading() as show:
            prepared = prepare(config, backend, run_dir.saved, show)
        tell("\n".join(summary(prepared)))
        # The rows are asked of the base before training, so that what it learns can be seen.
        held_out = Data(config).held_out_examples(prepared.data.eval)
        before = _show("Before: the base model", demo, config, backend, None, held_out, base)
        with progress_hook(config, backend) as hook:
            hook.begin_loading(prepared.config.run)
            result = execute(prepared, run_dir, [hook], shared_base=base)
        title = "After: the base model with the adapter"
        after = _show(title, demo, config, backend, result.adapter_dir, held_out, base)

    tell("")
    for name, share in before.items():
        tell(f"{name} on {len(held_out)} held-out rows: {share:.1%} before, {after[name]:.1%} after")
    tell(f"adapter     {result.adapter_dir}\n")
    tell("Next:")
    for line in _next_steps(demo, config, result.run_dir, held_out[0]):
        say(f"  {line}")
    if result.report is not None:
        tell(f"\nreport      {result.report}")


def _show(
    title: str,
    demo: Demo,
    config: Config,
    backend: Backend,
    adapter: Path | None,
    examples: Sequence[Example],
    base: SharedBase,
) -> dict[str, float]:
    """Print the first answers; return the share of right ones, by what is counted."""
    with phases() as shown:
        shown.begin("loading", "the base model" if adapter is None else "the adapter")
        model = load_model(backend, config.model.name, adapter, shared_base=base)
        tell(f"\n{title}")
        shown.begin("generating", "answers")
        for example in examples[:SHOWN]:
            reply = answer(model, example, max_tokens=MAX_TOKENS)
            tell(f"  asked     {reply.prompt}\n  answered  {reply.got}")
            if result := demo.result(reply.got):
                tell(f"  gives     {result}")
            tell(f"  expected  {reply.expected}\n")
        shown.begin("evaluating", "exact match")
        shares = {"exact match": exact_match(model, examples, config.data.max_length, shown.update)}
        if demo.score is not None:
            shown.begin("generating", "all answers")
            shares[demo.score_is] = _score(demo.score, model, examples, shown.update)
        return shares


def _score(
    score: Callable[[str, str], bool], model: LoadedModel, examples: Sequence[Example],
    show: Callable[[int, int], object],
) -> float:  # fmt: skip
    """Return the share of examples whose generated answer is as good as the expected one."""
    questions = [question(model, example) for example in examples]
    num_right = 0
    answers = continue_all(model, [asked.ids for asked in questions], Sampling(max_tokens=MAX_TOKENS))
    for done, continuation in enumerate(answers, start=1):
        num_right += score(questions[continuation.number].expected, continuation.text)
        show(done, len(examples))
    return num_right / len(examples)


def _next_steps(demo: Demo, config: Config, run_dir: Path, example: Example) -> list[str]:
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
    if demo is not TINY:  # whose answers are of no use
        chat = [call, "chat", quoted(config.model.name), f"--adapter {adapter}", "--compare"]
        commands[2:2] = [chat, [call, "export", quoted(run_dir), "--to gguf"]]
    return [in_lines(words, room).replace("\n", "\n  ") for words in commands]
