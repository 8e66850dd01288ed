"""TARGET of `dualtune push` and `pull`: the kind of remote that a text names, and the path of the bundle there.

    user@host:path            ssh; the path is relative to the home directory there, as with scp
    ssh://user@host:22/path   ssh; the path is absolute, as with git; /~/path is relative to the home directory
    path                      a directory of this machine
    s3://bucket/path, …       a file system of fsspec
    hf://owner/name           a model repository of the Hugging Face hub (see `hub`)

A path that ends in .tar or .dualtune is that of the bundle; any other is a directory that holds one bundle.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dualtune.base.errors import ConfigError
from dualtune.base.files import expanded
from dualtune.use.transfer.bundles.names import IN_DIRECTORY
from dualtune.use.transfer.remotes import remote_files
from dualtune.use.transfer.remotes.remote_files import DirectoryStore, RemoteFiles
from dualtune.use.transfer.remotes.retries import Patience
from dualtune.use.transfer.remotes.ssh import SshStore
from dualtune.use.transfer.remotes.store import MAX_FILE_BYTES, ChunkStore

FILE_ENDS = (".tar", ".dualtune")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SCP = re.compile(r"((?:[^/:@\[\]]+@)?(?:\[[0-9A-Fa-f:.%\w]+\]|[^/:@\[\]]+)):(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """The location of a bundle on a remote."""

    remote: ChunkStore | RemoteFiles
    path: str  # of the bundle
    name: str  # of its local copy, without an ending

    def __str__(self) -> str:
        return self.remote.shown(self.path)

    def push(
        self, file: Path, *, ending: str = "", verified: str | None = None, force: bool = False, patience: Patience
    ) -> bool:
        """Copy a verified file to the bundle's path plus an ending. False if it was there already."""
        return self.remote.push(file, self.path + ending, verified=verified, force=force, patience=patience)

    def pull(self, target: Path, *, ending: str = "", patience: Patience, most: int = MAX_FILE_BYTES) -> Path:
        """Fetch that file, of at most `most` bytes, into a hidden file next to a local path."""
        return self.remote.pull(self.path + ending, target, patience=patience, most=most)


def parse(text: str) -> RemoteTarget:
    """Parse a TARGET. ConfigError if it is invalid, EnvironmentFault if a package for it is missing."""
    if not text or not text.isprintable():
        raise ConfigError(f"TARGET: got {text!r}; allowed: user@host:path, a directory, or a URL")
    scheme = _SCHEME.match(text)
    if scheme is None:
        if match := _SCP.fullmatch(text):
            return _target(SshStore(match[1].replace("[", "").replace("]", "")), _ssh_path(match[2]))
        return _target(DirectoryStore(), str(expanded(text)))
    kind = scheme[0].removesuffix("://").lower()
    if kind == "file":
        return _target(DirectoryStore(), unquote(urlsplit(text).path))
    if kind == "ssh":
        return _ssh(text)
    return _target(*remote_files.open_url(text))


def _ssh(url: str) -> RemoteTarget:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"TARGET: got {url!r}: {error}; allowed: ssh://user@host:port/path") from None
    if not host or parts.password is not None or parts.query or parts.fragment:
        raise ConfigError("TARGET: allowed with ssh://: ssh://user@host:port/path, without a password")
    path = unquote(parts.path)
    user = f"{unquote(parts.username)}@" if parts.username else ""
    return _target(SshStore(user + host, port), _ssh_path(path[1:] if path.startswith("/~") else path))


def _ssh_path(path: str) -> str:
    """Return a path for the remote shell: absolute, or starting with ./, so that no command takes it as an option."""
    if path == "~" or path.startswith("~/"):
        path = path[2:]  # ssh starts there anyway
    elif path.startswith("~"):
        raise ConfigError(f"TARGET: got the path {path!r}; allowed with ~: only your own home directory, ~/…")
    return path if path.startswith("/") else f"./{path}"


def _target(remote: ChunkStore | RemoteFiles, path: str) -> RemoteTarget:
    is_file = path.endswith(FILE_ENDS)
    path = path if is_file else f"{path.rstrip('/')}/{IN_DIRECTORY}"
    parent, _, file = path.rpartition("/")
    name = file.rpartition(".")[0] if is_file else parent.rpartition("/")[2].strip(".")
    return RemoteTarget(remote, path, name or "pulled")
