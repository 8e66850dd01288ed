"""The adapter of a directory added to the weights of its base: a model directory in the base's stored precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.base.fields import shown
from dualtune.base.files import check_writable, new_directory
from dualtune.data.tokens.stop_tokens import stop_texts, write_stop_tokens
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import Backend, Engine, LoadRequest
from dualtune.model.config_file import read_config, stored_precision
from dualtune.model.formats.chat_template import write_training_template
from dualtune.model.formats.directory import Adapter
from dualtune.model.optimizer import OptimizerSpec
from dualtune.model.places import in_names_of
from dualtune.train.generation.inference import inference_spec, load_adapter
from dualtune.use.verify.identity import compare
from dualtune.use.verify.verdict import recorded_in

# Formats whose plain matrices may be merged into: each tensor is copied or changed on its own, and packed ones refused.
PARTLY_PLAIN = ("mxfp4", "fp8")


def check_plain(base: Path) -> None:
    """Raise ConfigError if the model is stored quantized as a whole."""
    config = read_config(base)
    stored: dict[str, Any] = config.get("quantization_config") or {}
    if "quantization" in config or (stored and stored.get("quant_method") not in PARTLY_PLAIN):
        raise ConfigError(
            f"merge: {base} is stored quantized, and merging into packed weights loses the adapter. "
            "Give the plain model as --base, and quantize the result"
        )


def check_base(adapter: Adapter, base: Path) -> None:
    """Raise ConfigError if the adapter has recorded that it was trained on a model with other weights than `base`."""
    recorded = recorded_in(adapter.metadata, "the adapter")
    if recorded is None:
        return
    parts = compare(recorded.base_model, recorded.training, recorded.base, base, adapter.template)
    weights = next(part for part in parts if part.name == "weights")
    if weights.state == "differs":
        raise ConfigError(
            f"--base: {base} is not the model that this adapter was trained on ({recorded.base_model.get('name')}): of "
            f"its weights, {weights.found}. Give that model; or, to merge into this one, also --other-base"
        )


def load_to_merge(adapter: Adapter, base: Path, backend: Backend, dtype: str = "auto") -> Engine:
    """Load the base with the adapter, to merge them in `dtype`, or with "auto" in the base's stored precision.

    ConfigError if the base is quantized, or if the adapter does not fit it.
    """
    check_plain(base)
    stored = stored_precision(read_config(base)) or "auto"  # the merged float32 weights are rounded to it once
    adapter = in_names_of(adapter, base)
    spec = inference_spec(adapter)
    engine = backend.load(
        LoadRequest(base, stored if dtype == "auto" else dtype, "none", "pretrained", spec, OptimizerSpec(), seed=0)
    )
    load_adapter(engine, adapter, str(base))
    return engine


def write_merged(engine: Engine, adapter: Adapter, out: Path, tell: Callable[[str], None]) -> None:
    """Write the merged model with the chat template of the training to a new directory, whole or not at all.

    It stops where the training stopped: its files name every token that ends a turn.
    """
    with new_directory(out.resolve(), by_library=True) as directory:
        engine.save_merged(directory)
        tell(f"template    {write_training_template(directory, adapter.template, adapter.metadata)}")
        tell(f"stops at    {named_stops(directory)}")


def named_stops(model: Path) -> str:
    """Name the tokens that end a trained turn in the files of a model directory; return them in words."""
    try:
        tokenizer = Tokenizer(model)
        write_stop_tokens(model, tokenizer)
    except EnvironmentFault as error:  # the base is without a tokenizer, or with one that only its own code can load
        return f"what the base's files say: {error}"
    return (
        ", ".join(map(shown, stop_texts(tokenizer)))
        or "nothing: neither the tokenizer nor the chat template names a token"
    )


def note_of_base(adapter: Adapter) -> str | None:
    """Return what to know where the adapter was trained on a quantized base and is merged into the plain one."""
    recorded: dict[str, object] = adapter.metadata.get("base") or {}
    trained_on = recorded.get("loaded_as", "none")
    if trained_on == "none":
        return None
    return (
        f"note: the adapter was trained on a base in {trained_on}, and is merged into the original weights, not into "
        "the dequantized ones: the loss may differ from that of the training"
    )


def check_free(out: Path) -> None:
    """Raise ConfigError unless `out` does not exist or is an empty directory; DiskError if it cannot be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: already exists and is not an empty directory. Choose another path or remove it.")
    check_writable(out)
