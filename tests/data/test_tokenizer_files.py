"""What is loaded without transformers is what transformers' AutoTokenizer gives, or transformers is asked."""

import json
import re
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualtune.base.errors import ConfigError
from dualtune.data.tokens import tokenizer_classes, tokenizer_files
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.data.tokens.tokenizer_classes import CLASS_OF_TYPE, FAMILIES, OVERRULED

transformers = pytest.importorskip("transformers")

TEXTS = (
    "Hi there", "", " ", "  two  spaces \n\n\ttabs\r\n", "2+2=7 12345 it's I'LL", "é 語 \u0301 \ufdfa 👪",
    "<s>Hi</s><unk>", "<|im_start|>user\nHi<|im_end|>\n", "a <extra> b<extra>", "▁x ▁",
    "Hello , world . n't <|endoftext|> end",
)  # fmt: skip
EXTRA = {"__type": "AddedToken", "content": "<extra>", "lstrip": True, "rstrip": True, "normalized": False,
         "single_word": False, "special": True}  # fmt: skip
LISTED = {key: value for key, value in EXTRA.items() if key != "__type"}
TYPES = ("llama", "mistral", "phi3", "gpt2", "gpt_neox", "qwen2", "qwen3", "qwen3_5", "gemma2", None)
CLASSES = (
    None, "PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast",
    "GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "GPTNeoXTokenizerFast",
    "GemmaTokenizer", "GemmaTokenizerFast",
)  # fmt: skip


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A tokenizer in the manner of SentencePiece: metaspace, bytes for what is not in the vocabulary, BOS."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    letters = [chr(i) for i in range(33, 127)] + ["▁", "é"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)], *letters, "▁▁", "Hi", "▁Hi", "th", "er"]
    merges = [("▁", "▁"), ("H", "i"), ("▁", "Hi"), ("t", "h"), ("e", "r")]
    rust = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, byte_fallback=True,
                                unk_token="<unk>", fuse_unk=True))  # fmt: skip
    rust.add_special_tokens(["<unk>", "<s>", "</s>"])
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      decoders.Strip(" ", 1, 0)])  # fmt: skip
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    path = tmp_path_factory.mktemp("pieces")
    rust.save(str(path / "tokenizer.json"))
    return path / "tokenizer.json"


@pytest.fixture
def assert_same(tmp_path):
    """Write a model directory and hold what is loaded against transformers."""

    def check(file, config, model_type="llama", *, others=(), is_left_to_transformers=None):
        path = tmp_path / "model"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        shutil.copyfile(file, path / "tokenizer.json")
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        if model_type is not None:
            (path / "config.json").write_text(json.dumps({"model_type": model_type}))
        for name, content in dict(others).items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        theirs = transformers.AutoTokenizer.from_pretrained(path)
        try:
            ours = tokenizer_files._load(path, (path / "tokenizer.json").read_bytes())
        except tokenizer_classes.Unknown:
            assert is_left_to_transformers is not False
            ours = tokenizer_files.load(path)
        else:
            assert not is_left_to_transformers
        assert_equal(ours, theirs)
        return Tokenizer(path)

    return check


