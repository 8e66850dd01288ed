"""Check that an untrusted tokenizer.json is safe for the Rust library, which does not validate its input.

A few hundred bytes can make it allocate gigabytes: chained normalizers and decoders each lengthen a text, a template
repeats it, and a failed allocation ends the process. So the file is checked here first: only known parts are allowed,
and their growth per character is computed. What cannot be computed, above all the time of a regular expression, is
tried in a process with limits (`answer`); the verdict is cached by content.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import Container, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from dualtune.base.errors import DiskError, FormatError
from dualtune.base.files import cache_dir, write_file
from dualtune.base.limits import Exceeded, Limits, run
from dualtune.base.untrusted import parse_object
from dualtune.base.versions import versions_of
from dualtune.data.tokens.tokenizer_classes import QWEN2, QWEN3_5

MAX_FILE_BYTES = 64 << 20  # the largest in use, of 262,144 tokens, has 33 MiB
MAX_STRUCTURES = 10  # times the limit of other JSON: the largest file has some 5 million quotes, commas and brackets
MAX_TOKENS = 1 << 20
MAX_MERGES = 1 << 21
MAX_ID = 1 << 24
MAX_ADDED_BYTES = 4 << 20  # the text of all added tokens
MAX_PARTS = 32  # normalizers, pre-tokenizers or decoders in a row
MAX_GROWTH = 64  # characters that a chain of parts may make of one
MAX_PIECES = 64  # of a template of special tokens
MAX_PATTERN = 4096  # characters of a regular expression
MAX_WORD = 1000  # characters of a word; WordPiece is quadratic in it
MAX_CHARSMAP = 4 << 20
MAX_HERE = 4 << 20  # bytes of a file to check in this process; a larger one goes to the trial directly
# Limits of a trial, with an additional allowance for a large vocabulary.
MEMORY_BYTES, MEMORY_FOR_A_BYTE = 256 << 20, 12
CPU_S, BYTES_A_SECOND = 5, 4 << 20
REMEDY = "Use the file that the model was published with"
LENGTH = 3000  # characters of a text of the trial: quadratic time shows, and a good tokenizer takes a second for all
GOOD_PATTERNS = {QWEN2, QWEN3_5, QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")}  # the last is Llama 3's
RULES = 1  # increase it when the accepted content changes, to invalidate cached verdicts

NORMALIZERS = {
    "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend",
    "Replace", "Strip", "StripAccents",
}  # fmt: skip
PRE_TOKENIZERS = {
    "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Delimiter", "Digits", "FixedLength", "Metaspace",
    "Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit",
}  # fmt: skip
DECODERS = {
    "BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece",
}  # fmt: skip
POST_PROCESSORS = {"BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"}
MODELS = {"BPE", "Unigram", "WordLevel", "WordPiece"}
# (the known parts, the key of the list in a Sequence)
SEQUENCES = {
    "normalizer": (NORMALIZERS, "normalizers"), "pre_tokenizer": (PRE_TOKENIZERS, "pretokenizers"),
    "decoder": (DECODERS, "decoders"), "post_processor": (POST_PROCESSORS, "processors"),
}  # fmt: skip
NFK_GROWTH = 18  # U+FDFA becomes eighteen characters
BYTES_GROWTH = 4  # a character becomes at most four

# What our own code or the library raises for a part that is not what it should be.
_WRONG = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)

Table = Mapping[str, Any]


def vet(data: bytes, path: Path) -> None:
    """Raise FormatError if this content of a tokenizer.json must not be loaded."""
    if len(data) > MAX_FILE_BYTES:
        raise FormatError(f"{path}: more than {MAX_FILE_BYTES} bytes, which no tokenizer has. {REMEDY}")
    digest = hashlib.sha256(json.dumps([RULES, versions_of(("tokenizers",))]).encode())
    digest.update(data)
    verdict = cache_dir() / "tokenizers" / digest.hexdigest()[:32]
    with contextlib.suppress(OSError):
        if verdict.read_text(encoding="ascii") == "ok":
            return
    try:
        if len(data) > MAX_HERE or check(parse_object(data, path, strict=False)):
            limits = Limits(MEMORY_BYTES + MEMORY_FOR_A_BYTE * len(data), CPU_S + len(data) // BYTES_A_SECOND)
            if reason := run(__name__, data, limits):
                raise Refused(reason)
    except Exceeded as error:
        reason = f"a trial on texts of {LENGTH:,} characters took more than {error}"
        raise FormatError(f"{path}: {reason}. {REMEDY}") from None
    except Refused as refusal:
        raise FormatError(f"{path}: {refusal}. {REMEDY}") from None
    with contextlib.suppress(OSError, DiskError):
        verdict.parent.mkdir(parents=True, exist_ok=True)
        write_file(verdict, "ok")


@contextlib.contextmanager
def rust_errors(path: object) -> Generator[None]:
    """Convert errors of the Rust library to FormatError: bare Exceptions, and panics, which are BaseExceptions."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException" and not isinstance(error, _WRONG):
            raise
        reason = reason_of(error)
        raise FormatError(f"{path}: the tokenizer is damaged: {reason}. {REMEDY}") from None


