"""Checkpoints in MXFP4 and FP8: the same numbers as the plain model with the weights that they stand for."""

import json

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing.conformance import random_adapter
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.engine.testing.tolerances import LOGPROBS
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune.use.export.merge import check_plain

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

SPEC = AdapterSpec(rank=4, alpha=6.0, dropout=0.0, targets=("q_proj", "o_proj"))
BATCH = random_batch([9, 16], 96)
# E2M1 by its code: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats, section 5.3.3).
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4 = torch.cat([FP4, -FP4])
SHAPE = {
    "vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


def gpt_oss():
    """Experts [E, in, out] are stored as blocks [E, out, in / 32, 16], two codes a byte, and exponents."""
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=64, head_dim=16, num_local_experts=4, num_experts_per_tok=2, **SHAPE
    )

    def store(name, weight):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return weight, {name: weight}
        E, I, O = weight.shape  # noqa: E741
        codes = torch.randint(0, 16, (E, O, I // 32, 32))
        exponents = torch.randint(118, 124, (E, O, I // 32))
        plain = (FP4[codes] * 2.0 ** (exponents[..., None] - 127)).view(E, O, I).transpose(1, 2)
        pairs = codes.to(torch.uint8).unflatten(-1, (16, 2))
        blocks = pairs[..., 0] | pairs[..., 1] << 4
        return plain.contiguous(), {f"{name}_blocks": blocks, f"{name}_scales": exponents.to(torch.uint8)}

    return config, store, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def qwen3():
    """Linear layers are stored as E4M3 with a scale for each block of 128 x 128."""
    config = transformers.Qwen3Config(hidden_size=256, intermediate_size=384, head_dim=64, **SHAPE)

    def store(name, weight):
        if "_proj" not in name:
            return weight, {name: weight}
        scales = torch.rand([-(-size // 128) for size in weight.shape]) / 100 + 0.01
        small = (torch.randn(weight.shape) * 2).to(torch.float8_e4m3fn)
        by_weight = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
        return small.float() * by_weight, {name: small, f"{name}_scale_inv": scales}

    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    return config, store, quantization | {"modules_to_not_convert": ["lm_head"]}


@pytest.fixture(params=[gpt_oss, qwen3], ids=["mxfp4", "fp8"])
def directories(request, tmp_path):
    """The plain model, and the stored one."""
    config, store, quantization = request.param()
    torch.manual_seed(0)
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(plain)
    stored.mkdir()
    weights = safetensors.load_file(plain / "model.safetensors")
    pairs = {name: store(name, weight) for name, weight in weights.items()}
    safetensors.save_file({name: pair[0] for name, pair in pairs.items()}, plain / "model.safetensors")
    parts = {name: part for _, parts in pairs.values() for name, part in parts.items()}
    assert len(parts) > len(weights)
    safetensors.save_file(parts, stored / "model.safetensors")
    keys = json.loads((plain / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(keys | {"quantization_config": quantization}))
    return plain, stored


def request_of(path, quantization="auto", init="pretrained"):
    return LoadRequest(path, "float32", quantization, init, SPEC, OptimizerSpec(), seed=4)


def test_the_weights_are_those_that_the_codes_stand_for(directories, open_backend, capfd):
    backend, results = open_backend("torch"), []
    for path in directories:
        engine = backend.load(request_of(path))
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        engine.forward_backward(BATCH, divisor=BATCH.num_targets)
        step = engine.optim_step(lr=1e-2, max_grad_norm=1.0)
        results.append((engine.logprobs(BATCH), float(step.loss), float(step.grad_norm)))
    kind = json.loads((directories[1] / "config.json").read_text())["quantization_config"]["quant_method"]
    assert engine.description.quantization == "none"
    assert engine.description.quantization_reason == f"stored as {kind}, dequantized as it was read"
    assert np.array_equal(results[0][0], results[1][0]) and results[0][1:] == results[1][1:]
    assert "dequantize" not in "".join(capfd.readouterr())


def test_an_adapter_is_merged_into_plain_matrices_and_packed_ones_are_refused(directories, open_backend, tmp_path):
    """gpt-oss has experts in MXFP4, which are copied, and attention in plain weights."""
    backend, out = open_backend("torch"), tmp_path / "merged"
    engine = backend.load(request_of(directories[1]))
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    check_plain(directories[1])
    if "fp8" in engine.description.quantization_reason:
        with pytest.raises(ConfigError, match=r"is stored as F8_E4M3, so the adapter of .* cannot be added"):
            engine.save_merged(out)
        return
    engine.save_merged(out)
    merged = backend.load(request_of(out))
    merged.load_adapter_state(merged.neutral_state())
    assert np.abs(merged.logprobs(BATCH) - engine.logprobs(BATCH)).max() <= LOGPROBS
    before, after = (safetensors.load_file(path / "model.safetensors") for path in (directories[1], out))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        f"model.layers.{i}.self_attn.{name}.weight" for i in range(2) for name in ("q_proj", "o_proj")
    }


def test_another_format_is_refused_with_a_way_out(directories, open_backend):
    with pytest.raises(ConfigError) as caught:
        open_backend("torch").load(request_of(directories[1], quantization="nf4"))
    message = str(caught.value)
    assert message.startswith("model.quantization: got 'nf4', but ") and "Allowed: auto, none" in message


def test_random_weights_need_no_stored_ones(directories, open_backend):
    engine = open_backend("torch").load(request_of(directories[1], init="random"))
    assert np.isfinite(engine.logprobs(BATCH)).all()
