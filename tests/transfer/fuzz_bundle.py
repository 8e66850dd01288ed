"""Fuzzing of the bundle reader: damaged, forged and random files, and what unpacking them may never do.

    python tests/transfer/fuzz_bundle.py --inputs 100000 --seed 1

For every input: `unpack` ends with FormatError and leaves nothing, or what it wrote is what Python's tarfile reads in
the input, with the sha256 of the list. A file that was only damaged is never accepted. Nothing appears outside of the
target, and the peak memory of the process is at most 64 MiB.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import io
import json
import random
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from dualtune.base.errors import FormatError
from dualtune.use.transfer.bundles import archive
from dualtune.use.transfer.bundles.bundle import unpack

MAX_MEMORY_BYTES = 64 << 20
NAMES = [
    "../x", "/etc/passwd", "a\\b", "a\nb", "..", "config.yaml:s", "x.py", "CONFIG.YAML", "adapter/dualtune.json",
    "NUL", "", "x" * 300, "config.yaml", "BUNDLE.json", "tokenizer/vocab.json", "checkpoints/step-00000099/state.json",
    "\ud800",
]  # fmt: skip
VALUES = [None, True, -1, 0, 1, 2**31, 2**63, 10**400, 1.5, "", "x", "\ud800", [], {}, [[]], {"a": {}}, "0" * 64]
TRAPS = [b"\x80\x04.", b"PK\x03\x04", b"#!/bin/sh", b'{"auto_map": {}}', b"\x7fELF", b"", b"\0" * 99, b"{" * 50_000]


def seeds() -> list[bytes]:
    """A bundle of an adapter and one of a checkpoint, made by another process so that its memory is not counted."""
    from dualtune.model.adapter import AdapterSpec, init_adapter
    from dualtune.model.formats.directory import Adapter, write_adapter
    from dualtune.use.transfer.bundles.pack import pack

    golden = Path(__file__).parents[1] / "golden" / "checkpoint_v1"
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        tensors = {n: x + 1 for n, x in init_adapter({"m.layers.0.q_proj": (4, 4)}, 2, seed=0).items()}
        write_adapter(place / "a", Adapter(AdapterSpec(2, 4, 0.0, ("q_proj",)), tensors, "org/base"))
        step = json.loads((golden / "MANIFEST.json").read_text())["step"]
        shutil.copytree(golden, place / "run" / "checkpoints" / f"step-{step:08d}")
        config = json.loads((golden / "state.json").read_text())["config"]
        text = "".join(f"{section}: {json.dumps(keys)}\n" for section, keys in config.items())
        (place / "run" / "config.yaml").write_text(text)
        pack(place / "a", place / "a.tar")
        pack(place / "run", place / "r.tar")
        return [(place / "a.tar").read_bytes(), (place / "r.tar").read_bytes()]


# --- inputs ----------------------------------------------------------------------------------------------------------


def damaged(seed: bytes, draw: random.Random) -> bytes:
    """The file with some bytes flipped, cut out, repeated, exchanged, put in or left off."""
    raw = bytearray(seed)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at, size = draw.randrange(len(raw)), draw.choice((1, 8, 512, 1024, draw.randrange(1, 5000)))
        match draw.randrange(7):
            case 0:
                raw[at] ^= 1 << draw.randrange(8)
            case 1:
                raw[at] = draw.randrange(256)
            case 2:
                del raw[at : at + size]
            case 3:
                raw[at:at] = raw[at : at + size]
            case 4:
                raw[at : at + size] = bytes(len(raw[at : at + size]))
            case 5:
                raw[at:at] = draw.randbytes(size)
            case _:
                other = draw.randrange(len(raw)) // 512 * 512
                at = at // 512 * 512
                raw[at : at + 512], raw[other : other + 512] = raw[other : other + 512], raw[at : at + 512]
        if not raw:
            return b""
    return bytes(raw[: draw.randrange(len(raw))] if draw.random() < 0.1 else raw)


def headers_forged(seed: bytes, draw: random.Random) -> bytes:
    """The file with a header changed somewhere, and a checksum that is right."""
    raw = bytearray(seed)
    at = draw.choice([i for i in range(0, len(raw), 512) if raw[i + 257 : i + 262] == b"ustar"])
    block = raw[at : at + 512]
    begin, end = draw.choice(((0, 100), (100, 108), (124, 136), (156, 157), (157, 257), (345, 500), (500, 512)))
    name = draw.choice(NAMES).encode("utf-8", "replace")
    new = draw.choice(
        (name, draw.randbytes(end - begin), b"12345670", b"77777777777\0", b"\x80" + bytes(10), b"2", b"5")
    )
    block[begin:end] = new[: end - begin].ljust(end - begin, b"\0")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    raw[at : at + 512] = block
    return bytes(raw)


def lists_forged(seed: bytes, draw: random.Random) -> bytes:
    """The file with another list, another content or other names, and every hash and header right."""
    with tarfile.open(fileobj=io.BytesIO(seed)) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
    table = json.loads(files.pop("BUNDLE.json"))
    for _ in range(draw.choice((1, 1, 2))):
        name = draw.choice([*files])
        match draw.randrange(5):
            case 0:
                table[draw.choice([*table, "x"])] = draw.choice(VALUES)
            case 1:
                files[draw.choice(NAMES)[:100]] = draw.choice((files[name], *TRAPS))
            case 2:
                files[name] = draw.choice((draw.choice(TRAPS), damaged(files[name] or b"x", draw)))
            case 3:
                del files[name]
            case _:
                files["tokenizer/" + draw.choice(("vocab.json", "merges.txt", "tokenizer.model"))] = draw.choice(TRAPS)
        if not files:
            break
    listed = {n: {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()} for n, raw in sorted(files.items())}
    if listed and draw.random() < 0.3:
        listed[draw.choice([*listed])] = draw.choice((*VALUES, {"bytes": draw.choice(VALUES), "sha256": "0" * 64}))
    table = {key: value for key, value in table.items() if key != "digest"} | {"files": listed}

    def text(value: object) -> bytes:
        return (json.dumps(value, indent=2, ensure_ascii=draw.random() < 0.1) + "\n").encode("utf-8", "replace")

    first = text(table | {"digest": hashlib.sha256(text(table)).hexdigest()})
    parts = [("BUNDLE.json", first), *sorted(files.items())]
    return b"".join(member(name, raw) for name, raw in parts) + bytes(1024)


def member(name: str, raw: bytes) -> bytes:
    encoded = name.encode("utf-8", "replace")[:100]
    return (
        archive.header(encoded.decode("ascii", "replace").replace("\ufffd", "?"), len(raw))
        + raw
        + bytes(-len(raw) % 512)
    )


def noise(seed: bytes, draw: random.Random) -> bytes:
    """No bundle at all, perhaps behind the beginning of one."""
    return seed[: draw.choice((0, 0, 1, 512, 600))] + draw.randbytes(draw.choice((0, 1, 511, 512, 513, 4000)))


# --- what may never happen -------------------------------------------------------------------------------------------


def check(raw: bytes, only_damaged: bool, place: Path) -> str:
    """The outcome of one input. AssertionError where a promise is broken."""
    file, target = place / "x.tar", place / "there"
    file.write_bytes(raw)
    try:
        unpack(file, target)
    except FormatError as refusal:
        assert {path.name for path in place.iterdir()} == {"x.tar"}, "something was left"
        assert str(refusal).isprintable() and len(str(refusal)) < 1000, repr(str(refusal))
        return "refused"
    assert not only_damaged, "a damaged file was accepted"
    assert {path.name for path in place.iterdir()} == {"x.tar", "there"}
    with tarfile.open(file) as tar:
        assert all(entry.isreg() for entry in tar)
        expected = {entry.name: tar.extractfile(entry).read() for entry in tar}
    assert all(path.is_dir() or (path.is_file() and not path.is_symlink()) for path in target.rglob("*"))
    found = {p.relative_to(target).as_posix(): p.read_bytes() for p in target.rglob("*") if p.is_file()}
    assert found == expected
    listed = json.loads(found.pop("BUNDLE.json"))["files"]
    assert {name: hashlib.sha256(content).hexdigest() for name, content in found.items()} == {
        name: entry["sha256"] for name, entry in listed.items()
    }
    shutil.rmtree(target)
    return "accepted"


def peak_bytes() -> int:
    """The peak memory of this process. Linux's ru_maxrss begins with that of the process that started it."""
    if sys.platform == "linux":
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--make-seeds", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make_seeds:
        sys.stdout.write(json.dumps([raw.hex() for raw in seeds()]))
        return
    made = subprocess.run([sys.executable, __file__, "--make-seeds"], capture_output=True, check=True, text=True)
    good = [bytes.fromhex(text) for text in json.loads(made.stdout)]
    draw, counts, begun = random.Random(options.seed), collections.Counter[str](), time.monotonic()
    kinds = (damaged, headers_forged, lists_forged, noise)
    memory = Path("/dev/shm")  # an fsync costs nothing there
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        place = Path(name) / "in"
        place.mkdir()
        assert [check(raw, False, place) for raw in good] == ["accepted"] * len(good)
        for number in range(options.inputs):
            make, seed = draw.choice(kinds), draw.choice(good)
            raw = make(seed, draw)
            if raw in good:
                counts["unchanged"] += 1
                continue
            try:
                outcome = check(raw, make is not lists_forged, place)
            except BaseException:
                Path("failed-input.tar").write_bytes(raw)
                print(f"input {number} ({make.__name__}) is in failed-input.tar", file=sys.stderr)
                raise
            counts[f"{make.__name__} {outcome}"] += 1
        assert [path.name for path in Path(name).iterdir()] == ["in"], "written outside"
    peak = peak_bytes()
    result = {"inputs": options.inputs, "seed": options.seed, "elapsed_s": round(time.monotonic() - begun, 1)}
    print(json.dumps(result | {"peak_bytes": peak} | dict(sorted(counts.items()))))
    assert peak <= MAX_MEMORY_BYTES, f"peak memory {peak} bytes"


if __name__ == "__main__":
    main()
