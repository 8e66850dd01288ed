"""Token ids as Hugging Face's wrapper gives them, BOS once, and what tells tokenizers apart."""

import json
import shutil

import numpy as np
import pytest
from transformers import AutoTokenizer

from dualtune.base.errors import ConfigError, DataError
from dualtune.data.tokens.tokenizer import Tokenizer

BOS, EOS = 1, 2
TEXTS = ["Hi there", "", "2+2=7\n\n é 語 \N{FAMILY}", "<s>Hi</s>", "<|im_start|>user\nHi<|im_end|>\n", "<s><s>x", " "]


@pytest.fixture
def model(tiny_llama, tmp_path):
    """A copy of the tiny model, to change."""
    return shutil.copytree(tiny_llama, tmp_path / "model")


def by_wrapper(path, texts, special):
    out = AutoTokenizer.from_pretrained(path)(texts, add_special_tokens=special, return_offsets_mapping=True)
    return list(zip(out["input_ids"], out["offset_mapping"], strict=True))


def as_lists(encoded):
    return [(ids.tolist(), [tuple(pair) for pair in offsets.tolist()]) for ids, offsets in encoded]


def test_ids_and_offsets_are_those_of_the_wrapper(tiny_llama):
    tokenizer = Tokenizer(tiny_llama)
    encoded = tokenizer.encode_batch(TEXTS, special=False)
    assert as_lists(encoded) == by_wrapper(tiny_llama, TEXTS, False)
    assert all(ids.dtype == offsets.dtype == np.int32 and offsets.shape == (len(ids), 2) for ids, offsets in encoded)
    assert tokenizer.encode_batch([], special=False) == []


@pytest.mark.parametrize("special", [False, True])
def test_real_texts_have_the_ids_of_the_wrapper(shared, special):
    path = shared("tokenizers/smollm2")
    tokenizer = Tokenizer(path)
    lines = shared("data/gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()[:300]
    rows = [json.loads(line) for line in lines]
    texts = [f"<|im_start|>user\n{r['question']}<|im_end|>\n<|im_start|>assistant\n{r['answer']}" for r in rows]
    texts += ["<|im_start|><|im_start|>", *TEXTS]
    assert as_lists(tokenizer.encode_batch(texts, special=special)) == by_wrapper(path, texts, special)


def test_a_plain_text_has_one_bos_and_a_chat_what_its_template_writes(tiny_llama):
    tokenizer = Tokenizer(tiny_llama)
    assert tokenizer.bos_id == BOS
    for text in ("Hi", "<s>Hi"):
        ((ids, offsets),) = tokenizer.encode_batch([text], special=True)
        assert ids.tolist().count(BOS) == 1 and ids[0] == BOS
        assert tokenizer.decode(ids.tolist()) == "Hi" and text[slice(*offsets[-1])] == "i"
    assert tokenizer.encode("<s><s>Hi", special=False).tolist().count(BOS) == 2
    assert tokenizer.encode_prompt("Hi").tolist().count(BOS) == 1


def test_truncation_and_padding_of_a_tokenizer_json_are_switched_off(model, tiny_llama):
    path = model / "tokenizer.json"
    table = json.loads(path.read_text(encoding="utf-8"))
    table["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    table["padding"] = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                        "pad_type_id": 0, "pad_token": "<pad>"}  # fmt: skip
    path.write_text(json.dumps(table), encoding="utf-8")
    ours, plain = Tokenizer(model), Tokenizer(tiny_llama)
    assert as_lists(ours.encode_batch(TEXTS, special=False)) == as_lists(plain.encode_batch(TEXTS, special=False))


def test_a_fingerprint_changes_with_what_decides_ids_and_with_nothing_else(model, tiny_llama, tmp_path):
    template = tmp_path / "other.jinja"
    template.write_text("{{ messages[0].content }}", encoding="utf-8")
    found = {Tokenizer(tiny_llama, choice).fingerprint() for choice in ("auto", "none", str(template))}
    assert len(found) == 3
    (model / "README.md").write_text("A model.")
    assert Tokenizer(model).fingerprint() in found
    for name, old, new in (("tokenizer.json", "<|im_end|>", "<|no_end|>"), ("tokenizer_config.json", "</s>", "<pad>")):
        text = (model / name).read_text(encoding="utf-8")
        assert old in text
        (model / name).write_text(text.replace(old, new), encoding="utf-8")
        found.add(Tokenizer(model).fingerprint())
        (model / name).write_text(text, encoding="utf-8")
    assert len(found) == 5


def test_the_hash_of_the_template_is_told(tiny_llama):
    tokenizer = Tokenizer(tiny_llama)
    assert tokenizer.template is not None and tokenizer.template_hash == tokenizer.template.hash
    assert Tokenizer(tiny_llama, "none").template_hash == "none"


def test_the_end_of_a_turn_is_found_behind_an_empty_thought(tiny_llama, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last %}<think></think>{% endif %}{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert Tokenizer(tiny_llama, str(path)).stop_ids == {EOS, 4}


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{{", "line 1 of the chat template"), (b"\xff", "is not UTF-8 .byte 0"), (None, "or an existing Jinja file")],
)
def test_a_file_that_is_no_template_is_refused(tiny_llama, tmp_path, content, message):
    path = tmp_path / "template.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Tokenizer(tiny_llama, str(path))


def test_a_prompt_that_the_template_refuses_is_a_data_error(tiny_llama, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ raise_exception('a system message is needed') }}")
    with pytest.raises(DataError, match=r"the prompt: the chat template refuses .*: a system message is needed. Use"):
        Tokenizer(tiny_llama, str(path)).encode_prompt("Hi")


def test_an_end_of_turn_that_the_tokenizer_splits_is_noticed(tiny_llama, tmp_path):
    """A ChatML template on a model that was never given its tokens would teach it to spell them."""
    path = tmp_path / "template.jinja"
    for end, is_split in (("<|im_end|>", False), ("<|eot_id|>", True), ("[/INST]", True), ("\n", False)):
        path.write_text("{% for m in messages %}>{{ m.content }}" + end + "{% endfor %}")
        warning = Tokenizer(tiny_llama, str(path)).warning
        assert (warning is not None) == is_split
        assert not is_split or f"ends a turn with {end}, which this tokenizer splits" in warning
    assert Tokenizer(tiny_llama, "none").warning is None
