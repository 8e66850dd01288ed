"""A GGUF file as a base model: the files that dualtune writes come back, and what is not understood is refused."""

import itertools
import json
import random
import shutil

import numpy as np
import pytest

from dualtune.base.errors import FormatError
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.testing.tiny_models import write_tiny_llama
from dualtune.model.base_model import find_weights, model_here, resolve_model
from dualtune.model.config_file import read_config
from dualtune.model.gguf import GgufFile, model_from_gguf, tokenizer_files
from dualtune.use.export.gguf_file import write

gguf = pytest.importorskip("gguf")
pytest.importorskip("torch")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
TEXT = "We need 13 pillows=7.\n\tIt's  fine: <|im_start|>Grüße, 日本!"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DUALTUNE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True, "rope_scaling": LLAMA3, "rope_theta": 5e5}),
     ("mistral", {"num_key_value_heads": 1}), ("qwen3", {"head_dim": 128, "rope_theta": 1e6})],
)  # fmt: skip
def test_a_written_model_comes_back_to_the_bit(make_model, logits, family, changes, tmp_path):
    model, file = make_model(family, **changes), tmp_path / "m.gguf"
    write(model, file, "f32")
    found = resolve_model(str(file))
    np.testing.assert_array_equal(logits(found), logits(model))
    ours, theirs = Tokenizer(found), Tokenizer(model)
    assert ours.encode(TEXT, special=True).tolist() == theirs.encode(TEXT, special=True).tolist()
    assert ours.template.source == theirs.template.source and ours.stop_ids == theirs.stop_ids
    assert model_here(str(file)) == found and read_config(found)["dtype"] == "float32"


@pytest.mark.parametrize(("kind", "stored"), [("f16", "F16"), ("bf16", "BF16"), ("q8_0", "F16")])
def test_matrices_keep_a_plain_precision_and_are_float16_if_they_were_quantized(
    make_model, logits, kind, stored, tmp_path
):
    write(make_model(), tmp_path / "m.gguf", kind)
    found = model_from_gguf(tmp_path / "m.gguf")
    assert {tensor.dtype for tensor in find_weights(found).tensors.values() if len(tensor.shape) == 2} == {stored}
    assert np.abs(logits(found) - logits(tmp_path, gguf_file="m.gguf")).max() < (1e-2 if kind == "q8_0" else 1e-6)


