"""The day, commit and processor of every result that a page shows, written into the pages.

    python benchmarks/origins.py

A page of results/ ends with a line for each JSON that it links or is called after, and with the reason where a part of
it is older than RECENT. In docs/ the name of a JSON is followed by its day. Decisions are left as they are: they tell
what was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
DOCS = RESULTS.parents[1] / "docs"
MARK = "<!-- measured -->\n"
RECENT = "2026-11-25"
NO_TIME = "there was no machine time for it"
WHY_OLDER = {  # why the older parts of a result were not measured again
    **dict.fromkeys(("fast_pieces", "peers"), "no CPU with AMX could be had since"),
    **dict.fromkeys(("no_slower", "startup"), "it compares with a tree of that time"),
    **dict.fromkeys(("checkpointing_mlx", "streaming_mlx"), "MLX takes minutes a step on the CPU that could be had"),
    "checkpointing": "its times want an idle machine",
    **dict.fromkeys(("affine4_memory", "averaging", "checkpoint_overhead", "clean"), NO_TIME),
    **dict.fromkeys(("data", "memory_limit", "optimizer_8bit", "streaming"), NO_TIME),
}
DAY = r"\d{4}-\d\d-\d\d"
NAMED = re.compile(rf"((?:\((?:\.\./)+|`)benchmarks/results/(\w+)\.json[)`])(?:, {DAY}(?: to {DAY})?)?")


def origins_of(result: Any) -> set[tuple[str, str, str]]:
    """Return (day, commit, processor) of a result or, where its parts have their own, of the parts."""
    values = result.values() if isinstance(result, dict) else result if isinstance(result, list) else ()
    parts: set[tuple[str, str, str]] = set().union(*map(origins_of, values))
    if parts or not (isinstance(result, dict) and "commit" in result):
        return parts
    return {(result["date"], result["commit"], result["machine"].get("cpu") or result["machine"]["system"])}


def days_of(name: str) -> str:
    """Return the day of a result behind a comma, the first and the last if it has several; nothing for counts."""
    days = sorted({day for day, _, _ in origins_of(read(name))})
    return f", {' to '.join([days[0], *days[1:][-1:]])}" if days else ""


def line_of(name: str) -> str:
    """Return what a page says of a result: when and where it was measured."""
    processors: dict[str, list[tuple[str, str]]] = {}
    for day, commit, processor in sorted(origins_of(read(name))):
        processors.setdefault(processor, []).append((day, commit))
    places = [f"{', '.join(f'{day} at {commit}' for day, commit in at)} on {cpu}" for cpu, at in processors.items()]
    why = f". Not all again: {WHY_OLDER[name]}" if is_older(name) else ""
    return f"- [{name}.json]({name}.json): {'; '.join(places) or 'counts, which have no day'}{why}"


def is_older(name: str) -> bool:
    """Return whether a part of a result is older than RECENT."""
    return any(day < RECENT for day, _, _ in origins_of(read(name)))


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def with_origins(text: str, stem: str) -> str:
    """Return a page of results/, whose file has this stem, with its lines; unchanged if it shows no result."""
    text = text.partition(MARK)[0].rstrip("\n") + "\n"
    named = {stem, *re.findall(r"\((\w+)\.json\)", text)}
    lines = [line_of(name) for name in sorted(named) if (RESULTS / f"{name}.json").exists()]
    return "\n".join([text, f"{MARK}", "Measured:\n", *lines, ""]) if lines else text


def with_days(text: str) -> str:
    """Return a page of docs/ with the day behind every result."""
    return NAMED.sub(lambda match: match[1] + days_of(match[2]), text)


def dated(page: Path, text: str) -> str:
    """Return the text of this page with where its figures are from."""
    return with_origins(text, page.stem) if page.parent == RESULTS else with_days(text)


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page with the text that it should have."""
    for page in sorted([*RESULTS.glob("*.md"), *DOCS.rglob("*.md")]):
        if page.parent.name != "decisions":
            yield page, dated(page, page.read_text(encoding="utf-8"))


def main() -> None:
    for page, text in pages():
        if page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
            print(page)


if __name__ == "__main__":
    main()
