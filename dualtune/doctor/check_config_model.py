"""Checks of the base model of a config without a download: its files, its shape, its tokenizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualtune.base.checks import Check
from dualtune.base.errors import ConfigError, DualtuneError, EnvironmentFault
from dualtune.base.fields import shown
from dualtune.base.files import expanded
from dualtune.config import Config
from dualtune.data.sources.readers import is_hub_name
from dualtune.data.tokens.stop_tokens import turn_end
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.doctor.storage import local_model, missing_files
from dualtune.engine.memory.counted import Shape, shape_from
from dualtune.engine.memory.shapes import UnknownShape, published
from dualtune.engine.routing import experts_of_token
from dualtune.model.base_model import is_here, resolve_model
from dualtune.model.config_file import ignored_code, longest_text, position_table_size, read_config
from dualtune.model.embeddings import untied_head, untrained_rows
from dualtune.model.experts import expert_of
from dualtune.model.importing.foreign import base_shapes
from dualtune.model.targets import OUTPUT_HEAD, Shapes, adapted_as, check_pattern, is_target, select_modules
from dualtune.model.weight_files import has_weights, weights_in
from dualtune.train.activation_cache import layers_below

# Class names of Hugging Face models that predict the next token; `architectures` in config.json names the class.
CAUSAL = ("ForCausalLM", "LMHeadModel")
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
WITH_MORE = "ForConditionalGeneration"  # with images or other inputs, or an encoder


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The facts of a base model, as far as they are known."""

    directory: Path | None  # where its files are; None: not on this machine
    config: Mapping[str, Any] | None  # its config.json; None: not known until it is downloaded
    fault: DualtuneError | None = None  # why its files cannot be used


def find_model(config: Config, key: str = "model.name") -> tuple[BaseModel, list[Check]]:
    """Find the model in a directory, in the hub cache or among the published shapes. Nothing is downloaded.

    `key`: that names it.
    """
    name = config.model.name
    directory = local_model(name)
    if directory is not None and (is_here(name) or (directory / "config.json").is_file()):
        return _on_this_machine(config, directory)
    if not is_hub_name(name) or Path(name).exists():
        text = f"there is no model directory {expanded(name)}"
        return BaseModel(None, None), [_fails("model", text, f"Set {key} to a directory or a hub id")]
    if (shape := published(name)) is not None:
        text = f"{name}: not downloaded yet; its shape is known"
        return BaseModel(None, shape), [Check("model", "ok", text), *_architecture(shape)]
    text = f"{name}: not downloaded yet, so its shape and the memory for it are unknown; config.json is enough for that"
    return BaseModel(None, None), [Check("model", "advice", text, f"hf download {name} --include '*.json'")]


def _on_this_machine(config: Config, directory: Path) -> tuple[BaseModel, list[Check]]:
    """Check the files of a local model. Missing ones fail, except in the hub cache, which a run completes."""
    name, weights = config.model.name, config.model.init == "pretrained"
    named = is_here(name)
    try:
        missing = missing_files(directory, weights=weights)
        resolve_model(str(directory), weights=weights and (named or not missing))
        described = read_config(directory)
    except DualtuneError as error:
        return BaseModel(directory, None, error), [failure("model", error)]
    row = Check("model", "ok", f"{name}, on this machine")
    if missing:
        lacks = f"{directory} lacks {', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}"
        row = Check("model", "advice", f"{lacks}; the run downloads it", f"hf download {name}")
    head = untied_head(described, weights_in(directory).tensors) if weights and not missing else None
    notices = {"code": ignored_code(described), "head": head}
    rows = [Check(name, "ok", notice) for name, notice in notices.items() if notice]
    return BaseModel(directory, described), [row, *rows, *_architecture(described)]