def test_a_file_is_unpacked_once_and_again_when_it_has_changed(make_model, tmp_path):
    file = tmp_path / "m.gguf"
    write(make_model(), file, "f32")
    shares = []
    first = model_from_gguf(file, shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert model_from_gguf(file, pytest.fail) == first
    file.unlink()
    write(make_model(num_hidden_layers=1), file, "f32")
    second = model_from_gguf(file)
    assert second != first and read_config(second)["num_hidden_layers"] == 1


def test_what_another_process_has_made_meanwhile_is_taken(make_model, tmp_path):
    file = tmp_path / "m.gguf"
    write(make_model(), file, "f32")
    found = model_from_gguf(file)
    others = shutil.move(found, tmp_path / "others")
    assert model_from_gguf(file, lambda share: share == 1.0 and shutil.copytree(others, found)) == found
    assert [path.name for path in found.parent.iterdir()] == [found.name] and find_weights(found).tensors


def test_a_run_trains_on_a_file(make_model, write_rows, dualtune_main, tmp_path):
    write(make_model(), tmp_path / "m.gguf", "q8_0")
    rows = write_rows([{"prompt": "2+2?", "completion": "4."}] * 8)
    options = ("--model", tmp_path / "m.gguf", "--data", rows, "--steps", 2, "--platform", "cpu",
               "--set", f"run.dir={tmp_path / 'run'}")  # fmt: skip
    done = dualtune_main("train", *options)
    assert done.returncode == 0, done.stderr
    checked = dualtune_main("verify", tmp_path / "run/adapter", "--base", tmp_path / "m.gguf", "--platform", "cpu")
    assert checked.returncode == 0, checked.stdout + checked.stderr


# --- what is refused -------------------------------------------------------------------------------------------------


def small_file(path, architecture="llama", tokenizer="gpt2", tensors=(), **keys):
    """A GGUF whose header says what a Llama's says, changed."""
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {"embedding_length": 8, "block_count": 1, "feed_forward_length": 8, "attention.head_count": 2,
               "context_length": 64}  # fmt: skip
    for key, value in {**numbers, **keys}.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b"])
    for name in ("token_embd.weight", *tensors):
        writer.add_tensor(name, np.zeros((2, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"architecture": "mamba"}, "its architecture is mamba"), ({"expert_count": 8}, "its key llama.expert_count"),
     ({"tensors": ["blk.0.ffn_gate_exps.weight"]}, "the tensor blk.0.ffn_gate_exps.weight"),
     ({"tensors": ["blk.0.attn_q.bias"]}, "some of its linear layers have a bias"),
     ({"tokenizer": "bert"}, "its tokenizer is of the kind bert"),
     ({"attention.value_length": 2}, "different sizes"), ({"block_count": 0}, "llama.block_count is 0")],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name_and_leaves_nothing(changes, words, tmp_path):
    file = small_file(tmp_path / "m.gguf", **changes)
    with pytest.raises(FormatError, match=words):
        model_from_gguf(file)
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_a_damaged_file_is_one_sentence(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(FormatError, match=r"m\.gguf: is not a GGUF file, or it is damaged"):
        resolve_model(str(tmp_path / "m.gguf"))


# --- SentencePiece's tokenizers --------------------------------------------------------------------------------------


def by_score(text, scores):
    """SentencePiece's own rule: of all neighbours, join those that give the token of the highest score."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = enumerate(itertools.pairwise(pieces))
        joined = [(scores[a + b], -i) for i, (a, b) in pairs if a + b in scores]
        if not joined:
            return pieces
        i = -max(joined)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def test_a_sentencepiece_vocabulary_joins_by_score_and_falls_back_to_bytes(tmp_path):
    random.seed(0)
    letters = ["▁", *"abc"]
    longer = {"".join(random.choices(letters, k=random.randint(2, 4))) for _ in range(60)}
    words = [*letters, *sorted(longer, key=len)]
    scores = dict(zip(words, random.sample(range(-len(words), 0), len(words)), strict=True))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(scores[word]) for word in words],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    file = GgufFile(tmp_path, gguf, metadata, {})
    write_tiny_llama(tmp_path / "model", vocab_size=len(tokens))
    config = {"max_position_embeddings": 64, "bos_token_id": 1}
    for name, table in tokenizer_files(file, config).items():
        (tmp_path / "model" / name).write_text(json.dumps(table))
    read = Tokenizer(tmp_path / "model")
    for _ in range(200):
        text = "".join(random.choices("abc ", k=12)).strip()
        expected = [tokens.index(piece) for piece in by_score(text, scores)]
        assert read.encode(text, special=False).tolist() == expected
    assert read.encode("é", special=False).tolist() == [tokens.index(each) for each in ("▁", "<0xC3>", "<0xA9>")]
    assert (
        read.encode("a", special=True).tolist()[0] == 1
        and read.decode_all(read.encode("ab é c", special=False)) == "ab é c"
    )


# --- where texts begin -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "keys", "begins"),
    [("llama-bpe", {}, True), ("gpt-2", {}, False), ("qwen2", {}, False),
     ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False),
     ("gpt-2", {"tokenizer.ggml.add_bos_token": True}, True)],
)  # fmt: skip
def test_texts_begin_with_bos_as_in_llama_cpp(pre, keys, begins, tmp_path):
    """Files of Llama 3 do not say so: it follows from the name of the splitting."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<s>", "</s>", *sorted(ByteLevel.alphabet())]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [], "tokenizer.ggml.token_type": [3, 3] + [1] * 256,
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1, **keys,
    }  # fmt: skip
    write_tiny_llama(tmp_path / "model", vocab_size=len(tokens))
    config = {"max_position_embeddings": 64, "bos_token_id": 0}
    for name, table in tokenizer_files(GgufFile(tmp_path, gguf, metadata, {}), config).items():
        (tmp_path / "model" / name).write_text(json.dumps(table))
    assert Tokenizer(tmp_path / "model").encode("a", special=True).tolist() == [0] * begins + [tokens.index("a")]
