"""Build and load the stand-in for a GPU. torch asks for its CUDA hooks once, so this comes before `import torch`."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("stand_in.cpp")


def load() -> None:
    """Register the stand-in in this process. Raises RuntimeError if torch is loaded already."""
    if "torch" in sys.modules:
        raise RuntimeError("torch is loaded already; load the stand-in before it")
    torch = Path(str(importlib.util.find_spec("torch").origin)).parent
    ctypes.CDLL(str(torch / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(_built(torch)), ctypes.RTLD_GLOBAL)


def _built(torch: Path) -> Path:
    """Compile the stand-in for this torch, once per machine."""
    key = hashlib.sha256(SOURCE.read_bytes() + (torch / "version.py").read_bytes()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"dualtune-stand-in-{os.getuid()}-{key}.so"
    if not library.exists():
        include = torch / "include"
        with tempfile.TemporaryDirectory(dir=library.parent) as place:
            built = Path(place) / library.name
            subprocess.run(
                ["g++", "-shared", "-fPIC", "-std=c++20", "-O0", f"-I{include}",
                 f"-I{include}/torch/csrc/api/include", str(SOURCE), "-o", str(built)],
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            built.replace(library)  # at once: another process may build it, too
    return library
