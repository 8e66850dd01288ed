"""The training steps that are counted. Two layers each: every further layer adds the same.

`SHAPES` are of plain LoRA. `METHODS` are the other methods, optimizers and objectives, on a shape of those.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from dualtune.engine.memory.shapes import KNOWN

SMOLLM, TINYLLAMA, QWEN3 = "HuggingFaceTB/SmolLM2-135M", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "Qwen/Qwen3-8B"
MIXTURE = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 32000,
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


@dataclass(frozen=True)
class StepShape:
    """A model, and micro-batches of `rows` rows with `documents` documents each."""

    model: str | dict[str, Any]
    changes: dict[str, Any] = field(default_factory=lambda: {"num_hidden_layers": 2})
    quantization: str = "none"
    rows: int = 1
    tokens: int = 2048
    documents: int = 8
    dropout: float = 0.0
    checkpointing: bool = False
    fused: bool = True
    deterministic: bool = False
    # What is trained, and how: fields of `AdapterSpec`, and the name of the optimizer.
    adapter: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    labels: int = 1  # of each target, more than one with weights: a distillation
    compares: bool = False  # answers: the log-probabilities of all come first, and decide the weights

    def config(self) -> dict[str, Any]:
        """Return the config.json of the model."""
        return {**(KNOWN[self.model] if isinstance(self.model, str) else self.model), **self.changes}


SHAPES = {
    "padded": StepShape(SMOLLM, rows=4, tokens=512, documents=1),
    "dropout": StepShape(SMOLLM, dropout=0.05),
    "dropout, 3 layers": StepShape(SMOLLM, changes={"num_hidden_layers": 3}, dropout=0.05),
    "checkpointing": StepShape(SMOLLM, dropout=0.05, checkpointing=True),
    "nf4": StepShape(TINYLLAMA, quantization="nf4"),
    "affine4": StepShape(TINYLLAMA, quantization="affine4"),
    "qwen3": StepShape(QWEN3),
    "mixture": StepShape(MIXTURE, changes={}),
    "reference": StepShape(SMOLLM, fused=False, documents=1),
}

# The "dropout" and the "mixture" above with something else in place of LoRA, AdamW or the loss of plain targets. DPO,
# KTO and ORPO ask the same of an engine: what they compute of the log-probabilities is NumPy.
_LORA, _WHOLE = SHAPES["dropout"], {"method": "full", "targets": ()}
METHODS = {
    "dora": replace(_LORA, adapter={"method": "dora"}),
    "pissa": replace(_LORA, adapter={"init": "pissa"}),
    "merge_for: affine4": replace(_LORA, adapter={"merge_for": "affine4"}),
    "train_rows": replace(_LORA, adapter={"beside": {"rows": (5, 7, 11)}}),
    "experts": replace(SHAPES["mixture"], adapter={"experts": True}),
    "lion": replace(_LORA, optimizer="lion"),
    "muon": replace(_LORA, optimizer="muon"),
    "full": replace(_LORA, dropout=0.0, adapter=_WHOLE),
    "full, lion": replace(_LORA, dropout=0.0, adapter=_WHOLE, optimizer="lion"),
    "full, muon": replace(_LORA, dropout=0.0, adapter=_WHOLE, optimizer="muon"),
    "dpo, kto, orpo": replace(_LORA, compares=True),
    "distill": replace(_LORA, labels=9),
}
