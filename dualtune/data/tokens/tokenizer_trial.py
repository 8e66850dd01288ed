"""Try a tokenizer.json in the process with limits that `dualtune.base.limits` starts.

The texts are long runs of one kind of character that end differently. On these a badly written regular expression
takes quadratic time or never ends.
"""

from __future__ import annotations

import itertools

from tokenizers import Tokenizer

from dualtune.base.errors import FormatError
from dualtune.base.untrusted import parse_object
from dualtune.data.tokens.tokenizer_vetting import MAX_STRUCTURES, REMEDY, Refused, check, rust_errors

CHARACTERS = ("a", "A", "1", " ", "\n", "\t", ".", "'", "_", "<", "é", "語", "\u0301", "\ufdfa", "👪", "▁")
ENDS = ("", "!", "\0", "a")
LENGTH = 3000  # characters: quadratic time shows, and a good tokenizer takes a second for all texts
MAX_TOKENS = 200  # per character


def answer(data: bytes) -> str:
    """Return the reason why this content must not be used, or ""."""
    try:
        check(parse_object(data, "tokenizer.json", strict=False, allowance=MAX_STRUCTURES))
        with rust_errors("tokenizer.json"):
            rust = Tokenizer.from_buffer(data)
            rust.no_truncation()
            rust.no_padding()
            for run in (*CHARACTERS, *map("".join, itertools.pairwise(CHARACTERS))):
                for end in ENDS:
                    text = run * (LENGTH // len(run)) + end
                    ids = rust.encode(text).ids
                    if len(ids) > MAX_TOKENS * len(text):
                        return f"it splits {len(text)} characters into {len(ids)} tokens"
                    rust.decode(ids[:LENGTH])
    except Refused as refusal:
        return str(refusal)
    except FormatError as error:
        return str(error).removeprefix("tokenizer.json: ").removesuffix(f". {REMEDY}")
    return ""
