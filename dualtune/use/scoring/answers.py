"""Answers to held-out rows: kept while they are generated, and written with their rows at the end."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.base.errors import DiskError
from dualtune.base.files import write_file
from dualtune.model.adapter import Tensors
from dualtune.model.base_model import resolve_model
from dualtune.model.fingerprint import fingerprint
from dualtune.train.generation.batched import Continuation, continue_all
from dualtune.train.generation.inference import LoadedModel
from dualtune.train.generation.sampling import Sampling

# ----------------------------------------------------------------------------------------------------------------------
# Answers kept while many are generated, so that a command that was stopped continues where it was.
#
# Beside the file that the command writes at its end lies FILE.part: a line of JSON for each answer, written at once.
# The first line, {"made_by": …}, is a hash of all that decides an answer but the prompt; the others have side, number,
# prompt (the hash of its token ids), text, num_tokens and is_whole. A file made by something else is replaced. Its end
# may be torn.

MAX_FILE_BYTES = 1 << 30  # that is read again; a larger one is begun anew


class KeptAnswers:
    """The answers of one command. Without a file, none is saved."""

    def __init__(self, target: Path | None, made_by: Mapping[str, Any]) -> None:
        """`target`: the file that the command writes at its end; `made_by`: what decides an answer, as JSON values."""
        self.path = None if target is None else target.with_name(f"{target.name}.part")
        self._answers: dict[tuple[str, int, str], Continuation] = {}
        if self.path is not None:
            head = json.dumps({"made_by": _hash(json.dumps(made_by, sort_keys=True).encode())})
            lines = self._read(self.path, head)
            write_file(self.path, "".join(f"{line}\n" for line in (head, *lines)))

    def continued(
        self, side: str, model: LoadedModel, prompts: Sequence[np.ndarray], sampling: Sampling,
        *, is_shortage: Callable[[BaseException], bool], tell: Callable[[str], object],
    ) -> Generator[Continuation]:  # fmt: skip
        """Yield the continuation of each prompt, first those that are there already. The rest is as `continue_all`."""
        keys = [(side, number, _hash(prompt.astype(np.int32).tobytes())) for number, prompt in enumerate(prompts)]
        earlier = [self._answers[key] for key in keys if key in self._answers]
        if earlier:
            tell(f"{len(earlier)} of {len(keys)} answers were generated before, by the same command")
        yield from earlier
        missing = [number for number, key in enumerate(keys) if key not in self._answers]
        continuations = continue_all(
            model,
            [prompts[number] for number in missing],
            sampling,
            numbers=missing,
            is_shortage=is_shortage,
            tell=tell,
        )
        for continuation in continuations:
            self._keep(keys[continuation.number], continuation)
            yield continuation

    def finish(self) -> None:
        """Remove the file: what the command writes has all that was in it. DiskError if that fails."""
        if self.path is not None:
            try:
                self.path.unlink()
            except OSError as error:
                raise DiskError(f"{self.path}: {error.strerror}") from error

    def _keep(self, key: tuple[str, int, str], answer: Continuation) -> None:
        self._answers[key] = answer
        if self.path is not None:
            row = {"side": key[0], "prompt": key[2], **asdict(answer)}
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError as error:
                raise DiskError(f"{self.path}: {error.strerror}") from error

    def _read(self, path: Path, head: str) -> list[str]:
        """Read the answers, and return their lines."""
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return []
        first, *lines = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
        whole = list[str]()
        for line in lines if first == head else ():
            try:
                row = json.loads(line)
                key = row.pop("side"), row["number"], row.pop("prompt")
                self._answers[key] = Continuation(**row)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                continue  # the torn end
            whole.append(line)
        return whole


def identity(names: Sequence[str], model: LoadedModel, sampling: Sampling) -> dict[str, Any]:
    """Return what decides an answer, for `made_by`: the models, the adapter's numbers, precision and sampling.

    `names`: of the models that answer, directories or hub ids.
    """
    description = model.engine.description
    return {
        "models": [fingerprint(resolve_model(name, weights=False)) for name in names],
        "adapter": hash_of(model.engine.adapter_state()),
        "dtype": description.dtype,
        "quantization": description.quantization,
        "sampling": asdict(sampling),
        "stop_ids": sorted(model.tokenizer.stop_ids),
    } | ({"stop_text": stop} if (stop := model.tokenizer.stop_text) else {})


def hash_of(tensors: Tensors) -> str:
    """Return a hash of names, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(json.dumps([name, *tensors[name].shape]).encode())
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


# ----------------------------------------------------------------------------------------------------------------------
# Predictions: one row of JSON for each held-out row, for people and for the pages that show answers.
#
# It has prompt, expected, base, adapter, right and loss, which is the mean over the row's target tokens, weighted as in
# training. `right` and `loss` are the adapter's; without an adapter they are the base's. A text is null if it was not
# generated, `right` if no metric says true or false, `loss` if the row has no target within data.max_length.


@dataclass(frozen=True, slots=True)
class PredictedRow:
    """A line of the file."""

    prompt: str
    expected: str
    base: str | None
    adapter: str | None
    right: bool | None
    loss: float | None


def write_predictions(path: Path, rows: Iterable[PredictedRow]) -> None:
    """Create or replace the file. DiskError if that fails; then the old one is still there."""
    write_file(path, "".join(json.dumps(asdict(row), allow_nan=False) + "\n" for row in rows))


def mean_loss(loss_sum: float, weight: float) -> float | None:
    """Return the mean, or None for a row without a target and for a loss that is not finite."""
    mean = loss_sum / weight if weight > 0 else math.nan
    return mean if math.isfinite(mean) else None
