"""Each model continues a text in a way that computes what it computes of the whole text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
from dualtune.engine.decoding import CannotBatch  # noqa: E402
from dualtune_torch.host.generation import TextContinuation, crop_on_device  # noqa: E402

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, **HEADS),
    "mamba": lambda: transformers.MambaConfig(**SIZES, state_size=4),
    "rwkv": lambda: transformers.RwkvConfig(**SIZES, attention_hidden_size=32, context_length=64),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_next_logits_are_those_of_the_whole_text(kind: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    continuation, held = TextContinuation(model, torch.no_grad), None
    tokens = torch.arange(12)[None] * 5 % 64
    with torch.no_grad():
        expected_TV = model(tokens, use_cache=False).logits[0].numpy()
    for begin, end in ((0, 4), (4, 5), (5, 9), (9, 10)):
        found_V, held = continuation.next_logits(tokens[0, begin:end].tolist(), held)
        np.testing.assert_allclose(found_V, expected_TV[end - 1], atol=1e-4)
    if kind == "llama":
        continuation.check_batchable()
        assert crop_on_device(held, 6)
        found_V, held = continuation.next_logits(tokens[0, 4:6].tolist(), held)
        np.testing.assert_allclose(found_V, expected_TV[5], atol=1e-4)
    else:
        assert not crop_on_device(held, 6)
        with pytest.raises(CannotBatch):
            continuation.check_batchable()


def test_a_model_that_ignores_its_cache_computes_the_whole_text() -> None:
    """As Mamba 2 and RWKV do of a cache that they do not know."""

    class Forgetful(torch.nn.Module):
        device = torch.device("cpu")

        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(64, 64)
            self.config = transformers.LlamaConfig(**SIZES, **HEADS)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.table

        def forward(self, tokens: Any, past_key_values: Any = None, use_cache: bool = False) -> Any:
            return transformers.modeling_outputs.CausalLMOutput(logits=self.table(tokens).cumsum(1))

    model: Any = Forgetful()
    continuation = TextContinuation(model, torch.no_grad)
    _, held = continuation.next_logits([3, 4], None)
    found_V, _ = continuation.next_logits([5], held)
    np.testing.assert_allclose(found_V, model.table.weight[3:6].sum(0).detach().numpy(), rtol=1e-5)
