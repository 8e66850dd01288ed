"""Write the rows of sources without those that repeat another one or cannot be used, and a list of what was left out.

Each source is read once. Its rows wait as JSON lines in a temporary file of the new directory until it is known which
of them are kept. A row keeps its values and its place.
"""

from __future__ import annotations

import json
import os
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, DataError
from dualtune.base.files import new_directory
from dualtune.base.versions import import_extra
from dualtune.data.chat.examples import Example
from dualtune.data.chat.formats import to_examples
from dualtune.data.documents import OpenedSource
from dualtune.data.similarity import Keep, Repeat, Repeats
from dualtune.data.sources.rows import BadRow, RawRow

LEFT_OUT, PERSONAL = "left_out.jsonl", "personal.jsonl"
UNUSABLE, EXACT, NEAR_ONE = "unusable", "exact duplicate", "near duplicate"


@dataclass(frozen=True, slots=True)
class CleanedSource:
    """How much of a source was kept."""

    path: str
    file: str  # the new one, in the new directory
    rows: int
    kept: int


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What was written; `dualtune data clean --json` prints it under these names."""

    sources: list[CleanedSource]
    left_out: dict[str, int]  # reason -> rows
    personal: dict[str, int] | None  # kind -> values in the rows that were kept; None: not looked for
    personal_rows: int


def clean(
    sources: Mapping[str, OpenedSource], out: Path, near: float | None, keep: Keep = "first",
    recognize: Recognize | None = None, show: Callable[[int], None] = lambda rows: None,
) -> Cleaned:  # fmt: skip
    """Write each source to the file of its name in the new directory `out`, and beside them LEFT_OUT.

    `near` is the least similarity of near duplicates, None: only equal rows are left out. A row of an earlier source is
    kept before one of a later source. With `recognize`, the personal data in the kept rows are listed in PERSONAL,
    masked. `show` gets the number of rows read. Raises ConfigError if `out` is not empty, DataError for sources
    that cannot be read, DiskError; then nothing is left there.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"--out: {out} exists and is not an empty directory. Choose another one, or remove it")
    with (
        new_directory(out) as directory, tempfile.TemporaryFile(dir=directory) as file,
        Repeats(near, directory) as repeats,
    ):  # fmt: skip
        # Which rows are kept is known only when all have been read, so they wait on the disk in their final form.
        waiting = _Waiting(file)
        for number, opened in enumerate(sources.values()):
            for row, fields in _rows(opened):
                interrupt.poll()
                if isinstance(row, Example):
                    repeats.add(row)
                waiting.add(number, row, fields)
                show(len(waiting.lines))
        if not len(repeats):
            raise DataError(f"{', '.join(sources)}: no row can be used: `dualtune check-data` says why")
        # One new file for each source, in its order, and what was left out beside them.
        with ExitStack() as opened_files:
            names = [*sources, LEFT_OUT, *([PERSONAL] if recognize else [])]
            files = [opened_files.enter_context((directory / name).open("xb")) for name in names]
            written = _Written(files, len(sources), recognize)
            waiting.write(repeats.find(keep), written)
            for output in files:
                output.flush()
                os.fsync(output.fileno())
    kept, total = written.kept, Counter(waiting.sources)
    return Cleaned(
        [CleanedSource(o.files.name, name, total[i], kept[i]) for i, (name, o) in enumerate(sources.items())],
        dict(written.left_out), dict(written.personal) if recognize else None, written.personal_rows,
    )  # fmt: skip


def _rows(opened: OpenedSource) -> Iterator[tuple[Example | BadRow, dict[str, Any]]]:
    """Yield each row with the fields that it has in its file; a bad row has none."""
    last: list[dict[str, Any]] = [{}]

    def remembered() -> Iterator[RawRow | BadRow]:
        for row in opened.files.rows():
            last[0] = row.fields if isinstance(row, RawRow) else {}
            yield row

    for example in to_examples(remembered(), *opened.layout):  # one for each row, as it comes
        yield example, last[0]


