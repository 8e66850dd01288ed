"""The model cards, README.md, of an adapter on the hub and of an export: only what was recorded and measured.

Metadata: https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import yaml
from pydantic import BaseModel

from dualtune.config import Config, get_value
from dualtune.config.combinations import PREFERENCE_KEYS
from dualtune.config.values import ON_POLICY
from dualtune.model.adapter import is_of_base
from dualtune.model.beside import sizes_of
from dualtune.model.formats.chat_template import TEMPLATE_FILE, describe_template
from dualtune.model.formats.directory import Adapter

FILE = "README.md"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def _joined(sections: Iterable[str]) -> str:
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(library: str, tags: list[str], base: str | None, relation: str, datasets: Sequence[str] = ()) -> str:
    table: dict[str, Any] = {"library_name": library, "tags": tags}
    if base and _HUB_NAME.fullmatch(base):
        table |= {"base_model": base, "base_model_relation": relation}
    if datasets:
        table["datasets"] = datasets
    return f"---\n{yaml.safe_dump(table, sort_keys=True, allow_unicode=True)}---"


def _section(title: str, rows: Sequence[tuple[str, Any]]) -> str:
    """Return a table of two columns below a title; nothing without rows."""
    lines = [f"| {_safe(name)} | {_safe(value)} |" for name, value in rows]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines]) if rows else ""


def _safe(value: Any) -> str:
    """Return a value, escaped for a cell of a table or a line of text."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return "".join(c if c.isprintable() else " " for c in text).replace("|", "\\|").replace("<", "&lt;")


def _code(text: str) -> str:
    """Return a text as a span of code."""
    return f"`{' '.join(text.split()).replace('`', ' ')}`"


# ----------------------------------------------------------------------------------------------------------------------
# An adapter on the hub, by its dualtune.json and the config of its run.

_NUMBERS = (  # of `training` in dualtune.json
    ("final_loss", "training loss, last step"),
    ("eval_loss_before", "evaluation loss, before training"),
    ("eval_loss", "evaluation loss, after training"),
    ("best_eval_loss", "best evaluation loss"),
    ("best_step", "step of the best evaluation loss"),
)
_SETTINGS = ("train.optimizer", "train.learning_rate", "train.lora_plus_ratio", "train.schedule", "train.warmup",
             "train.weight_decay", "data.max_length", "data.loss_on", "model.dtype", "model.quantization")  # fmt: skip
# Those that are shown where they are not the default, beside all of `rollouts`.
_IF_CHANGED = (
    "adapter.init", "adapter.dropout", "adapter.merge_for", "adapter.bias", "train.embedding_learning_rate",
    "train.label_smoothing", "train.router_aux_loss_coef", "train.average", "train.average_over",
)  # fmt: skip
_USAGE = """## Use it

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
_TEMPLATE = """The tokenizer of the base needs the chat template used in training:

```python
from huggingface_hub import hf_hub_download

tokenizer.chat_template = open(hf_hub_download("{repo}", "{file}"), encoding="utf-8").read()
```"""


def adapter_card(repo: str, adapter: Adapter, config: Config | None) -> str:
    """Return README.md for a repository `owner/name`. The config must no longer hold directories of this machine."""
    training, spec = _table(adapter.metadata.get("training")), adapter.spec
    base: str | None = _table(adapter.metadata.get("base")).get("name") or adapter.base_model
    sources = _sources(config) if config else []

    method: list[tuple[str, Any]] = [("method", spec.method_spec.title)] if training else []
    if adapter.template_hash is not None:
        method.append(("chat template", describe_template(adapter.template, adapter.metadata)))
    scale = "alpha / √rank" if spec.scaling == "rank_stabilized" else "alpha / rank"
    method += [("rank", spec.rank), (f"scale ({scale})", spec.scale), ("modules", ", ".join(spec.targets))]
    if beside := sizes_of({name: x.shape for name, x in adapter.tensors.items() if is_of_base(name)}):
        method.append(("trained of the base", ", ".join(f"{module}: {size:,}" for module, size in beside.items())))
    if adapter.new_tokens:
        method.append(("new tokens", ", ".join(f"`{token}`" for token, _ in adapter.new_tokens)))
    method += [(f"of {target}", shown) for target, shown in spec.differences().items()]
    method += [(key, training[key]) for key in ("backend", "steps", "skipped_steps", "seed") if key in training]
    if config is not None:
        values, objective = config.model_dump(mode="json"), config.train.objective
        keys = [*_SETTINGS]
        if objective != "sft":
            keys += ["train.objective", *(f"preference.{key}" for key in PREFERENCE_KEYS.get(objective, ()))]
        if objective in ("distill", ON_POLICY):
            keys += [f"distill.{key}" for key in type(config.distill).model_fields]
        changeable = [*_IF_CHANGED, *(f"rollouts.{key}" for key in type(config.rollouts).model_fields)]
        keys += [key for key in changeable if get_value(config, key) != _default_of(config, key)]
        settings = {key: values[section][name] for key in keys for section, _, name in [key.partition(".")]}
        method += [(f"`{key}`", _listed(value)) for key, value in settings.items() if value is not None]

    data: list[tuple[str, Any]] = [("source", ", ".join(sources))] if config else []
    data += [("documents trained on", training["train_documents"])] if "train_documents" in training else []
    measured = [(label, training[key]) for key, label in _NUMBERS if training.get(key) is not None]
    name = f"`{_safe(base)}`" if base else "a base model that was not recorded"
    usable_base = base if base and _HUB_NAME.fullmatch(base) else "BASE_MODEL"
    return _joined([
        _front_matter("peft", [spec.method, "dualtune", "mlx"], base, "adapter",
                      [source for source in sources if _HUB_NAME.fullmatch(source) and "." not in source]),
        f"# {repo}",
        f"A {spec.method_spec.title} adapter for {name}. It holds only the adapter: the base model is needed too. "
        "`dualtune.json` has the sha256 of each file and of parts of the base, and what both compute for fixed "
        "prompts.",
        _section("How it was trained", method),
        _section("Data", data),
        _section("Measured", measured) or "## Measured\n\nNothing was recorded.",
        _USAGE.format(base=usable_base, repo=repo),
        _TEMPLATE.format(repo=repo, file=TEMPLATE_FILE) if adapter.template is not None else "",
    ])  # fmt: skip


def _listed(value: Any) -> Any:
    return ", ".join(map(str, cast("list[Any]", value))) if isinstance(value, list) else value


def _default_of(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return cast("type[BaseModel]", type(getattr(config, section))).model_fields[name].default


def _sources(config: Config) -> list[str]:
    """Return the names of the training data: files without their directories, datasets as on the hub."""
    sources: Any = config.model_dump(mode="json")["data"]["train"]
    listed = cast("list[Any]", sources) if isinstance(sources, list) else [sources]
    return [str(_table(source).get("path", source)) for source in listed]


def _table(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


# ----------------------------------------------------------------------------------------------------------------------
# An export, by its export.json.

_LIBRARIES = {"hf": "transformers", "mlx": "mlx", "gguf": "gguf", "ollama": "gguf", "lmstudio": "gguf"}
_LOSSES = {"run": "last evaluation of the run", "merged": "merged", "written": "as written here"}
_DISTANCES = {
    "adapter from base": "what the adapter changes",
    "merged from adapter": "the merged model, from base and adapter",
    "written from adapter": "what is written here, from what it stands for",
    "base, quantized alike, from base": "the base, quantized alike, from the base",
}


def export_card(name: str, record: Mapping[str, Any], notes_on_adapter: Sequence[str] = ()) -> str:
    """Return README.md for the content of an export.json. `notes_on_adapter`: what PEFT does not load of it."""
    base, trained_on, loss, distances = (record[key] for key in ("base", "trained_on", "loss", "divergence_nats"))
    model = "A model that was trained whole"
    if base is not None:  # of a path, the last part: the rest is of no use elsewhere
        own_name = base if _HUB_NAME.fullmatch(base) else re.split(r"[/\\]", base.rstrip("/\\"))[-1]
        model = f"{_code(own_name)} with an adapter merged"
    merge = ""
    if base is not None and trained_on == "none":
        merge = "The adapter was trained on the base's own weights, and is merged into them."
    elif base is not None and trained_on is not None:
        merge = (
            f"The adapter was trained on the base in {_safe(trained_on)} (QLoRA), and is merged into the original "
            "weights, not into the dequantized ones that it was trained on: the loss may differ from that of the "
            "training."
        )
    losses = [(label, f"{loss[key]:.4f}") for key, label in _LOSSES.items() if loss[key] is not None]
    losses += [("not measured", loss["unknown"])] if loss["unknown"] else []
    return _joined([
        _front_matter(_LIBRARIES[record["target"]], ["dualtune"], base, "finetune"),
        f"# {_safe(name)}",
        f"{model}, written for {record['target']} ({record['quantization']}) by dualtune {record['dualtune']}.",
        merge,
        *(f"Of the adapter by itself: {_safe(note)}." for note in notes_on_adapter),
        _section("Loss on the rows that the run held out, nats", losses),
        _section("Distances on fixed prompts, mean KL in nats",
                 [(label, f"{distances[key]['kl']:.2e}") for key, label in _DISTANCES.items() if distances[key]]),
        f"An answer ends with {', '.join(map(_code, record['stops']))}." if record["stops"] else "",
    ])  # fmt: skip
