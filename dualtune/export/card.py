"""The model card of an export, README.md: only what was recorded and measured.

Metadata: https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

CARD = "README.md"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_LIBRARIES = {"hf": "transformers", "mlx": "mlx", "gguf": "gguf", "ollama": "gguf", "lmstudio": "gguf"}
_DIVERGENCES = {
    "adapter from base": "what the adapter changes",
    "merged from adapter": "the merged model, from base and adapter",
    "written from adapter": "what is written here, from what it stands for",
    "base, quantized alike, from base": "the base, quantized alike, from the base",
}


def card(name: str, record: Mapping[str, Any], of_adapter: Sequence[str] = ()) -> str:
    """Return README.md for the content of an export.json. `of_adapter`: what PEFT does not load of the adapter."""
    base = record["base"]
    table: dict[str, Any] = {"library_name": _LIBRARIES[record["target"]], "tags": ["dualtune"]}
    if base and _HUB_NAME.fullmatch(base):
        table |= {"base_model": base, "base_model_relation": "finetune"}
    whole = "A model that was trained whole" if base is None else f"{_code(_last(base))} with a LoRA adapter merged"
    parts = [
        f"---\n{yaml.safe_dump(table, sort_keys=True, allow_unicode=True)}---",
        f"# {_safe(name)}",
        f"{whole}, written for {record['target']} ({record['quantization']}) by dualtune {record['dualtune']}.",
        _merge(record),
        *(f"Of the adapter by itself: {_safe(note)}." for note in of_adapter),
        _rows("Loss on the rows that the run held out, nats", _losses(record["loss"])),
        _rows("Distances on fixed prompts, mean KL in nats", _distances(record["divergence_nats"])),
        f"An answer ends with {', '.join(map(_code, record['stops']))}." if record["stops"] else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _merge(record: Mapping[str, Any]) -> str:
    trained_on = record["trained_on"]
    if trained_on is None or record["base"] is None:
        return ""
    if trained_on == "none":
        return "The adapter was trained on the base's own weights, and is merged into them."
    return (
        f"The adapter was trained on the base in {_safe(trained_on)} (QLoRA), and is merged into the original weights, "
        "not into the dequantized ones that it was trained on: the loss may differ from that of the training."
    )


def _losses(loss: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("last evaluation of the run", loss["run"]),
        ("merged", loss["merged"]),
        ("as written here", loss["written"]),
    ]
    found = [(what, f"{value:.4f}") for what, value in rows if value is not None]
    return found + ([("not measured", loss["unknown"])] if loss["unknown"] else [])


def _distances(divergences: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(words, f"{found['kl']:.2e}") for key, words in _DIVERGENCES.items() if (found := divergences[key])]


def _rows(title: str, rows: list[tuple[str, str]]) -> str:
    lines = [f"| {_safe(what)} | {_safe(value)} |" for what, value in rows]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines]) if rows else ""


def _last(base: str) -> str:
    """Return a hub id, or the last part of a path, which is of no use elsewhere."""
    return base if _HUB_NAME.fullmatch(base) else re.split(r"[/\\]", base.rstrip("/\\"))[-1]


def _safe(text: object) -> str:
    """Return a text without what ends a cell of a table or begins markup."""
    return re.sub(r"[|`<>\r\n]", " ", str(text))


def _code(text: str) -> str:
    """Return a text as a span of code."""
    return f"`{re.sub(chr(96), ' ', ' '.join(text.split()))}`"
