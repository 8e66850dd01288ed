"""A signature in a file next to the bundle, created and verified by OpenSSH: `ssh-keygen -Y sign` and `-Y verify`.

It covers the whole file. https://man.openbsd.org/ssh-keygen#Y~5
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, EnvironmentFault, FormatError
from dualtune.base.untrusted import open_file
from dualtune.use.transfer.bundles.names import MAX_BUNDLE_FILE_BYTES

NAMESPACE = "dualtune-bundle"  # a signature made for anything else does not count
MAX_SIGNATURE_BYTES = 64 << 10
HEAD_BYTES = 512 + MAX_BUNDLE_FILE_BYTES  # a header and BUNDLE.json
_PIECE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Trust:
    """The required signer. The file is in the ALLOWED SIGNERS format of ssh-keygen(1)."""

    allowed_signers: Path
    identity: str


def path_of(bundle: Path) -> Path:
    return bundle.with_name(bundle.name + ".sig")


def sign(file: BinaryIO, key: Path) -> tuple[str, str]:
    """Sign an open file; return the signature and the sha256 of what was signed. May ask for a passphrase."""
    if not key.is_file():
        raise ConfigError(f"--sign: {key}: no such file; give a private SSH key, or a public one held by ssh-agent")
    digest = hashlib.sha256()
    done = _run(["-Y", "sign", "-n", NAMESPACE, "-f", str(key)], file, digest.update)
    if done.returncode:
        raise ConfigError(f"--sign: {key}: ssh-keygen could not sign with it: {_message_of(done)}. Nothing was written")
    return done.stdout.decode("ascii", "replace"), digest.hexdigest()


def verify(file: BinaryIO, bundle: Path, trust: Trust) -> bytes:
    """Verify the signature of an open file and return its beginning, as it was then: it holds BUNDLE.json.

    BUNDLE.json has the sha256 of everything else, so a reader who uses these bytes reads what was signed, even if the
    file changes meanwhile. FormatError unless the signature next to the bundle is that of the identity over all of it.
    """
    signers = trust.allowed_signers
    if not signers.is_file():
        raise ConfigError(
            f"--verify-signature: {signers}: no such file; it needs a line such as: {trust.identity} ssh-ed25519 …"
        )
    head = bytearray()
    with tempfile.TemporaryDirectory(prefix="dualtune-verify-") as directory:
        signature = Path(directory) / "signature"  # a copy: the original may be replaced meanwhile
        signature.write_bytes(_signature_of(bundle))
        options = ["-n", NAMESPACE, "-f", str(signers), "-I", trust.identity, "-s", str(signature)]
        done = _run(["-Y", "verify", *options], file, lambda piece: head.extend(piece[: HEAD_BYTES - len(head)]))
    if done.returncode:
        raise FormatError(
            f"{bundle}: has no valid signature of {trust.identity!r} by {signers}: {_message_of(done)}. Do not use it"
        )
    return bytes(head)


def _signature_of(bundle: Path) -> bytes:
    signature = path_of(bundle)
    if not signature.exists():
        raise FormatError(f"{bundle}: has no signature: {signature} is missing. Copy it too, or pack with --sign")
    with open_file(signature, max_bytes=MAX_SIGNATURE_BYTES) as file:
        return file.read(MAX_SIGNATURE_BYTES)


def _run(arguments: list[str], file: BinaryIO, see: Callable[[bytes], object]) -> subprocess.CompletedProcess[bytes]:
    """Run ssh-keygen on the file from its beginning, and pass what it reads to `see`, piece by piece."""
    program = shutil.which("ssh-keygen")
    if program is None:
        raise EnvironmentFault(
            "ssh-keygen, which creates and verifies signatures, is not installed. Install the OpenSSH client"
        )
    file.seek(0)
    command = [program, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin
        try:
            with contextlib.suppress(BrokenPipeError):  # ssh-keygen ended early; its error output says why
                while piece := file.read(_PIECE_BYTES):
                    interrupt.poll()
                    process.stdin.write(piece)
                    see(piece)
            out, err = process.communicate()
        except BaseException:
            process.kill()
            raise
    file.seek(0)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _message_of(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = (done.stderr + b"\n" + done.stdout).decode("utf-8", "replace").split("\n")
    text = "; ".join(line.strip() for line in lines if line.strip())
    return "".join(c if c.isprintable() else " " for c in text)[:300] or f"exit code {done.returncode}"
