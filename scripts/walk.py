"""The walk of a config: the files that a training enters, in order, from the command line to the written adapter.

    python scripts/walk.py [KEY=VALUE …]     # three steps on the demo's model and data

A file counts when one of its functions is called. What is called by imports alone is left out, and so is what runs in
other threads.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = (str(ROOT / "dualtune"), str(ROOT / "backends"))
DEMO = ROOT / "dualtune" / "demo"
SMALL = (
    f"model.name={DEMO / 'model'}", f"data.train={DEMO / 'data' / 'heldout.jsonl'}", "train.steps=3",
    "train.documents_per_step=4", "train.warmup=0", "run.report=false",
)  # fmt: skip


def walk(arguments: list[str]) -> tuple[list[str], int]:
    """The files in the order in which they are first entered, and how often the walk changes from one to another."""
    from dualtune.cli.main import cli

    files: dict[str, None] = {}
    last, stays = "", 0

    def enter(frame: FrameType, event: str, _: object) -> None:
        nonlocal last, stays
        name = frame.f_code.co_filename
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # not the body of a module or a class
        if event == "call" and is_function and name != last and name.startswith(PRODUCT):
            files[name.removeprefix(f"{ROOT}/")] = None
            last, stays = name, stays + 1

    sys.setprofile(enter)
    try:
        cli(arguments, standalone_mode=False)
    finally:
        sys.setprofile(None)
    return list(files), stays


def main(settings: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, more in (("imports", ["data.max_length=255"]), ("walk", [])):  # other data: nothing is in the cache
            words = [*SMALL, f"run.dir={folder}/{name}", *settings, *more]
            files, stays = walk(["train", *(word for setting in words for word in ("--set", setting))])
    print("\n".join(files))
    print(f"\n{len(files)} files, entered {stays} times")


if __name__ == "__main__":
    main(sys.argv[1:])
