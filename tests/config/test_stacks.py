"""The stacks of memory techniques that the source documents ask for: planned below their limits, or refused with the
nearest that works, which is then planned in place of what was refused."""

import json

import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import load_config
from dualtune.doctor.check_config import plan_config
from dualtune.engine.capabilities import check_capabilities
from dualtune.engine.card import card_of
from dualtune.engine.choose import choose
from dualtune.engine.machines import named

SHAPES = {  # GPT-2 of 1.02 billion parameters, and Llama 2 7B
    "1B": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 1408, "n_layer": 40, "n_head": 22,
           "n_positions": 1024, "vocab_size": 50257},
    "7B": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "vocab_size": 32000,
           "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
           "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
}  # fmt: skip
ALL = "adapter.targets=all-linear"
STREAMED_1B = ("model.quantization=int8", "memory.resident_layers=2", "data.max_length=512")
STREAMED_7B = ("model.quantization=int8", "memory.resident_layers=1", "data.max_length=2048")
GB = 10**9


@pytest.fixture
def plan(tmp_path):
    """The bytes that a stack takes on a machine, by plan."""

    def plan_(shape, machine, *settings):
        (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape]))
        base = {"model": {"name": str(tmp_path), "init": "random"}, "data": {"train": "unused"}}
        config, choice = load_config(base, settings), choose("cuda", named(machine))
        check_capabilities(card_of(choice.backend), config)
        return plan_config(config, named(machine), choice).estimate.total_bytes

    return plan_


@pytest.mark.parametrize(
    ("shape", "machine", "stack", "limit"),
    [
        ("1B", "rtx-5080-16", (*STREAMED_1B, ALL), 14 * GB),
        ("1B", "rtx-5080-16", (*STREAMED_1B, ALL, "memory.offload=activations"), 14 * GB),
        ("1B", "rtx-5080-16", ("adapter.method=full", "train.optimizer=adamw_8bit", "data.max_length=512",
                               "train.micro_batch_tokens=1024", "memory.checkpointing=full"), 14 * GB),
        ("7B", "rtx-4090-24", STREAMED_7B, 22 * GB),
        ("7B", "rtx-4090-24", (*STREAMED_7B, "hybrid.enabled=true", "hybrid.offload=optimizer"), 22 * GB),
        ("7B", "rtx-4090-24", ("model.quantization=int8", "memory.checkpointing={layers: 32, every: 4}",
                               "data.max_length=2048"), 22 * GB),
    ],
)  # fmt: skip
def test_a_stack_that_the_documents_ask_for_is_planned_below_their_limit(plan, shape, machine, stack, limit):
    assert 0.3 * GB < plan(shape, machine, *stack) < limit


@pytest.mark.parametrize(
    ("shape", "machine", "stack", "refused", "nearest"),
    [
        ("1B", "rtx-5080-16", (*STREAMED_1B, "adapter.method=full"), {"model.quantization", "memory.resident_layers"},
         ("adapter.method=lora", ALL)),
        ("1B", "rtx-5080-16", (*STREAMED_1B, "adapter.method=full"), {"model.quantization", "memory.resident_layers"},
         ("adapter.method=full", "model.quantization=none", "memory.resident_layers=all",
          "train.optimizer=adamw_8bit", "memory.checkpointing=full")),
        ("1B", "rtx-5080-16", (*STREAMED_1B, ALL, "memory.checkpointing={layers: 40, every: 8}"),
         {"memory.checkpointing"}, ("memory.checkpointing=full",)),
        ("7B", "rtx-4090-24", (*STREAMED_7B, "memory.checkpointing={layers: 32, every: 4}"), {"memory.checkpointing"},
         ("memory.checkpointing=full",)),
        ("7B", "rtx-4090-24", ("memory.offload=activations", "memory.checkpointing=none"), {"memory.checkpointing"},
         ("memory.checkpointing={layers: 32, every: 4}",)),
        ("7B", "rtx-4090-24", (*STREAMED_7B, "train.activation_cache=disk", ALL),
         {"train.activation_cache"}, ("train.activation_cache=none",)),
    ],
)  # fmt: skip
def test_a_stack_that_cannot_be_is_refused_with_one_that_can(
    plan, wording, shape, machine, stack, refused, nearest
):  # fmt: skip
    with pytest.raises(ConfigError) as error:
        plan(shape, machine, *stack)
    text = str(error.value)
    assert all(f"{key}: got" in text for key in refused)
    assert plan(shape, machine, *stack, *nearest) > 0
    wording(text)
