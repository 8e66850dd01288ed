"""Files: written whole or not at all, and opened so that no link of a stranger redirects what is read or written."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from io import BufferedReader
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from dualtune.base import faults
from dualtune.base.errors import ConfigError, DiskError, FormatError
from dualtune.base.text import closest, did_you_mean, in_bytes

# ----------------------------------------------------------------------------------------------------------------------
# Files and directories that are written whole or not at all, even if the machine crashes.

Pieces = Sequence[bytes | memoryview]
Content = bytes | Pieces  # of a file

ALIKE = 0.65  # of `closest`, for the names of files
MOST_NEIGHBOURS = 10_000  # whose names are compared
_MARK = ".tmp-"  # in the name of everything that is unfinished or being removed
_OWNER = re.compile(r"(?P<pid>[1-9]\d{0,8})-(?P<home>[0-9a-f]{8})[0-9a-f]{8}", re.ASCII)


def write_directory(target: Path, files: Mapping[str, Content]) -> None:
    """Create the directory with these files. Raises DiskError if that fails; then nothing is left there."""
    with new_directory(target) as temporary:
        for name, content in files.items():
            with (temporary / name).open("xb") as file:
                _write(file, content)


@contextlib.contextmanager
def new_directory(target: Path, *, by_library: bool = False) -> Generator[Path]:
    """Yield a directory to write to, which becomes `target` at the end of the block; after an error nothing remains.

    It is a sibling (same file system) that is renamed to `target`. The caller must fsync the files written there.
    `by_library`: a library creates the directory and its files, which are flushed here, and get the usual rights.
    """
    temporary = hidden_sibling(target)
    created: list[Path] = []
    is_done = False
    remove_abandoned(target.parent)
    try:
        if not target.parent.exists():
            created = [path for path in target.parents if not path.exists()]
            target.parent.mkdir(parents=True, exist_ok=True)
            fsync(target.parent.parent)
        if not by_library:
            temporary.mkdir()
        yield temporary
        if by_library:
            follow_umask(temporary)
        for path in (temporary, *temporary.rglob("*")):
            if by_library or path.is_dir():
                fsync(path)
        faults.reach("synced")
        temporary.rename(target)  # atomic; replaces an empty directory and nothing else
        is_done = True
        faults.reach("renamed")
        fsync(target.parent)
    except OSError as error:
        raise DiskError(f"{target}: cannot be written: {error.strerror or error}. Nothing was left there.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):  # another program may already use them
            for path in created if not is_done else []:
                path.rmdir()


@contextlib.contextmanager
def new_file(target: Path) -> Generator[BinaryIO]:
    """Yield a file to write, which becomes `target` at the end of the block; after an error nothing remains."""
    temporary = hidden_sibling(target)
    remove_abandoned(target.parent)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            fsync(temporary)
        temporary.rename(target)
        fsync(target.parent)
    except OSError as error:
        raise DiskError(f"{target}: cannot be written: {error.strerror or error}. Nothing was left there.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def follow_umask(directory: Path) -> None:
    """Give the files below a directory the default mode of `open`: libraries make some readable only by the owner.

    A probe file shows the umask, because reading it directly requires changing it, for all threads.
    """
    probe = hidden_sibling(directory)
    probe.touch(exist_ok=False)
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


def json_bytes(table: Mapping[str, Any]) -> bytes:
    """Return the content of a JSON file. Raises ValueError for NaN and Infinity, which JSON does not have."""
    return (json.dumps(table, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def listing(files: Mapping[str, Content]) -> dict[str, dict[str, Any]]:
    """Return the manifest entry of each file: its size and sha256."""
    entries: dict[str, dict[str, Any]] = {}
    for name, content in files.items():
        sha256 = hashlib.sha256()
        for piece in _pieces(content):
            sha256.update(piece)
        entries[name] = {"bytes": sum(map(len, _pieces(content))), "sha256": sha256.hexdigest()}
    return entries


def _pieces(content: Content) -> Pieces:
    return [content] if isinstance(content, bytes) else content


def write_file(target: Path, text: str) -> None:
    """Create or replace a file. Raises DiskError if that fails; then the old one is still there."""
    temporary = hidden_sibling(target)
    try:
        with temporary.open("xb") as file:
            _write(file, text.encode())
        temporary.replace(target)
    except OSError as error:
        raise DiskError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def remove_directory(path: Path) -> None:
    """Remove a directory atomically: it is renamed first. Raises DiskError if that fails."""
    doomed = hidden_sibling(path)
    try:
        path.rename(doomed)
        faults.reach("doomed")
        if doomed.is_symlink():  # do not touch its target
            doomed.unlink()
        else:
            shutil.rmtree(doomed)
    except OSError as error:
        raise DiskError(f"{path}: cannot be removed: {error.strerror or error}") from error


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove what killed processes left half-written or half-removed in a directory; return what was removed."""
    leftovers = sorted(directory.glob(f".*{_MARK}*"))
    for path in leftovers:
        _remove(path)
    return [path for path in leftovers if not path.exists()]