def reason_of(error: BaseException) -> str:
    """Return an error's message, safe for a terminal, because it may quote the file."""
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return "".join(letter if letter.isprintable() else "?" for letter in text)


class Refused(Exception):
    """A tokenizer.json needs more than a tokenizer should."""


def check(table: Table) -> bool:
    """Return whether a trial is needed. Raises Refused for unknown parts or ones that lengthen a text too much."""
    _check_model(_object(table.get("model"), "model"))
    tokens = [_object(token, "added_tokens") for token in _items(table.get("added_tokens"), "added_tokens")]
    _check_ids([token.get("id") for token in tokens], "added_tokens")
    if sum(len(str(token.get("content"))) for token in tokens) > MAX_ADDED_BYTES:
        raise Refused(f"the added tokens have more than {MAX_ADDED_BYTES} characters")
    needs_trial = False
    for name, (kinds, key) in SEQUENCES.items():
        parts = _parts(table.get(name), kinds, key, name)
        growth = math.prod(_growth(part, name) for part in parts)
        if growth > MAX_GROWTH:
            raise Refused(
                f"its {name} can make a text {growth:.3g} times as long, at most {MAX_GROWTH} times are allowed"
            )
        needs_trial |= any(part["type"] == "Precompiled" or _has_own_regex(part) for part in parts)
    return needs_trial


def _has_own_regex(part: Table) -> bool:
    pattern = part.get("pattern")
    return isinstance(pattern, dict) and "Regex" in pattern and not _is_one_of(pattern["Regex"], GOOD_PATTERNS)


def _is_one_of(value: Any, names: Container[str]) -> bool:
    """Return whether a value is one of the names; it may also be unhashable (a list, an object)."""
    return isinstance(value, str) and value in names


def _parts(value: Any, kinds: set[str], key: str, name: str, depth: int = 0) -> list[Table]:
    """Return the flattened chain of parts; a Sequence may contain Sequences."""
    if value is None:
        return []
    part = _object(value, name)
    kind = part.get("type")
    if kind == "Sequence" and depth < 4:
        inner = _items(part.get(key), f"{name}.{key}")
        parts = [leaf for item in inner[: MAX_PARTS + 1] for leaf in _parts(item, kinds, key, name, depth + 1)]
        if max(len(inner), len(parts)) > MAX_PARTS:
            raise Refused(f"its {name} has more than {MAX_PARTS} parts")
        return parts
    if not _is_one_of(kind, kinds):
        raise Refused(f"{name}: got type {_shown(kind)}, allowed: Sequence, {', '.join(sorted(kinds))}")
    return [part]


def _growth(part: Table, name: str) -> float:
    """Return an upper bound on the characters that a part makes of one."""
    match part["type"]:
        case "Replace":
            pattern, content = part.get("pattern"), part.get("content")
            text = _object(pattern, name).get("String")
            _check_pattern(pattern, name)
            if not isinstance(content, str):
                raise Refused(f"{name}: Replace has no content")
            # A regular expression may match the empty string; then the content is added to the characters.
            return max(1.0, len(content) / len(text)) if isinstance(text, str) and text else 1.0 + len(content)
        case "Split":
            _check_pattern(part.get("pattern"), name)
            return 1
        case "Precompiled":
            return _charsmap_growth(part.get("precompiled_charsmap"))
        case "NFKC" | "NFKD":
            return NFK_GROWTH
        case "NFD" | "BertNormalizer" | "ByteLevel":
            return BYTES_GROWTH
        case "Prepend" | "WordPiece" | "BPEDecoder" | "CTC" | "Metaspace":
            longest = max([len(value) for value in part.values() if isinstance(value, str)], default=1)
            if longest > MAX_PIECES:
                raise Refused(f"{name}: a text of {longest} characters, at most {MAX_PIECES} are allowed")
            return 1
        case "TemplateProcessing":
            return _check_template(part)
        case _:
            return 1


def _check_pattern(pattern: Any, name: str) -> None:
    match pattern:
        case {"String": str(text)} | {"Regex": str(text)} if len(text) <= MAX_PATTERN:
            return
        case _:
            raise Refused(f"{name}: pattern must be a String or Regex of at most {MAX_PATTERN} characters")


