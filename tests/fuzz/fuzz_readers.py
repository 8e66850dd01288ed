"""Fuzzing of every reader of files that come from somebody else.

    python tests/fuzz/fuzz_readers.py --inputs 100000 --seed 1

For every input: the reader accepts it, and then reads what other programs read in it, or ends with a DualtuneError
whose text is safe for a terminal; it takes at most 5 seconds of the CPU, writes nothing but what it was asked to
write, changes no input, gives no warning, and makes the process at most 64 MiB larger than it was, or 256 MiB where a
tokenizer is read. First come the largest inputs that there can be, then random ones. The input that breaks a promise
is left in the directory failed-input.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import json
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import large
import mutations
import readers
import readers_template

from dualtune.base.errors import DualtuneError

MAX_CPU_S = 5
MAX_WAIT_S = 180  # for what waits, or never ends; other programs may keep the machine busy
MAX_MESSAGE = 20_000  # characters: a config may have many faults


def mutated(seed: readers.Files, reader: readers.Reader, draw: random.Random) -> readers.Files:
    files = dict(seed)
    for name in draw.sample(sorted(files), k=min(len(files), draw.choice((1, 1, 1, 2)))):
        change = mutations.damaged
        if draw.random() < 0.8:
            if name.endswith(".json"):
                change = mutations.forged_json
            elif name.endswith(".safetensors"):
                change = mutations.forged_tensors
            elif name.endswith(".jsonl"):
                change = mutations.forged_lines
            elif name.endswith(".jinja"):
                change = readers_template.forged_template
        files[name] = change(files[name], draw)
    if draw.random() < 0.8:
        reader.rehash(files)
    if len(files) > 1 and draw.random() < 0.02:
        files.pop(draw.choice(sorted(files)))
    return files


def check(files: readers.Files, reader: readers.Reader, draw: random.Random, home: Path) -> tuple[str, int]:
    """(outcome, bytes needed) of one input. AssertionError, or what the reader raised, where a promise is broken."""
    place, out = home / "in", home / "out"
    place.mkdir()
    for name, data in files.items():
        (place / name).write_bytes(data)
    before, begun = peak_bytes(reset=True), time.process_time()
    signal.setitimer(signal.ITIMER_REAL, MAX_WAIT_S)
    try:
        reader.read(place, out, draw)
        outcome = "accepted"
    except DualtuneError as error:
        outcome = "refused"
        lines = str(error).split("\n")
        assert all(line.isprintable() for line in lines) and len(str(error)) < MAX_MESSAGE, repr(str(error))[:3000]
        assert not out.exists(), "refused, and something was written"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert time.process_time() - begun < MAX_CPU_S, "took too long"
    growth = peak_bytes() - before
    assert growth <= reader.max_growth_bytes, f"needed {growth} bytes"
    assert {path.name: path.read_bytes() for path in place.iterdir()} == files, "an input was changed"
    assert {path.name for path in home.iterdir()} <= {"in", "out"}, "written outside of the target"
    shutil.rmtree(place)
    shutil.rmtree(out, ignore_errors=True)
    return outcome, growth


def peak_bytes(*, reset: bool = False) -> int:
    """The peak memory of this process, on Linux since the last reset."""
    if sys.platform == "linux":
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def keep_no_memory() -> None:
    """Let glibc return what is freed: by default it keeps the more the larger it was, which is no need of a reader."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD


def too_late(*_: object) -> None:
    raise TimeoutError("took too long")


def fuzz(num_inputs: int, seed: int, only: list[str], few_large: bool, home: Path) -> dict[str, object]:
    draw, counts = random.Random(seed), collections.Counter[str]()
    seeds = {name: readers.READERS[name].seeds() for name in only}
    for name, good in seeds.items():  # also what is imported and allocated once
        for files in good * 3:
            outcome, _ = check(files, readers.READERS[name], draw, home)
            assert outcome == "accepted" or name == "adapter", f"{name}: a good input was refused"
    slowest = most = 0.0
    begun = time.monotonic()
    for number, (name, files) in enumerate(inputs(seeds, num_inputs, few_large, draw)):
        started = time.process_time()
        try:
            outcome, growth = check(files, readers.READERS[name], draw, home)
        except BaseException:
            shutil.rmtree("failed-input", ignore_errors=True)
            Path("failed-input").mkdir()
            for file, data in files.items():
                (Path("failed-input") / file).write_bytes(data)
            print(f"input {number} ({name}) is in failed-input", file=sys.stderr)
            raise
        slowest, most = max(slowest, time.process_time() - started), max(most, growth)
        counts[f"{name} {outcome}"] += 1
    return {
        "inputs": counts.total(), "seed": seed, "elapsed_s": round(time.monotonic() - begun, 1),
        "slowest_cpu_s": round(slowest, 2), "most_bytes": most, **dict(sorted(counts.items())),
    }  # fmt: skip


def inputs(
    seeds: dict[str, list[readers.Files]], num_inputs: int, few_large: bool, draw: random.Random
) -> Iterator[tuple[str, readers.Files]]:
    """(reader, files)"""
    yield from ((name, files) for name, files in large.large_inputs(few=few_large) if name in seeds)
    for name in draw.choices([*seeds], [readers.SHARES.get(name, 1) for name in seeds], k=num_inputs):
        yield name, mutated(draw.choice(seeds[name]), readers.READERS[name], draw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=readers.READERS, default=list(readers.SHARES))
    parser.add_argument("--few-large", action="store_true", help="of the largest inputs only those of one kind of file")
    options = parser.parse_args()
    warnings.simplefilter("error")
    keep_no_memory()
    signal.signal(signal.SIGALRM, too_late)
    memory = Path("/dev/shm")  # an fsync costs nothing there
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        print(json.dumps(fuzz(options.inputs, options.seed, options.only, options.few_large, Path(name)), indent=2))


if __name__ == "__main__":
    main()
