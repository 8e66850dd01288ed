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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open  # pyright: ignore[reportUnknownVariableType]

from dualtune.base import fields
from dualtune.base.errors import FormatError
from dualtune.base.tensors import FLOATS, floats_of, rounded
from dualtune.base.untrusted import MAX_HEADER_BYTES, open_file, parse_object, read_json, read_npz, read_safetensors
from dualtune.model.adapter import PREFIX, Tensors, is_module_path
from dualtune.model.formats import mlx_lm, naming, peft
from dualtune.model.formats.canonical import Pair, Pairs
from dualtune.model.formats.directory import (
    CONFIG_FILE,
    INDEX_FILE,
    MAX_CONFIG_BYTES,
    NPZ_FILE,
    integrity_problems,
    open_directory,
    open_files,
    read_manifest,
)
from dualtune.model.targets import OUTPUT_HEAD, is_target, position_of
from dualtune.model.weight_files import StoredTensor, check_shard, shards_of, weights_in

Shapes = Mapping[str, tuple[int, int] | None]  # module -> (out, in), None if unknown
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
    if not files or usual:
        with open_directory(path):
            pass  # it names what is wrong with the directory
    if (manifest := read_manifest(path)) is not None:
        with open_files(path) as opened:
            problems = integrity_problems(path, manifest, opened)
        if problems:
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
    # Packed weights have another shape in the file than the layer has.
    described = config_of(model_dir)
    packing = fields.subtable(described, "quantization", model_dir / "config.json")
    group = fields.rank(packing, "group_size", model_dir / "config.json") if "group_size" in packing else 0
    linear: dict[str, tuple[int, int] | None] = {}
    for name, shape in shapes.items():
        module, _, last = name.rpartition(".")
        if last != "weight" or len(shape) != 2:
            continue
        if _EMBEDDING.fullmatch(module):
            if f"{OUTPUT_HEAD}.weight" not in shapes:  # tied: the embedding is also the output head
                linear[OUTPUT_HEAD] = None
            continue
        scales = shapes.get(f"{module}.scales")
        if scales is not None and len(scales) == 2:  # MLX packs several numbers into one word
            linear[module] = (shape[0], scales[1] * group) if group else None
        else:
            packed = f"{name}.absmax" in shapes  # bitsandbytes
            linear[module] = None if packed else (shape[0], shape[1])
    if naming.is_fan_in_fan_out(described):
        return dict(naming.canonical_layer(module, shape) for module, shape in linear.items())
    return linear


def config_of(model_dir: Path) -> dict[str, Any]:
    """Return the config.json of a model directory; empty if there is none."""
    config = model_dir / "config.json"
    described = read_json(config, max_bytes=MAX_CONFIG_BYTES, strict=False) if config.is_file() else {}
    fields.name(described, "model_type", config)  # used as a key of tables
    return described


def _present(path: Path, names: Mapping[str, str]) -> dict[str, Path]:
    return {layout: path / name for layout, name in names.items() if (path / name).is_file()}


def _intermediate_save(path: Path) -> Path | None:
    saves = sorted(file for file in path.glob("*_adapters.safetensors") if _INTERMEDIATE_SAVE.fullmatch(file.name))
    if len(saves) > 1:
        names = ", ".join(file.name for file in saves[-3:])
        raise FormatError(
            f"{path}: has no adapters.safetensors, but {len(saves)} intermediate saves of an unfinished run ({names}). "
            "Rename the one you want to adapters.safetensors."
        )
    return saves[0] if saves else None


