"""The content of a file of a bundle, checked while it streams: no code, no pickle, no archive."""

from __future__ import annotations

import codecs
import re

from dualtune.errors import FormatError
from dualtune.io.untrusted import MAX_HEADER_BYTES

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
        other = next((what for magic, what in _OTHER_FORMATS if re.match(magic, head)), None)
        if self._suffix == "safetensors":  # it starts with 8 bytes of length, which may equal any magic number
            length = int.from_bytes(head[:8], "little")
            if length > min(MAX_HEADER_BYTES, self._num_bytes - 8) or head[8:9] != b"{":
                raise FormatError(f"{self._where}: is no safetensors file" + (f", but {other}" if other else ""))
        elif other:
            raise FormatError(f"{self._where}: is {other}")
        elif self._suffix == "json" and not head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
            raise FormatError(f"{self._where}: is no JSON object")
