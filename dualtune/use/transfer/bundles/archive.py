"""The container of a bundle: the simplest tar (POSIX ustar), with regular files only.

A header has 512 bytes; the content follows, padded with zeros to whole blocks; two blocks of zeros end the file.
Everything in a header except name and size is fixed, so a header is valid if and only if it equals the one that
`header` returns: this one comparison refuses everything else that a tar can hold (links, devices, long names, owners,
times). https://pubs.opengroup.org/onlinepubs/9799919799/utilities/pax.html (ustar Interchange Format)
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from typing import BinaryIO

from dualtune.base.errors import FormatError
from dualtune.base.untrusted import MAX_HEADER_BYTES
from dualtune.use.transfer.bundles.names import BUNDLE_FILE, MAX_BUNDLE_FILE_BYTES, problem_of, shown

BLOCK = 512
CHUNK = 1 << 18
END = bytes(2 * BLOCK)
_TYPES = {
    b"1": "a hard link", b"2": "a symbolic link", b"3": "a character device", b"4": "a block device",
    b"5": "a directory", b"6": "a FIFO", b"7": "a contiguous file", b"x": "a pax header", b"g": "a global pax header",
    b"L": "a GNU long name", b"K": "a GNU long link", b"S": "a sparse file", b"M": "a part of a larger file",
    b"V": "a volume label", b"D": "a GNU dump directory",
}  # fmt: skip
_OTHER_FILES = (
    (b"PK", "a zip archive"),
    (b"\x1f\x8b", "compressed with gzip"),
    (b"BZh", "compressed with bzip2"),
    (b"\xfd7zXZ", "compressed with xz"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd"),
    (b"\x80", "a pickle"),
    (b"version https://git-lfs", "a git-lfs pointer (run: git lfs pull)"),
)


def header(name: str, size: int) -> bytes:
    """Return the only valid header for a member with this name and size."""
    # name, mode, uid, gid, size, mtime | checksum | type, link | magic and version | owner, group, device, prefix
    first = name.encode().ljust(100, b"\0") + b"0000644\0" + 2 * b"0000000\0" + b"%011o\0" % size + b"00000000000\0"
    fixed = b"0" + bytes(100) + b"ustar\x0000" + bytes(64 + 16 + 155 + 12)
    checksum = sum(first) + 8 * ord(" ") + sum(fixed)
    return first + b"%06o\0 " % checksum + fixed


def padding(size: int) -> int:
    """Return the number of zeros after content of this size."""
    return -size % BLOCK


def read_first(file: BinaryIO, where: object) -> bytes:
    """Return the content of BUNDLE.json, which is the first member."""
    block = file.read(BLOCK)
    for magic, kind in _OTHER_FILES:
        if block.startswith(magic):
            raise FormatError(f"{where}: is {kind}; a bundle is a plain tar file written by `dualtune bundle pack`")
    if len(block) < BLOCK:
        raise FormatError(f"{where}: has {len(block)} bytes, too few for a bundle. Copy it again")
    match = re.fullmatch(rb"([0-7]{11})\0", block[124:136])
    size = int(match[1], 8) if match else -1
    if block != header(BUNDLE_FILE, max(size, 0)):
        raise FormatError(f"{where}: {_diagnosis(block, BUNDLE_FILE, size, {}, 0)}")
    if size > MAX_BUNDLE_FILE_BYTES:
        raise FormatError(f"{where}: {BUNDLE_FILE} has {size} bytes, at most {MAX_BUNDLE_FILE_BYTES} are allowed")
    raw = file.read(size)
    if len(raw) < size:
        raise FormatError(f"{where}: ends inside {BUNDLE_FILE}: it is truncated. Copy it again")
    return raw


def check_structure(file: BinaryIO, num_bytes: int, sizes: Mapping[str, int], where: object) -> None:
    """Check that the headers are those of BUNDLE.json, in its order, and that the file ends after the last member.

    Only headers are read. FormatError says what was expected and what was found.
    """
    position = 0
    for name, size in sizes.items():
        file.seek(position)
        block = file.read(BLOCK)
        if len(block) == BLOCK and block != header(name, size):
            raise FormatError(f"{where}: {_diagnosis(block, name, size, sizes, position)}")
        position += BLOCK + size + padding(size)
        if position > num_bytes:
            raise FormatError(
                f"{where}: ends inside {name}: got {num_bytes} bytes, expected {_total(sizes)}. Copy it again"
            )
    file.seek(position)
    block = file.read(BLOCK)
    if len(block) == BLOCK and any(block):
        raise FormatError(f"{where}: {_diagnosis(block, None, 0, sizes, position)}")
    if num_bytes < _total(sizes):
        raise FormatError(
            f"{where}: ends before its end marker: got {num_bytes} bytes, expected {_total(sizes)}. Copy it again"
        )
    if num_bytes > _total(sizes) or any(file.read(BLOCK)):
        raise FormatError(f"{where}: has bytes after its end: got {num_bytes}, expected {_total(sizes)}. Copy it again")


def chunks(file: BinaryIO, name: str, size: int, where: object) -> Iterator[bytes]:
    """Yield the content of the next member, piece by piece."""
    file.seek(BLOCK, 1)
    remaining = size
    while remaining:
        chunk = file.read(min(CHUNK, remaining))
        if not chunk:
            raise FormatError(f"{where}: ends inside {name}: it became shorter while it was read")
        remaining -= len(chunk)
        yield chunk
    if any(file.read(padding(size))):
        raise FormatError(f"{where}: there are bytes other than zero in the padding after {name}")


def _total(sizes: Mapping[str, int]) -> int:
    return sum(BLOCK + size + padding(size) for size in sizes.values()) + len(END)


def _diagnosis(block: bytes, name: str | None, size: int, sizes: Mapping[str, int], position: int) -> str:
    """Say what is wrong with a header that is not that of `name` (None: the end was expected)."""
    expected = f"{name} is expected" if name else "the end is expected"
    if not any(block):
        return f"ends at byte {position}, where {expected}"
    if not _has_checksum(block):
        return f"is damaged: the header at byte {position}, where {expected}, has a wrong checksum"
    prefix, name_field = (field.split(b"\0", 1)[0] for field in (block[345:500], block[:100]))
    raw = b"/".join(filter(None, (prefix, name_field)))
    actual = raw.decode("utf-8", "backslashreplace")
    order = list(sizes)
    is_seen = actual in (order[: order.index(name)] if name is not None and name in sizes else order)
    if (kind := block[156:157]) not in (b"0", b"\0"):
        return f"{shown(actual)} is {_TYPES.get(kind, 'of an unknown type')}; only regular files are allowed"
    if problem := problem_of(actual):
        return f"{shown(actual)} {problem}"
    if is_seen:
        return f"{actual} is in it twice"
    if actual not in sizes and actual != name:
        return f"{actual} is not listed in {BUNDLE_FILE}" if sizes else f"begins with {actual}, not {BUNDLE_FILE}"
    if actual != name:
        return f"{actual} is at byte {position}, where {expected}: files must be in the order of {BUNDLE_FILE}"
    if block[124:136] != header(actual, max(size, 0))[124:136]:
        return f"{actual} has another size in its header than in {BUNDLE_FILE} ({size} bytes)"
    return (
        f"the header of {actual} holds more than name and size (owner, time, mode …): not written by `dualtune bundle`"
    )


def _has_checksum(block: bytes) -> bool:
    match = re.match(rb" *([0-7]{1,7})[\0 ]", block[148:156])
    return match is not None and int(match[1], 8) == sum(block[:148]) + 8 * ord(" ") + sum(block[156:])


# ----------------------------------------------------------------------------------------------------------------------
# The content of a file of a bundle, checked while it streams: no code, no pickle, no archive.

# Keys with which a config makes transformers import code: from the model's repository or, with the last one, from a
# kernel's (CVE-2026-4372, which needs no trust_remote_code).
FORBIDDEN_KEYS = ("auto_map", "trust_remote_code", "_attn_implementation_internal")
_OTHER_FORMATS = (
    (rb"\x80[\x02-\x05]", "a pickle"),
    (rb"PK\x03\x04|PK\x05\x06|\x1f\x8b|BZh|\xfd7zXZ|7z\xbc\xaf|\x28\xb5\x2f\xfd", "an archive"),
    (rb"\x7fELF|MZ|\xfe\xed\xfa|\xcf\xfa\xed\xfe|#!", "a program"),
    (rb"version https://git-lfs", "a git-lfs pointer; pack it again after: git lfs pull"),
    (rb"(?s:.{257})ustar", "an archive"),
)
_LONGEST_MATCH = 6 * max(map(len, FORBIDDEN_KEYS)) + 2  # every character written as \u00xx


def _spellings(key: str) -> str:
    """Return a regular expression for all the ways to write a key in JSON."""
    codes = (f"{ord(c):04x}" for c in key)
    digits = ("".join(f"[{d}{d.upper()}]" if d.isalpha() else d for d in code) for code in codes)
    return "".join(rf"(?:{re.escape(c)}|\\u{code})" for c, code in zip(key, digits, strict=True))


_FORBIDDEN = re.compile("|".join(f'"(?:{_spellings(key)})"' for key in FORBIDDEN_KEYS).encode())


class Content:
    """The checks of one file, by its suffix. `feed` takes its bytes in any pieces; both methods raise FormatError."""

    def __init__(self, name: str, num_bytes: int, where: object) -> None:
        self._where = f"{where}: {name}"
        self._suffix = name.rpartition(".")[2]
        self._num_bytes = num_bytes
        self._head: bytes | None = b""  # None after it was checked
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._carry = b""

    def feed(self, chunk: bytes) -> None:
        if self._head is not None:
            self._head += chunk
            if len(self._head) >= 512:
                self._check_head()
        if self._suffix in ("json", "yaml", "txt", "jinja"):
            self._check_text(chunk)
        if self._suffix == "json":
            if _FORBIDDEN.search(text := self._carry + chunk):
                names = ", ".join(FORBIDDEN_KEYS)
                raise FormatError(f"{self._where}: has a key that can make a reader run code (one of {names})")
            self._carry = text[-_LONGEST_MATCH:]

    def finish(self) -> None:
        if self._head is not None:
            self._check_head()
        self._check_text(b"", final=True)

    def _check_text(self, chunk: bytes, *, final: bool = False) -> None:
        try:
            is_text = "\0" not in self._decoder.decode(chunk, final)
        except UnicodeDecodeError:
            is_text = False
        if not is_text:
            raise FormatError(f"{self._where}: is not UTF-8 text")

    def _check_head(self) -> None:
        head, self._head = self._head or b"", None
        other = next((kind for magic, kind in _OTHER_FORMATS if re.match(magic, head)), None)
        if self._suffix == "safetensors":  # it starts with 8 bytes of length, which may equal any magic number
            length = int.from_bytes(head[:8], "little")
            if length > min(MAX_HEADER_BYTES, self._num_bytes - 8) or head[8:9] != b"{":
                raise FormatError(f"{self._where}: is not a safetensors file" + (f", but {other}" if other else ""))
        elif other:
            raise FormatError(f"{self._where}: is {other}")
        elif self._suffix == "json" and not head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
            raise FormatError(f"{self._where}: is not a JSON object")