def _read_names(
    tensors: Tensors, parts: tuple[Path, ...], layout: str, file: Path, findings: list[Finding]
) -> WeightFile:
    """Return the matrices by module, and add a finding for each deviation from the format's names."""
    halves, foreign, deviations, adapters = Halves(), Tensors(), defaultdict[str, int](int), set[str]()
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        path = match["module"] if match else ""
        wrapper = _WRAPPER.match(path)  # before PEFT's own prefix: of DDP, torch.compile and a second PEFT
        wrappers = wrapper[0] if wrapper else ""
        module = path.removeprefix(wrappers).removeprefix(PREFIX)
        if match is None or tensor.ndim != 2 or not is_module_path(module):
            foreign[name] = tensor  # the strict reader refuses it by name
            continue
        small, adapter = match["part"].islower(), match["adapter"]
        if adapter:
            adapters.add(adapter)
            deviations[f"contain the adapter's name ({adapter})"] += 1
        for deviation, deviates in {
            f"start with an extra {wrappers}": bool(wrappers),
            f"lack {PREFIX} at the start": layout == "peft" and not small and not path.startswith(PREFIX),
            f"start with {PREFIX}": layout == "mlx" and path.startswith(PREFIX),
            "contain mlx-lm's lora_a and lora_b": layout == "peft" and small,
            "contain PEFT's lora_A and lora_B": layout == "mlx" and not small,
            "end in .weight": layout == "mlx" and small and bool(match["end"]),
            "lack .weight at the end": layout == "peft" and not small and not match["end"],
        }.items():
            deviations[deviation] += deviates
        # One tensor may be there twice, under an old name and a new one.
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
    findings += [Finding(f"{file.name}: {n} names {deviation}", repair) for deviation, n in deviations.items() if n]
    return WeightFile(layout, file, parts, halves, foreign)


def _read(file: Path, findings: list[Finding]) -> tuple[Tensors, tuple[Path, ...]]:
    """Return (tensors, files read) of a weight file, or of an index of shards."""
    if file.name == NPZ_FILE:
        return read_npz(file), (file,)
    if file.name != INDEX_FILE:
        return _read_safetensors(file, findings), (file,)
    shards, tensors = shards_of(file), Tensors()
    for shard, names in shards.items():
        of_shard = _read_safetensors(shard, findings)
        check_shard(shard, {*of_shard}, names, file)
        tensors |= of_shard
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


# ----------------------------------------------------------------------------------------------------------------------
# The orientation of each module's two matrices, decided only by their shapes.
#
# For square layers a missed transpose (Bᵀ Aᵀ would be right) and a swap (A B would be) have the same shapes: then
# there are several answers, and the caller needs more information.

Undo = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]

AS_NAMED = "as named"
CHANGES: dict[str, Undo] = {  # how lora_A and lora_B were changed -> how to undo it
    AS_NAMED: lambda a, b: (a, b),
    "lora_A and lora_B are transposed": lambda a, b: (a.T, b.T),
    "lora_A is transposed": lambda a, b: (a.T, b),
    "lora_B is transposed": lambda a, b: (a, b.T),
    "lora_A and lora_B are swapped": lambda a, b: (b, a),
    "lora_A and lora_B are swapped and transposed": lambda a, b: (b.T, a.T),
}
SCRAMBLED = "lora_A and lora_B are transposed in the header only, not in the data"
# Modules that read and write the hidden states of a transformer block, by the last part of the path.
_READS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
_WRITES = {"o_proj", "down_proj"}


class Reading(NamedTuple):
    """One way to read all matrices of a file; `changes` has the modules that are not read as they are named."""

    changes: dict[str, str]
    pairs: Pairs


def readings(pairs: Pairs, ranks: Mapping[str, int | None], base: Shapes) -> list[Reading]:
    """Return the ways to read the file that fit the ranks, the base model's shapes and each other; [] if none does.

    Names are trusted if they fit. Otherwise all modules are assumed to have the same damage. Only if that does not fit,
    each module is decided separately, by its shape in the base model or in the other layers.
    """

    def fitting(module: str, expected: Shapes) -> list[str]:
        undone = {name: Pair(*undo(*pairs[module])) for name, undo in CHANGES.items()}
        return [name for name, pair in undone.items() if _fits(pair, ranks[module], expected.get(module), name)]

    # First what fits the names, then one change for all modules, and only then each module by itself.
    fitting_changes = {module: fitting(module, base) for module in pairs}
    common = [change for change in CHANGES if all(change in changes for changes in fitting_changes.values())]
    if AS_NAMED in common:
        return [Reading({}, pairs)]
    alike = [_undo(pairs, dict.fromkeys(pairs, change)) for change in common]
    if not base:
        alike = [reading for reading in alike if _is_one_stack(reading.pairs)]
    if alike:
        return alike
    shapes = dict(base) or _shapes_of_others(
        {m: pairs[m] for m, changes in fitting_changes.items() if AS_NAMED in changes}, pairs
    )
    own = {module: fitting(module, shapes) for module in pairs}
    own = {module: changes[:1] if AS_NAMED in changes else changes for module, changes in own.items()}
    if all(len(changes) == 1 for changes in own.values()):
        return [_undo(pairs, {module: changes[0] for module, changes in own.items()})]
    if all(own.values()):  # several ways for some modules: two are enough to show that there is no single one
        return [_undo(pairs, {m: changes[i % len(changes)] for m, changes in own.items()}) for i in range(2)]
    return []


