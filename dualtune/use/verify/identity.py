"""Whether a base model is the one that an adapter was trained on, judged by its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.model.base_model import find_weights
from dualtune.model.config_file import read_config
from dualtune.model.fingerprint import fingerprint
from dualtune.model.formats.canonical import to_pairs
from dualtune.model.formats.directory import Adapter
from dualtune.model.formats.naming import canonical_layer, is_fan_in_fan_out
from dualtune.model.places import file_names
from dualtune.model.targets import is_target, is_text
from dualtune.train.fingerprints import PROMPTS, Entry

PLAIN = ("F64", "F32", "F16", "BF16")  # dtypes of weights that are not packed
# note: the files differ, but may mean the same. unknown: nothing to compare, and `found` says why
State = Literal["same", "note", "differs", "unknown"]


@dataclass(frozen=True, slots=True)
class ComparedPart:
    """One part of a base model, compared with its record."""

    name: str
    state: State
    found: str


def compare(
    recorded: Mapping[str, Any], training: Mapping[str, Any], entries: list[Entry], base: Path,
    template: str | None = None,
) -> list[ComparedPart]:  # fmt: skip
    """Compare config, tokenizer, template, weights and quantization of the model in `base` with dualtune.json.

    `template` is that of the adapter.
    """
    present, tokenizer = fingerprint(base), Tokenizer(base)
    requantized = recorded.get("quantization") != present["quantization"]
    return [
        _by_hash("config", recorded.get("config_sha256"), present["config_sha256"], requantized),
        _tokenizer(recorded.get("tokenizer_sha256"), present["tokenizer_sha256"], entries, tokenizer),
        _template(recorded, training, present, tokenizer, template),
        _weights(recorded, present, requantized),
        ComparedPart("quantization", "note", f"recorded: {_form(recorded)}; here: {_form(present)}")
        if requantized
        else ComparedPart("quantization", "same", _form(present)),
    ]


def _by_hash(name: str, before: object, now: object, requantized: bool) -> ComparedPart:
    if before is None:
        return ComparedPart(name, "unknown", "not recorded")
    if before == now:
        return ComparedPart(name, "same", "same hashes")
    if requantized:
        return ComparedPart(name, "unknown", "stored in another quantization, so the hashes cannot be compared")
    if isinstance(before, dict) and isinstance(now, dict):
        old, new = cast("dict[str, str]", before), cast("dict[str, str]", now)
        different = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        text = f"{len(different)} of {len(old)} sampled tensors differ, such as {different[0]}"
        return ComparedPart(name, "differs", text)
    return ComparedPart(name, "differs", "different hash")


def _weights(recorded: Mapping[str, Any], present: Mapping[str, Any], requantized: bool) -> ComparedPart:
    """Compare the sampled tensors, which show what differs, then the hash over all, which older versions lack."""
    by_tensor = _by_hash("weights", recorded.get("tensors"), present["tensors"], requantized)
    if by_tensor.state != "same" or "weights_sha256" not in recorded:
        return by_tensor
    return _by_hash("weights", recorded["weights_sha256"], present["weights_sha256"], requantized)


def _tokenizer(before: object, now: object, entries: list[Entry], tokenizer: Tokenizer) -> ComparedPart:
    """Compare the tokens of fixed prompts: the same tokenizer may be saved in different files."""
    for i, entry in enumerate(entries):
        prompt = entry.get("prompt") or (PROMPTS[i] if i < len(PROMPTS) else None)  # an older dualtune: in this order
        if prompt is not None and (ids := tokenizer.encode(prompt, special=True).tolist()) != entry["tokens"]:
            detail = f"{prompt!r} is encoded as {_shown(ids)}, recorded: {_shown(entry['tokens'])}"
            return ComparedPart("tokenizer", "differs", detail)
    if before is None or before == now:
        return ComparedPart("tokenizer", "same", "same hash" if before else "same tokens for the fixed prompts")
    return ComparedPart("tokenizer", "note", "different file, but the same tokens for the fixed prompts")


def _template(
    recorded: Mapping[str, Any], training: Mapping[str, Any], present: Mapping[str, Any], tokenizer: Tokenizer,
    of_adapter: str | None,
) -> ComparedPart:  # fmt: skip
    before, now = training.get("template_hash"), tokenizer.template_hash
    if before == now:
        return ComparedPart("template", "same", "none" if now == "none" else "same hash")
    if training.get("template") == "none":
        return ComparedPart("template", "same", "the adapter was trained without one")
    if before is None:
        return ComparedPart("template", "unknown", "not recorded")
    if of_adapter is not None:
        return ComparedPart("template", "note", "not the base's: the adapter contains the one it was trained with")
    if recorded.get("chat_template_sha256") == present["chat_template_sha256"]:
        return ComparedPart("template", "note", "the base's is unchanged; the training used another (data.template)")
    return ComparedPart("template", "differs", f"trained with {before[:19]}, here {now[:19]}")


def _form(base: Mapping[str, Any]) -> str:
    """Return how the weights are stored."""
    match base.get("quantization"):
        case {"bits": bits, "group_size": size}:
            return f"{bits} bits, groups of {size}"
        case {"quant_method": method}:
            return f"format of {method}"
        case None:
            return "plain"
        case _:
            return "quantized"


def _shown(ids: list[int]) -> str:
    return f"[{', '.join(map(str, ids[:6]))}{', …' if len(ids) > 6 else ''}]"


# --- shapes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether the tensors of an adapter fit the weights of a base model, by the headers of its files."""

    problems: list[str]
    missing: list[str]  # modules that the adapter's config targets and the base has, without tensors in the adapter
    note: str


def fit(adapter: Adapter, base: Path) -> Fit:
    """Compare lora_A [r, in] and lora_B [out, r] with the weight [out, in] of each module; packed weights by name."""
    shapes = _weight_shapes(base)
    pairs = to_pairs(adapter.tensors, "adapter")
    names = file_names(pairs, shapes)  # other tools, and older versions, have other names inside a wrapper
    pairs = {names[module]: pair for module, pair in pairs.items()}
    problems: list[str] = []
    for module, pair in sorted(pairs.items()):
        whole = module if module in shapes else module.rpartition(".")[0]  # a part of a fused matrix is called after it
        if whole not in shapes:
            problems.append(f"{module}: the base has no such module")
        elif (shape := shapes[whole]) is not None and not _fits(pair.delta_shape, shape, is_part=whole != module):
            problems.append(f"{module}: the adapter is for {list(pair.delta_shape)}, the base has {list(shape)}")
    missing = [m for m in sorted(shapes) if m not in pairs and is_text(m) and is_target(m, adapter.spec.targets)]
    return Fit(problems, missing, f"{len(pairs)} modules fit the base")


def _fits(delta: tuple[int, int], shape: tuple[int, int], *, is_part: bool) -> bool:
    return delta == shape or (is_part and delta[0] < shape[0] and delta[1] == shape[1])


def _weight_shapes(base: Path) -> dict[str, tuple[int, int] | None]:
    """Return module -> [out, in] of every matrix; None for a packed one."""
    shapes: dict[str, tuple[int, int] | None] = {}
    is_transposed = is_fan_in_fan_out(read_config(base))  # GPT-2; others have layers of the same names, not transposed
    for name, tensor in find_weights(base).tensors.items():
        if len(tensor.shape) == 2:
            module, shape = name.removesuffix(".weight"), (tensor.shape[0], tensor.shape[1])
            if is_transposed:
                module, shape = canonical_layer(module, shape)
            shapes[module] = shape if tensor.dtype in PLAIN else None
    return shapes