def _architecture(described: Mapping[str, Any]) -> list[Check]:
    """Return a row if the model may not be a causal language model."""
    names: list[str] = described.get("architectures") or []
    if not names or any(name.endswith(CAUSAL) for name in names):
        return []
    text = f"{', '.join(names)}: not a causal language model ({', '.join(f'…{end}' for end in CAUSAL)})"
    if any(name.endswith(WITH_MORE) for name in names):
        text = f"{', '.join(names)}: of a multimodal model only the text part is loaded and trained"
        return [Check("architecture", "advice", text)]
    return [_fails("architecture", text, "Choose a causal language model")]


def shape_of(model: BaseModel, name: str, backend: str) -> tuple[Shape | None, str]:
    """Return the shape of the model of this name for a backend, or None and why it is not known."""
    if model.config is None:
        reason = "its shape is not known; for that only its config.json is needed, not the weights"
        return None, f"{reason}: hf download {name} config.json"
    try:
        return shape_from(model.config, backend), ""
    except UnknownShape as error:
        return None, f"there is no formula for this model: {error}"


def decoder_to_plan(config: Config, backend: str, key: str = "model.name") -> Shape:
    """Return the shape of a config's model for a backend. EnvironmentFault if it is not known; FormatError: damaged.

    `key`: that names it.
    """
    model, _ = find_model(config, key)
    if model.fault is not None:
        raise model.fault
    decoder, reason = shape_of(model, config.model.name, backend)
    if decoder is None:
        raise EnvironmentFault(f"{key}: {config.model.name}: {reason}")
    return decoder


def load_tokenizer(config: Config, model: BaseModel) -> tuple[Tokenizer | None, Check]:
    """Load the tokenizer and the chat template, if the model is here."""
    if model.directory is None or not list(model.directory.glob("tokenizer*")):
        if model.directory is None or not is_here(config.model.name):
            return None, Check("tokenizer", "skipped", "not downloaded yet")
        text = f"{model.directory} has no tokenizer.json"
        return None, _fails("tokenizer", text, "Copy the whole model directory")
    try:
        tokenizer = Tokenizer.of(model.directory, config.data)
    except DualtuneError as error:
        return None, failure("tokenizer", error)
    size = tokenizer.vocabulary_size
    if size is not None and (largest := tokenizer.largest_id) >= size:
        text = f"ids up to {largest}, but the model has embeddings for {size} tokens; data with other ids are refused"
        return tokenizer, Check("tokenizer", "advice", text, "Use the tokenizer.json and the weights of one model")
    if tokenizer.warning:
        return tokenizer, Check("tokenizer", "advice", tokenizer.warning)
    chats = "with a chat template" if tokenizer.template else "no chat template: prompt and completion as they are"
    return tokenizer, Check("tokenizer", "ok", chats)


def stop_rows(config: Config, model: BaseModel, tokenizer: Tokenizer | None) -> list[Check]:
    """Return advice if the token that ends a trained turn is one that the model never learned and nothing adapts."""
    if tokenizer is None or model.directory is None or not has_weights(model.directory):
        return []
    targets = [config.adapter.targets] if isinstance(config.adapter.targets, str) else config.adapter.targets
    if config.adapter.trains_model or config.model.init != "pretrained" or is_target(OUTPUT_HEAD, targets):
        return []
    end = turn_end(tokenizer)
    if (token := tokenizer.eos_id if end is None else end) is None:
        return []
    try:
        rows = untrained_rows(model.directory, token, tokenizer.special_ids)
    except DualtuneError:  # the row on the model reports it
        return []
    if not rows:
        return []
    text = f"{shown(tokenizer.decode_all([token]))} ends an answer, but the model has not learned it: "
    text += "; ".join(f"{row.tensor}: {row.why}" for row in rows)
    fix = (
        "Set data.template to one whose end token the model knows, add lm_head to adapter.targets where the model has "
    )
    return [Check("stop token", "advice", text, f"{fix}one of its own, or train all of it: adapter.method full")]


