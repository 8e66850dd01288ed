"""The settings of each peer, in the peer's own names: its defaults, and what its documentation and code offer.

Settings that change the mathematics (rank, dropout, optimizer, learning rate, clipping, documents of a step) are the
same for all, and peers_sides.py sets them. Of several "best" settings, the fastest in a few steps is used.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peers_inputs import DOCUMENTS_PER_STEP

Settings = dict[str, Any]


def hf(micro_batch: int, attention: str, *, dtype: str = "bfloat16", autocast: bool = False) -> Settings:
    model = {"dtype": dtype, "attn_implementation": attention}
    return {"micro_batch": micro_batch, "autocast": autocast} | model


def accumulated(micro_batch: int) -> Settings:
    """The documents of a step in micro-batches."""
    return {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": DOCUMENTS_PER_STEP // micro_batch,
    }


def trl(micro_batch: int, attention: str, *, dtype: str = "bfloat16", **arguments: Any) -> Settings:
    """bf16, which is TRL's own default, without checkpointing. `padding_free` makes one row of a micro-batch, as
    packing does, which would choose other documents for a step."""
    model = {"dtype": dtype, "attn_implementation": attention}
    return {"model": model, "arguments": accumulated(micro_batch) | {"gradient_checkpointing": False} | arguments}


def factory(attention: str, **arguments: Any) -> Settings:
    return {"bf16": True, "disable_gradient_checkpointing": True, "flash_attn": attention} | arguments


def axolotl(micro_batch: int, attention: str, **arguments: Any) -> Settings:
    """Without sample_packing, which would choose other documents for a step."""
    batch = {"micro_batch_size": micro_batch, "gradient_accumulation_steps": DOCUMENTS_PER_STEP // micro_batch}
    return batch | {"attn_implementation": attention} | arguments


def unsloth(micro_batch: int, *, dtype: str | None = None, **arguments: Any) -> Settings:
    """Checkpointing is switched off in all three places."""
    off, batch = {"use_gradient_checkpointing": False}, accumulated(micro_batch)
    model = off | {"dtype": dtype} if dtype else off
    return {"model": model, "adapter": off, "arguments": batch | {"gradient_checkpointing": False} | arguments}


PADDING_FREE = {"padding_free": True, "max_length": None}
LIGER = {"use_liger_kernel": True}
IN_FLOAT32 = {"dtype": "float32", "bf16": False}
DEFAULTS: dict[str, Settings] = {
    "hf_peft": hf(8, "sdpa"),  # a loop has no defaults: these are those of the libraries
    "trl": {"model": {"dtype": "float32"}, "arguments": {}},
    "llamafactory": {},
    "axolotl": {},
    "unsloth": {"model": {}, "adapter": {}, "arguments": {}},
    "mlx_lm": {},
}
# What their documentation recommends for short documents. On a CPU their single documents can be faster.
PACKED: dict[str, Settings] = {
    "trl": trl(8, "sdpa", **PADDING_FREE),
    "llamafactory": factory("sdpa", neat_packing=True),
}
BEST: dict[str, dict[str, list[Settings]]] = {
    "cpu": {
        "hf_peft": [
            hf(1, "eager"), hf(8, "sdpa"), hf(1, "eager", autocast=True), hf(2, "eager"),
            hf(2, "eager", autocast=True), hf(1, "sdpa"), hf(2, "sdpa"), hf(4, "sdpa"),
        ],
        "trl": [
            trl(1, "eager", bf16=False), trl(8, "sdpa", **PADDING_FREE), trl(1, "eager"), trl(1, "sdpa"),
            trl(2, "eager", **PADDING_FREE), trl(8, "eager", **PADDING_FREE),
        ],
        "llamafactory": [
            factory("disabled", **accumulated(1)), factory("sdpa", **accumulated(1)),
            factory("disabled", neat_packing=True), factory("sdpa", neat_packing=True),
        ],
        "axolotl": [
            axolotl(1, "eager", bf16=False), axolotl(1, "eager", bf16=True), axolotl(1, "sdpa", bf16=True),
            axolotl(2, "sdpa", bf16=True), axolotl(8, "sdpa", bf16=True),
        ],
        "unsloth": [unsloth(8), unsloth(4), unsloth(2), unsloth(1)],
    },
    "cuda": {
        "hf_peft": [hf(8, "sdpa"), hf(8, "flash_attention_2"), hf(4, "sdpa"), hf(8, "sdpa", autocast=True)],
        "trl": [
            trl(8, "flash_attention_2", **PADDING_FREE, **LIGER), trl(8, "sdpa", **PADDING_FREE, **LIGER),
            trl(8, "sdpa", **LIGER), trl(8, "sdpa", **PADDING_FREE),
        ],
        "llamafactory": [
            factory("fa2", neat_packing=True, enable_liger_kernel=True),
            factory("sdpa", neat_packing=True, enable_liger_kernel=True), factory("sdpa", enable_liger_kernel=True),
        ],
        "axolotl": [axolotl(8, "flash_attention_2", bf16=True), axolotl(8, "sdpa", bf16=True)],
        "unsloth": [unsloth(8, **PADDING_FREE), unsloth(8), unsloth(2)],
    },
    "mlx": {
        # It cuts batches before it shuffles them, so with another size a step would take other documents.
        "mlx_lm": [{}],
    },
}  # fmt: skip
# In float32 on a CPU.
BEST_IN_FLOAT32: dict[str, list[Settings]] = {
    "hf_peft": [hf(8, "sdpa", dtype="float32"), hf(1, "eager", dtype="float32")],
    "trl": [trl(8, "sdpa", **IN_FLOAT32), trl(8, "sdpa", **IN_FLOAT32, **PADDING_FREE)],
    "llamafactory": [factory("sdpa", bf16=False), factory("sdpa", bf16=False, neat_packing=True)],
    "axolotl": [axolotl(8, "sdpa", bf16=False), axolotl(1, "eager", bf16=False)],
    "unsloth": [unsloth(8, **IN_FLOAT32), unsloth(1, **IN_FLOAT32)],
}  # fmt: skip

# --- environments ---

TORCH = "torch==2.13.0"
# The arguments of pip, call by call. The last releases of Unsloth ask for a certifi that not every index has yet.
PACKAGES: dict[str, list[list[str]]] = {
    "hf_peft": [["transformers==5.23.0", "peft==0.21.2", "accelerate"]],
    "trl": [["trl==1.16.0", "peft==0.21.2"]],
    "llamafactory": [["llamafactory==0.9.5"]],
    "axolotl": [["axolotl==0.19.0"]],
    "unsloth": [["unsloth"], ["--no-deps", "unsloth==2026.10.9", "unsloth_zoo==2026.10.9"]],
    "mlx_lm": [["mlx[cpu]" if sys.platform == "linux" else "mlx", "mlx-lm"]],
}
MODULES = {"hf_peft": "peft", "trl": "trl", "llamafactory": "llamafactory", "axolotl": "axolotl",
           "unsloth": "unsloth", "mlx_lm": "mlx_lm"}  # fmt: skip
ON_CUDA = {
    "trl": ["liger-kernel", "bitsandbytes"],
    "hf_peft": ["bitsandbytes"],
    "llamafactory": ["liger-kernel", "bitsandbytes"],
}


def python_of(peer: str, envs: Path) -> Path | None:
    """The interpreter of the peer's environment; this one, if there is none and it has the peer; or None."""
    python = envs / peer / "bin" / "python"
    if python.exists():
        return python
    return Path(sys.executable) if find_spec(MODULES[peer]) else None


