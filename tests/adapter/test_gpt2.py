"""Adapters of GPT-2 between the names of PEFT and mlx-lm, where a directory does not say that it is one."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from dualtune.engine.testing.tiny_models import write_tiny_gpt2
from dualtune.model.adapter import AdapterSpec, init_adapter
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.model.importing.foreign import base_shapes
from dualtune.model.importing.repair import import_adapter

D = 64
GPT2 = {"attn.c_attn": (3 * D, D), "attn.c_proj": (D, D), "mlp.c_fc": (4 * D, D), "mlp.c_proj": (D, 4 * D)}
BIGCODE = GPT2 | {"attn.c_attn": (D + 2 * 16, D)}  # one key and one value for all heads


@pytest.fixture
def peft_directory(tmp_path):
    """As a tool writes it that knows PEFT's names and leaves fan_in_fan_out false."""

    def write(linear, names):
        shapes = {f"transformer.h.{i}.{name}": linear[name] for i in range(2) for name in names}
        tensors = {name: x + 0.01 for name, x in init_adapter(shapes, 4, seed=0).items()}
        write_adapter(tmp_path / "peft", Adapter(AdapterSpec(4, 8.0, 0.0, tuple(names)), tensors), layout="peft")
        config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
        assert config["fan_in_fan_out"] is False
        return tmp_path / "peft"

    return write


def names_for_mlx_lm(adapter, out):
    write_adapter(out, adapter)
    return {*load_file(out / "adapters.safetensors")}, json.loads((out / "adapter_config.json").read_text())


def test_attention_of_three_times_the_width_is_gpt2_s(peft_directory, tmp_path):
    names, config = names_for_mlx_lm(read_adapter(peft_directory(GPT2, ["attn.c_attn", "mlp.c_fc"])), tmp_path / "out")
    assert names >= {"model.h.0.attn.c_attn.lora_a", "model.h.1.mlp.c_fc.lora_b"}
    assert config["fan_in_fan_out"] is True
    assert config["lora_parameters"]["keys"] == ["attn.c_attn", "mlp.c_fc"]


def test_the_layers_of_gpt_bigcode_keep_their_names(peft_directory, tmp_path):
    """They are plain linear layers, and mlx-lm calls them as transformers does."""
    names, config = names_for_mlx_lm(read_adapter(peft_directory(BIGCODE, [*BIGCODE])), tmp_path / "out")
    assert names >= {"transformer.h.0.attn.c_attn.lora_a", "transformer.h.1.mlp.c_proj.lora_b"}
    assert config["fan_in_fan_out"] is False


def test_the_base_model_says_what_the_adapter_leaves_open(peft_directory, tmp_path):
    """Its files have shorter names and turned weights, neither of which is a fault of the adapter."""
    base = write_tiny_gpt2(tmp_path / "base", n_embd=D)
    assert base_shapes(base) == {f"transformer.h.{i}.{n}": s for i in range(2) for n, s in GPT2.items()} | {
        "lm_head": None
    }
    source = peft_directory(GPT2, ["mlp.c_fc", "mlp.c_proj"])
    found = import_adapter(source, base=base)
    assert found.repaired == () and found.adapter.fan_in_fan_out
    tensors = read_adapter(source).tensors
    assert all(np.array_equal(x, found.adapter.tensors[name]) for name, x in tensors.items())
    assert "model.h.0.mlp.c_fc.lora_a" in names_for_mlx_lm(found.adapter, tmp_path / "out")[0]


def test_a_single_layer_is_named_by_its_whole_path(tmp_path):
    shapes = {"transformer.h.1.attn.c_attn": GPT2["attn.c_attn"]}
    tensors = {name: x + 0.01 for name, x in init_adapter(shapes, 4, seed=0).items()}
    adapter = Adapter(AdapterSpec(4, 8.0, 0.0, tuple(shapes)), tensors, fan_in_fan_out=True)
    _, config = names_for_mlx_lm(adapter, tmp_path / "out")
    assert config["target_modules"] == ["transformer.h.1.attn.c_attn"]
    assert config["lora_parameters"]["keys"] == ["model.h.1.attn.c_attn"]
    for layout in ("dual", "mlx"):
        write_adapter(tmp_path / layout, adapter, layout=layout)
        assert read_adapter(tmp_path / layout).spec.targets == ("transformer.h.1.attn.c_attn",)