def length_row(config: Config, model: BaseModel) -> Check:
    """Compare data.max_length with the positions that the model was trained on."""
    length = config.data.max_length
    described = model.config or {}
    longest, table_size = longest_text(described), position_table_size(described.get("text_config", described))
    if longest is None:
        return Check("length", "skipped", "the model's config does not state a maximum length")
    text = f"data.max_length is {length}, the model has positions up to {longest}"
    if length <= longest:
        return Check("length", "ok", text)
    fix = f"--set data.max_length={longest}"
    if table_size:
        return Check("length", "fail", f"{text} and no more", fix, ConfigError.exit_code)
    return Check("length", "advice", f"{text}; it was not trained on longer texts", fix)


def activation_cache_rows(config: Config, decoder: Shape | None) -> list[Check]:
    """Return what train.activation_cache keeps on disk, or why it cannot; no row where it is not asked for."""
    name, targets = "activation cache", config.adapter.targets
    if config.train.activation_cache == "none":
        return []
    if decoder is None:
        return [Check(name, "skipped", "only the loaded model shows whether a layer lies below the adapter")]
    try:
        below = layers_below(
            decoder, (targets,) if isinstance(targets, str) else targets, config.adapter.layers, config.adapter.experts
        )
    except DualtuneError as error:
        return [failure(name, error)]
    text = f"{below} of {decoder.layers} layers; {decoder.hidden:,} numbers for each token of the data on disk"
    return [Check(name, "ok", text)]


def router_rows(config: Config, model: BaseModel) -> list[Check]:
    """Say whether train.router_aux_loss_coef has routers to balance; no row where it is not asked for."""
    if (coefficient := config.train.router_aux_loss_coef) is None or model.config is None:
        return []
    try:
        each = experts_of_token(model.config, coefficient)
    except DualtuneError as error:
        return [failure("routers", error)]
    return [Check("routers", "ok", f"a token goes to {each} experts; train.router_aux_loss_coef is {coefficient:g}")]


def targets_rows(config: Config, model: BaseModel) -> list[Check]:
    """Compare adapter.targets with the layers in the files of a model; no row if its weights are not here.

    For a model of known shape, the memory estimate checks them.
    """
    if model.directory is None or model.config is None or not has_weights(model.directory):
        return []
    if config.adapter.trains_model:
        return []
    targets = config.adapter.targets
    try:
        shapes = {module: shape for module, shape in base_shapes(model.directory).items() if shape is not None}
        if config.adapter.experts and not any(map(expert_of, shapes)):
            return []  # the files hold stacks of experts, whose parts the memory estimate knows
        names = (targets,) if isinstance(targets, str) else targets
        adapted = select_modules(shapes, names, config.adapter.layers, experts=config.adapter.experts)
        for key in ("rank_pattern", "alpha_pattern"):
            check_pattern(key, (*getattr(config.adapter, key).items(),), adapted)
    except DualtuneError as error:
        return [failure("targets", error)]
    kinds = adapted_as(shapes, names)
    text = f"{len(adapted)} linear layers{_share(model.directory, adapted)}"
    return [Check("targets", "ok", f"{text}; {kinds}" if kinds else text)]


def _share(directory: Path, adapted: Shapes) -> str:
    """Return how much of the model's weights these layers hold; nothing for packed weights, which count as fewer."""
    tensors = weights_in(directory).tensors.values()
    if not all(tensor.dtype in FLOATS for tensor in tensors):
        return ""
    share = sum(map(math.prod, adapted.values())) / sum(math.prod(tensor.shape) for tensor in tensors)
    return f" with {share:.0%} of the weights"


def failure(name: str, error: DualtuneError) -> Check:
    """Return a row that fails with the error and exit code of the run."""
    return Check(name, "fail", "; ".join(str(error).splitlines()), exit_code=error.exit_code)


def _fails(name: str, text: str, fix: str | None = None) -> Check:
    return Check(name, "fail", text, fix, EnvironmentFault.exit_code)
