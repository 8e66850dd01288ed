"""Sample answers of a run at each evaluation: greedy, with the weights that the evaluation measures.

Nothing here draws a random number or changes the adapter, the optimizer or the gradient, so a run with samples has the
bits of the run without.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, DataError, PeerLost, Preempted
from dualtune.base.files import open_own, write_file
from dualtune.base.untrusted import open_file
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import Engine
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.evaluation import using_result
from dualtune.train.generation.batched import continue_all
from dualtune.train.generation.inference import LoadedModel
from dualtune.train.generation.sampling import Sampling
from dualtune.train.hooks import Event, SampleRecord
from dualtune.train.team import PeerFailed

MAX_TOKENS = 64  # of an answer
MAX_FILE_BYTES = 1 << 26  # that a resumed run reads


def check_samples(
    prompts: Sequence[str], tokenizer: Tokenizer, positions: int | None, num_eval_documents: int,
    system: str | None = None,
) -> None:  # fmt: skip
    """Raise ConfigError if a prompt of run.sample_prompts cannot be answered. `system`: the training's message."""
    if prompts and not num_eval_documents:
        raise ConfigError("run.sample_prompts: answers are given at evaluations, and data.eval holds out no document")
    for number, prompt in enumerate(prompts):
        where = f"run.sample_prompts[{number}]"
        try:
            ids = tokenizer.encode_prompt(prompt, system)
        except DataError as error:
            raise ConfigError(f"{where}: {error}") from error
        if not len(ids):
            raise ConfigError(f"{where}: got {prompt!r}, which has no token; allowed: a text with at least one")
        if positions is not None and len(ids) >= positions:
            raise ConfigError(f"{where}: got {len(ids)} tokens, but this model has {positions} positions. Shorten it")


class Samples:
    """Answers the prompts of run.sample_prompts, asked as the rows ask, and keeps the answers in samples.jsonl."""

    def __init__(
        self, model: LoadedModel, optimizer: OptimizerSpec, prompts: Sequence[str], path: Path, first_step: int,
        system: str | None = None,
    ) -> None:  # fmt: skip
        """`system`: the system message of the training."""
        self._model, self._optimizer, self._path = model, optimizer, path
        self._prompts = [(prompt, model.tokenizer.encode_prompt(prompt, system)) for prompt in prompts]
        self._has_failed = False
        keep_rows(path, first_step)

    def take(
        self, engine: Engine, step: int, tell: Callable[[SampleRecord], None], report: Callable[[Event], None]
    ) -> None:
        """Answer every prompt with this engine. A failure is reported, ends the samples, and not the run.

        But of a sharded base it ends the run, because the other processes wait for their part of the computation.
        """
        if self._has_failed:
            return
        model = replace(self._model, engine=engine)
        try:
            with using_result(engine, self._optimizer):
                ids, answers = [ids for _, ids in self._prompts], dict[int, str]()
                for continued in continue_all(model, ids, Sampling(max_tokens=MAX_TOKENS)):
                    answers[continued.number] = continued.text
                for number, (prompt, _) in enumerate(self._prompts):
                    interrupt.poll()
                    record = SampleRecord(step, prompt, answers[number])
                    self._write(record)
                    tell(record)
        except (Preempted, PeerFailed, PeerLost):
            raise
        except Exception as error:
            if engine.description.sharding == "full":
                raise
            self._has_failed = True  # a sample is worth less than the run
            engine.discard()
            text = f"no samples from here on: {type(error).__name__}: {error}"
            report(Event(step, "samples_failed", text))

    def _write(self, record: SampleRecord) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        row = {"time": now, "step": record.step, "prompt": record.prompt, "answer": record.answer}
        with os.fdopen(open_own(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
            file.write((json.dumps(row) + "\n").encode())


def keep_rows(path: Path, first_step: int) -> None:
    """Drop the rows of steps that a resumed run repeats, and those that were truncated."""
    if not os.path.lexists(path):
        return
    with open_file(path, is_own=True) as file:
        is_small = first_step and os.fstat(file.fileno()).st_size <= MAX_FILE_BYTES
        lines = file.read(MAX_FILE_BYTES).decode("utf-8", errors="replace").splitlines() if is_small else []
    write_file(path, "".join(f"{line}\n" for line in lines if _is_before(line, first_step)))


def _is_before(line: str, first_step: int) -> bool:
    try:
        step = json.loads(line)["step"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return False
    return type(step) is int and step <= first_step
