"""Two reports beside each other: an H100's and a Mac's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from dualtune.selftest.checks.finding import most_apart
from dualtune.text.show import in_columns

Report = Mapping[str, Any]
MISSING = "-"


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
    said = [f"losses      {name}: up to {gap:.1e} nats apart, {most:.0e} allowed" for name, gap, most in gaps]
    if not gaps:
        said = ["losses      no run is in both reports"]
    speeds = [rows.get("speed", {}).get("figures", {}).get("tokens_per_s") for rows in (first, second)]
    if all(isinstance(speed, float) for speed in speeds):
        said.append(f"speed       {speeds[0]:,.0f} and {speeds[1]:,.0f} tokens/s, of the shapes named above")
    return Beside((in_columns(table), "", *said), bool(gaps) and all(gap <= most for _, gap, most in gaps))


def _result(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return MISSING
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
    found = cast("list[Any]", values) if isinstance(values, list) else []
    return found if all(type(value) in (int, float) for value in found) else []
