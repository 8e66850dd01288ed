"""Which fast pieces a model gets: families against their own code, and what is said of those that get less."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, gradient, random_adapter
from dualtune.engine.testing.tiny_models import pack, random_batch
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dualtune_torch.kernels import attention, choose, compiled, trial  # noqa: E402

DOCUMENTS = random_batch([9, 16, 5, 12], 96)
PACKED = pack(DOCUMENTS, [[2, 0, 3], [1]])
SPEC = AdapterSpec(rank=4, alpha=6.0, dropout=0.1, targets=("all-linear",))
SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
ALL = {"lora", "attention", "loss"}
BLOCKS = {"norms", "mlp", "rotary"}
# What each family gets without and with a compiler; whatever else there is stays plain, and is said to.
FAMILIES = {
    "Llama": (GROUPED, ALL | BLOCKS),
    "Mistral": (GROUPED | {"sliding_window": 8}, ALL | BLOCKS),
    "Qwen2": ({"num_key_value_heads": 2}, ALL | BLOCKS),
    "Qwen3": (GROUPED, ALL | BLOCKS),
    "Gemma": (GROUPED, ALL | BLOCKS),
    "Gemma2": (GROUPED | {"sliding_window": 8, "attn_logit_softcapping": 2.0}, ALL | BLOCKS),
    "Gemma3Text": (GROUPED | {"sliding_window": 8}, ALL | BLOCKS),
    "Phi": ({}, ALL | {"rotary"}),
    "Phi3": ({"num_key_value_heads": 2}, ALL | {"norms", "rotary"}),
    "GPT2": ({}, ALL),  # Conv1D, LayerNorm, learned positions
    "Granite": ({"num_key_value_heads": 2, "logits_scaling": 1.0}, ALL | BLOCKS),
    "Cohere": ({"num_key_value_heads": 2}, {"lora", "attention", "mlp"}),  # scaled logits, interleaved rotation
    "Mixtral": (GROUPED | {"num_local_experts": 4}, ALL | {"norms", "rotary"}),
    "GptOss": (  # sinks
        GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        {"lora", "loss"},
    ),
}


@pytest.fixture
def load(open_backend, tmp_path):
    backend = open_backend("torch")

    def load_(family, kernels="auto", dtype="float32", **changes):
        config = getattr(transformers, f"{family}Config")(**SHAPE | FAMILIES[family][0] | changes)
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
        request = LoadRequest(
            tmp_path / "model", dtype, "auto", "pretrained", SPEC, OptimizerSpec(), seed=4, kernels=kernels
        )
        engine = backend.load(request)
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        return engine

    return load_


def used(engine):
    fused = engine.description.kernels.split("; ")[0]
    return set(fused.removeprefix("fused: ").split(", "))


def assert_same(engine, plain, batches=(DOCUMENTS, PACKED)):
    for batch in batches:
        found, expected = (e.evaluate(batch).loss_sum / batch.num_targets for e in (engine, plain))
        assert abs(found - expected) <= tolerances.LOGPROBS
        assert_close(gradient(engine, batch), gradient(plain, batch), tolerances.GRADIENT)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_computed_alike(family, load):
    engine = load(family)
    assert used(engine) == FAMILIES[family][1] - BLOCKS
    assert "nothing is compiled for so small a model" in engine.description.kernels
    # A row of several documents is nothing that these sinks can be told of: training refuses it.
    assert_same(engine, load(family, "reference"), (DOCUMENTS,) if family == "GptOss" else (DOCUMENTS, PACKED))


@pytest.mark.parametrize(
    "family",
    ["Qwen3", *(pytest.param(name, marks=pytest.mark.long) for name in ("Llama", "Gemma3Text", "Phi3", "Cohere"))],
)
def test_a_family_is_compiled_alike(family, load, monkeypatch):
    monkeypatch.setattr(choose, "WORTH_COMPILING", 0)
    engine = load(family)
    assert used(engine) == FAMILIES[family][1]
    assert all(f"{name} plain: of unknown form" in engine.description.kernels for name in BLOCKS - used(engine))
    assert_same(engine, load(family, "reference"))


def test_reference_changes_nothing(load):
    engine = load("Llama", "reference")
    assert engine.description.kernels == "reference"
    assert engine.model.config._attn_implementation == "sdpa"
    assert not any("forward" in module.__dict__ for module in engine.model.modules())


def test_fused_is_all_or_an_error_that_names_the_rest(load):
    assert used(load("Llama", "fused")) == ALL | BLOCKS
    with pytest.raises(ConfigError, match=r"^model\.kernels: got fused, but .*CohereForCausalLM.*loss plain.*Set auto"):
        load("Cohere", "fused")


def test_without_a_compiler_the_rest_is_fast_and_it_is_said(load, monkeypatch):
    monkeypatch.setattr(choose, "WORTH_COMPILING", 0)
    monkeypatch.setattr(compiled, "compile_function", lambda function: broken)
    engine = load("Llama")
    assert used(engine) == ALL
    assert "nothing is compiled (torch.compile: no C++ compiler)" in engine.description.kernels
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler"):
        load("Llama", "fused")


def broken(*args):
    raise RuntimeError("no C++ compiler")


def test_a_piece_that_computes_something_else_is_found_out(load, monkeypatch):
    from dualtune_torch.kernels import attention

    right = attention.DocumentAttention.forward
    monkeypatch.setattr(attention.DocumentAttention, "forward", lambda *args: 1.01 * right(*args))
    engine = load("Llama")
    assert used(engine) == ALL - {"attention"}
    assert "attention plain: computes different logits (by" in engine.description.kernels
    assert_same(engine, load("Llama", "reference"))


def test_a_piece_whose_backward_pass_is_wrong_is_found_out_on_a_gpu(load, monkeypatch):
    monkeypatch.setattr(trial, "DEVICES_OF_GRADIENT", ("cpu",))
    assert used(load("Llama")) == ALL
    right = attention.DocumentAttention.backward
    monkeypatch.setattr(attention.DocumentAttention, "backward", lambda *args: tuple(
        each * 1.1 if isinstance(each, torch.Tensor) else each for each in right(*args)
    ))  # fmt: skip
    engine = load("Llama")
    assert used(engine) == ALL - {"attention"}
    assert "attention plain: computes different gradients (by" in engine.description.kernels
    assert_same(engine, load("Llama", "reference"))


def test_a_block_that_computes_something_else_is_taken_out_again(load, monkeypatch):
    from dualtune_torch.kernels import blocks

    monkeypatch.setattr(choose, "WORTH_COMPILING", 0)
    monkeypatch.setattr(blocks, "gated", lambda activation, gate, up: activation(gate) * up * 1.5)
    engine = load("Llama")
    assert used(engine) == ALL | BLOCKS - {"mlp"}
    assert "mlp plain: computes different logits" in engine.description.kernels
    assert_same(engine, load("Llama", "reference"))


@pytest.mark.parametrize("device_of_gradient", ["cuda", "cpu"])
def test_in_16_bits_what_later_layers_make_of_rounding_is_no_difference(device_of_gradient, monkeypatch):
    """As in a real model: the logits differ by more than is allowed, though each layer only rounds once less."""
    monkeypatch.setattr(trial, "DEVICES_OF_GRADIENT", (device_of_gradient,))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE | GROUPED | {"num_hidden_layers": 8, "initializer_range": 0.5})
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    norms = [module for module in model.modules() if type(module).__name__ == "LlamaRMSNorm"]
    for norm in norms:
        norm.weight.data.uniform_(0.5, 1.5)
    expected = trial.own_results(model)

    def use(norm, factor):
        def forward(x):
            wide = x.float()
            scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)
            return (factor * norm.weight.float() * scaled).to(x.dtype)

        norm.forward = forward

    for norm in norms:
        use(norm, 1.0)
    with torch.no_grad():
        gap = trial.largest_gap(trial.packed(model, None), expected.logits_1TV)
    assert gap > trial.ROUNDING[torch.bfloat16]
    trial.compare(model, lambda: trial.packed(model, None), expected)
    use(norms[5], 1.3)
    with pytest.raises(attention.NotCovered, match="computes something else in a layer"):
        trial.compare(model, lambda: trial.packed(model, None), expected)


def test_a_window_that_attention_is_not_told_of_is_found_out(load, monkeypatch):
    from transformers import AttentionInterface

    from dualtune_torch.kernels import attention

    monkeypatch.setitem(
        AttentionInterface._global_mapping, attention.NAME,
        lambda *args, **options: attention.attend(*args, **options | {"sliding_window": None}),
    )  # fmt: skip
    assert (
        "attention plain: has a sliding window that exists only in its own masks" in load("Mistral").description.kernels
    )


def of_torch_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    return query


def of_torch_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):  # fmt: skip
    return query


def of_torch_2_12(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    assert (scale, window_size, enable_gqa, k.shape[1]) == (0.5, (-1, 0), True, 1)
    return q


@pytest.mark.parametrize(
    ("varlen_attn", "lacking"),
    [(of_torch_2_10, "scale, window_size, enable_gqa"), (of_torch_2_11, "enable_gqa"), (of_torch_2_12, None)],
)
def test_an_older_torch_has_no_attention_for_ragged_rows(varlen_attn, lacking, monkeypatch):
    """The signatures are those of torch's releases."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    where = attention.DocumentBorders.of(np.ones((1, 4), np.int32), torch.tensor([0, 4]), lambda function: function)
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 1, 4, 8)
    if lacking is None:
        assert torch.equal(attention._varlen(q, k, k, where, 0.5, None), q.transpose(1, 2))
        return
    with pytest.raises(attention.NotCovered, match=f"without {lacking}, .*pip install --upgrade 'torch>=2.12'"):
        attention._varlen(q, k, k, where, 0.5, None)