def unscrambled(pairs: Pairs) -> Reading:
    """Undo a transposed view that was written in memory order: right shapes, but numbers in the wrong order."""
    straight = {m: Pair(p.A_rI.T.reshape(p.A_rI.shape), p.B_Or.T.reshape(p.B_Or.shape)) for m, p in pairs.items()}
    return Reading(dict.fromkeys(pairs, SCRAMBLED), straight)


def common_rank(pairs: Pairs) -> int | None:
    """Return the rank that all pairs have in some low-rank reading; None if there is none."""
    candidates = [[Pair(*undo(*pair)) for undo in CHANGES.values()] for pair in pairs.values()]
    possible = [{pair.A_rI.shape[0] for pair in options if _fits(pair, None, None)} for options in candidates]
    ranks = set[int].intersection(*possible) if possible else set[int]()
    return ranks.pop() if len(ranks) == 1 else None


def _fits(pair: Pair, rank: int | None, shape: tuple[int, int] | None, change: str = "") -> bool:
    """Return whether B A exists, with this rank and shape.

    A rank above the layer's size is accepted only for matrices as named; else a wrong rank would transpose those
    of a small layer.
    """
    inner = pair.A_rI.shape[0]
    if inner != pair.B_Or.shape[1] or shape not in (None, pair.delta_shape) or rank not in (None, inner):
        return False
    return inner <= min(pair.delta_shape) or (change == AS_NAMED and rank is not None)


def _undo(pairs: Pairs, changes: Mapping[str, str]) -> Reading:
    undone = {module: Pair(*CHANGES[changes[module]](*pair)) for module, pair in pairs.items()}
    return Reading({module: change for module, change in changes.items() if change != AS_NAMED}, undone)


def _is_one_stack(pairs: Pairs) -> bool:
    """Return whether a module has the same shape in all layers, and the hidden states have one width."""
    shapes, hidden, inner = defaultdict[str, set[tuple[int, int]]](set), set[int](), set[int]()
    for module, pair in pairs.items():
        position, last = position_of(module), module.rpartition(".")[2]
        shapes[position.name if position else module].add(pair.delta_shape)
        out_dim, in_dim = pair.delta_shape
        hidden |= {in_dim} if last in _READS else {out_dim} if last in _WRITES else set()
        inner |= {out_dim} if last in ("gate_proj", "up_proj") else {in_dim} if last == "down_proj" else set()
    return len(hidden) <= 1 and len(inner) <= 1 and all(len(of_module) == 1 for of_module in shapes.values())


def _shapes_of_others(trusted: Pairs, pairs: Pairs) -> dict[str, tuple[int, int] | None]:
    """Return the shape of the same module in other layers, if those agree."""
    by_name = defaultdict[str, set[tuple[int, int]]](set)
    for module, pair in trusted.items():
        if position := position_of(module):
            by_name[position.name].add(pair.delta_shape)
    positions = {module: position_of(module) for module in pairs}
    return {
        module: next(iter(by_name[position.name]))
        for module, position in positions.items()
        if position and len(by_name.get(position.name, ())) == 1
    }


# ----------------------------------------------------------------------------------------------------------------------
# Copies of a base's embedding or output head beside an adapter, compared with the base and left out if they are equal.
#
# PEFT saves them by itself where the vocabulary was resized or `save_embedding_layers` is set, and Unsloth lists them
# under `modules_to_save`. An equal copy changes nothing; a changed one was trained, if it is listed there, or resized.

ROWS = 4096  # compared at once
_COPY = re.compile(
    r"(?P<module>(?:.+\.)?(?P<last>embed_tokens|wte|embed_in|word_embeddings|tok_embeddings|lm_head|embed_out))"
    r"(?:\.base_layer|\.original_module|\.modules_to_save(?:\.[\w-]+)?)?\.weight"
)
_HEADS = {"lm_head", "embed_out"}


