"""Start Python on the null GPU: `python tests/nogpu/null/start.py [-m pytest …]`, with a CUDA build of torch.

The library lies in front of CUDA's own ones. TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR decide, as always, whether
compiled code is kept.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import build

ROOT = Path(__file__).parents[3]


def main() -> None:
    library = build.build(Path(sys.prefix) / "null-gpu")
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], os.environ | environment(library))


def environment(library: Path) -> dict[str, str]:
    """The variables with which a program gets the null GPU."""
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "backends"), str(Path(__file__).parent)]
    return {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # the workers of a pool would be started with the library, too
        "NULL_GPU_CAPABILITIES": os.environ.get("NULL_GPU_CAPABILITIES", "90,86"),
        "NULL_GPU_MIB": os.environ.get("NULL_GPU_MIB", "81559,24564"),  # an H100 and an RTX 3090 in nvidia-smi
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


if __name__ == "__main__":
    main()
