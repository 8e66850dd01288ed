"""The tokens that end a trained turn, named in every file of a model where a program looks for them.

A base checkpoint stops at the end of a text; tuned with a chat template, it stops at the end of a turn. transformers
and vLLM read generation_config.json and the tokenizer's `eos_token`, mlx-lm config.json, llama.cpp's converter
tokenizer_config.json: a file that still names only the old token lets that program write on and on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from dualtune.base.untrusted import read_json
from dualtune.data.chat.conversations import Message
from dualtune.data.sources.rows import RowError
from dualtune.data.tokens.tokenizer import MAX_GENERATION_CONFIG_BYTES, Tokenizer
from dualtune.data.tokens.tokenizer_vetting import MAX_FILE_BYTES
from dualtune.model.config_file import MAX_CONFIG_BYTES

GENERATION_CONFIG = "generation_config.json"
_NAMING_EOS = ("tokenizer_config.json", "special_tokens_map.json")
_ANSWER = "Blue."


def stop_texts(tokenizer: Tokenizer) -> list[str]:
    """Return every text that ends an answer: that of each token, and one with which the template ends turns."""
    return [*stop_tokens(tokenizer).texts, *([tokenizer.stop_text] if tokenizer.stop_text else [])]


class StopTokens(NamedTuple):
    """The ids of the tokens that end an answer: first the one that ends a turn of the chat template."""

    ids: list[int]
    texts: list[str]


def stop_tokens(tokenizer: Tokenizer) -> StopTokens:
    """Return every token that ends an answer of a model with this tokenizer and chat template."""
    first = turn_end(tokenizer)
    first = tokenizer.eos_id if first is None else first
    ids = sorted(tokenizer.stop_ids, key=lambda token: (token != first, token))
    return StopTokens(ids, [tokenizer.decode_all([token]) for token in ids])


def turn_end(tokenizer: Tokenizer) -> int | None:
    """Return the token that ends an assistant's turn in the chat template; None without a template or such a token."""
    if tokenizer.template is None:
        return None
    try:
        text = tokenizer.render([Message("user", "Which colour?"), Message("assistant", _ANSWER)])
    except RowError:
        return None
    _, answer, end = text.rpartition(_ANSWER)
    tokens: list[int] = tokenizer.encode(end, special=False).tolist() if answer else []
    return next((token for token in tokens if token in tokenizer.stop_ids), None)


def write_stop_tokens(model: Path, tokenizer: Tokenizer | None = None) -> StopTokens:
    """Name the stop tokens of a model directory, which holds the chat template of its training, in all of its files.

    The tokenizer's `eos_token` becomes the end of a turn only if the template does not write `eos_token` itself.
    `tokenizer`: that of the directory, if it is loaded already.
    """
    tokenizer = tokenizer or Tokenizer(model)
    stops = stop_tokens(tokenizer)
    if not stops.ids and not tokenizer.stop_text:
        return stops
    # transformers and vLLM look here, also for a text that no token stands for.
    config = read_json(model / "config.json", max_bytes=MAX_CONFIG_BYTES, strict=False)
    generation = model / GENERATION_CONFIG
    if generation.is_file():
        table = read_json(generation, max_bytes=MAX_GENERATION_CONFIG_BYTES, strict=False)
    else:  # what transformers takes from config.json where this file is missing
        table = {key: config[key] for key in ("bos_token_id", "pad_token_id") if key in config}
    if tokenizer.stop_text:  # transformers stops at it if `generate` is given the tokenizer
        table["stop_strings"] = [tokenizer.stop_text]
    if not stops.ids:
        _write(generation, table)
        return stops
    # mlx-lm looks in config.json; llama.cpp's converter at the tokenizer's own end token, which is changed only where
    # the template does not write it.
    named = stops.ids if len(stops.ids) > 1 else stops.ids[0]
    _write(generation, table | {"eos_token_id": named})
    for part in (config, config.get("text_config")):  # the latter of a model that takes images too
        if isinstance(part, dict) and (part is config or "eos_token_id" in part):
            cast("dict[str, Any]", part)["eos_token_id"] = named
    _write(model / "config.json", config)
    source = tokenizer.template.source if tokenizer.template else ""
    if stops.ids[0] != tokenizer.eos_id and "eos_token" not in source:  # the variable of chat templates
        for name in _NAMING_EOS:
            _rename_eos(model / name, stops.texts[0])
    return stops


def _write(path: Path, table: Mapping[str, Any]) -> None:
    """Write a table that was read from there; it may hold Infinity, as some configs do."""
    path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _rename_eos(path: Path, token: str) -> None:
    if not path.is_file():
        return
    table = read_json(path, max_bytes=MAX_FILE_BYTES, strict=False, allowance=4)
    if isinstance(old := table.get("eos_token"), dict):
        table["eos_token"] = {**cast("dict[str, Any]", old), "content": token}
    elif old is not None or path.name == _NAMING_EOS[0]:
        table["eos_token"] = token
    _write(path, table)
