"""The Triton kernels compiled ahead of time for every architecture, without a GPU: registers, shared memory, spills.

    python benchmarks/triton_kernels.py

Each kernel is compiled exactly as it is launched: the code that launches it gets tensors without data, of the shapes
of real models, and its arguments are the signature. Compiler, assembler and disassembler come with Triton. Nothing
runs, so nothing here is a time. Writes results/triton_kernels.json, with which `tests/nogpu/kernels` compares what is
compiled today.
"""

from __future__ import annotations

import importlib
import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import record
import torch

ARCHITECTURES = (80, 86, 89, 90, 100, 120)  # A100, RTX 30, RTX 40, H100, B200, RTX 50
# The most shared memory of one block, in KiB: CUDA C++ programming guide, compute capabilities.
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# Tokens, input features, output features, rank, layers of the group.
SHAPES = {
    "SmolLM2-135M mlp, r8, 1000 tokens": (1000, 576, 1536, 8, 2),
    "Mistral-7B q k v, r16, 8192 tokens": (8192, 4096, 4096, 16, 3),
    "Llama-3-8B gate up, r64, 4096 tokens": (4096, 4096, 14336, 64, 2),
}
LORA = ("lora_down", "lora_dx", "lora_da", "lora_back_g")
WIDE = "u in float32"  # the variant of lora_back_g for `dualtune.engine.kernels.lora_backward`
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.uint8: "u8"}


class Launch(Exception):
    """Carries the arguments of a launch out of the code that wanted it."""


def main() -> None:
    cases = {f"{kernel}: {case}": compiled(kernel, case) for kernel, case in all_cases()}
    spilling = [name for name, case in cases.items() if any(part["stack_bytes"] for part in case["compiled"].values())]
    print(record.write("triton_kernels", {"cases": cases}), f"{len(cases)} cases, spilling: {spilling or 'none'}")


def all_cases() -> Iterator[tuple[str, str]]:
    for kernel, shape in itertools.product(LORA, SHAPES):
        yield from ((kernel, f"{shape}, {dtype}") for dtype in ("bfloat16", "float16"))
    yield from (("lora_back_g", f"{shape}, {WIDE}, bfloat16") for shape in SHAPES)
    for dtype in ("bfloat16", "float16", "float32"):
        yield "nf4_dequant", dtype
        yield from (("affine_dequant", f"{bits} bits, {dtype}") for bits in (4, 8))


def compiled(kernel: str, case: str, architectures: tuple[int, ...] = ARCHITECTURES) -> dict[str, Any]:
    """Return the grid and, for each architecture, what the assembler says of the machine code."""
    grid, arguments, options = launch(kernel, case)
    function = module_of(kernel).kernel
    return {
        "grid": list(grid),
        "bytes": dict(zip(("plain", "kernel"), bytes_moved(kernel, case, grid), strict=True)),
        "options": options,
        "compiled": {f"sm_{number}": resources(function, arguments, options, number) for number in architectures},
    }


def bytes_moved(kernel: str, case: str, grid: tuple[int, ...]) -> tuple[float, float]:
    """Count what the plain code and the kernel read and write in device memory, as the kernel's docstring derives it.

    A matrix that fits no cache counts each time. Matrices of rank width, A, B and the scales of scales are left out;
    parts of sums, in float32, are counted twice, written and read. For weights: bytes for each weight.
    """
    if kernel == "nf4_dequant":  # codes, scales; the plain code writes the scales in float32 and adds the offset
        size = getattr(torch, case).itemsize
        return 0.5 + (1 + 4 + 8 + 4) / 64 + size, 0.5 + 1 / 64 + size
    if kernel == "affine_dequant":
        bits, size = int(case[0]), getattr(torch, case.rpartition(" ")[2]).itemsize
        halves = 0.5 + 1 + 2 + 3 + 2 if bits == 4 else 0  # to int16, shift, or, and: two weights in two bytes
        return halves + 1 + size + 4 * size, bits / 8 + 2 * size / 64 + size
    M, in_dim, out_dim, r, layers = SHAPES[re.split(r", (?:bf|f|u)", case)[0]]
    x, S = 2 * M * in_dim, r * layers
    if kernel == "lora_back_g":
        return 2 * 2 * M * out_dim, 2 * M * out_dim + 8 * grid[0] * out_dim * r
    if kernel == "lora_dx":
        return 4 * x, 2 * x
    parts = 8 * grid[2] * S * (M if kernel == "lora_down" else in_dim)
    plain = {"lora_down": 3, "lora_da": 1}[kernel] * x
    return plain, x + (parts if grid[2] > 1 or kernel == "lora_da" else 0)