class _Waiting:
    """Rows in the form in which they will be written, in a temporary file, and where each comes from."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._paths: dict[str, int] = {}
        self.sources, self._files, self.lines, self._is_good = array("i"), array("i"), array("q"), array("b")

    def add(self, source: int, row: Example | BadRow, fields: Mapping[str, Any]) -> None:
        is_good = isinstance(row, Example)
        content = fields if is_good else {"file": row.path, "line": row.line, "why": UNUSABLE, "detail": row.reason}
        self._file.write(_line(content, f"{row.path}:{row.line}"))
        self.sources.append(source)
        self._files.append(self._paths.setdefault(row.path, len(self._paths)))
        self.lines.append(row.line)
        self._is_good.append(is_good)

    def write(self, repeats: Mapping[int, Repeat], written: _Written) -> None:
        """Send every row to where it belongs, in order. `repeats` numbers the good rows."""
        paths = list(self._paths)
        entries: list[int] = np.flatnonzero(np.frombuffer(self._is_good, np.int8)).tolist()
        good = 0

        def where(i: int) -> dict[str, Any]:
            return {"file": paths[self._files[i]], "line": self.lines[i]}

        self._file.seek(0)
        for i, line in enumerate(self._file):
            interrupt.poll()
            if not self._is_good[i]:
                written.leave_out(UNUSABLE, line)
                continue
            repeat = repeats.get(good)
            good += 1
            if repeat is None:
                written.keep(self.sources[i], line, where(i))
                continue
            why = EXACT if repeat.is_exact else NEAR_ONE
            of = {"duplicate_of": where(entries[repeat.of]), "similarity": round(repeat.similarity, 4)}
            written.leave_out(why, _line({**where(i), "why": why, **of}))


@dataclass(slots=True)
class _Written:
    """The new files, and what has been written to them."""

    files: Sequence[BinaryIO]  # one for each source, then LEFT_OUT, then PERSONAL if it is wanted
    num_sources: int
    recognize: Recognize | None
    kept: Counter[int] = field(default_factory=Counter[int])
    left_out: Counter[str] = field(default_factory=Counter[str])
    personal: Counter[str] = field(default_factory=Counter[str])
    personal_rows: int = 0

    def keep(self, source: int, line: bytes, where: Mapping[str, Any]) -> None:
        self.files[source].write(line)
        self.kept[source] += 1
        if self.recognize is None:
            return
        values = [value for text in texts_in(json.loads(line)) for value in self.recognize(text)]
        self.personal_rows += bool(values)
        for kind, masked in values:
            self.personal[kind] += 1
            self.files[-1].write(_line({**where, "kind": kind, "masked": masked}))

    def leave_out(self, why: str, line: bytes) -> None:
        self.files[self.num_sources].write(line)
        self.left_out[why] += 1


def _line(fields: Mapping[str, Any], where: str = "") -> bytes:
    """Return a JSON line. DataError for a value that JSON does not have."""
    try:
        text = json.dumps(fields, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: has a value that cannot be written as JSON: {error}. Remove its column") from error
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate in a column that is not used
        return json.dumps(fields).encode() + b"\n"


# ----------------------------------------------------------------------------------------------------------------------
# Personal data in the values of rows, found by the pattern recognizers of presidio-analyzer (an optional package).
#
# Only recognizers that work by pattern and checksum are used: they need no language model, no download and no idea of
# the language. Names and addresses of people, which need a model, are not found. Nothing is ever removed.

RECOGNIZERS = (
    "EmailRecognizer", "PhoneRecognizer", "CreditCardRecognizer", "IbanRecognizer", "UsSsnRecognizer",
    "CryptoRecognizer", "IpRecognizer", "MacAddressRecognizer",
)  # fmt: skip
LEAST_SCORE = 0.4  # that of a phone number without a word about phones beside it

Recognize = Callable[[str], list["Personal"]]


class Personal(NamedTuple):
    """A value that identifies somebody."""

    kind: str  # presidio's name, such as EMAIL_ADDRESS
    masked: str  # its first letter or digit, and its form


def recognizer() -> Recognize:
    """Return the function that finds personal data in a text. EnvironmentFault if presidio is not installed."""
    predefined = import_extra("presidio_analyzer.predefined_recognizers", "pii", "--pii")
    tldextract = import_extra("tldextract", "pii", "--pii")
    recognizers = [getattr(predefined, name)() for name in RECOGNIZERS]
    # With the list of domains that is in the package: by default it is downloaded.
    domains = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)

    def is_address(text: str) -> bool:
        return bool(domains(text).fqdn)

    recognizers[0].validate_result = is_address

    def recognize(text: str) -> list[Personal]:
        results = [
            result
            for recognizer in recognizers
            for result in recognizer.analyze(text, recognizer.supported_entities, None)
        ]
        return [
            Personal(result.entity_type, masked(text[result.start : result.end]))
            for result in sorted(results, key=lambda result: (result.start, result.end, result.entity_type))
            if result.score >= LEAST_SCORE
        ]

    return recognize


def masked(value: str) -> str:
    """Return the value with all letters and digits but the first as *."""
    hidden = "".join("*" if char.isalnum() else char for char in value)
    first = next((i for i, char in enumerate(value) if char.isalnum()), 0)
    return hidden[:first] + value[first : first + 1] + hidden[first + 1 :]


def texts_in(value: Any) -> Iterator[str]:
    """Yield the strings of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in cast(Mapping[str, Any], value).values():
            yield from texts_in(item)
    elif isinstance(value, list):
        for item in cast(list[Any], value):
            yield from texts_in(item)
