"""Build the null GPU for the CUDA build of torch of this interpreter.

Functions that its libraries need and that are not written here are added: each returns "not supported" and is counted
as "not implemented", so that a test fails and no call is silently a success.
"""

from __future__ import annotations

import fcntl
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).with_name("library")
NAMES = ("libnullgpu.so", "libcuda.so.1", "libnvidia-ml.so.1")  # one library: what loads it by another name gets it too
NOT_SUPPORTED = {"cublas": 15, "cuda": 801, "cu": 801, "nvml": 3}
DRIVER = re.compile(r"\bcu[A-Z]\w+")
NVML = re.compile(r"(?<=\0)nvml[A-Z]\w+(?=\0)")
LINKED = re.compile(r"(__)?(cublas|cuda|cu(?=[A-Z])(?!File)|nvml)\w+")


def build(directory: Path) -> Path:
    """Return the library; built anew, by one process at a time, if a source is newer."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _built(directory)


def _built(directory: Path) -> Path:
    packages = Path(str(importlib.util.find_spec("torch").origin)).parents[1]
    library = directory / NAMES[0]
    sources = sorted(SOURCES.glob("*.cpp"))
    newest = max(path.stat().st_mtime for path in (*SOURCES.iterdir(), Path(__file__)))
    if library.exists() and library.stat().st_mtime > newest:
        return library
    objects = [_compiled(source, directory, packages) for source in sources]
    stubs = directory / "not_implemented.cpp"
    stubs.write_text(_stubs(_wanted(packages) - _symbols("--defined-only", objects)))
    objects.append(_compiled(stubs, directory, packages))
    linked = directory / "linked.so"
    _run("g++", "-shared", "-Wl,-soname,libcuda.so.1", *objects, "-o", linked, "-ldl", "-lpthread")
    linked.replace(library)  # at once: another process may have it loaded
    for name in NAMES[1:]:
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(NAMES[0])
    return library


def _compiled(source: Path, directory: Path, packages: Path) -> Path:
    compiled = directory / f"{source.stem}.o"
    include = packages / "nvidia" / "cu13" / "include"
    options = ["-std=c++17", "-O1", "-Wall", "-fPIC", "-fvisibility=hidden", f"-I{include}"]
    _run("g++", *options, "-c", source, "-o", compiled)
    return compiled


def _wanted(packages: Path) -> set[str]:
    """The functions of CUDA and cuBLAS that torch and bitsandbytes link, or that torch and Triton look up by name."""
    callers = [*packages.glob("torch/lib/lib*.so"), *packages.glob("bitsandbytes/libbitsandbytes_cuda130.so")]
    by_torch = (packages / "torch/lib/libc10_cuda.so").read_bytes().decode("latin-1")
    by_triton = (packages / "triton/backends/nvidia/driver.c").read_text()
    of_driver = set(DRIVER.findall((packages / "nvidia/cu13/include/cuda.h").read_text()))
    looked_up = of_driver & set(DRIVER.findall(by_torch + by_triton)) | set(NVML.findall(by_torch))
    return _symbols("--undefined-only", callers) | looked_up


def _symbols(which: str, files: list[Path]) -> set[str]:
    listed = _run("nm", *(["-D"] if which == "--undefined-only" else []), which, *files)
    names = (line.split()[-1].partition("@")[0] for line in listed.splitlines() if line and not line.endswith(":"))
    return {name for name in names if LINKED.fullmatch(name)}


def _stubs(names: set[str]) -> str:
    head = 'extern "C" int null_gpu_not_implemented(const char*, int);\n'
    head += '#define MISSING(name, status) extern "C" __attribute__((visibility("default"))) int name() '
    head += "{ return null_gpu_not_implemented(#name, status); }\n"
    lines = (f"MISSING({name}, {NOT_SUPPORTED[LINKED.fullmatch(name)[2]]})\n" for name in sorted(names))
    return head + "".join(lines)


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stderr[-3000:]}")
    sys.stderr.write(done.stderr)
    return done.stdout