def module_of(kernel: str) -> Any:
    return importlib.import_module(f"dualtune_torch.kernels.gpu.{kernel}")


def launch(kernel: str, case: str) -> tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
    """Return grid, arguments and options of the first launch that the kernel's own code makes of a case."""

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def call(*arguments: Any, **options: Any) -> None:
                raise Launch(grid, arguments, options)

            return call

    module, kept = module_of(kernel), module_of(kernel).kernel
    module.kernel = Recorder()
    try:
        (launch_lora if kernel in LORA else launch_unpacking)(module, case)
    except Launch as found:
        return found.args
    finally:
        module.kernel = kept
    raise RuntimeError(f"{kernel} launched nothing for {case}")


def launch_lora(module: Any, case: str) -> None:
    shape, dtype_name = case.rsplit(", ", 1)
    (M, in_dim, out_dim, r, layers), dtype = SHAPES[shape.removesuffix(f", {WIDE}")], getattr(torch, dtype_name)
    S = r * layers

    def new(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    mask = new(M, dtype=torch.int32), new(in_dim, dtype=torch.int32), -(2**30) + 1, 1 / 0.9
    x, A, v = new(M, in_dim), new(S, in_dim), new(M, S)
    u = new(M, S, dtype=torch.float32 if shape.endswith(WIDE) else dtype)
    calls: dict[str, Callable[[], object]] = {
        "lora_down": lambda: module.lora_down(x, A, *mask),
        "lora_dx": lambda: module.add_dx(x, v, A, *mask),
        "lora_da": lambda: module.add_dA(new(S, in_dim, dtype=torch.float32), v, x, *mask),
        "lora_back_g": lambda: module.back_g(
            new(M, out_dim), new(out_dim, r), u[:, :r], 2.0, v[:, :r], new(out_dim, r, dtype=torch.float32)
        ),
    }
    calls[module.__name__.rpartition(".")[2]]()


def launch_unpacking(module: Any, case: str) -> None:
    from dualtune_torch.weights.affine import Packed

    def new(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    dtype, rows, columns = getattr(torch, case.rpartition(" ")[2]), 4096, 14336
    if module.__name__.endswith("nf4_dequant"):
        second = SimpleNamespace(code=new(256), absmax=new(rows * columns // 64 // 256))
        absmax = new(rows * columns // 64, dtype=torch.uint8)
        state = SimpleNamespace(
            shape=(rows, columns), dtype=dtype, absmax=absmax, code=new(16), offset=new(), state2=second
        )
        module.unpacked(new(rows * columns // 2, 1, dtype=torch.uint8), state)
    else:
        scales = new(rows, columns // 64, dtype=dtype)
        module.unpacked(Packed(new(rows, columns * int(case[0]) // 8, dtype=torch.uint8), scales, scales))


def resources(function: Any, arguments: tuple[Any, ...], options: dict[str, Any], number: int) -> dict[str, int]:
    """Compile for sm_<number>. Registers and stack are those of a thread; a stack above 0 is a spill."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, constants, attributes = signature(function, arguments)
    source = ASTSource(function, types, constants, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", number, 32), options=options)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = output(tools / "cuobjdump", "--dump-resource-usage", file.name)
        code = output(tools / "nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return {
        "registers": int(found[1]),
        "stack_bytes": int(found[2]),
        "shared_bytes": binary.metadata.shared,
        "tensor_core_instructions": len(re.findall(r"\b(?:HMMA|HGMMA|UTCHMMA)\b", code)),
    }


def signature(function: Any, arguments: tuple[Any, ...]) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Types, constants and divisibility, as Triton derives them from the arguments of a launch."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[Any, Any] = {}
    for place, (parameter, value) in enumerate(zip(function.params, arguments, strict=True)):
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            types[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            types[parameter.name] = f"*{TYPES[value.dtype]}"
        else:
            is_wide = isinstance(value, int) and not -(2**31) <= value < 2**31
            types[parameter.name] = "fp32" if isinstance(value, float) else "i64" if is_wide else "i32"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[place,] = [["tt.divisibility", 16]]
    return types, constants, attributes


def output(*command: object) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