def remove_abandoned(directory: Path) -> None:
    """Remove what processes of this machine that are gone left half-written in a directory, which others may use too.

    What another machine or container writes there carries another mark, and stays.
    """
    for path in directory.glob(f".*{_MARK}*"):
        owner = _OWNER.fullmatch(path.name.rpartition(_MARK)[2])
        if owner and owner["home"] == _home() and not _is_running(int(owner["pid"])):
            _remove(path)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        pass
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def expanded(path: str | Path) -> Path:
    """Return a path with the home directory in place of `~` or `~name`. ConfigError for a user who does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{path}: there is no user of that name with a home directory. Write the path without the ~, or begin with "
            f"./ if a directory is called {Path(path).parts[0]}"
        ) from None


def cache_dir() -> Path:
    """Return the user's cache directory: $DUALTUNE_CACHE, $XDG_CACHE_HOME/dualtune, or ~/.cache/dualtune."""
    own, xdg = os.environ.get("DUALTUNE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return expanded(own)
    return (Path(xdg) if xdg else expanded("~") / ".cache") / "dualtune"


def existing(path: Path) -> Path:
    """Return the path or its nearest existing parent, to find the disk that the path will be on."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def check_writable(path: Path) -> None:
    """Raise DiskError if nothing can be made at a path, to know before the work that makes it."""
    place = existing(path.absolute().parent)
    if not os.access(place, os.W_OK):
        raise DiskError(f"{path}: cannot be written, because {place} is read-only here. Choose another path")


def did_you_mean_path(path: str | Path) -> str:
    """Return ". Did you mean …?" with what is there and differs in one name of a missing path; "" if nothing does.

    Only the first part that is missing is compared, with its neighbours: by their names without suffixes first, for
    these make any two files alike.
    """
    path = missing = Path(path)
    while not os.path.lexists(missing.parent):
        missing = missing.parent
    try:
        names = [entry.name for entry in islice(os.scandir(missing.parent), MOST_NEIGHBOURS)]
    except OSError:  # no directory, or one that may not be listed
        return ""
    stem = missing.stem.lower()
    alike = {name.lower(): name for name in names if closest(stem, [Path(name).stem.lower()], ALIKE)}
    nearest = closest(missing.name.lower(), [name for name in alike if not name.startswith(".")], ALIKE)
    there = None if nearest is None else missing.parent / alike[nearest] / path.relative_to(missing)
    return f". {did_you_mean(str(there))}" if there is not None and there.exists() else ""


def numbered(path: Path) -> Iterator[Path]:
    """Yield the path, then path-2, path-3, …"""
    return chain([path], (path.with_name(f"{path.name}-{number}") for number in count(2)))


def free_name(path: Path) -> Path:
    """Return the path, or the first of path-2, path-3, … that does not exist."""
    return next(candidate for candidate in numbered(path) if not os.path.lexists(candidate))


def hidden_sibling(path: Path) -> Path:
    """Return a unique temporary name next to the path, which `remove_leftovers` recognizes."""
    return path.with_name(f".{path.name}{_MARK}{os.getpid()}-{_home()}{secrets.token_hex(4)}")


@functools.cache
def _home() -> str:
    """Return a mark of where the numbers of processes mean what they mean here: this machine, and this container."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        namespace = ""
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]


def _write(file: BinaryIO, content: Content) -> None:
    for piece in _pieces(content):
        done = faults.allowed("write", len(piece))
        file.write(piece[:done])
        if done < len(piece):
            file.flush()
            faults.die()
    file.flush()
    os.fsync(file.fileno())


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ----------------------------------------------------------------------------------------------------------------------
# Detect files that are replaced during a run, by comparing what is at a path now with what was opened.


