"""Copies of the base's embedding and output head beside an adapter: PEFT writes them by itself."""

import json
import shutil

import numpy as np
import pytest
import safetensors.torch
from safetensors.numpy import load_file, save_file

from dualtune.base.errors import FormatError
from dualtune.engine.testing.tiny_models import write_tiny_llama
from dualtune.model.formats.directory import read_adapter
from dualtune.model.importing.repair import import_adapter

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

EMBEDDING, HEAD = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "llama"
    return write_tiny_llama(path, vocab_size=48, hidden_size=32, head_dim=8, tie_word_embeddings=request.param)


def saved_by_peft(base, path, **options):
    """Return the directory that PEFT saves, and its adapter without copies."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=options.pop("dtype", torch.float32))
    resized = options.pop("resized", None)
    if resized:
        model.resize_token_embeddings(resized)
    config = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **options}
    model = peft.get_peft_model(model, peft.LoraConfig(**config))
    for name, x in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(x, std=0.2)
    model.save_pretrained(path, save_embedding_layers=True)
    return path


def tensors_of(path):
    return load_file(path / "adapter_model.safetensors")


def test_a_copy_equal_to_the_base_is_left_out_with_the_base_at_hand(base, tmp_path):
    saved = saved_by_peft(base, tmp_path / "a")
    assert {EMBEDDING, HEAD} & tensors_of(saved).keys()
    with pytest.raises(FormatError, match="--base MODEL compares it"):
        import_adapter(saved)
    found = import_adapter(saved, base=base)
    expected = {name: x for name, x in tensors_of(saved).items() if "lora" in name}
    assert found.adapter.tensors.keys() == expected.keys()
    assert all((found.adapter.tensors[name] == x).all() for name, x in expected.items())
    assert any("model.embed_tokens: a copy of the base's" in note for note in found.adapter.notes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_copy_in_fewer_bits_is_the_base_rounded_to_them(base, dtype, tmp_path):
    saved = saved_by_peft(base, tmp_path / "a", dtype=dtype)
    names = safetensors.torch.load_file(saved / "adapter_model.safetensors").keys()
    assert import_adapter(saved, base=base).adapter.tensors.keys() == {name for name in names if "lora" in name}


def test_a_changed_copy_is_refused_with_both_shapes(base, tmp_path):
    saved = saved_by_peft(base, tmp_path / "a")
    tensors = tensors_of(saved)
    tensors[EMBEDDING] = np.array(tensors[EMBEDDING])
    tensors[EMBEDDING][[3, 7], 0] += 1e-3
    save_file(tensors, saved / "adapter_model.safetensors")
    with pytest.raises(FormatError, match=r"the copy has \[48, 32\], the base \[48, 32\]; 2 rows differ"):
        import_adapter(saved, base=base, repair=True)
    resized = saved_by_peft(base, tmp_path / "b", resized=51)
    with pytest.raises(FormatError, match=r"embed_tokens: .*the copy has \[51, 32\], the base \[48, 32\]"):
        import_adapter(resized, base=base, repair=True)


def test_modules_to_save_that_were_not_trained_are_copies_too(base, tmp_path):
    saved = saved_by_peft(base, tmp_path / "a", modules_to_save=["embed_tokens", "lm_head"])
    assert {EMBEDDING, HEAD} <= import_adapter(saved).adapter.tensors.keys()  # it cannot be known
    found = import_adapter(saved, base=base)
    assert {name.rpartition(".")[2] for name in found.adapter.tensors} == {"weight"} and len(found.adapter.notes) == 2
    tensors = tensors_of(saved)
    tensors[HEAD] = tensors[HEAD] * 1.5
    save_file(tensors, saved / "adapter_model.safetensors")
    found = import_adapter(saved, base=base)  # then they were trained
    assert {EMBEDDING, HEAD} <= found.adapter.tensors.keys() and not found.adapter.notes
    assert found.adapter.spec.beside.modules == ("embed_tokens", "lm_head")


@pytest.mark.parametrize("name", ["/home/somebody/llama", "unsloth/llama-3-8b-bnb-4bit"])
def test_the_base_of_an_import_is_written_where_the_named_one_is_of_no_use(name, base, tmp_path, dualtune_main):
    saved = saved_by_peft(base, tmp_path / "a")
    config = json.loads((saved / "adapter_config.json").read_text()) | {"base_model_name_or_path": name}
    (saved / "adapter_config.json").write_text(json.dumps(config))
    done = dualtune_main("adapter", "import", saved, tmp_path / "out", "--base", base, "--json")
    assert done.returncode == 0, done.stderr
    [warning] = json.loads(done.stdout)["warnings"]
    assert name in warning and str(base) in warning
    assert read_adapter(tmp_path / "out").base_model == str(base)


def test_an_adapted_output_head_with_its_base_layer_computes_as_in_peft(base, tmp_path, dualtune_main):
    if json.loads((base / "config.json").read_text())["tie_word_embeddings"]:
        pytest.skip("a tied head is not adapted")
    saved = saved_by_peft(base, tmp_path / "a", target_modules=["q_proj", "lm_head"])
    assert "base_model.model.lm_head.base_layer.weight" in tensors_of(saved)
    done = dualtune_main("adapter", "import", saved, tmp_path / "out", "--base", base)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(saved)
    assert "base_model.model.lm_head.lora_A.weight" in read_adapter(tmp_path / "out").tensors
