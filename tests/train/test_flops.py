"""The formula of model FLOPs against torch's own count of what transformers and PEFT compute."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dualtune.data.batches import SequenceLayout, micro_batches, step_documents
from dualtune.data.documents import units_in_memory
from dualtune.doctor.bench.measure import (
    NoFormula,
    Shape,
    document_lengths,
    document_sizes,
    read_shape,
    training_flops,
)
from dualtune.engine.testing.tiny_models import pack, random_batch, write_tiny_llama

TINY = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
RANK = 4


def transformer(tmp_path, kind: str, **changes):
    """A random model of transformers and the directory with its config."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    config = transformers.AutoConfig.for_model(kind, **TINY | changes)
    config.save_pretrained(tmp_path)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def described(model) -> dict:
    return {"num_parameters": model.num_parameters(), "adapter_parameters": 0}


# --- the formula -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [16, 64])
@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_counts_what_torch_counts(tmp_path, length, tied):
    """Operation by operation, but for three things: torch computes scores that no token sees, does not compute them
    again in the backward pass, and needs no gradient below the lowest adapters."""
    peft = pytest.importorskip("peft")
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model = transformer(tmp_path, "llama", num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied)
    description = described(model)
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear"))
    shape = read_shape(tmp_path, **description | {"adapter_parameters": model.get_nb_trainable_parameters()[0]})
    tokens = torch.randint(0, 96, (2, length))
    with FlopCounterMode(display=False) as forward:
        loss = model(tokens, labels=tokens).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()

    got = training_flops(shape, np.array([length, length]))
    width, layers, hidden = 32, 3, 32
    seen = 2 * length * (length + 1) / 2 * layers
    square = 2 * length**2 * layers
    expected_forward = got.forward + 4 * width * (square - seen)
    below = 2 * (2 * length) * (hidden * (width + 16 + 16) + 3 * RANK * hidden)
    expected_backward = got.backward - 10 * width * seen + 8 * width * square - below
    # The rotary angles are a matrix product too, of 2 · 4 operations a token.
    assert forward.get_total_flops() == pytest.approx(expected_forward, rel=1e-3)
    assert backward.get_total_flops() == pytest.approx(expected_backward, rel=1e-3)


def test_documents_see_themselves_and_no_further_than_a_window():
    shape = Shape(0, 0, attention_width=1, windows=(None, 3))
    one = np.tri(5, dtype=int)
    windowed = one - np.tri(5, k=-3, dtype=int)
    assert training_flops(shape, np.array([5])).forward == 4 * (one.sum() + windowed.sum())
    assert training_flops(shape, np.array([5, 5])).forward == 2 * training_flops(shape, np.array([5])).forward
    assert training_flops(replace(shape, windows=(3,)), np.array([2])).forward == 4 * 3


def test_the_lengths_of_documents_do_not_depend_on_the_layout():
    batch = random_batch([9, 16, 5, 12], 31, pad=3)
    packed = pack(batch, [[1, 2], [0, 3]], pad=7)
    assert document_lengths([batch]).tolist() == [9, 16, 5, 12]
    assert sorted(document_lengths([packed, batch])) == [5, 5, 9, 9, 12, 12, 16, 16]


def test_what_documents_share_is_counted_once():
    """The operations of two answers with a prompt of 4 are those of one mask in which the second sees the prompt."""
    documents = units_in_memory(
        [[(np.arange(9), np.arange(9) >= 5), (np.arange(7) + (np.arange(7) > 4), np.arange(7) >= 5)]]
    )
    documents.shares = True
    (batch,) = micro_batches(documents, range(2), SequenceLayout(64, 64), seed=0, step=0)
    lengths, shared = document_sizes([batch])
    assert (lengths.tolist(), shared.tolist()) == ([9, 7], [0, 4]) and batch.num_computed == 12
    shape = Shape(10, 0, attention_width=1, windows=(None,))
    seen = np.tri(9).sum() + np.tri(7).sum() - np.tri(4).sum()
    assert training_flops(shape, lengths, shared).forward == 2 * 10 * 12 + 4 * seen
    step = step_documents(lengths, SequenceLayout(64, 64), "the test", 0.5, shared)
    assert (step.tokens, step.computed.tolist(), step.seen, step.rows) == (16, [9, 3], seen, (((9, 3),),))
    assert step.targets == (7,)


# --- the shape -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"num_key_value_heads": 2}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 24}),
        ("qwen3", {"num_key_value_heads": 1, "head_dim": 16}),
        ("gemma3_text", {"num_key_value_heads": 2, "head_dim": 16}),
        ("phi", {"hidden_size": 128, "num_attention_heads": 8}),
        ("gpt2", {"hidden_size": 128, "intermediate_size": 512, "n_positions": 16}),
    ],
)
def test_the_shape_is_that_of_the_weights(tmp_path, kind, changes):
    model = transformer(tmp_path, kind, **changes)
    names = {name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")}
    weights = [parameter for name, parameter in model.named_parameters() if name.removesuffix(".weight") in names]
    head = model.get_output_embeddings().weight
    if not any(weight is head for weight in weights):
        weights.append(head)
    shape = read_shape(tmp_path, **described(model))
    assert shape.matmul_parameters == sum(weight.numel() for weight in weights)
    assert len(shape.windows) == 3


def test_where_config_does_not_say_whether_the_head_is_tied_the_parameters_do(tmp_path):
    for tied in (True, False):
        path = write_tiny_llama(tmp_path / str(tied), tie_word_embeddings=tied)
        config = json.loads((path / "config.json").read_text())
        del config["tie_word_embeddings"]
        (path / "config.json").write_text(json.dumps(config))
        body = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
        total = body + 5 * 64 + 96 * 64 * (1 if tied else 2)
        shape = read_shape(path, num_parameters=total, adapter_parameters=0)
        assert shape.matmul_parameters == body + 96 * 64


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("mixtral", {}, "it is a mixture of experts: a token uses only a few of them"),
        ("qwen3_moe", {"moe_intermediate_size": 16}, "it is a mixture of experts: a token uses only a few of them"),
        ("falcon_h1", {"num_key_value_heads": 2, "head_dim": 8}, "do not match a dense decoder"),
    ],
)
def test_a_model_that_the_formula_is_not_for_is_named(tmp_path, kind, changes, reason):
    model = transformer(tmp_path, kind, **changes)
    with pytest.raises(NoFormula, match=reason):
        read_shape(tmp_path, **described(model))


def test_a_config_that_does_not_say_enough_is_no_shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "dualtune-softmax"}))
    with pytest.raises(NoFormula, match=r"its config\.json has no num_hidden_layers"):
        read_shape(tmp_path, num_parameters=8, adapter_parameters=0)


def test_layers_of_another_type_are_named(tmp_path):
    path = write_tiny_llama(tmp_path, layer_types=["full_attention", "linear_attention"])
    total = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128) + 2 * 96 * 64
    with pytest.raises(NoFormula, match="it has layers of type linear_attention"):
        read_shape(path, num_parameters=total, adapter_parameters=0)
