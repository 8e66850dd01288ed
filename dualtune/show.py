"""Numbers and tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """A line for each row, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def in_bytes(num_bytes: float) -> str:
    """A number of bytes in the largest binary unit that leaves at least one: 1.5 MiB."""
    units = ("B", "KiB", "MiB", "GiB")
    power = next((p for p in range(len(units)) if num_bytes < 1024 ** (p + 1)), len(units) - 1)
    return f"{num_bytes / 1024**power:.{1 if power else 0}f} {units[power]}"
