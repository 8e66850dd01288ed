"""The adapter in another library than dualtune: PEFT on a model of transformers, as a user would load it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Peft:
    """`PeftModel.from_pretrained` on `AutoModelForCausalLM`, in float32 on the CPU."""

    dtype = "float32"

    def __init__(self, base: Path, adapter: Path) -> None:
        import peft
        import transformers

        self.version = f"peft {peft.__version__}, transformers {transformers.__version__}"
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")  # PEFT warns of tensors that it does not find
            self._model: Any = peft.PeftModel.from_pretrained(model, adapter)
        self._model.eval()
        self.warnings = tuple(str(warning.message) for warning in caught if "adapter keys" in str(warning.message))

    def logprobs(self, ids: Sequence[int], *, adapted: bool) -> np.ndarray:
        """Return log p float32 [T, V] after each token of a text, with the adapter or of the base alone."""
        with torch.inference_mode(), contextlib.nullcontext() if adapted else self._model.disable_adapter():
            logits_TV = self._model(torch.tensor([list(ids)])).logits[0].float()
        return torch.log_softmax(logits_TV, dim=-1).numpy()
