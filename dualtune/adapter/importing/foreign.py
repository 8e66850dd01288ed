"""Adapter directories of other tools: the files, and the meaning of the tensor names.

A tensor's name tells what it is: `lora_A` and `lora_B` are PEFT's matrices, [rank, in] and [out, rank]; `lora_a` and
`lora_b` are mlx-lm's, their transposes. The rest of the name differs between tools and versions.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open  # pyright: ignore[reportUnknownVariableType]

from dualtune.adapter.formats import gpt2, mlx_lm, peft
from dualtune.adapter.formats.containers import INDEX_FILE, NPZ_FILE, check_shard, read_npz, shards_of
from dualtune.adapter.formats.directory import CONFIG_FILE, FILES, MAX_CONFIG_BYTES, open_directory
from dualtune.adapter.formats.manifest import integrity_problems, read_manifest
from dualtune.adapter.layers import is_module_path
from dualtune.adapter.spec import OUTPUT_HEAD, PREFIX, Tensors
from dualtune.errors import FormatError
from dualtune.io import fields
from dualtune.io.untrusted import MAX_HEADER_BYTES, open_file, parse_object, read_json, read_safetensors

Halves = dict[tuple[str, str], np.ndarray]  # (module, "A" or "B") -> matrix, in PEFT's orientation if its name is right
WEIGHTS = {"peft": peft.WEIGHTS_FILE, "mlx": mlx_lm.WEIGHTS_FILE}
OTHER_CONTAINERS = {"peft": INDEX_FILE, "mlx": NPZ_FILE}

_NAME = re.compile(
    r"(?P<module>.+)\.lora_(?P<part>[ABab])(?:\.(?P<adapter>(?!weight$|bias$)[\w-]+))?(?P<end>\.weight)?"
)
_WRAPPER = re.compile(rf"(?:module\.|_orig_mod\.|{re.escape(PREFIX)}(?=base_model\.|module\.|_orig_mod\.))+")
_INTERMEDIATE_SAVE = re.compile(r"\d+_adapters\.safetensors")
_EMBEDDING = re.compile(r"(.*\.)?(embed\w*|wte|wpe|tok_embeddings|word_embeddings)")

# To decide between the two 16-bit formats: the magnitudes of weights are within a few powers of two of each other and
# reach down to zero. Read in the wrong format, one step of the exponent becomes eight steps, or an eighth of one.
MAX_SPREAD = 64.0  # largest / median magnitude
MIN_SMALL_SHARE = 0.02  # share of magnitudes under an eighth of the median


class Finding(NamedTuple):
    """A fault, and how --repair fixes it; `repair` is None if there is not exactly one right answer."""

    fault: str
    repair: str | None = None


class WeightFile(NamedTuple):
    """One tool's weights: the matrices, and other tensors that are not part of a plain LoRA adapter."""

    layout: str  # peft | mlx
    file: Path  # for error messages
    parts: tuple[Path, ...]  # the files that were read: the file, or its shards
    halves: Halves
    foreign: Tensors


def open_source(path: Path, findings: list[Finding]) -> tuple[dict[str, Any], dict[str, WeightFile], dict[str, Any]]:
    """Return (config, weight files by layout, dualtune.json) of a directory. FormatError if it cannot be repaired."""
    usual = _present(path, WEIGHTS)
    files = usual or _present(path, OTHER_CONTAINERS)
    if not files and (save := _intermediate_save(path)):
        files = {"mlx": save}
        findings.append(Finding(f"{save.name} is an intermediate save of an unfinished mlx-lm run", "uses it"))
    manifest = read_manifest(path) if files and not usual else open_directory(path).manifest
    if manifest is not None and (problems := integrity_problems(path, manifest, FILES)):
        raise FormatError(f"{path}: {'; '.join(problems[:3])}")
    config = read_json(path / CONFIG_FILE, max_bytes=MAX_CONFIG_BYTES)
    weights = {layout: _read_names(*_read(file, findings), layout, file, findings) for layout, file in files.items()}
    return config, weights, manifest or {}