class OpenDirectory:
    """A directory that stays open, so that its inode number is not reused."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def fault(self) -> str | None:
        """Return what happened to the path since; None if it still leads here."""
        return fault_of(self._path, self._file)

    def close(self) -> None:
        os.close(self._file)


def fault_of(path: Path, file: int) -> str | None:
    """Return what happened to the path of an open file or directory; None if it still leads to it."""
    try:
        is_same = os.path.samestat(path.stat(), os.fstat(file))
    except OSError as error:
        return f"{path} was deleted" if isinstance(error, FileNotFoundError) else f"{path}: {error.strerror}"
    return None if is_same else f"{path} was replaced"


def set_aside(path: Path) -> str:
    """Rename a foreign file that has replaced ours, if there is one. Returns a description of what was done."""
    if not os.path.lexists(path):
        return ""
    aside = free_name(path.with_name(f"{path.name}.replaced"))
    path.rename(aside)
    return f"; what was there is kept as {aside.name}"


# ----------------------------------------------------------------------------------------------------------------------
# Files that are really inside a directory: a link in a stranger's may lead to a private key of the user.


def file_in(directory: Path, name: str, kind: str = "model") -> Path:
    """Return the regular file of this name in a directory of that kind. FormatError if none, or if a link leaves it.

    The hub's cache is the exception: there each file of models--ORG--NAME/snapshots/REVISION is a link to
    models--ORG--NAME/blobs/HASH.
    """
    path = directory / name
    try:
        root, target = directory.resolve(), path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: circular links
        reason = error.strerror if isinstance(error, OSError) else "its links form a loop"
        raise FormatError(f"{path}: cannot be read: {reason}") from None
    is_blob = root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs"
    if not (target.is_relative_to(root) or is_blob):
        raise FormatError(
            f"{path}: is a link to {target}, outside of the {kind} directory. If that file belongs to the {kind}, "
            "replace the link with a copy"
        )
    if not target.is_file():
        raise FormatError(f"{path}: is not a regular file")
    return path


# ----------------------------------------------------------------------------------------------------------------------
# A directory that other users may write to, opened once: links that they create lead nowhere.

# Non-blocking, because opening a FIFO in place of a file would wait for a writer.
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class NotRegular(OSError):
    """A directory, a FIFO or a device where a file was expected."""


class Folder:
    """An open directory; all methods act on that directory, even if its path is replaced meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def part(self, name: str) -> BinaryIO:
        """Open the partial file of that name to read and write: that of an earlier attempt, or a new one."""
        if (part := self.find_part(name)) is not None:
            return part
        self.remove(name)
        return cast(BinaryIO, os.fdopen(os.open(name, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._fd), "r+b"))

    def find_part(self, name: str) -> BinaryIO | None:
        """Open the partial file of an earlier attempt, if it is a regular file of this user without further links."""
        try:
            fd = os.open(name, _FLAGS, dir_fd=self._fd)
        except OSError:  # missing, a link, of another kind or user: cannot be resumed
            return None
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1:
            os.fchmod(fd, 0o600)  # private until it is complete
            return cast(BinaryIO, os.fdopen(fd, "r+b"))
        os.close(fd)
        return None

    def check_space(self, num_bytes: int, part: BinaryIO) -> None:
        """Raise DiskError if the disk has no room for the rest of a partial file of `num_bytes`."""
        written = os.fstat(part.fileno()).st_blocks * 512
        disk = os.statvfs(self._fd)
        if (needed := num_bytes - written) > (free := disk.f_bavail * disk.f_frsize):
            raise DiskError(
                f"{self.path}: needs {in_bytes(needed)}, the disk has {in_bytes(free)} free. Free some space"
            )

    def publish(self, part: BinaryIO, name: str, final: str) -> None:
        """Rename a complete part to its final name, durably and with the default file mode."""
        os.fchmod(part.fileno(), 0o666 & ~umask())
        os.fsync(part.fileno())
        os.rename(name, final, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        os.fsync(self._fd)

    def holds(self, name: str) -> bool:
        """Return whether anything has that name, including a broken link."""
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def remove_parts(self, name: str, keep: str | None = None) -> None:
        """Remove all partial files for the same target as the part `name`, except `keep`."""
        stem = f"{name.rpartition('-')[0]}-"
        for entry in os.listdir(self._fd):  # noqa: PTH208  pathlib knows no descriptors
            if entry.startswith(stem) and entry != keep:
                with contextlib.suppress(OSError):  # of another user, or a directory
                    os.unlink(entry, dir_fd=self._fd)


def umask() -> int:
    """Return the umask. It can only be read by setting another one."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def open_own(path: Path, flags: int) -> int:
    """Open a file of a run directory, as os.open does with mode 0o666. FormatError if it is anything but a file.

    The directory may come from a stranger: a link would redirect what is written, and a FIFO would never answer.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError:
        check_own(path, stat.S_ISREG)
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_own(path, "is not a regular file")
    return fd


def check_own(path: Path, is_kind: Callable[[int], bool]) -> None:
    """Raise FormatError if there is something at a path of a run directory that is not of this kind (of `stat`)."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not is_kind(mode):
        kind = "directory" if is_kind is stat.S_ISDIR else "regular file"
        raise _not_own(path, "is a link" if stat.S_ISLNK(mode) else f"is not a {kind}")


def _not_own(path: Path, fault: str) -> FormatError:
    return FormatError(
        f"{path}: {fault}, and is not followed or opened: the files and directories of a run are its own. Move it "
        "away; if it is a link of yours, put what it leads to in its place"
    )


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises NotRegular for anything else, such as an endless FIFO."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegular(None, "is not a regular file")
    return os.fdopen(fd, "rb")
