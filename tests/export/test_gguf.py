"""GGUF with what people have: pip's `gguf` alone, a checkout of llama.cpp, an installed quantizer."""

import json
import os
import shutil
import stat
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, EnvironmentFault, FormatError
from dualtune.data.chat.template import with_variables
from dualtune.model.adapter import AdapterSpec, init_adapter
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.model.gguf import interleaved, llama3_factors
from dualtune.use.export import llama_environment
from dualtune.use.export.gguf_file import check, problems_of, set_numbers, unpack, write
from dualtune.use.export.llama_environment import find_llama_cpp

VOCAB = 262
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
EOS, END = 2, 4
needs_gguf = pytest.mark.skipif(not llama_environment._is_installed("gguf"), reason="needs the package gguf")


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch):
    monkeypatch.delenv("DUALTUNE_LLAMA_CPP", raising=False)
    monkeypatch.setattr(llama_environment, "_program", lambda name, checkout: None)


@pytest.fixture(scope="module")
def llama(make_model):
    return make_model()


def fields(file):
    import gguf

    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


# --- what pip's gguf writes by itself --------------------------------------------------------------------------------


@needs_gguf
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen3", {"head_dim": 128, "rope_theta": 1e6})],
)
def test_transformers_computes_the_same_with_the_file(make_model, family, changes, tmp_path, logits):
    model = make_model(family, **changes)
    write(model, tmp_path / "m.gguf", "f32")
    np.testing.assert_array_equal(logits(tmp_path, gguf_file="m.gguf"), logits(model))


@needs_gguf
@pytest.mark.parametrize(("kind", "most"), [("f16", 0.01), ("bf16", 0.1), ("q8_0", 0.3)])
def test_each_kind_is_as_exact_as_its_format_and_is_read_back_as_transformers_reads_it(
    llama, kind, most, tmp_path, logits
):
    write(llama, tmp_path / "m.gguf", kind)
    found = logits(tmp_path, gguf_file="m.gguf")
    assert 0 < np.abs(found - logits(llama)).max() < most
    unpack(tmp_path / "m.gguf", llama, tmp_path / "back")
    np.testing.assert_array_equal(logits(tmp_path / "back"), found)


@needs_gguf
def test_the_tokenizer_is_that_of_the_model_and_names_each_stop(llama, tmp_path):
    from transformers import AutoTokenizer

    write(llama, tmp_path / "m.gguf", "f32")
    found = fields(tmp_path / "m.gguf")
    assert found["tokenizer.ggml.eos_token_id"] == END and found["tokenizer.ggml.eot_token_id"] == EOS
    assert found["tokenizer.ggml.pre"] == "gpt-2" and found["tokenizer.ggml.add_bos_token"] is True
    assert found["tokenizer.chat_template"] == TURNS
    assert found["tokenizer.ggml.tokens"][-3:] == ["=7", "[PAD262]", "[PAD263]"]
    assert found["tokenizer.ggml.token_type"][:6] == [3, 3, 3, 3, 3, 1] and found["tokenizer.ggml.token_type"][-1] == 5
    text = "We need 13 pillows=7.\n"
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    plain = AutoTokenizer.from_pretrained(llama)
    assert read.encode(text, add_special_tokens=False) == plain.encode(text, add_special_tokens=False)


def test_the_frequencies_of_llama_3_are_divided_as_transformers_divides_them(make_model):
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    model = make_model(rope_scaling=scaling)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(model), "cpu")
    plain = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    factors = llama3_factors(scaling | {"rope_theta": 10000.0}, 16)
    np.testing.assert_allclose(plain / factors, expected.numpy(), rtol=1e-6)
    assert factors.min() == 1 and factors.max() == 8 and len({*factors.tolist()}) > 2


def test_interleaved_rows_are_separated_again():
    values = np.arange(2 * 6 * 3).reshape(12, 3)
    there = interleaved(values, 2)
    assert there[:4, 0].tolist() == [0, 9, 3, 12]
    np.testing.assert_array_equal(interleaved(there, 2, back=True), values)


def test_what_it_cannot_write_is_refused_with_every_reason(tiny_llama, tmp_path):
    shutil.copytree(tiny_llama, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    changed = config | {"model_type": "gemma2", "hidden_act": "gelu", "rope_scaling": {"type": "yarn", "factor": 2}}
    (tmp_path / "model/config.json").write_text(json.dumps(changed))
    assert [reason.split()[0] for reason in problems_of(tmp_path / "model")] == [
        "model_type",
        "hidden_act",
        "its",
        "its",
    ]
    with pytest.raises(ConfigError, match=r"gemma2.*gelu.*yarn.*splits texts.*--llama-cpp DIR"):
        check(tmp_path / "model")


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def export(dualtune_main, llama, tmp_path, open_backend):
    open_backend("torch")
    shapes = {"model.layers.0.self_attn.q_proj": (64, 64)}
    tensors = {name: tensor + 0.2 for name, tensor in init_adapter(shapes, 2, 0).items()}
    write_adapter(tmp_path / "tuned", Adapter(AdapterSpec(2, 40.0, 0.0, (*shapes,)), tensors))

    def export_(*options, out=tmp_path / "out"):
        return dualtune_main("export", tmp_path / "tuned", out, "--base", llama, "--platform", "cpu", *options)

    return export_


@needs_gguf
def test_the_package_alone_exports_and_computes_what_it_has_written(export, tmp_path, llama, logits):
    done = export("--to", "gguf", "--quantize", "q8_0")
    assert done.returncode == 0, done.stderr
    distances = json.loads((tmp_path / "out/export.json").read_text())["divergence_nats"]
    assert 0 < distances["written from adapter"]["kl"] < 0.1 * distances["adapter from base"]["kl"]
    assert distances["base, quantized alike, from base"]["kl"] > 0
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == ["README.md", "export.json", "out-Q8_0.gguf"]
    done = export("--to", "ollama", "--quantize", "f32", "--without-base", out=tmp_path / "ollama")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "ollama/Modelfile").read_text()
    assert 'PARAMETER stop "<|im_end|>"\nPARAMETER stop "</s>"\n' in text
    assert np.abs(logits(tmp_path / "ollama", gguf_file="ollama-F32.gguf") - logits(llama)).max() > 0.1