def base_shapes(model_dir: Path) -> dict[str, tuple[int, int] | None]:
    """Return module path -> (out, in) of each linear layer of a model directory; None if packed in an unknown way."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        try:
            tensors: Any = safe_open(file, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise FormatError(f"{file}: not a complete safetensors file: {fields.shown(str(error))}") from None
        names = [str(name) for name in tensors.keys() if is_module_path(str(name))]  # noqa: SIM118
        shapes |= {name: list(tensors.get_slice(name).get_shape()) for name in names}
    if not shapes:
        raise FormatError(f"{model_dir}: holds no *.safetensors; --base must be a model directory with its weights")
    described = config_of(model_dir)
    group = _group_size(described, model_dir / "config.json")
    found: dict[str, tuple[int, int] | None] = {}
    for name, shape in shapes.items():
        module, _, last = name.rpartition(".")
        if last != "weight" or len(shape) != 2:
            continue
        if _EMBEDDING.fullmatch(module):
            if f"{OUTPUT_HEAD}.weight" not in shapes:  # tied: the embedding is also the output head
                found[OUTPUT_HEAD] = None
            continue
        scales = shapes.get(f"{module}.scales")
        if scales is not None and len(scales) == 2:  # MLX packs several numbers into one word
            found[module] = (shape[0], scales[1] * group) if group else None
        else:
            packed = f"{name}.absmax" in shapes  # bitsandbytes
            found[module] = None if packed else (shape[0], shape[1])
    if gpt2.is_fan_in_fan_out(described):
        return dict(gpt2.canonical_layer(module, shape) for module, shape in found.items())
    return found


def config_of(model_dir: Path) -> dict[str, Any]:
    """Return the config.json of a model directory; empty if there is none."""
    config = model_dir / "config.json"
    described = read_json(config, max_bytes=MAX_CONFIG_BYTES, strict=False) if config.is_file() else {}
    fields.name(described, "model_type", config)  # used as a key of tables
    return described


def _group_size(described: Mapping[str, Any], config: Path) -> int:
    """Return the group size of MLX's quantization; 0 if the model's config does not have it."""
    if not (table := fields.subtable(described, "quantization", config)):
        return 0
    return fields.rank(table, "group_size", config) if "group_size" in table else 0


def _present(path: Path, names: Mapping[str, str]) -> dict[str, Path]:
    return {layout: path / name for layout, name in names.items() if (path / name).is_file()}


def _intermediate_save(path: Path) -> Path | None:
    found = sorted(file for file in path.glob("*_adapters.safetensors") if _INTERMEDIATE_SAVE.fullmatch(file.name))
    if len(found) > 1:
        names = ", ".join(file.name for file in found[-3:])
        raise FormatError(
            f"{path}: has no adapters.safetensors, but {len(found)} intermediate saves of an unfinished run ({names}). "
            "Rename the one you want to adapters.safetensors."
        )
    return found[0] if found else None


def _read_names(
    tensors: Tensors, parts: tuple[Path, ...], layout: str, file: Path, findings: list[Finding]
) -> WeightFile:
    """Return the matrices by module, and add a finding for each deviation from the format's names."""
    halves, foreign, deviations, adapters = Halves(), Tensors(), defaultdict[str, int](int), set[str]()
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        module, wrappers = _unwrapped(match["module"]) if match else ("", "")
        if match is None or tensor.ndim != 2 or not is_module_path(module):
            foreign[name] = tensor  # the strict reader refuses it by name
            continue
        small, adapter = match["part"].islower(), match["adapter"]
        if adapter:
            adapters.add(adapter)
            deviations[f"contain the adapter's name ({adapter})"] += 1
        for deviation, found in {
            f"start with an extra {wrappers}": bool(wrappers),
            f"lack {PREFIX} at the start": layout == "peft" and not small and not match["module"].startswith(PREFIX),
            f"start with {PREFIX}": layout == "mlx" and match["module"].startswith(PREFIX),
            "contain mlx-lm's lora_a and lora_b": layout == "peft" and small,
            "contain PEFT's lora_A and lora_B": layout == "mlx" and not small,
            "end in .weight": layout == "mlx" and small and bool(match["end"]),
            "lack .weight at the end": layout == "peft" and not small and not match["end"],
        }.items():
            deviations[deviation] += found
        key = (module, match["part"].upper())
        matrix = tensor.T if small else tensor
        if key in halves and not np.array_equal(halves[key], matrix):
            fault = f"{file.name}: {module}: two names for lora_{key[1]}, with different numbers"
            findings.append(Finding(f"{fault}. Remove the wrong tensor"))
        elif key in halves:
            deviations["repeat a tensor under another name"] += 1
        halves[key] = matrix
    if len(adapters) > 1:
        names = ", ".join(sorted(adapters))
        findings.append(Finding(f"{file.name}: contains several adapters ({names}). Save only the one you want"))
    repair = "renames them as the format requires"
    findings += [Finding(f"{file.name}: {n} names {what}", repair) for what, n in deviations.items() if n]
    return WeightFile(layout, file, parts, halves, foreign)


