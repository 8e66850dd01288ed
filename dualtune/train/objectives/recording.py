"""Recording a teacher's distributions, micro-batch by micro-batch, so that a killed recording can be continued.

What is recorded is appended to the files of a directory beside the target, which are put together at the end. Nothing
but the digests of documents stays in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from dualtune.base.errors import ConfigError, DiskError, FormatError
from dualtune.base.files import json_bytes, new_file, remove_directory
from dualtune.base.tensors import StoredForm, safetensors_of_files
from dualtune.base.untrusted import open_file, parse_object
from dualtune.data.documents import Documents
from dualtune.engine.backend import Engine
from dualtune.train.activation_cache import each_alone
from dualtune.train.objectives.distillation import FORMAT, FORMS
from dualtune.train.state.lock import Lock

PARTIAL = ".partial"  # after the name of the target: the directory of an unfinished recording
KEY = "key.json"  # in it: of which teacher, documents and k
_MAX_KEY = 1 << 16
_PIECE = 1 << 20  # bytes read at once


@dataclass(frozen=True, slots=True)
class TeacherRecord:
    """What was recorded."""

    num_targets: int
    num_continued: int  # documents that an earlier process had recorded


def record(
    path: Path, teacher: Engine, name: str, parts: Sequence[Documents], k: int,
    show: Callable[[int, int], None] = lambda done, total: None, *, base: str = "",
) -> TeacherRecord:  # fmt: skip
    """Write a teacher's soft targets of all documents to a new file. `base`: the hash of its base's weights.

    Each document is alone in its row, so the numbers do not depend on the others. A document that occurs twice is
    recorded once. If the process is killed, the next one with the same arguments continues, to the same bytes. Raises
    DiskError, and ConfigError for an unfinished recording of something else.
    """
    done, total = 0, sum(map(len, parts))
    try:
        with _Unfinished(path.with_name(path.name + PARTIAL), _key_of(teacher, name, base, parts, k), k) as unfinished:
            continued = len(unfinished.digests)
            for documents in parts:
                digests = [digest.tobytes() for digest in documents.digests()]
                for batch in each_alone(documents):
                    ids = [document for (document,) in batch.documents]
                    if any(digests[i] not in unfinished.digests for i in ids):  # the whole batch, to the same bits
                        ends = np.cumsum(batch.is_target_BT.sum(1))[:-1]
                        columns = (np.split(values_Mk, ends) for values_Mk in teacher.top_logprobs(batch, k))
                        unfinished.append((digests[i] for i in ids), zip(*columns, strict=True))
                    done += len(ids)
                    show(done, total)
            with new_file(path) as file:
                file.writelines(unfinished.as_safetensors({"format": FORMAT, "teacher": name}))
            return TeacherRecord(unfinished.num_targets, continued)
    except OSError as error:
        raise DiskError(f"{path}: the distributions cannot be written: {error.strerror or error}") from error


def _key_of(teacher: Engine, name: str, base: str, parts: Sequence[Documents], k: int) -> dict[str, Any]:
    """Return all that the numbers depend on."""
    adapter, documents = hashlib.sha256(), hashlib.sha256()
    for tensor_name, tensor in sorted(teacher.adapter_state().items()):
        adapter.update(tensor_name.encode() + tensor.tobytes())
    for part in parts:
        documents.update(part.digests().tobytes())
    names = ("model_class", "device", "dtype", "quantization", "num_parameters", "threads")
    return {
        "format": FORMAT, "teacher": name, "base": base, "k": k, "adapter": adapter.hexdigest(),
        "documents": documents.hexdigest(),
        **{name: getattr(teacher.description, name) for name in names},
    }  # fmt: skip


class _Unfinished:
    """The directory of a recording, locked; it is removed when the block ends without an error."""

    def __init__(self, directory: Path, key: Mapping[str, Any], k: int) -> None:
        self._directory, self._key = directory, key
        # Bytes of a document, or of a target, in each file.
        self._sizes = {"documents": 16, "ends": 8, "logprobs": 4 * k, "tokens": 4 * k}
        self._k = k
        self.digests = set[bytes]()  # of the documents recorded
        self.num_targets = 0

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(self._directory)
        try:
            self._check_key()
            self._files = {name: (self._directory / name).open("ab") for name in FORMS}
            self._cut_to_whole_documents()
        except BaseException:
            self._lock.release_unused("failed", "the recording did not begin")
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        if kind is None:
            self._lock.remove()
            remove_directory(self._directory)
        else:
            self._lock.release("failed", str(error))

    def _check_key(self) -> None:
        file = self._directory / KEY
        if not file.exists():
            file.write_bytes(json_bytes(dict(self._key)))
            return
        try:
            with open_file(file, max_bytes=_MAX_KEY) as opened:
                recorded = parse_object(opened.read(), file)
        except FormatError:
            recorded = {}
        if recorded != json.loads(json_bytes(dict(self._key))):
            different = sorted(name for name in self._key if recorded.get(name) != self._key[name])
            raise ConfigError(
                f"--out: {self._directory} holds an unfinished recording with other values of {', '.join(different)}. "
                "Remove the directory, or choose another file"
            )

    def _cut_to_whole_documents(self) -> None:
        """Forget what a killed process has written in part."""
        sizes = {name: (self._directory / name).stat().st_size // size for name, size in self._sizes.items()}
        ends = np.fromfile(self._directory / "ends", "<i8")[: min(sizes["documents"], sizes["ends"])]
        number = int(np.searchsorted(ends, min(sizes["logprobs"], sizes["tokens"]), side="right"))
        self.num_targets = int(ends[number - 1]) if number else 0
        for name, file in self._files.items():
            file.truncate(self._sizes[name] * (number if name in ("documents", "ends") else self.num_targets))
            file.seek(0, os.SEEK_END)
        raw = (self._directory / "documents").read_bytes()
        self.digests = {raw[start : start + 16] for start in range(0, len(raw), 16)}

    def append(self, digests: Iterable[bytes], soft_targets: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Append the tokens and log-probabilities, each [n, k], of documents that are not there yet."""
        ends: list[tuple[bytes, int]] = []
        for digest, (tokens_nk, logprobs_nk) in zip(digests, soft_targets, strict=True):
            if digest not in self.digests:
                self.digests.add(digest)
                self.num_targets += len(tokens_nk)
                self._files["tokens"].write(tokens_nk.astype("<i4").tobytes())
                self._files["logprobs"].write(logprobs_nk.astype("<f4").tobytes())
                ends.append((digest, self.num_targets))
        # What a document has is on the disk before the document is.
        for name in ("tokens", "logprobs"):
            self._files[name].flush()
            os.fsync(self._files[name].fileno())
        for digest, end in ends:
            self._files["documents"].write(digest)
            self._files["ends"].write(end.to_bytes(8, "little"))
        for name in ("documents", "ends"):
            self._files[name].flush()

    def as_safetensors(self, notes: Mapping[str, str]) -> Iterator[bytes]:
        """Yield the bytes of the finished file."""
        number, targets, k = len(self.digests), self.num_targets, self._k
        shapes = {"documents": (number, 16), "ends": (number,), "logprobs": (targets, k), "tokens": (targets, k)}
        content = hashlib.sha256()
        for name in FORMS:
            for piece in self._pieces(name):
                content.update(piece)
        forms = {name: StoredForm(dtype, shapes[name]) for name, dtype in FORMS.items()}
        return safetensors_of_files(forms, self._pieces, {**notes, "content": content.hexdigest()})

    def _pieces(self, name: str) -> Iterator[bytes]:
        with (self._directory / name).open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece
