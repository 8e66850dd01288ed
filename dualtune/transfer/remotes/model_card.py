"""The model card of an adapter on the hub: only what dualtune.json and the config say.

Metadata: https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import yaml

from dualtune.adapter.formats.chat_template import TEMPLATE_FILE, describe_template
from dualtune.adapter.formats.directory import Adapter
from dualtune.config import Config

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_NUMBERS = (  # of `training` in dualtune.json
    ("final_loss", "training loss, last step"),
    ("eval_loss_before", "evaluation loss, before training"),
    ("eval_loss", "evaluation loss, after training"),
    ("best_eval_loss", "best evaluation loss"),
    ("best_step", "step of the best evaluation loss"),
)
_SETTINGS = ("train.optimizer", "train.learning_rate", "train.schedule", "train.warmup", "train.weight_decay",
             "data.max_length", "data.loss_on", "model.dtype", "model.quantization")  # fmt: skip


def card(repo: str, adapter: Adapter, config: Config | None) -> str:
    """Return README.md for a repository `owner/name`. The config must no longer hold directories of this machine."""
    training = _table(adapter.metadata.get("training"))
    base = _table(adapter.metadata.get("base")).get("name") or adapter.base_model
    numbers = [(words, training[key]) for key, words in _NUMBERS if training.get(key) is not None]
    sections = [
        _front_matter(base, config),
        f"# {repo}",
        _text_of_base(base),
        _section("How it was trained", _rows_of_training(adapter, training, config)),
        _section("Data", _rows_of_data(training, config)),
        _section("Measured", numbers) or "## Measured\n\nNothing was recorded.",
        _usage(repo, base if base and _HUB_NAME.fullmatch(base) else "BASE_MODEL"),
        _text_of_template(repo) if adapter.template is not None else "",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(base: str | None, config: Config | None) -> str:
    table: dict[str, Any] = {"library_name": "peft", "tags": ["lora", "dualtune", "mlx"]}
    if base and _HUB_NAME.fullmatch(base):
        table |= {"base_model": base, "base_model_relation": "adapter"}
    if datasets := [name for name in _sources(config) if _HUB_NAME.fullmatch(name) and "." not in name]:
        table["datasets"] = datasets
    return f"---\n{yaml.safe_dump(table, sort_keys=True, allow_unicode=True)}---"


def _text_of_base(base: str | None) -> str:
    name = f"`{_safe(base)}`" if base else "a base model that was not recorded"
    return (
        f"A LoRA adapter for {name}. It holds only the adapter: the base model is needed too. "
        "`dualtune.json` has the sha256 of each file and of parts of the base, and what both compute for fixed prompts."
    )


def _rows_of_training(adapter: Adapter, training: Mapping[str, Any], config: Config | None) -> list[tuple[str, Any]]:
    spec = adapter.spec
    rows: list[tuple[str, Any]] = [("method", spec.method_spec.title)] if training else []
    if adapter.template_hash is not None:
        rows.append(("chat template", describe_template(adapter.template, adapter.metadata)))
    how = "alpha / √rank" if spec.scaling == "rank_stabilized" else "alpha / rank"
    rows += [("rank", spec.rank), (f"scale ({how})", spec.scale), ("modules", ", ".join(spec.targets))]
    rows += [(key, training[key]) for key in ("backend", "steps", "skipped_steps", "seed") if key in training]
    if config is not None:
        values = config.model_dump(mode="json")
        rows += [(f"`{key}`", values[section][name]) for key in _SETTINGS for section, _, name in [key.partition(".")]]
    return rows


def _rows_of_data(training: Mapping[str, Any], config: Config | None) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [("source", ", ".join(_sources(config)))] if config is not None else []
    return rows + [("documents trained on", training[key]) for key in ("train_documents",) if key in training]


def _sources(config: Config | None) -> list[str]:
    """Return the names of the training data: files without their directories, datasets as on the hub."""
    if config is None:
        return []
    given: Any = config.model_dump(mode="json")["data"]["train"]
    many = cast("list[Any]", given) if isinstance(given, list) else [given]
    return [str(_table(one).get("path", one)) if isinstance(one, dict) else str(one) for one in many]


def _section(title: str, rows: list[tuple[str, Any]]) -> str:
    if not rows:
        return ""
    lines = [f"| {_safe(name)} | {_safe(value)} |" for name, value in rows]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines])


def _usage(repo: str, base: str) -> str:
    return f"""## Use it

```python
# PEFT: transformers, on torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{repo}")
```

```python
# mlx-lm
from huggingface_hub import snapshot_download
from mlx_lm import load

model, tokenizer = load("{base}", adapter_path=snapshot_download("{repo}"))
```

```sh
dualtune pull hf://{repo} pulled
dualtune verify pulled/adapter --base {base}    # does it compute the same here?
```"""


def _text_of_template(repo: str) -> str:
    return f"""The tokenizer of the base needs the chat template used in training:

```python
from huggingface_hub import hf_hub_download

tokenizer.chat_template = open(hf_hub_download("{repo}", "{TEMPLATE_FILE}"), encoding="utf-8").read()
```"""


def _safe(value: Any) -> str:
    """Return a value, escaped for a cell of a table."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return "".join(c if c.isprintable() else " " for c in text).replace("|", "\\|").replace("<", "&lt;")


def _table(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
