"""The adapter in another library than dualtune: mlx-lm, as `mlx_lm.generate --adapter-path` loads it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np


class MlxLm:
    """`mlx_lm.load` of the base, with the adapter and without, in float32 on the default device."""

    dtype = "float32"
    warnings: tuple[str, ...] = ()  # mlx-lm refuses what it cannot load

    def __init__(self, base: Path, adapter: Path) -> None:
        self.version = f"mlx-lm {version('mlx-lm')}, mlx {version('mlx')}"
        self._paths = {False: None, True: str(adapter)}
        self._base = str(base)
        self._load = cache(self._loaded)

    def _loaded(self, adapted: bool) -> Any:
        from mlx_lm import load

        model: Any = load(self._base, adapter_path=self._paths[adapted])[0]
        model.set_dtype(mx.float32)
        model.eval()
        return model

    def logprobs(self, ids: Sequence[int], *, adapted: bool) -> np.ndarray:
        """Return log p float32 [T, V] after each token of a text, with the adapter or of the base alone."""
        logits_TV = self._load(adapted)(mx.array([list(ids)]))[0].astype(mx.float32)
        return np.array(logits_TV - mx.logsumexp(logits_TV, axis=-1, keepdims=True))