def make_env(peer: str, envs: Path, platform: str) -> None:
    """torch first and alone, so that nothing that depends on it can choose another build."""
    folder = envs / peer
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if peer != "mlx_lm":
        subprocess.run([*pip, "install", TORCH], check=True)
    extra = ON_CUDA.get(peer, []) if platform == "cuda" else []
    for arguments in [*PACKAGES[peer], *([extra] if extra else [])]:
        constraint = [] if peer == "mlx_lm" or "--no-deps" in arguments else [TORCH]
        subprocess.run([*pip, "install", *constraint, *arguments], check=True)
    for package in ("torchvision", "torchaudio"):
        drop_if_broken(folder, package, pip)


def drop_if_broken(folder: Path, package: str, pip: list[Any]) -> None:
    """PyPI's builds do not load beside a torch for the CPU. Text needs neither, though LLaMA-Factory imports one."""
    python = folder / "bin" / "python"
    if has(python, package) and fails(python, f"import {package}"):
        subprocess.run([*pip, "uninstall", "--yes", package], check=True)
        if package == "torchaudio":
            [site] = (folder / "lib").glob("python*/site-packages")
            (site / "torchaudio.py").write_text("")


def has(python: Path, package: str) -> bool:
    return not fails(python, f"import importlib.metadata; importlib.metadata.version({package!r})")


def fails(python: Path, code: str) -> bool:
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode != 0


def environment(work: Path, platform: str, threads: int) -> dict[str, str]:
    """The variables of every measured process, ours and theirs."""
    return os.environ | {
        "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1",
        "DUALTUNE_CACHE": str(work / "cache"), "HF_DATASETS_CACHE": str(work / "datasets"),
        "AXOLOTL_DO_NOT_TRACK": "1", "PYTHONDONTWRITEBYTECODE": "",  # else every start compiles all libraries
    } | ({} if platform == "cuda" else {"CUDA_VISIBLE_DEVICES": "", "UNSLOTH_FORCE_CPU": "1"})  # fmt: skip