@needs_gguf
def test_the_gguf_has_the_template_with_the_variables_of_the_training(export, tmp_path):
    tuned = read_adapter(tmp_path / "tuned")
    shutil.rmtree(tmp_path / "tuned")
    source = with_variables(TURNS + "{{ '<think></think>' if quick is defined and quick }}", {"quick": True})
    write_adapter(tmp_path / "tuned", replace(tuned, template=source))
    done = export("--to", "gguf", "--quantize", "f32", "--without-base")
    assert done.returncode == 0, done.stderr
    assert fields(tmp_path / "out/out-F32.gguf")["tokenizer.chat_template"] == source


def test_all_that_is_missing_is_named_before_the_merge(export, monkeypatch, tmp_path):
    monkeypatch.setattr(llama_environment, "_is_installed", lambda module: False)
    monkeypatch.setattr("dualtune.use.export.export.export", pytest.fail)
    done = export("--to", "ollama")
    assert done.returncode == 4
    assert "dualtune[gguf]" in done.stderr and "llama-quantize" in done.stderr and "llama-cpp-python" in done.stderr
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp/convert_hf_to_gguf.py").touch()
    done = export("--to", "gguf", "--llama-cpp", tmp_path / "llama.cpp")
    assert done.returncode == 4 and "pip install gguf torch transformers safetensors" in done.stderr
    monkeypatch.setattr(llama_environment, "_is_installed", lambda module: module == "gguf")
    assert find_llama_cpp(None, "q8_0").kinds == ("f32", "f16", "bf16", "q8_0")
    with pytest.raises(EnvironmentFault, match="a quantizer for q4_k_m"):
        find_llama_cpp(None, "q4_k_m")


@needs_gguf
def test_a_checkout_converts_and_its_quantizer_or_an_installed_one_quantizes(export, tmp_path, monkeypatch, llama):
    """Stand-ins with the interface of llama.cpp's programs: this machine has no compiled ones."""
    monkeypatch.undo()
    monkeypatch.delenv("DUALTUNE_LLAMA_CPP", raising=False)
    checkout = tmp_path / "llama.cpp"
    (checkout / "build/bin").mkdir(parents=True)
    writer = (
        "import argparse, pathlib\nfrom dualtune.use.export.gguf_file import write\n"
        "from dualtune.use.export.gguf_file import set_numbers\np = argparse.ArgumentParser()\n"
        "p.add_argument('model', type=pathlib.Path)\np.add_argument('--outtype', default='f32')\n"
        "p.add_argument('--outfile', type=pathlib.Path)\np.add_argument('--vocab-only', action='store_true')\n"
        "a = p.parse_args()\nif not a.vocab_only:\n    write(a.model, a.outfile, a.outtype)\n"
        "    set_numbers(a.outfile, {'tokenizer.ggml.eos_token_id': 2, 'tokenizer.ggml.eot_token_id': 0})\n"
    )
    (checkout / "convert_hf_to_gguf.py").write_text(writer)
    program = checkout / "build/bin/llama-quantize"
    program.write_text(
        f"#!{sys.executable}\nimport shutil, sys\nassert sys.argv[3] == 'Q4_K_M'\nshutil.copy(*sys.argv[1:3])\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    done = export("--to", "gguf", "--quantize", "q4_k_m", "--llama-cpp", checkout, "--without-base")
    assert done.returncode == 0, done.stderr
    found = fields(tmp_path / "out/out-Q4_K_M.gguf")
    assert (found["tokenizer.ggml.eos_token_id"], found["tokenizer.ggml.eot_token_id"]) == (END, EOS)
    (tmp_path / "programs").mkdir()
    program.rename(tmp_path / "programs/llama-quantize")
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}{os.pathsep}{os.environ['PATH']}")
    assert find_llama_cpp(checkout, "q4_k_m").quantizer == tmp_path / "programs/llama-quantize"


# --- keys in the header ----------------------------------------------------------------------------------------------


@needs_gguf
def test_numbers_in_the_header_are_replaced_and_the_tensors_stay(llama, tmp_path):
    import gguf

    file = tmp_path / "m.gguf"
    write(llama, file, "f32")
    before, tensors = fields(file), {t.name: t.data.copy() for t in gguf.GGUFReader(file).tensors}
    set_numbers(file, {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eom_token_id": 9})
    after = fields(file)
    numbers = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eom_token_id": 9}
    counts = {"GGUF.kv_count": before["GGUF.kv_count"] + 1}
    assert after == before | numbers | counts
    for tensor in gguf.GGUFReader(file).tensors:
        np.testing.assert_array_equal(tensor.data, tensors[tensor.name])
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("content", [b"GGML", b"GGUF\x02\0\0\0", b"GGUF\x03\0\0\0" + b"\xff" * 16, b"GGUF\x03\0\0\0\0"])
def test_a_damaged_header_is_refused(content, tmp_path):
    file = Path(tmp_path / "m.gguf")
    file.write_bytes(content)
    with pytest.raises(FormatError):
        set_numbers(file, {})
