"""The file that is sent: report.json and verdict.txt in a .tar.gz. It is read without trust."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from dualtune.errors import FormatError
from dualtune.io import fields
from dualtune.io.disk import new_file
from dualtune.io.untrusted import parse_object
from dualtune.selftest.report import SCHEMA_VERSION

REPORT, VERDICT = "report.json", "verdict.txt"
ROW = {"name", "result", "words", "figures", "tolerance"}
MAX_BYTES = 4 << 20  # of the unpacked archive; a report has 40 kB


def default_name(report: Mapping[str, Any]) -> str:
    """Return a file name that says which machine it is of, and when."""
    machine = re.sub(r"[^a-z0-9]+", "-", str(report["machine"]["name"]).lower()).strip("-") or "machine"
    return f"dualtune-selftest-{machine[:40]}-{report['date']}.tar.gz"


def write_archive(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report and its verdict. DiskError if that fails."""
    files = {REPORT: json.dumps(report, indent=2) + "\n", VERDICT: "\n".join(report["verdict"]) + "\n"}
    with new_file(path) as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)  # without owner, group and time
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))


def read_report(path: Path) -> dict[str, Any]:
    """Return the report of an archive, or of a file that --json wrote. FormatError if it is neither."""
    try:
        data = path.read_bytes() if path.stat().st_size <= MAX_BYTES else b""
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from None
    report = parse_object(data if data[:1] == b"{" else _member(data, path), path)
    version = fields.rank(report, "schema_version", path)
    if version > SCHEMA_VERSION:
        raise FormatError(f"{path}: schema version {version}, this dualtune reads {SCHEMA_VERSION}. Upgrade dualtune")
    _check(report, path)
    return report


def _member(data: bytes, path: Path) -> bytes:
    """Return report.json of an archive, without writing anything to disk."""
    try:
        with gzip.open(io.BytesIO(data)) as stream:
            plain = stream.read(MAX_BYTES + 1)
        if len(plain) > MAX_BYTES:
            raise FormatError(f"{path}: unpacks to more than {MAX_BYTES} bytes, so it is no archive of a self-test")
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as tar:
            found = next((each for each in tar if each.name == REPORT and each.isreg()), None)
            stream = tar.extractfile(found) if found else None
            if stream is None:
                raise FormatError(f"{path}: holds no {REPORT}. Was it written by dualtune selftest?")
            return stream.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise FormatError(f"{path}: is no archive of a self-test: {error}") from None


def _check(report: Mapping[str, Any], path: Path) -> None:
    """Raise FormatError unless everything that is shown has its type."""
    fields.required(report, "machine", path)
    fields.subtable(report, "machine", path)
    for key in ("verdict", "checks"):
        if not isinstance(fields.required(report, key, path), list):
            raise fields.wrong(path, key, report[key], "a list")
    for row in cast("list[Any]", report["checks"]):
        table = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
        if not table.keys() >= ROW:
            raise fields.wrong(path, "checks", table, "rows of a self-test")
        for key in ("figures", "tolerance"):
            fields.subtable(table, key, path)
