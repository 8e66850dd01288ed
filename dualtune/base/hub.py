"""What huggingface_hub takes from a server and uses as the name of a file: checked before it does.

Its requests have a time limit: those for lists of files would wait for ever. And why a download failed, in one line:
the library's errors are of twenty kinds, some of them none of its own.

The names of files in its cache are the ETag and the commit that the server sends, as they are. A hostile mirror, or
whoever answers in its place, would have it write outside of the cache.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dualtune.base import interrupt
from dualtune.base.errors import DiskError, FormatError
from dualtune.base.files import cache_dir, write_file
from dualtune.base.untrusted import open_file

_NAMING = ("etag", "x-linked-etag", "x-repo-commit", "x-xet-hash")
_SAFE = re.compile(r'(W/)?"?(?!\.{1,2}"?$)[\w.+=:~-]{1,200}"?', re.ASCII)
_guarded = False


def guard_hub() -> None:
    """Check the answers that huggingface_hub gets in this process, from now on, and wait for them a limited time.

    FormatError for a name with a path.
    """
    global _guarded
    if _guarded:
        return
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http as http  # pyright: ignore[reportPrivateUsage]

    make: Any = getattr(http, "_GLOBAL_CLIENT_FACTORY", None) or http.default_client_factory

    def factory() -> Any:
        client: Any = make()
        hooks: dict[str, list[Any]] = client.event_hooks
        client.event_hooks = hooks | {
            "request": [*hooks.get("request", []), _limit],
            "response": [*hooks.get("response", []), _check],
        }
        return client

    set_client_factory(factory)
    _guarded = True


def _limit(request: Any) -> None:
    """Give a request for data the time limit of downloads (HF_HUB_DOWNLOAD_TIMEOUT) where it has none."""
    from huggingface_hub import constants

    if request.method in ("GET", "HEAD"):
        limits: dict[str, float | None] = request.extensions.get("timeout") or {}
        default = dict.fromkeys(("connect", "read", "write", "pool"), constants.HF_HUB_DOWNLOAD_TIMEOUT)
        request.extensions["timeout"] = default | {name: s for name, s in limits.items() if s is not None}


def _check(response: Any) -> None:
    if response.request.method != "HEAD":  # by which a file's names are asked; an ETag of the API may be anything
        return
    for name in _NAMING:
        value: str = response.headers.get(name, "")
        if value and not _SAFE.fullmatch(value):
            raise FormatError(
                f"{response.request.url.host}: sent the header {name} {value[:100]!r}, which leads out of the cache. "
                "The answer is discarded. This is not a hub, or somebody answers in its place: check HF_ENDPOINT"
            )


def why_download_failed(error: BaseException) -> str:
    """Return what happened, and what to do, of any error that huggingface_hub or its HTTP client raises."""
    causes = list(_chain(error))
    status = next(
        (s for cause in causes if (s := getattr(getattr(cause, "response", None), "status_code", None))), None
    )
    kinds = {kind.__name__ for cause in causes for kind in type(cause).__mro__}
    last = " ".join((str(causes[-1]) or type(causes[-1]).__name__).split())[:200]
    if "GatedRepoError" in kinds or status == 403:
        return "it is gated (403): accept its terms on its page, and log in with `hf auth login`"
    if status == 401:
        return "there is no such model, or it is private (401): check the name, or log in with `hf auth login`"
    if "RepositoryNotFoundError" in kinds or status == 404:
        return "there is no such model (404): check the name"
    if status == 429:
        return "the hub asks for a pause (429): try again in some minutes, or log in with `hf auth login`"
    if status is not None and status >= 500:
        return f"the hub has a fault ({status}): try again later; what has arrived is kept"
    if "TooManyRedirects" in kinds:
        return "the answers lead in a circle: check HF_ENDPOINT, and the proxy"
    if kinds & {"JSONDecodeError", "DecodingError", "KeyError", "TypeError"}:
        return f"the answer is not that of a hub ({last}): is there a login page of the network, or a proxy?"
    if kinds & {"TransportError", "TimeoutError", "ConnectionError", "XetDownloadError"}:
        return f"the connection broke ({last}): run the command again; the files that have arrived are kept"
    return last


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(10):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


# ----------------------------------------------------------------------------------------------------------------------
# Whether the files in the cache of huggingface_hub are the ones that the hub announced.
#
# The library compares sizes only. But it names each file in its cache by the hash that the hub announced: SHA-256 for
# large files, and for small ones Git's. A file is hashed when it is first used, and again if it has changed since.

SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
GIT = re.compile(r"[0-9a-f]{40}", re.ASCII)  # SHA-1 of "blob SIZE\0" and the content
_PIECE = 16 << 20

Tell = Callable[[float], object]


def check_announced(files: Iterable[Path], tell: Tell = lambda share: None) -> None:
    """Compare files of a snapshot in the hub's cache with their names; others, and hashes of other kinds, are skipped.

    `tell` gets the share of the bytes that are hashed, if any must be. FormatError for a file with another hash.
    """
    blobs = {target: file for file in files if _is_hash(target := file.resolve())}
    waiting = [blob for blob in blobs if not _is_checked(blob)]
    total, done = sum(blob.stat().st_size for blob in waiting), 0
    for blob in waiting:
        before = _state(blob)
        digest, size = _digest(blob), before["size"]
        with open_file(blob) as stream:
            while piece := stream.read(_PIECE):
                interrupt.poll()
                digest.update(piece)
                done += len(piece)
                tell(min(1.0, done / total))
        if digest.hexdigest() != blob.name:
            raise FormatError(
                f"{blobs[blob]}: its {size} bytes are not those that the hub announced: their hash is "
                f"{digest.hexdigest()}, must be {blob.name}. The download was damaged, or somebody changed it. Remove "
                f"{blob} and run the same command again: it downloads the file again"
            )
        with suppress(OSError, DiskError):  # a mark that cannot be written costs time, later
            _mark(blob).parent.mkdir(parents=True, exist_ok=True)
            write_file(_mark(blob), json.dumps(before))


def _is_hash(target: Path) -> bool:
    in_cache = target.parent.name == "blobs" and target.is_file()
    return in_cache and bool(SHA256.fullmatch(target.name) or GIT.fullmatch(target.name))


def _digest(blob: Path) -> Any:
    if SHA256.fullmatch(blob.name):
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)


def _is_checked(blob: Path) -> bool:
    try:
        return json.loads(_mark(blob).read_text(encoding="ascii")) == _state(blob)
    except (OSError, ValueError):
        return False


def _state(blob: Path) -> dict[str, Any]:
    """Return what changes if the file does."""
    now = blob.stat()
    return {"path": str(blob), "size": now.st_size, "modified_ns": now.st_mtime_ns, "changed_ns": now.st_ctime_ns}


def _mark(blob: Path) -> Path:
    return cache_dir() / "announced" / hashlib.sha256(bytes(blob)).hexdigest()[:32]