def _unwrapped(module: str) -> tuple[str, str]:
    """Return (module path, extra prefix before PEFT's own): DDP, torch.compile and a second PEFT add prefixes."""
    match = _WRAPPER.match(module)
    wrappers = match[0] if match else ""
    return module.removeprefix(wrappers).removeprefix(PREFIX), wrappers


def _read(file: Path, findings: list[Finding]) -> tuple[Tensors, tuple[Path, ...]]:
    """Return (tensors, files read) of a weight file, or of an index of shards."""
    if file.name == NPZ_FILE:
        return read_npz(file), (file,)
    if file.name != INDEX_FILE:
        return _read_safetensors(file, findings), (file,)
    shards, tensors = shards_of(file), Tensors()
    for shard, names in shards.items():
        found = _read_safetensors(shard, findings)
        check_shard(shard, {*found}, names, file)
        tensors |= found
    return tensors, tuple(shards)


def _read_safetensors(file: Path, findings: list[Finding]) -> Tensors:
    """Return the tensors of the file, even if 16-bit floats are labelled as integers."""
    header, _ = _header(file)
    if not any(info.get("dtype") == "U16" for info in header.values()):
        return read_safetensors(file)
    fitting = {dtype: tensors for dtype in ("BF16", "F16") if _is_plausible(tensors := _relabelled(file, dtype))}
    fault = f"{file.name}: got 16-bit integers (U16), must be floating-point numbers"
    if len(fitting) != 1:
        plausible = "both BF16 and F16 are" if fitting else "neither BF16 nor F16 is"
        raise FormatError(f"{file}: {fault}; {plausible} plausible. Save them again.")
    [(dtype, tensors)] = fitting.items()
    findings.append(Finding(f"{fault}; only {dtype} gives plausible weights", f"reads them as {dtype}"))
    return tensors


def _header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return (header, start of the data); an empty header if `read_safetensors` will refuse the file."""
    with open_file(file) as stream:
        size = int.from_bytes(stream.read(8), "little")
        data = stream.read(size) if size <= MAX_HEADER_BYTES else b""
    try:
        entries = parse_object(data, file, strict=False)
    except FormatError:
        return {}, 0
    return {name: info for name, info in entries.items() if isinstance(info, dict)}, 8 + size


def _relabelled(file: Path, dtype: str) -> Tensors:
    """Return the tensors, with U16 in the header replaced by `dtype`."""
    header, start = _header(file)
    table = {n: {**info, "dtype": dtype} if info.get("dtype") == "U16" else info for n, info in header.items()}
    data = json.dumps(table).encode()
    with tempfile.TemporaryDirectory() as folder, file.open("rb") as source:
        copy = Path(folder) / file.name
        with copy.open("wb") as target:
            target.write(len(data).to_bytes(8, "little") + data)
            source.seek(start)
            shutil.copyfileobj(source, target)
        return read_safetensors(copy)


def _is_plausible(tensors: Mapping[str, np.ndarray]) -> bool:
    """Return whether the magnitudes, relative to the median of their tensor, are distributed like those of weights."""
    sizes = [np.abs(x[np.nonzero(x)]) for x in tensors.values()]
    if not all(bool(np.isfinite(x).all()) for x in sizes) or not any(x.size for x in sizes):
        return False
    with np.errstate(over="ignore"):  # far above a median near zero: not plausible
        relative = np.concatenate([x / np.median(x) for x in sizes if x.size])
    return bool(relative.max() < MAX_SPREAD and np.mean(relative < 1 / 8) > MIN_SMALL_SHARE)