def without_copies(
    config: dict[str, Any], weights: Mapping[str, WeightFile], base: Path, findings: list[Finding]
) -> tuple[dict[str, Any], dict[str, WeightFile], tuple[str, ...]]:
    """Return config and weight files without the copies that equal the base's tensors, and a note on each.

    A copy that differs and is not in `modules_to_save` is a finding without a repair, with both shapes.
    """
    listed = fields.texts(config, "modules_to_save", "adapter_config.json") or []
    stored, notes = dict(weights_in(base).tensors), list[str]()
    # Where one of the listed modules was trained, the others belong to it.
    trained = [name for name in listed if _is_changed(name, weights, stored)]
    equal, result = set[str](), dict[str, WeightFile]()
    for layout, file in weights.items():
        foreign = dict(file.foreign)
        for name in [*foreign]:
            if (match := _COPY.fullmatch(name.removeprefix(PREFIX))) is None:
                continue
            module = match["module"]
            if trained and is_target(module, listed):
                continue
            if (original := _original(module, match["last"], stored)) is None:
                continue  # the strict reader refuses it by name
            if difference := _difference(foreign[name], original):
                fault = f"{file.file.name}: {module}: is a changed copy of the base's ({difference})"
                findings.append(Finding(f"{fault}: it was trained or resized, which a LoRA adapter cannot express"))
            equal.add(module)
            notes.append(f"{module}: a copy of the base's, equal bit for bit, is left out")
            del foreign[name]
        result[layout] = file._replace(foreign=foreign)
    return _without_saved(config, equal), result, tuple(dict.fromkeys(notes))


def _is_changed(name: str, weights: Mapping[str, WeightFile], stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether a module that modules_to_save lists has other numbers than the base, which it was trained from."""
    for file in weights.values():
        for tensor, values in file.foreign.items():
            match = _COPY.fullmatch(tensor.removeprefix(PREFIX))
            original = _original(match["module"], match["last"], stored) if match else None
            is_it = match and original and is_target(match["module"], [name]) and values.shape == original.shape
            if is_it and original and _difference(values, original):
                return True
    return False


def _original(module: str, last: str, stored: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """Return the base's tensor; for an output head that is tied, the embedding. None if it is not unambiguous."""
    if (exact := stored.get(f"{module}.weight")) is not None:
        return exact
    names = [name for name in stored if name.endswith(f"{last}.weight")]
    if not names and last in _HEADS:
        names = [name for name in stored if (match := _COPY.fullmatch(name)) and match["last"] not in _HEADS]
    return stored[names[0]] if len(names) == 1 else None


def _difference(copy: np.ndarray, original: StoredTensor) -> str | None:
    """Return how a copy (float32) differs from the base's tensor, None if it is that tensor in its own precision."""
    shapes = f"the copy has {list(copy.shape)}, the base {list(original.shape)}"
    if copy.shape != original.shape or original.dtype not in FLOATS:
        return shapes if original.dtype in FLOATS else f"{shapes} in {original.dtype}"
    changed = 0
    for start, rows in _blocks(original):
        part = copy[start : start + len(rows)]
        same = (part == rows).all(-1)
        for dtype in ("BF16", "F16"):  # or rounded to the precision of the copy
            same |= (part == floats_of(rounded(rows, dtype), dtype).reshape(rows.shape)).all(-1)
        changed += int((~same).sum())
    return f"{shapes}; {changed} rows differ" if changed else None


def _blocks(tensor: StoredTensor) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, rows in float32) of a stored table, a block after another."""
    count, width = tensor.shape
    row_bytes = width * FLOATS[tensor.dtype].itemsize
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.begin)
        for start in range(0, count, ROWS):
            values = floats_of(stream.read(min(ROWS, count - start) * row_bytes), tensor.dtype)
            yield start, values.astype(np.float32, copy=False).reshape(-1, width)


def _without_saved(config: dict[str, Any], equal: set[str]) -> dict[str, Any]:
    """Return the config without `modules_to_save`, if all of them are equal copies: nothing of them was trained."""
    saved = config.get("modules_to_save")
    if not isinstance(saved, list) or not saved or not equal:
        return config
    names = fields.texts(config, "modules_to_save", "adapter_config.json") or []
    are_copies = all(any(module == name or module.endswith(f".{name}") for module in equal) for name in names)
    return config | {"modules_to_save": None} if are_copies else config
