"""What is exported, for which program, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.export.deviation import Deviation, Logprobs
from dualtune.export.llama_environment import PLAIN, QUANTIZED
from dualtune.verify.verdict import VerifyVerdict

MLX_BITS = {f"affine{bits}": bits for bits in (2, 3, 4, 6, 8)}
# target -> the values of --quantize, the first of which is the default
KINDS = {
    "hf": ("none", "nf4"),
    "mlx": ("none", *MLX_BITS),
    "gguf": ("bf16", *(kind for kind in PLAIN if kind != "bf16"), *QUANTIZED),
    "ollama": ("q4_k_m", *PLAIN, *(kind for kind in QUANTIZED if kind != "q4_k_m")),
    "lmstudio": ("q4_k_m", *PLAIN, *(kind for kind in QUANTIZED if kind != "q4_k_m")),
}
Tell = Callable[[str], None]


@runtime_checkable
class WritesNf4(Protocol):
    """A backend that writes bitsandbytes' NF4."""

    def write_nf4(self, source: Path, out: Path) -> None:
        """Write a plain model directory in NF4 to a new directory."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """What to export."""

    adapter: Path  # without a base: a model, which was trained whole
    base: str | None
    out: Path
    target: str  # a key of KINDS
    kind: str  # one of KINDS[target]
    name: str  # of the model, in the names of files
    dtype: str = "auto"  # of the merged weights; auto: as the base is stored
    system: str | None = None  # ollama: the system message
    other_base: bool = False  # whether the base may be another one than that of the training
    compares_base: bool = True  # whether the base is quantized too, to compare what that costs
    run: Path | None = None  # the run whose held-out rows the export is evaluated on; None: it is not


@dataclass(slots=True)
class HeldOutLosses:
    """Mean losses on the rows that the run held out, in nats; None where nothing was measured."""

    run: float | None = None  # of the run's last evaluation
    merged: float | None = None  # of the merged model, or of the one that was trained whole
    written: float | None = None  # of what was written, if that is not the merged model
    unknown: str | None = None  # why the export was not evaluated


@dataclass(slots=True)
class Exported:
    """What was written, and how far each step is from what it stands for. A whole model has no `effect` and `merge`."""

    files: list[str] = field(default_factory=lambda: [])
    verdict: VerifyVerdict | None = None  # on base and adapter as they are here; None: nothing to compare them with
    effect: Deviation | None = None  # of base and adapter from the base: what the adapter changes
    merge: Deviation | None = None  # of the merged model from base and adapter
    lost: float | None = None  # the merge's share of what the adapter changes that it loses
    result: Deviation | None = None  # of what was written from base and adapter, if it is not the merged model
    base: Deviation | None = None  # of the base, quantized alike, from the base
    loss: HeldOutLosses = field(default_factory=HeldOutLosses)
    stops: list[str] = field(default_factory=lambda: [])  # the texts of the tokens that end an answer
    trained_on: str | None = None  # the form of the base in the adapter's training: none, nf4, …; None: not recorded
    notes: list[str] = field(default_factory=lambda: [])


@dataclass(frozen=True, slots=True)
class Expected:
    """What the exported model is to compute."""

    tokenizer: Tokenizer
    prompts: list[list[int]]
    tuned: Logprobs
    base: Logprobs | None = None
