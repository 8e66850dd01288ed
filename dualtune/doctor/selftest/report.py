"""The report of a self-test: versions, the machine, a row for each check, the verdict."""

from __future__ import annotations

import contextlib
import getpass
import gzip
import io
import itertools
import json
import math
import os
import re
import socket
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from dualtune.base import fields
from dualtune.base.checks import Check, exit_code
from dualtune.base.errors import FormatError
from dualtune.base.files import new_file
from dualtune.base.redaction import REDACTED, redact
from dualtune.base.text import in_columns
from dualtune.base.untrusted import parse_object
from dualtune.base.versions import VERSION, versions_of
from dualtune.doctor.selftest.case import most_apart
from dualtune.engine.choose import PlatformChoice
from dualtune.engine.machine import Machine
from dualtune.train.state.records import recorded_packages

# ----------------------------------------------------------------------------------------------------------------------
# What leaves the machine: without secrets, names of users and machines, and directories.

_DIRECTORIES = re.compile(r"(?<![\w.:/~])~?/(?:[^/\s'\"]+/)+")  # of an absolute path; not of a URL, or of tokens/s
_LEAST_NAME = 3  # characters: a shorter name is part of too many words
_COMMON = {"root", "user", "ubuntu", "runner", "localhost"}  # that say nothing


