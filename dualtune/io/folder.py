"""A directory that other users may write to, opened once, so that links they create cannot redirect our writes."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Self, cast

from dualtune.errors import DiskError, FormatError
from dualtune.text.show import in_bytes

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
        if (found := self.find_part(name)) is not None:
            return found
        self.remove(name)
        return cast(BinaryIO, os.fdopen(os.open(name, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._fd), "r+b"))

    def find_part(self, name: str) -> BinaryIO | None:
        """Open the partial file of an earlier attempt, if it is a regular file of this user without further links."""
        try:
            fd = os.open(name, _FLAGS, dir_fd=self._fd)
        except OSError:  # missing, a link, of another kind or user: cannot be resumed
            return None
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1:
            os.fchmod(fd, 0o600)  # private until it is complete
            return cast(BinaryIO, os.fdopen(fd, "r+b"))
        os.close(fd)
        return None

    def check_space(self, num_bytes: int, part: BinaryIO) -> None:
        """Raise DiskError if the disk has no room for the rest of a partial file of `num_bytes`."""
        there = os.fstat(part.fileno()).st_blocks * 512
        disk = os.statvfs(self._fd)
        if (needed := num_bytes - there) > (free := disk.f_bavail * disk.f_frsize):
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

    def remove_parts(self, name: str, kept: str | None = None) -> None:
        """Remove all partial files for the same target as the part `name`, except `kept`."""
        stem = f"{name.rpartition('-')[0]}-"
        for entry in os.listdir(self._fd):  # noqa: PTH208  pathlib knows no descriptors
            if entry.startswith(stem) and entry != kept:
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
        wanted = "directory" if is_kind is stat.S_ISDIR else "regular file"
        raise _not_own(path, "is a link" if stat.S_ISLNK(mode) else f"is not a {wanted}")


def _not_own(path: Path, fault: str) -> FormatError:
    return FormatError(
        f"{path}: {fault}, and is not followed or opened: the files and directories of a run are its own. Move it "
        "away; if it is a link of yours, put what it leads to in its place"
    )


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises NotRegular for anything else, such as an endless FIFO."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegular(None, "is not a regular file")
    return cast(BinaryIO, os.fdopen(fd, "rb"))
