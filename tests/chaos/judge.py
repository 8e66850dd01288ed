"""What must hold whenever a run has been killed, and when it has come to its end."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualtune.base.errors import DualtuneError
from dualtune.model.formats.directory import read_adapter
from dualtune.train.state import checkpoint

MARK = "damaged-by-the-chaos-suite"  # a file in a checkpoint that we have damaged ourselves
MEASURED = ("time", "step_s", "tokens_per_s", "documents_per_min", "peak_bytes")
_CHECKPOINT = re.compile(r"step-(\d{8})")


@dataclass(frozen=True, slots=True)
class Sight:
    """A run directory as a killed run left it."""

    newest: int  # step of the newest checkpoint under its final name, 0 if there is none; but see `damage`
    floor: int  # step of the newest checkpoint that there must be
    has_adapter: bool
    corrupted: list[str]
    damaged: int = 0  # step of a newer checkpoint that we have damaged ourselves


def look(run_dir: Path, save_every: int) -> Sight:
    """A row of step n is written when step n + 1 has been computed, so each save due before step n has been done."""
    visible = _visible(run_dir)
    ours = {step for step, path in visible.items() if (path / MARK).exists()}
    reached = max((row["step"] for row in _whole_rows(run_dir / "metrics.jsonl") if "loss" in row), default=0)
    floor = max(reached - 1, 0) // save_every * save_every
    newest = max(visible.keys() - ours, default=0)
    damaged = max((step for step in ours if step > newest), default=0)
    return Sight(newest, floor, (run_dir / "adapter").exists(), list(_damages(run_dir)), damaged)


def damage(run_dir: Path, where: float) -> bool:
    """Do to the newest checkpoint what a failing disk does, and no kill: flip a bit, or cut a file. Not to the last."""
    visible = _visible(run_dir)
    if len(visible) < 2:
        return False
    rng, path = random.Random(where), visible[max(visible)]
    (path / MARK).touch()
    file = path / rng.choice(["adapter.safetensors", "optimizer_m.safetensors", "optimizer_v.safetensors"])
    data = bytearray(file.read_bytes())
    place = rng.randrange(len(data) - len(data) // 4, len(data))  # in the numbers: the header is checked by its reader
    if rng.random() < 0.5:
        data[place] ^= 1 << rng.randrange(8)
    else:
        del data[place:]
    file.write_bytes(data)
    return True


def corruptions(run_dir: Path, control: Path) -> list[str]:
    """What is not as it should be in the directory of a finished run."""
    found = list(_damages(run_dir))
    found += [f"{path.name} was left behind" for path in run_dir.rglob(".*.tmp-*")]
    found += [f"{path.name} was set aside" for path in run_dir.rglob("*.old-*") if not (path / MARK).exists()]
    found += [f"{path.parent.name} is still there" for path in run_dir.rglob(f"step-????????/{MARK}")]
    if not (run_dir / "adapter").exists():
        found.append("there is no adapter")
    try:
        rows = strict_rows(run_dir / "metrics.jsonl")
    except (ValueError, OSError) as error:
        return [*found, f"metrics.jsonl: {error}"]
    expected = strict_rows(control / "metrics.jsonl")
    for kind in ("loss", "eval_loss"):
        has, wants = _steps(rows, kind), _steps(expected, kind)
        if has != wants:
            twice = sorted({step for step in has if has.count(step) > 1})
            found.append(f"metrics.jsonl: rows of {kind}: twice {twice}, missing {sorted({*wants} - {*has})}")
    return found


def differences(run_dir: Path, control: Path) -> list[str]:
    """Where a finished run differs from the uninterrupted one."""
    ours, theirs = _files(run_dir / "adapter"), _files(control / "adapter")
    found = [f"adapter/{name} differs" for name in sorted(ours | theirs) if ours.get(name) != theirs.get(name)]
    has, wants = (_numbers(path / "metrics.jsonl") for path in (run_dir, control))
    return found + [f"metrics.jsonl: step {key[1]} differs" for key in sorted(has.keys() & wants.keys())
                    if has[key] != wants[key]][:3]  # fmt: skip


def strict_rows(path: Path) -> list[dict[str, Any]]:
    """Every line, or ValueError."""
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        raise ValueError("the last line is cut")
    rows = [json.loads(line) for line in text.splitlines()]
    if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
        raise ValueError("a line is not a row")
    return rows


def _visible(run_dir: Path) -> dict[int, Path]:
    """Checkpoints by step; deliberately not the product's own listing."""
    names = ((path, _CHECKPOINT.fullmatch(path.name)) for path in (run_dir / "checkpoints").glob("*"))
    return {int(match[1]): path for path, match in names if match}


def _damages(run_dir: Path) -> Iterator[str]:
    """What is visible under its final name must be whole, at any moment."""
    for path in _visible(run_dir).values():
        if not (path / MARK).exists() and (problem := _problem_of(path) or checkpoint.problem_of(path)):
            yield f"{path.name}: {problem}"
    if (run_dir / "adapter").exists():
        try:
            if not read_adapter(run_dir / "adapter").metadata:
                yield "adapter: dualtune.json is missing"
        except (DualtuneError, OSError) as error:
            yield f"adapter: {error}"


def _problem_of(path: Path) -> str | None:
    """As the product's own, which may be what is broken."""
    try:
        listed = json.loads((path / "MANIFEST.json").read_text(encoding="utf-8"))["files"]
        for name, entry in listed.items():
            if hashlib.sha256((path / name).read_bytes()).hexdigest() != entry["sha256"]:
                return f"{name} is not what the manifest says"
        found = {file.name for file in path.iterdir()} - {"MANIFEST.json"}
        return None if found == listed.keys() else f"holds {sorted(found)}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def _whole_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The last line of a killed run may be cut."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)


def _steps(rows: list[dict[str, Any]], kind: str) -> list[int]:
    return [row["step"] for row in rows if kind in row]


def _files(directory: Path) -> dict[str, bytes]:
    """Not only the weights: the record beside them, with losses and the best step, must be the same too."""
    return {path.name: path.read_bytes() for path in directory.iterdir()} if directory.is_dir() else {}


def _numbers(path: Path) -> dict[tuple[str, int], str]:
    """Rows of steps and evaluations without what was measured by a clock, as text: NaN is NaN."""
    rows = [row for row in _whole_rows(path) if "event" not in row] if path.exists() else []
    return {
        ("loss" if "loss" in row else "eval_loss", row["step"]): json.dumps(
            {name: value for name, value in row.items() if name not in MEASURED}
        )
        for row in rows
    }
