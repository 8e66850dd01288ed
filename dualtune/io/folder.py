"""A directory to which others may write too, opened once: no link that they plant in it leads a write elsewhere."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import BinaryIO, Self, cast

from dualtune.errors import DiskError
from dualtune.text.show import in_bytes

# Not blocking: a FIFO in place of a file would keep an open waiting for a writer.
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class NotRegular(OSError):
    """A directory, a FIFO or a device where a file was expected."""


class Folder:
    """The directory at a path; all that is done here is done in that one, whatever gets its path meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def part(self, name: str) -> BinaryIO:
        """The partial file of that name, to read and write: the one that an earlier attempt left, or a new one."""
        if (found := self.find_part(name)) is not None:
            return found
        self.remove(name)
        return cast(BinaryIO, os.fdopen(os.open(name, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._fd), "r+b"))

    def find_part(self, name: str) -> BinaryIO | None:
        """What an earlier attempt left, if it is a regular file of this user with no other name."""
        try:
            fd = os.open(name, _FLAGS, dir_fd=self._fd)
        except OSError:  # not there, a link, of another kind or another user: not ours to go on with
            return None
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1:
            os.fchmod(fd, 0o600)  # until it is whole nobody else has business with it
            return cast(BinaryIO, os.fdopen(fd, "r+b"))
        os.close(fd)
        return None

    def check_space(self, num_bytes: int, part: BinaryIO) -> None:
        """DiskError if the rest of a part that is to have so many bytes does not fit on the disk."""
        there = os.fstat(part.fileno()).st_blocks * 512
        disk = os.statvfs(self._fd)
        if (needed := num_bytes - there) > (free := disk.f_bavail * disk.f_frsize):
            raise DiskError(f"{self.path}: needs {in_bytes(needed)}, and the disk has {in_bytes(free)} free. Free some")

    def publish(self, part: BinaryIO, name: str, final: str) -> None:
        """Give a part that is whole its final name, durably and with the rights of any new file."""
        os.fchmod(part.fileno(), 0o666 & ~umask())
        os.fsync(part.fileno())
        os.rename(name, final, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        os.fsync(self._fd)

    def holds(self, name: str) -> bool:
        """Whether anything has that name, be it a link that leads nowhere."""
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def remove_parts(self, name: str, kept: str | None = None) -> None:
        """Remove the partial files of other contents than that of the part `name`."""
        stem = f"{name.rpartition('-')[0]}-"
        for entry in os.listdir(self._fd):  # noqa: PTH208  pathlib knows no descriptors
            if entry.startswith(stem) and entry != kept:
                with contextlib.suppress(OSError):  # of another user, or a directory: no business of ours
                    os.unlink(entry, dir_fd=self._fd)


def umask() -> int:
    """The rights that new files lack. The system tells it only to who sets another one."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def open_regular(path: Path) -> BinaryIO:
    """A regular file, to be read. NotRegular for anything else, a FIFO that never ends among them."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegular(None, "is not a regular file")
    return cast(BinaryIO, os.fdopen(fd, "rb"))