def anonymous(value: Any) -> Any:
    """Return a JSON value with every text made anonymous, and numbers that JSON does not have as text."""
    if isinstance(value, str):
        return _text(value, _names())
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): anonymous(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [anonymous(item) for item in cast("list[Any]", value)]
    return value


def _text(text: str, names: set[str]) -> str:
    text = _DIRECTORIES.sub(".../", redact(text))
    for name in names:
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", REDACTED, text)
    return text


def _names() -> set[str]:
    names = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    with contextlib.suppress(KeyError, OSError):  # a user without a name, as in some containers
        names.add(getpass.getuser())
    return {name for name in names if len(name) >= _LEAST_NAME and name not in _COMMON}


# ----------------------------------------------------------------------------------------------------------------------
# The verdict in words: what works, what failed, what stayed plain and why, what is slow, and what to do next.

SLOW = 0.5  # of the predicted speed
# What a failure means for a user, by the group of the check.
NEXT = {
    "device": "dualtune check-gpu says what is missing",
    "numbers": "this device does not compute float32 as float32: do not compare its float32 runs with other machines",
    "kernels": "train with model.kernels=reference until the kernel is fixed",
    "waits": "training is right, but the device idles while the host waits: expect less speed",
    "memory": "keep more memory free than the estimate says: lower train.micro_batch_tokens first",
    "resume": "do not rely on a resumed run being the one that was stopped",
    "recorded": "do not compare losses of this machine with those of others",
    "speed": "look at the check's own words",
}
SEND = "attach the archive to an issue, by the form for self-tests"


def verdict(rows: Sequence[Check]) -> list[str]:
    """Return the lines of the verdict, each with its label."""
    return [f"{label:<11} {text}" for label, text in _lines(rows)]


def _lines(rows: Sequence[Check]) -> Iterator[tuple[str, str]]:
    failed = [row for row in rows if row.level == "fail"]
    passed = [row for row in rows if row.level == "ok"]
    groups = ", ".join(dict.fromkeys(map(_group, passed))) or "none"
    yield "works", f"{len(passed)} of {len(passed) + len(failed)} checks that could be made passed: {groups}"
    for row in failed:
        yield "failed", f"{row.name}: {row.found}"
    for row in rows:
        if row.level == "skipped":
            yield "plain" if _group(row) == "kernels" else "skipped", f"{row.name}: {row.found}"
    for row in passed:
        if not row.figures.get("bitwise", True):
            yield "differs", row.found
    yield from _speed(rows)
    for group in dict.fromkeys(map(_group, failed)):
        yield "next", NEXT[group]
    yield "next", SEND if failed else f"dualtune validate --tier quick, then train. And {SEND}"


def _group(row: Check) -> str:
    return row.name.partition("/")[0]


def _speed(rows: Sequence[Check]) -> Iterator[tuple[str, str]]:
    for row in rows:
        rate, predicted = (row.figures.get(name) for name in ("tokens_per_s", "predicted_tokens_per_s"))
        if rate and predicted and rate < SLOW * predicted:
            yield "slow", f"{row.found}. dualtune bench shows where the time goes"
        elif rate:
            yield "speed", row.found


# ----------------------------------------------------------------------------------------------------------------------
# The report as JSON values.

SCHEMA_VERSION = 1
# Variables that change how a framework computes or takes memory.
SETTINGS = (
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING", "MLX_ENABLE_TF32", "DUALTUNE_KERNELS", "OMP_NUM_THREADS",
)  # fmt: skip


def report(choice: PlatformChoice, kind: str, machine: Machine, rows: Sequence[Check]) -> dict[str, Any]:
    """Return the report as JSON values. It names no user, host or directory."""
    code = exit_code(rows)
    values = {
        "schema_version": SCHEMA_VERSION,
        "ok": code == 0,
        "exit_code": code,
        "dualtune": VERSION,
        "date": datetime.now(UTC).date().isoformat(),
        "platform": choice.platform,
        "backend": choice.backend,
        "kind": kind,
        "machine": _described(machine, kind),
        "packages": versions_of(recorded_packages()),
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "checks": [_row(row) for row in rows],
        "verdict": verdict(rows),
    }
    return anonymous(values)


def machine_name(machine: Machine, kind: str) -> str:
    """Return what a reader calls the machine: its GPU, or its processor."""
    return machine.gpus[0].name if kind == "cuda" and machine.gpus else machine.cpu


def _described(machine: Machine, kind: str) -> dict[str, Any]:
    gpus = [
        {"name": gpu.name, "bytes": gpu.total_bytes, "capability": gpu.compute_capability, "mig": gpu.mig}
        for gpu in machine.gpus
    ]
    return {
        "name": machine_name(machine, kind), "system": machine.system, "arch": machine.arch, "python": machine.python,
        "cpu": machine.cpu, "cores": machine.cores, "memory_bytes": machine.memory_bytes, "gpus": gpus,
        "driver": machine.driver, "cuda": machine.cuda, "macos": machine.macos,
        "metal_limit_bytes": machine.metal_limit_bytes,
    }  # fmt: skip


def _row(row: Check) -> Mapping[str, Any]:
    return {
        "name": row.name, "title": row.title, "result": row.verdict, "words": row.found,
        "figures": row.figures, "tolerance": row.limits, "seconds": round(row.seconds, 2),
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# The file that is sent: report.json and verdict.txt in a .tar.gz. It is read without trust.

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
            raise FormatError(f"{path}: unpacks to more than {MAX_BYTES} bytes, so it is not an archive of a self-test")
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as tar:
            member = next((member for member in tar if member.name == REPORT and member.isreg()), None)
            stream = tar.extractfile(member) if member else None
            if stream is None:
                raise FormatError(f"{path}: holds no {REPORT}. Was it written by dualtune selftest?")
            return stream.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise FormatError(f"{path}: is not an archive of a self-test: {error}") from None


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


# ----------------------------------------------------------------------------------------------------------------------
# Two reports beside each other: an H100's and a Mac's.

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Beside:
    """Two reports compared."""

    lines: tuple[str, ...]
    agree: bool  # whether all losses that both have are within the tolerance


def beside(a: Report, b: Report) -> Beside:
    """Compare the checks of two reports, the losses that both recorded, and the speed."""
    first, second = ({row["name"]: row for row in report["checks"]} for report in (a, b))
    names = dict.fromkeys((*first, *second))
    table = [("", *(str(report["machine"].get("name", "?")) for report in (a, b)))]
    table += [(name, *(_result(rows.get(name)) for rows in (first, second))) for name in names]
    gaps = list(_gaps(first, second))
    lines = [f"losses      {name}: up to {gap:.1e} nats apart, {most:.0e} allowed" for name, gap, most in gaps]
    if not gaps:
        lines = ["losses      no run is in both reports"]
    speeds = [rows.get("speed", {}).get("figures", {}).get("tokens_per_s") for rows in (first, second)]
    if all(isinstance(speed, float) for speed in speeds):
        lines.append(f"speed       {speeds[0]:,.0f} and {speeds[1]:,.0f} tokens/s, of the shapes named above")
    return Beside((in_columns(table), "", *lines), bool(gaps) and all(gap <= most for _, gap, most in gaps))


def _result(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{row['result']}: {row['words']}" if row["name"] == "speed" else str(row["result"])


def _gaps(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield (run, largest gap of the losses, tolerance) of each recorded run, float32 never beside 16 bits."""
    for name, other in itertools.product(first, second):
        (group, _, dtype), (other_group, _, other_dtype) = name.partition("/"), other.partition("/")
        if not group == other_group == "recorded" or (dtype == "float32") != (other_dtype == "float32"):
            continue
        losses, others = (_numbers(row["figures"].get("losses")) for row in (first[name], second[other]))
        if losses and len(losses) == len(others):
            gap = max(abs(x - y) for x, y in zip(losses, others, strict=True))
            yield " and ".join(dict.fromkeys((name, other))), gap, most_apart(dtype)


def _numbers(values: Any) -> list[float]:
    """Return a list of numbers, empty if it is anything else."""
    numbers = cast("list[Any]", values) if isinstance(values, list) else []
    return numbers if all(type(number) in (int, float) for number in numbers) else []
