"""The tokenizer and chat template of a GGUF file, as the files that a model directory has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from dualtune.errors import FormatError
from dualtune.io.fields import shown

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # llama.cpp's types of tokens
END_KEYS = ("eos", "eot", "eom")  # of tokenizer.ggml.…_token_id: llama.cpp stops at each
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
REGEX = {"llama-bpe": _WORDS.replace("NUMBERS", r"\p{N}{1,3}"), "qwen2": _WORDS.replace("NUMBERS", r"\p{N}")}
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "gpt2": "gpt-2"}
IGNORES_MERGES = "llama-bpe"


class GgufFile(NamedTuple):
    """A GGUF file: what it says of itself, and its tensors by name."""

    path: Path
    gguf: Any
    metadata: dict[str, Any]
    tensors: dict[str, Any]

    def refused(self, reason: str) -> FormatError:
        return FormatError(
            f"model.name: {self.path}: {reason}. Read are Llama, Mistral, Qwen 2, Qwen 3 and what shares their "
            "architecture; of another model, use the original directory or hub id that the file was made from"
        )


def tokens_of(file: GgufFile) -> list[str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise file.refused("it holds no tokenizer")
    return cast("list[str]", tokens)


def tokenizer_files(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokenizer's files by name, with the chat template and every token that ends an answer."""
    metadata, tokens = file.metadata, tokens_of(file)
    kind = metadata.get("tokenizer.ggml.model")
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(str(kind))
    if build is None:
        raise file.refused(f"its tokenizer is of the kind {shown(str(kind))}, which is not read")
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    model = build(file, tokens, types)
    added = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": kind == CONTROL}
        for i, (text, kind) in enumerate(zip(tokens, types, strict=True)) if kind in (CONTROL, USER)
    ]  # fmt: skip
    names: dict[str, Any] = {}
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            names[f"{name}_token"] = tokens[token]
    # Files of Llama 3 have no such key: llama.cpp knows by the name of the splitting that texts begin with BOS.
    usual = kind == "llama" or _splitting(file) == IGNORES_MERGES
    begins = metadata.get("tokenizer.ggml.add_bos_token", usual) and "bos_token" in names
    ends = metadata.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in names
    table = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **model}
    if begins or ends:
        table["post_processor"] = _template(tokens, names["bos_token"] if begins else None,
                                            names["eos_token"] if ends else None)  # fmt: skip
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names,
                "model_max_length": config["max_position_embeddings"]}  # fmt: skip
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    stops = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in END_KEYS)
    generation: dict[str, Any] = {"eos_token_id": sorted({token for token in stops if token is not None}),
                                  "bos_token_id": config["bos_token_id"]}  # fmt: skip
    return {"tokenizer.json": table, "tokenizer_config.json": settings, "generation_config.json": generation}


def _template(tokens: list[str], first: str | None, last: str | None) -> dict[str, Any]:
    """Return a post-processor that puts special tokens around a text."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    ends = [{"SpecialToken": {"id": each, "type_id": 0}} if each else None for each in (first, last)]
    used = {each: {"id": each, "ids": [tokens.index(each)], "tokens": [each]} for each in (first, last) if each}
    single = [part for part in (ends[0], text, ends[1]) if part]
    second: list[Any] = [{"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": single + second, "special_tokens": used}


def _splitting(file: GgufFile) -> str:
    """Return llama.cpp's name for the way in which a tokenizer splits texts, one of several for the same."""
    name = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    return _SAME.get(name, name)


def _byte_level(file: GgufFile, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """Return GPT-2's kind of tokenizer: byte pairs in the file's order, over pieces that a regular expression cuts."""
    pre = _splitting(file)
    steps: list[dict[str, Any]] = [
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre not in REGEX}
    ]
    if pre in REGEX:
        steps.insert(0, {"type": "Split", "pattern": {"Regex": REGEX[pre]}, "behavior": "Isolated", "invert": False})
    elif pre == "smollm":
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    elif pre != "gpt-2":
        raise file.refused(f"its tokenizer splits texts as {shown(pre)}, which is not read")
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": pre == IGNORES_MERGES, "vocab": {text: i for i, text in enumerate(tokens)},
            "merges": [each.split(" ") for each in file.metadata.get("tokenizer.ggml.merges", [])],
        },
    }  # fmt: skip


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """Return SentencePiece's kind of tokenizer: byte pairs by score, with bytes for what the vocabulary lacks."""
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(cast("list[float]", scores)) != len(tokens):
        raise file.refused("its tokenizer has no score for each token")
    prefix: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}]
    has_prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip: list[dict[str, Any]] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    unknown = next((text for text, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *(strip if has_prefix else [])]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*(prefix if has_prefix else []), spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": BYTE in types, "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(tokens)},
            "merges": list(_merges(tokens, cast("list[float]", scores), types)),
        },
    }  # fmt: skip


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> Iterator[list[str]]:
    """Yield the pairs that SentencePiece joins, first those that give a token of a higher score."""
    ids = {text: i for i, text in enumerate(tokens)}
    joins = list[tuple[float, int, int]]()
    for text, score, kind in zip(tokens, scores, types, strict=True):
        if kind in (NORMAL, USER):
            pairs = ((ids.get(text[:i]), ids.get(text[i:])) for i in range(1, len(text)))
            joins += [(-score, left, right) for left, right in pairs if left is not None and right is not None]
    for _, left, right in sorted(joins):
        yield [tokens[left], tokens[right]]
