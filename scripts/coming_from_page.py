"""Regenerate the tables of docs/coming_from/ from the rules of `dualtune config import`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from dualtune.config.importing.table import Rule
from dualtune.config.importing.translate import TRAINERS

PAGES = Path(__file__).parents[1] / "docs" / "coming_from"

# (their names, our keys, what differs)
TRL = (
    ("SFTConfig, ModelConfig", "", "the names of the table above"),
    ("LoraConfig.r, lora_alpha, lora_dropout", "adapter.rank, adapter.alpha, adapter.dropout", ""),
    ("LoraConfig.target_modules", "adapter.targets", "`all-linear`, or a list of names"),
    ("train_dataset, eval_dataset", "data.train, data.eval", "a name, a file or a directory"),
    ("merge_and_unload", "", "`dualtune export RUN --to hf`; also `gguf`, `ollama`, `lmstudio` and `mlx`"),
    ("push_to_hub", "", "`dualtune push hf://owner/name RUN --adapter`: the adapter and a model card"),
    ("transformers chat, transformers serve", "", "`dualtune chat`, `dualtune serve`"),
    ("compute_metrics", "", "`dualtune eval`, after the run"),
    ("DPOTrainer, GRPOTrainer and others", "", "not supported yet"),
)  # fmt: skip

UNSLOTH = (
    ("FastLanguageModel.from_pretrained(model_name)", "model.name", ""),
    ("max_seq_length", "data.max_length", ""),
    ("load_in_4bit", "model.quantization", "`nf4`; it is off by default here"),
    ("get_peft_model(r, lora_alpha, lora_dropout)", "adapter.rank, adapter.alpha, adapter.dropout", ""),
    ("target_modules", "adapter.targets", ""),
    ("use_rslora", "adapter.scaling", "`rank_stabilized`"),
    ("use_gradient_checkpointing", "memory.checkpointing", "`full`; by default as little as fits"),
    ("random_state", "run.seed", ""),
    ("get_chat_template", "data.template", "the tokenizer's own, a name such as `qwen-2.5`, or a Jinja file"),
    ("train_on_responses_only", "data.loss_on", "`assistant`, by default"),
    ("the arguments of SFTConfig", "", "see TRL"),
    ("save_pretrained_merged", "", "`dualtune export RUN --to hf`, or `dualtune adapter merge`"),
    ("save_pretrained_gguf", "", "`dualtune export RUN --to gguf --quantize q4_k_m`; also `ollama` and `lmstudio`"),
    ("push_to_hub, push_to_hub_merged, push_to_hub_gguf", "",
     "`dualtune push hf://owner/name RUN --adapter` publishes the adapter; a merged model or a GGUF: `hf upload`"),
    ("report_to", "run.track", "trackio, wandb, mlflow, tensorboard; W&B is offline by default"),
    ("for_inference, fast_generate", "", "`dualtune chat`, `dualtune generate`, `dualtune serve`"),
)  # fmt: skip

# What is written in Python, for reading only.
OTHERS = {"TRL-in-Python": TRL, "Unsloth-in-Python": UNSLOTH}

_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.S)


def with_tables(page: str) -> str:
    """Return the page with each table between its marks regenerated."""
    return _TABLE.sub(lambda match: f"{match[1]}{_table(match[2])}\n{match[3]}", page)


def _table(name: str) -> str:
    if name in OTHERS:
        rows = ((_in_code(names), _in_code(ours), note) for names, ours, note in OTHERS[name])
    else:
        rows = (_row(rule) for rule in sorted(TRAINERS[name].RULES, key=_is_lost) if _has_ours(rule))
    return "\n".join([f"| {name} | dualtune | |", "|---|---|---|", *_lines(rows)])


def _has_ours(rule: Rule) -> bool:
    """Whether a page names the rule: `dualtune config import` reports the others, with their reason."""
    return bool(rule.convert or (rule.ours and not rule.is_needless))


def _is_lost(rule: Rule) -> bool:
    return not rule.convert


def _row(rule: Rule) -> tuple[str, str, str]:
    word = "not translated: " if _is_lost(rule) else ""
    return _in_code(", ".join(rule.names)), _in_code(rule.ours), word + rule.note


def _lines(rows: Iterable[tuple[str, str, str]]) -> Iterable[str]:
    escaped = ((cell.replace("|", "\\|") for cell in row) for row in rows)
    return (f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in escaped)


def _in_code(names: str) -> str:
    """Format each of the names as code."""
    return ", ".join(f"`{name}`" for name in names.split(", ")) if names else ""


if __name__ == "__main__":
    for page in PAGES.glob("*.md"):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