def _charsmap_growth(charsmap: Any) -> float:
    """Return the growth bound of SentencePiece's replacement table: a trie, then zero-terminated strings."""
    if not isinstance(charsmap, str) or len(charsmap) > MAX_CHARSMAP:
        raise Refused(f"normalizer: precompiled_charsmap must be a text of at most {MAX_CHARSMAP} characters")
    try:
        blob = base64.b64decode(charsmap, validate=True)
    except ValueError:
        raise Refused("normalizer: precompiled_charsmap is not base64") from None
    size = int.from_bytes(blob[:4], "little")
    if not 4 + size <= len(blob):
        raise Refused("normalizer: precompiled_charsmap is truncated")
    return max([1, *(len(text.decode("utf-8", "replace")) for text in blob[4 + size :].split(b"\0"))])


def _check_template(part: Table) -> float:
    """Return 1. Raises Refused if a template of special tokens repeats its text or is too long."""
    special = _object(part.get("special_tokens"), "post_processor.special_tokens")
    for token in special.values():
        ids = _items(_object(token, "post_processor.special_tokens").get("ids"), "post_processor.special_tokens")
        if len(ids) > MAX_PIECES:
            raise Refused(f"post_processor: a special token of {len(ids)} ids, at most {MAX_PIECES} are allowed")
        _check_ids(ids, "post_processor.special_tokens")
    for name in ("single", "pair"):
        where = f"post_processor.{name}"
        pieces = [_object(piece, where) for piece in _items(part.get(name), where)]
        num_texts = sum("Sequence" in piece for piece in pieces)
        if len(pieces) > MAX_PIECES or num_texts > (1 if name == "single" else 2):
            raise Refused(f"{where}: repeats its text, or has more than {MAX_PIECES} pieces")
    return 1


def _check_model(model: Table) -> None:
    kind = model.get("type")
    if kind is not None and not _is_one_of(kind, MODELS):  # older files name none
        raise Refused(f"model: got type {_shown(kind)}, allowed: {', '.join(sorted(MODELS))}")
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        tokens = cast("dict[str, Any]", vocab)
        _check_ids(tokens.values(), "model.vocab")
    else:
        tokens = _items(vocab, "model.vocab")
    merges = _items(model.get("merges"), "model.merges")
    for name, count, most in (("vocab", len(tokens), MAX_TOKENS), ("merges", len(merges), MAX_MERGES)):
        if count > most:
            raise Refused(f"model.{name}: {count} entries, at most {most} are allowed")
    word = model.get("max_input_chars_per_word")
    if word is not None and not (type(word) is int and 0 < word <= MAX_WORD):
        raise Refused(f"model.max_input_chars_per_word: got {_shown(word)}, allowed: 1 to {MAX_WORD}")


def _check_ids(ids: Iterable[Any], name: str) -> None:
    for id in ids:
        if type(id) is not int or not 0 <= id < MAX_ID:
            raise Refused(f"{name}: got id {_shown(id)}, allowed: 0 to {MAX_ID - 1}")


def _items(value: Any, name: str) -> Sequence[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise Refused(f"{name}: must be a list")
    return cast("list[Any]", value)


def _object(value: Any, name: str) -> Table:
    if not isinstance(value, dict):
        raise Refused(f"{name}: must be an object")
    return cast("dict[str, Any]", value)


def _shown(value: Any) -> str:
    return ascii(value)[:50]


# ----------------------------------------------------------------------------------------------------------------------
# The trial, in the process with limits that `dualtune.base.limits` starts.
#
# The texts are long runs of one kind of character that end differently. On these a badly written regular expression
# takes quadratic time or never ends.

CHARACTERS = ("a", "A", "1", " ", "\n", "\t", ".", "'", "_", "<", "é", "語", "\u0301", "\ufdfa", "👪", "▁")
ENDS = ("", "!", "\0", "a")
MAX_TOKENS_OF_ONE = 200  # of a character


def answer(data: bytes) -> str:
    """Return the reason why this content must not be used, or ""."""
    try:
        check(parse_object(data, "tokenizer.json", strict=False, allowance=MAX_STRUCTURES))
        with rust_errors("tokenizer.json"):
            rust = Tokenizer.from_buffer(data)
            rust.no_truncation()
            rust.no_padding()
            for run_of in (*CHARACTERS, *map("".join, itertools.pairwise(CHARACTERS))):
                for end in ENDS:
                    text = run_of * (LENGTH // len(run_of)) + end
                    ids = rust.encode(text).ids
                    if len(ids) > MAX_TOKENS_OF_ONE * len(text):
                        return f"it splits {len(text)} characters into {len(ids)} tokens"
                    rust.decode(ids[:LENGTH])
    except Refused as refusal:
        return str(refusal)
    except FormatError as error:
        return str(error).removeprefix("tokenizer.json: ").removesuffix(f". {REMEDY}")
    return ""
