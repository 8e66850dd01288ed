"""A family under test: where its files lie, and what several stages ask of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.config import Config
from dualtune.engine.backend import Backend, Batch, Engine, get_backend
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.adapter import Tensors
from dualtune.train.generation.inference import load_model
from dualtune.train.state.metrics import read_rows
from family.make import auto_class, auto_classes
from family.mlx_only import is_known_to_transformers

BACKENDS = ("torch", "mlx")

TEXT_TOKENS = 256  # of the tokenizer; later ids may stand for images
LENGTHS = (23, 17, 31)  # some longer than the sliding window, none a multiple of a head size or chunk


class Needs(Exception):
    """A stage has nothing to look at, because an earlier one has left nothing."""


class Differs(Exception):
    """Two numbers that should be equal are not."""


class Told(Exception):
    """Something does not work that cannot work, and the user is told."""


class Lost(Exception):
    """Tensors of the model are gone."""


@dataclass
class Case:
    family: str
    directory: Path
    backends: dict[str, Backend] = field(default_factory=dict)

    @property
    def model_dir(self) -> Path:
        return self.directory / "model"

    @property
    def data(self) -> Path:
        return self.directory / "train.jsonl"

    @property
    def batch(self) -> Batch:
        return random_batch(LENGTHS, TEXT_TOKENS)

    @property
    def real(self) -> np.ndarray:
        return self.batch.segments_BT > 0

    def backend(self, name: str) -> Backend:
        if name not in self.backends:
            self.backends[name] = get_backend(name, "cpu")
        return self.backends[name]

    def config(self, name: str, *, packing: bool = False) -> Config:
        """Return the config of a run: default targets, and a rate at which four steps change the function."""
        return Config.model_validate({
            "model": {"name": str(self.model_dir), "dtype": "float32"},
            "adapter": {"rank": 4, "alpha": 8.0, "dropout": 0.0},
            "data": {"train": str(self.data), "eval": None, "max_length": 64, "packing": packing},
            "train": {"documents_per_step": 4, "micro_batch_tokens": 160, "learning_rate": 5e-3, "epochs": 1},
            "run": {"dir": str(self.run_dir(name, packing=packing)), "save_every": None, "eval_every": None},
        })  # fmt: skip

    def run_dir(self, name: str, *, packing: bool = False) -> Path:
        return self.directory / (f"{name}-packed" if packing else name)

    def losses(self, name: str, *, packing: bool = False) -> list[float]:
        """Return the loss of each step of a run."""
        file = self.run_dir(name, packing=packing) / "metrics.jsonl"
        if not file.exists():
            raise Needs
        return [row["loss"] for row in read_rows(file) if "loss" in row]

    def adapter(self, name: str) -> Path:
        path = self.run_dir(name) / "adapter"
        if not path.exists():
            raise Needs
        return path

    def engine(self, name: str, adapter: Path | None = None, model_dir: Path | None = None) -> Engine:
        return load_model(self.backend(name), str(model_dir or self.model_dir), adapter, dtype="float32").engine

    def logprobs(self, name: str, adapter: Path | None = None, model_dir: Path | None = None) -> np.ndarray:
        """Return what an engine computes for the batch; padding is 0."""
        return np.where(self.real[..., None], self.engine(name, adapter, model_dir).logprobs(self.batch), 0)

    @cached_property
    def in_transformers(self) -> bool:
        return is_known_to_transformers(self.family)

    @cached_property
    def stock(self) -> np.ndarray:
        """What transformers computes for the documents of the batch, one after another; mlx-lm, if only it can."""
        return self.of_transformers(self.stock_model()[0]) if self.in_transformers else self.of_mlx_lm(self.model_dir)

    def stock_model(self, model_dir: Path | None = None, kind: str | None = None) -> tuple[Any, Any]:
        """Return a model that transformers has loaded, and what it says of missing and unexpected tensors."""
        import transformers

        if not self.in_transformers:
            raise Needs
        path = model_dir or self.model_dir
        config = transformers.AutoConfig.from_pretrained(path)
        chosen = getattr(transformers, kind) if kind else auto_class(config)
        return chosen.from_pretrained(path, dtype="float32", output_loading_info=True)

    def kinds(self) -> list[str]:
        """Return the names of the auto classes of transformers that load this model."""
        import transformers

        if not self.in_transformers:
            raise Needs
        return [kind.__name__ for kind in auto_classes(transformers.AutoConfig.from_pretrained(self.model_dir))]

    def of_transformers(self, model: Any) -> np.ndarray:
        import torch

        model = _writing_part(model.eval())
        rows = []
        for tokens, real in zip(self.batch.tokens_BT, self.real, strict=True):
            ids = torch.from_numpy(tokens[real]).long()[None]
            with torch.no_grad():
                logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            rows.append(logits[0].float().log_softmax(-1).numpy())
        return self._padded(rows)

    def of_mlx_lm(self, model_dir: Path, adapter: Path | None = None) -> np.ndarray:
        import mlx.core as mx
        import mlx_lm

        model = mlx_lm.load(str(model_dir), adapter_path=adapter and str(adapter))[0]  # type: ignore[arg-type]
        rows = []
        for tokens, real in zip(self.batch.tokens_BT, self.real, strict=True):
            logits = model(mx.array(tokens[real])[None])[0].astype(mx.float32)
            rows.append(np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
        return self._padded(rows)

    def _padded(self, rows: list[np.ndarray]) -> np.ndarray:
        found = np.zeros((*self.real.shape, rows[0].shape[-1]), np.float32)
        for b, row in enumerate(rows):
            found[b, : len(row)] = row
        return found


def _writing_part(model: Any) -> Any:
    """Return the model that computes: the one within a model that is several side by side (Qwen Omni)."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(whole, "thinker", model)


def check_close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> float:
    """Return the largest difference of log-probabilities, relative below −1. Differs if it exceeds the tolerance."""
    width = min(found.shape[-1], expected.shape[-1])  # heads padded to a round number
    found, expected = found[..., :width], expected[..., :width]
    gap = float((np.abs(found - expected) / np.maximum(1, np.abs(expected))).max())
    if not gap <= tolerance:
        raise Differs(f"log p differ by {gap:.1e}")
    return gap


def stored(model_dir: Path) -> Tensors:
    """Return all tensors of a model directory."""
    from safetensors.torch import load_file

    return {name: w for file in sorted(model_dir.glob("*.safetensors")) for name, w in load_file(file).items()}  # type: ignore[misc]