def assert_equal(ours, theirs):
    ours.rust.no_truncation()
    ours.rust.no_padding()
    for special in (True, False):
        for text in TEXTS:
            try:
                found = ours.rust.encode(text, add_special_tokens=special)
            except Exception as error:  # noqa: BLE001 the class does not go with the vocabulary: then for both
                with pytest.raises(type(error), match=re.escape(str(error))):
                    theirs(text, add_special_tokens=special)
                continue
            expected = theirs(text, add_special_tokens=special, return_offsets_mapping=True)
            assert found.ids == expected["input_ids"], text
            assert found.offsets == expected["offset_mapping"], text
            assert ours.decode(found.ids) == theirs.decode(found.ids, skip_special_tokens=True), text
            assert ours.rust.decode(found.ids, skip_special_tokens=False) == theirs.decode(
                found.ids, clean_up_tokenization_spaces=False
            )
    assert dict(ours.named) == theirs.special_tokens_map
    assert ours.id_of("bos_token") == theirs.bos_token_id and ours.id_of("eos_token") == theirs.eos_token_id
    added = {id for id, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.special_ids == {*theirs.all_special_ids, *added} - {None}
    assert ours.rust.get_vocab() == theirs.get_vocab()
    assert (ours.templates or None) == (theirs.chat_template or None)


# --- which class -----------------------------------------------------------------------------------------------------


def test_the_tables_are_those_of_transformers():
    from transformers.models.auto.tokenization_auto import (
        MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
        TOKENIZER_MAPPING_NAMES,
    )

    for model_type, name in CLASS_OF_TYPE.items():
        theirs = TOKENIZER_MAPPING_NAMES.get(model_type)
        if theirs != "MistralCommonBackend":  # where mistral-common is installed; PLAIN without a tekken.json
            assert (theirs and theirs.removesuffix("Fast")) == name, model_type
    assert {*CLASS_OF_TYPE} & MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS == OVERRULED


@pytest.mark.parametrize("model_type", TYPES)
def test_every_class_for_every_type(tiny_llama, pieces, assert_same, model_type):
    for file in (tiny_llama / "tokenizer.json", pieces):
        for name in CLASSES:
            config = {"bos_token": "<s>", "eos_token": "</s>"} | ({"tokenizer_class": name} if name else {})
            assert_same(file, config, model_type, is_left_to_transformers=False)


@pytest.mark.parametrize(
    ("name", "model_type"), [("CohereTokenizer", "llama"), ("NoSuchClass", "llama"), (None, "bert")]
)
def test_another_class_is_left_to_transformers(tiny_llama, assert_same, name, model_type):
    config = {"bos_token": "<s>"} | ({"tokenizer_class": name} if name else {})
    assert_same(tiny_llama / "tokenizer.json", config, model_type, is_left_to_transformers=True)


# --- what a config may say -------------------------------------------------------------------------------------------

CONFIGS = {
    "nothing": {},
    "added tokens": {"added_tokens_decoder": {"0": LISTED | {"content": "<pad>"}, "262": LISTED}},
    "added tokens that are new": {"added_tokens_decoder": {"999": LISTED, "5": LISTED | {"content": "new"}}},
    "special tokens that are new": {"bos_token": "<new>", "eos_token": "<newer>", "pad_token": "<pad>"},
    "a token as an object": {"bos_token": EXTRA, "eos_token": "</s>"},
    "no token": {"bos_token": None, "eos_token": None, "pad_token": None, "unk_token": None},
    "additional tokens": {"additional_special_tokens": ["<extra>", "<more>"]},
    "additional tokens as objects": {"additional_special_tokens": [EXTRA, "Hi"]},
    "extra tokens": {"extra_special_tokens": ["<extra>"], "additional_special_tokens": ["<more>"]},
    "extra tokens by name": {"extra_special_tokens": {"image_token": "<image>", "audio_token": "<audio>"}},
    "a token of this model": {"image_token": "<image>", "video_token": EXTRA, "eos_token": "</s>"},
    "BOS and EOS asked for": {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>"},
    "a prefix space": {"add_prefix_space": True, "legacy": True},
    "no prefix space": {"add_prefix_space": False, "legacy": False},
    "legacy": {"legacy": True},
    "clean up": {"clean_up_tokenization_spaces": True},
    "clean up though it is BPE": {
        "clean_up_tokenization_spaces": True,
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
    },
    "a template": {"chat_template": "{{ messages }}"},
    "templates": {"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]},
    "what is not used": {"model_max_length": 3, "padding_side": "left", "tokenizer_file": "/etc/passwd", "errors": "x"},
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("name", ["TokenizersBackend", *FAMILIES])
def test_what_a_config_says(tiny_llama, pieces, assert_same, case, name):
    for file in (tiny_llama / "tokenizer.json", pieces):
        config = CONFIGS[case] | {"tokenizer_class": name}
        if name == "Qwen2Tokenizer" and case == "no token":
            config |= {"eos_token": "</s>"}
        assert_same(file, config, is_left_to_transformers=False)


OLDER = {
    "special_tokens_map": {
        "special_tokens_map.json": {"bos_token": "<extra>", "eos_token": LISTED | {"content": "</s>"}}
    },
    "further tokens": {
        "special_tokens_map.json": {"additional_special_tokens": ["<extra>", "<z>"], "image_token": "<i>"}
    },
    "added_tokens": {"added_tokens.json": {"<extra>": 700, "<z>": 400, "</s>": 2}},
    "both": {"added_tokens.json": {"<extra>": 700, "<z>": 400}, "special_tokens_map.json": {"bos_token": "<z>"}},
    "a template file": {"chat_template.jinja": "{{ 1 }}\r\n{{ 2 }}"},
    "several": {"chat_template.jinja": "1", "additional_chat_templates/rag.jinja": "2"},
    "several, no default": {"additional_chat_templates/rag.jinja": "2"},
}  # fmt: skip


@pytest.mark.parametrize("case", OLDER)
@pytest.mark.parametrize("listed", [False, True])
def test_the_files_beside_it(tiny_llama, pieces, assert_same, case, listed):
    config = {"bos_token": "<s>"} | ({"added_tokens_decoder": {"300": LISTED}} if listed else {})
    for file in (tiny_llama / "tokenizer.json", pieces):
        for name in ("TokenizersBackend", "LlamaTokenizer"):
            if case == "several, no default":
                with pytest.raises(ConfigError, match=r"several chat templates .rag. and none is its default"):
                    assert_same(file, config, others=OLDER[case])
            else:
                assert_same(file, config | {"tokenizer_class": name}, others=OLDER[case])


@pytest.mark.parametrize("pad", [{}, {"pad_token": "</s>"}, {"pad_token": None}])
@pytest.mark.parametrize("name", ["TokenizersBackend", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer"])
def test_padding_names_a_token(pieces, tmp_path, assert_same, name, pad):
    table = json.loads(pieces.read_text())
    table["padding"] = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 9,
                        "pad_type_id": 0, "pad_token": "<padding>"}  # fmt: skip
    (tmp_path / "padded.json").write_text(json.dumps(table))
    assert_same(tmp_path / "padded.json", pad | {"tokenizer_class": name}, is_left_to_transformers=False)


TOKENS = st.sampled_from(["<s>", "</s>", "<extra>", "Hi", "<new>", EXTRA, EXTRA | {"content": "</s>"}, None])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    model_type=st.sampled_from(TYPES), name=st.sampled_from(CLASSES), which=st.booleans(),
    config=st.fixed_dictionaries({}, optional={
        "bos_token": TOKENS, "eos_token": TOKENS, "pad_token": TOKENS, "unk_token": st.sampled_from(["<unk>", "<pad>"]),
        "mask_token": TOKENS, "image_token": st.sampled_from(["<image>", "<s>"]),
        "additional_special_tokens": st.lists(TOKENS.filter(bool), max_size=3),
        "extra_special_tokens": st.lists(st.sampled_from(["<more>", "</s>"]), max_size=2),
        "added_tokens_decoder": st.dictionaries(
            st.sampled_from(["0", "1", "300", "9000"]), st.sampled_from([LISTED, LISTED | {"content": "<s>"}])
        ),
        "add_prefix_space": st.sampled_from([True, False]), "legacy": st.booleans(), "add_bos_token": st.booleans(),
    }),
)  # fmt: skip
def test_any_config(tiny_llama, pieces, assert_same, model_type, name, which, config):
    config = config | ({"tokenizer_class": name} if name else {})
    assert_same(pieces if which else tiny_llama / "tokenizer.json", config, model_type)


def test_real_tokenizers(shared, assert_same):
    for path in (shared("tokenizers/smollm2"), shared("models/stories260k")):
        config = json.loads((path / "tokenizer_config.json").read_text())
        assert_same(path / "tokenizer.json", config, is_left_to_transformers=False)
        for name in ("GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer"):
            assert_same(path / "tokenizer.json", config | {"tokenizer_class": name}, is_left_to_transformers=False)
    for path in (shared("tokenizers/smollm2"), shared("models/stories260k")):
        assert_equal(tokenizer_files.load(path), transformers.AutoTokenizer.from_pretrained(path))