def test_generation_goes_on_with_the_model_s_own_attention(load):
    prompt = DOCUMENTS.tokens_BT[1]
    texts = []
    for kernels in ("auto", "reference"):
        left = iter(range(8))
        pick = lambda logits, left=left: int(np.argmax(logits)) if next(left, None) is not None else None  # noqa: E731
        texts.append(list(load("Mistral", kernels).generate(prompt, choose=pick)))
    assert len(texts[0]) == 8
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("compiles", [False, True])
def test_what_a_layer_keeps_for_the_backward_pass(compiles, dropout, load, monkeypatch):
    """Numbers per token and layer: what each product and each norm needs, once; compiled, what down_proj reads is made
    again from gate and up."""
    monkeypatch.setattr(choose, "WORTH_COMPILING", 0 if compiles else 1e9)
    monkeypatch.setattr(sys.modules[__name__], "SPEC", replace(SPEC, dropout=dropout))
    short, long = load("Llama"), load("Llama", num_hidden_layers=4)
    dim, kv, inner, rank, heads = 32, 16, 64, SPEC.rank, 4
    needed = 2 * dim + 2 * dim  # what goes into the norms, and what comes out
    needed += (dim + 2 * kv) + dim + 2 * inner  # q, k and v; what attention gives; gate and up
    needed += 0 if compiles else inner  # their product
    needed += dim if dropout else 0  # what attention gives, dropped
    needed += 7 * rank + heads  # u; log-sum-exp
    per_layer = (kept_bytes(long) - kept_bytes(short)) / 2 / PACKED.tokens_BT.size / 4
    norms = 2 if compiles else 2 + 2 * dim  # a factor each; the plain ones keep what they multiply, too
    assert per_layer <= needed + norms


def kept_bytes(engine):
    kept = {}

    def note(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    engine._dropout_seeds.seeds_BT = torch.from_numpy(PACKED.dropout_seeds_BT.view(np.int32))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = engine._loss_sum(engine._inputs(PACKED))
    weights = {w.untyped_storage().data_ptr() for w in engine.model.state_dict().values()}
    assert loss.requires_grad
    return sum(size for pointer, size in kept.items() if pointer not in weights)
