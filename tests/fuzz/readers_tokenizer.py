"""Readers of what decides the tokens of a text: tokenizers."""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer  # dualtune imports it late, and it is large

from dualtune.data.tokens import tokenizer

assert AutoTokenizer
CACHE = tempfile.mkdtemp(prefix="dualtune-fuzz-")  # verdicts on tokenizers are kept
os.environ["DUALTUNE_CACHE"] = CACHE
atexit.register(shutil.rmtree, CACHE)
SPECIAL = ("<s>", "</s>", "<unk>")
TEXTS = ("Hi <s>there</s>\n", "a" * 300, "\u00e9 \u8a9e \U0001f46a", " \t ")


def tokenizer_seeds() -> list[dict[str, bytes]]:
    """Bytes, pieces in the manner of SentencePiece, and words; with the files of today and older ones beside them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_bytes = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIAL, *letters, "Hi"])}, [("H", "i")]))
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_bytes.decoder = decoders.ByteLevel()
    pieces = Tokenizer(models.Unigram([("<unk>", 0.0), ("\u2581", -1.0), *((x, -2.0) for x in letters)], 0))
    pieces.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "\u2581")])
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2, "hi": 3}, unk_token="[UNK]"))
    words.normalizer = normalizers.BertNormalizer()
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.decoder = decoders.WordPiece()
    for rust in (by_bytes, pieces, words):
        rust.add_special_tokens(list(SPECIAL))
        id = rust.token_to_id("<s>")
        rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", id)])
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    listed = {"0": {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                    "special": True}}  # fmt: skip
    model = json.dumps({"model_type": "llama"}).encode()
    files = [{"tokenizer.json": rust.to_str().encode(), "config.json": model} for rust in (by_bytes, pieces, words)]
    today = {"tokenizer_config.json": json.dumps(config | {"added_tokens_decoder": listed}).encode()}
    older = {
        "tokenizer_config.json": json.dumps(config | {"tokenizer_class": "GPT2Tokenizer"}).encode(),
        "special_tokens_map.json": json.dumps({"bos_token": "<s>", "additional_special_tokens": ["<x>"]}).encode(),
        "added_tokens.json": json.dumps({"<x>": 700}).encode(),
    }
    return [files[0] | today, files[1] | today, files[2] | today, files[0] | older]


def read_a_tokenizer(place: Path, out: Path, draw: random.Random) -> None:
    """What is accepted encodes and decodes, and has an id for each token that it makes."""
    del out
    found = tokenizer.Tokenizer(place, "none")
    found.fingerprint()
    for ids, offsets in found.encode_batch(TEXTS, special=draw.random() < 0.5):
        assert ids.dtype == np.int32 and offsets.shape == (len(ids), 2) and len(ids) < 10_000
        found.decode(ids.tolist())
