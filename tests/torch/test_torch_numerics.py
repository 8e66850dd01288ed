"""What torch is set to while an engine computes, on the CPU: settings come back, whatever happens."""

import os

import pytest

torch = pytest.importorskip("torch")
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from dualtune_torch import numerics  # noqa: E402

MIXTURE = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def test_an_error_leaves_no_setting_behind():
    with pytest.raises(ZeroDivisionError), numerics.together(numerics.exact, numerics.deterministic)():
        assert torch.are_deterministic_algorithms_enabled()
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.allow_tf32
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.parametrize(("given", "kept"), [(":16:8", ":16:8"), (":4096:2", ":4096:8")])
def test_a_workspace_that_torch_accepts_stays(given, kept, monkeypatch):
    monkeypatch.setenv(numerics.WORKSPACE, given)
    with numerics.deterministic():
        assert os.environ[numerics.WORKSPACE] == kept


def test_experts_are_computed_without_what_torch_refuses(monkeypatch):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **MIXTURE)).eval()
    tokens, counted = torch.arange(8)[None], []
    expected, histc = model(tokens).logits, torch.histc
    monkeypatch.setattr(torch, "histc", lambda *args, **options: counted.append(1) or histc(*args, **options))
    model(tokens)
    assert counted, "this test no longer shows anything: the grouped product counts otherwise"
    numerics.use_fixed_experts(model)
    counted.clear()
    torch.testing.assert_close(model(tokens).logits, expected)
    assert not counted
