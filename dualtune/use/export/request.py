"""An export as data: the request, the distance from the model it stands for, and the loss on the held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dualtune.base import fields
from dualtune.base.errors import ConfigError, DataError
from dualtune.base.untrusted import read_json
from dualtune.config import load_config
from dualtune.data.documents import Data
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import Engine
from dualtune.model.formats.directory import MANIFEST_FILE, MAX_BYTES, Adapter
from dualtune.train.evaluation import evaluate, layout_of
from dualtune.train.fingerprints import PROMPTS, logprobs_of
from dualtune.train.generation.inference import load_tokenizer
from dualtune.train.state.run_dir import CONFIG
from dualtune.use.export.llama_environment import PLAIN, QUANTIZED
from dualtune.use.verify.verdict import VerifyVerdict

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
Begin = Callable[[str, str], None]  # of a phase: what is done, and with what


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

    run: float | None = None  # of the run's last evaluation, if that is the loss on the answers of the rows
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


# ----------------------------------------------------------------------------------------------------------------------
# How far one model is from another: log-probabilities after every token of fixed prompts.
#
# Shape suffixes: T tokens of a prompt, V vocabulary.

# Shares of what the adapter changes, by divergence. Rounding to bfloat16 costs a few thousandths of it.
LOST = 0.02
NOISE = 1e-6  # nats: a divergence that float32 makes by itself

Logprobs = Sequence[np.ndarray]  # float64 [T, V] for each prompt


@dataclass(frozen=True, slots=True)
class Deviation:
    """The distance of a model from the one it stands for, over all positions of the prompts."""

    kl: float  # mean Kullback-Leibler divergence, nats; infinite if the model computes NaN
    largest: float  # of a position, nats
    same_token: float  # share of the positions with the same most probable token


def prompts_of(tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of the prompts of the fingerprints."""
    return [tokenizer.encode(prompt, special=True).tolist() for prompt in PROMPTS]


def logprobs(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return the engine's log-probabilities, float64 [T, V] for each prompt."""
    return [values.astype(np.float64) for values in logprobs_of(engine, prompts, [*map(len, prompts)])]


def deviation(expected: Logprobs, actual: Logprobs) -> Deviation:
    """Compare p, which is expected, with q: Σ p log(p/q) in each position, over the tokens that both have."""
    kls, same = list[float](), list[bool]()
    for p_TV, q_TV in zip(expected, actual, strict=True):
        size = min(p_TV.shape[-1], q_TV.shape[-1])  # converters leave out or add rows beyond the vocabulary
        p_TV, q_TV = p_TV[:, :size], q_TV[:, :size]
        kl_T = (np.exp(p_TV) * (p_TV - q_TV)).sum(-1)
        kls += np.where(np.isfinite(kl_T), np.maximum(kl_T, 0.0), np.inf).tolist()
        same += (p_TV.argmax(-1) == q_TV.argmax(-1)).tolist()
    return Deviation(float(np.mean(kls)), float(np.max(kls)), float(np.mean(same)))


def lost_share(merge: Deviation, effect: Deviation) -> float:
    """Return the divergence of the merged model from base and adapter, as a share of what the adapter changes."""
    return merge.kl / max(effect.kl, NOISE / LOST)


# ----------------------------------------------------------------------------------------------------------------------
# The loss of an exported model on the rows that its run held out, beside the run's last evaluation.


# Objectives whose evaluation is the loss on the answers of the rows. Others compare answers, or judge samples.
_EVALUATED = ("sft", "distill")


class HeldOut:
    """The rows that a run held out, tokenized as in its training."""

    def __init__(self, run: Path, model: Path, adapter: Adapter | None, directory: Path | None) -> None:
        """Open the data of a run's config. DualtuneError, which says what is missing, if that cannot be done.

        `model`: the base, or the model that was trained whole. `directory`: that of the adapter.
        """
        if not (run / CONFIG).is_file():
            raise ConfigError(f"there is no run with a {CONFIG} around the adapter")
        config = load_config(run / CONFIG)
        tokenizer, _ = load_tokenizer(model, adapter, directory, "auto", config.data.special_tokens_in_text)
        self._documents, self._layout = Data(config).held_out_only(tokenizer).desirable(), layout_of(config)
        if not len(self._documents):
            raise DataError("the run held out no rows with an answer that is wanted")

    def loss(self, engine: Engine) -> float:
        """Return the mean loss over the target tokens, in nats; where answers are judged, of those that are wanted."""
        return evaluate(engine, self._documents, self._layout).eval_loss


def manifest_of(model: Path) -> dict[str, Any]:
    """Return the record of a model that a run has trained whole; empty for another one."""
    file = model / MANIFEST_FILE
    return read_json(file, max_bytes=MAX_BYTES) if file.is_file() else {}


def last_evaluation(metadata: dict[str, Any]) -> float | None:
    """Return the loss of a run's last evaluation by the manifest of its result.

    None if there was none, or if it was that of an objective with which the loss of a model does not compare.
    """
    training = fields.subtable(metadata, "training", "dualtune.json")
    is_loss = training.get("objective", "sft") in _EVALUATED
    return fields.number(training.get("eval_loss")) if is_loss else None
