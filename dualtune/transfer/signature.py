"""A signature beside a bundle, made and checked by OpenSSH: `ssh-keygen -Y sign` and `-Y verify`.

It covers the whole file. https://man.openbsd.org/ssh-keygen#Y~5
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dualtune.errors import ConfigError, EnvironmentFault, FormatError

NAMESPACE = "dualtune-bundle"  # a signature made for anything else does not count
MAX_SIGNATURE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Trust:
    """Whose signature is wanted. The file is in the ALLOWED SIGNERS format of ssh-keygen(1)."""

    allowed_signers: Path
    identity: str


def path_of(bundle: Path) -> Path:
    return bundle.with_name(bundle.name + ".sig")


def sign(file: BinaryIO, key: Path) -> str:
    """The signature of an open file, as text. ssh-keygen may ask for a passphrase."""
    if not key.is_file():
        raise ConfigError(f"--sign: {key}: no such file; give an SSH key, private, or public if ssh-agent has it")
    done = _run(["-Y", "sign", "-n", NAMESPACE, "-f", str(key)], file)
    if done.returncode:
        raise ConfigError(f"--sign: {key}: ssh-keygen could not sign with it: {_said(done)}. Nothing was written")
    return done.stdout.decode("ascii", "replace")


def verify(file: BinaryIO, bundle: Path, trust: Trust) -> None:
    """FormatError unless the signature beside the bundle is that of the identity over all of the open file."""
    signature, signers = path_of(bundle), trust.allowed_signers
    if not signers.is_file():
        raise ConfigError(
            f"--verify-signature: {signers}: no such file; a line of it is: {trust.identity} ssh-ed25519 …"
        )
    if not signature.is_file():
        raise FormatError(f"{bundle}: has no signature: {signature} is missing. Ask for it, or sign with --sign")
    if signature.stat().st_size > MAX_SIGNATURE_BYTES:
        raise FormatError(f"{signature}: is larger than {MAX_SIGNATURE_BYTES} bytes, which no signature is")
    options = ["-n", NAMESPACE, "-f", str(signers), "-I", trust.identity, "-s", str(signature)]
    done = _run(["-Y", "verify", *options], file)
    if done.returncode:
        raise FormatError(
            f"{bundle}: is not signed by {trust.identity!r} as {signers} has it: {_said(done)}. Do not use it"
        )


def _run(arguments: list[str], file: BinaryIO) -> subprocess.CompletedProcess[bytes]:
    program = shutil.which("ssh-keygen")
    if program is None:
        raise EnvironmentFault(
            "ssh-keygen is not installed, which makes and checks signatures. Install OpenSSH's client"
        )
    file.seek(0)
    try:
        return subprocess.run([program, *arguments], stdin=file, capture_output=True, check=False)
    finally:
        file.seek(0)


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = (done.stderr + b"\n" + done.stdout).decode("utf-8", "replace").split("\n")
    text = "; ".join(line.strip() for line in lines if line.strip())
    return "".join(c if c.isprintable() else " " for c in text)[:300] or f"exit code {done.returncode}"
