"""The adapter directory: one adapter in the files of PEFT, of mlx-lm, or (dual) of both.

    adapter_config.json         the keys of PEFT and of mlx-lm, side by side: each tool ignores the other's
    adapter_model.safetensors   PEFT's names and orientation; canonical
    adapters.safetensors        mlx-lm's; contiguous transposes of the same numbers
    chat_template.jinja         the chat template of the training, if it had one
    dualtune.json               ours: size and sha256 of each other file, and metadata of the writer

A directory is written whole or not at all. On reading, the files are checked against dualtune.json if there is one;
otherwise the two weight files are checked against each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.base import fields
from dualtune.base.errors import ConfigError, FormatError, NonFiniteError
from dualtune.base.files import Content, Pieces, did_you_mean_path, file_in, json_bytes, listing, write_directory
from dualtune.base.tensors import safetensors_pieces
from dualtune.base.untrusted import LFS_ADVICE, LFS_MAGIC, json_in, open_file, read_json, tensors_in
from dualtune.model.adapter import PREFIX, AdapterSpec, Tensors, modules_of, owner_of
from dualtune.model.beside import NewToken, parameter_name
from dualtune.model.formats import canonical, mlx_lm, peft, stacks, vllm
from dualtune.model.formats.chat_template import TEMPLATE_FILE, recorded_hash, template_in
from dualtune.model.formats.naming import PLAIN, Naming, Prefixes, read_naming, rename_tensors, renamed, reversed_
from dualtune.model.targets import is_embedding

CONFIG_FILE = peft.CONFIG_FILE
MANIFEST_FILE = "dualtune.json"
NEW_TOKENS, SPECIAL_TOKENS = "new_tokens", "special_tokens"  # keys there: texts, and which of them are special
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")  # of an adapter with new tokens
FILES = (CONFIG_FILE, peft.WEIGHTS_FILE, mlx_lm.WEIGHTS_FILE, TEMPLATE_FILE)  # without dualtune.json, which lists them
# Weights that only `dualtune adapter import` reads: PEFT's shards, and the NumPy archive of an old mlx-lm.
INDEX_FILE, NPZ_FILE = "adapter_model.safetensors.index.json", "adapters.npz"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
LAYOUTS = ("dual", "peft", "mlx", vllm.LAYOUT)
SCHEMA_VERSION = 1
MAX_BYTES = 1 << 20  # of dualtune.json
MAX_CONFIG_BYTES = 1 << 20
SAME_FUNCTION = 1e-5  # largest ‖ΔW₁ − ΔW₂‖ / ‖ΔW‖ of two files with the same adapter


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter in canonical form: PEFT names -> float32, lora_A [r, in], lora_B [out, r]."""

    spec: AdapterSpec
    tensors: Tensors
    base_model: str | None = None
    layout: str = "dual"  # dual | peft | mlx: the layout it was read from
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])  # the content of dualtune.json, if any
    notes: tuple[str, ...] = ()  # what was converted on reading
    template: str | None = None  # the source of its training's chat template, if it is in the directory
    naming: Naming = PLAIN  # how other tools name the layers
    fan_in_fan_out: bool = False  # the base model's linear layers are Conv1D: see `dualtune.model.formats.naming`
    # The tokenizer with the tokens that the training added, by file name; empty: that of the base.
    tokenizer: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    @property
    def is_for_peft(self) -> bool:
        return self.layout != "mlx"

    @property
    def new_tokens(self) -> tuple[NewToken, ...]:
        """The tokens that its training added to those of the base, in the order of their ids."""
        special = fields.texts(self.metadata, SPECIAL_TOKENS, MANIFEST_FILE) or ()
        texts = fields.texts(self.metadata, NEW_TOKENS, MANIFEST_FILE) or ()
        return tuple(NewToken(text, text in special) for text in texts)

    @property
    def template_hash(self) -> str | None:
        """The hash of its training's chat template; "none" if it had none, None if that is not recorded."""
        return recorded_hash(self.template, self.metadata)


@dataclass(frozen=True)
class Contents:
    """An adapter directory with its files open: each is opened once, so what is hashed is what is read."""

    directory: Path
    layout: str
    manifest: dict[str, Any] | None
    files: Mapping[str, BufferedReader]

    @cached_property
    def config(self) -> dict[str, Any]:
        return json_in(self.files[CONFIG_FILE], self.directory / CONFIG_FILE, max_bytes=MAX_CONFIG_BYTES)

    @cached_property
    def naming(self) -> Naming:
        return read_naming(self.manifest or {}, self.directory / MANIFEST_FILE)


def read_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Return the adapter of a directory in any of the three layouts, converted exactly, or raise FormatError."""
    with open_directory(path) as contents:
        if contents.manifest is not None:
            _refuse(contents, integrity_problems(contents.directory, contents.manifest, contents.files))
        adapter = load(contents)
        _refuse(contents, canonical.value_problems(adapter.tensors))
        if contents.layout == "dual" and contents.manifest is None:
            _refuse(contents, agreement_problems(contents, adapter))
        return adapter


def _refuse(contents: Contents, problems: list[str]) -> None:
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise FormatError(f"{contents.directory}: {'; '.join(problems[:3])}{more}")


def adapter_directory(path: str | os.PathLike[str]) -> Path:
    """Return the directory of an adapter: the given one, or the adapter in it if it is a run directory."""
    named = Path(path)
    result = named / "adapter"
    return result if not (named / CONFIG_FILE).exists() and (result / CONFIG_FILE).is_file() else named


@contextlib.contextmanager
def open_directory(path: str | os.PathLike[str]) -> Generator[Contents]:
    """Open a directory; for a run directory, its adapter. FormatError lists the contents if there is no adapter."""
    directory = adapter_directory(path)
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        nearest = did_you_mean_path(directory) if isinstance(error, FileNotFoundError) else ""
        what = nearest or f". An adapter is a directory with {CONFIG_FILE} and its weights."
        raise FormatError(f"{directory}: {error.strerror}{what}") from None
    has_peft, has_mlx = (directory / peft.WEIGHTS_FILE).is_file(), (directory / mlx_lm.WEIGHTS_FILE).is_file()
    if not (has_peft or has_mlx):
        raise FormatError(_no_adapter(directory, names))
    if CONFIG_FILE not in names:
        raise FormatError(f"{directory}: {CONFIG_FILE} is missing: without it the scale of the adapter is unknown")
    layout = "dual" if has_peft and has_mlx else "peft" if has_peft else "mlx"
    manifest = read_manifest(directory)
    with open_files(directory) as files:
        yield Contents(directory, layout, manifest, files)


@contextlib.contextmanager
def open_files(directory: Path) -> Generator[dict[str, BufferedReader]]:
    """Open those of FILES and TOKENIZER_FILES that are in a directory."""
    with contextlib.ExitStack() as stack:
        paths = [directory / name for name in (*FILES, *TOKENIZER_FILES)]
        present = [path for path in paths if path.exists()]  # `open_file` refuses a pipe
        yield {file.name: stack.enter_context(open_file(file)) for file in present}


def _no_adapter(directory: Path, names: list[str]) -> str:
    if pickles := [name for name in names if name.endswith(PICKLE_SUFFIXES)]:
        return (
            f"{directory}: {pickles[0]!r} is a pickle, which can run code when it is opened. If you trust it, load it "
            f"with PEFT and save it as {peft.WEIGHTS_FILE}: model.save_pretrained(path, safe_serialization=True)."
        )
    if others := {INDEX_FILE, NPZ_FILE} & {*names}:
        return f"{directory}: has {min(others)}. `dualtune adapter import {directory} OUT` reads it"
    for model in (directory / "model", directory):
        if (model / "config.json").is_file():
            return f"{model}: is a model, not an adapter: use it in the place of a base model, without an adapter"
    if (directory / "checkpoints").is_dir():
        return (
            f"{directory}: is a run directory without an adapter: the adapter is written at the end of the run. "
            f"`dualtune train {directory / 'config.yaml'}` goes on from the newest checkpoint; with --steps of that "
            "checkpoint's number it ends there"
        )
    if "MANIFEST.json" in names:
        return (
            f"{directory}: is a checkpoint, not an adapter: `dualtune train {directory.parent.parent / 'config.yaml'}` "
            "goes on from it, and writes the adapter at the end of the run"
        )
    if runs := [name for name in sorted(names) if (directory / name / "adapter").is_dir()]:
        return (
            f"{directory}: holds {len(runs)} runs with an adapter. Give one of them, such as {directory / runs[0]}; "
            f"`dualtune runs {directory} --sort best` lists them, best first"
        )
    listing = ", ".join(map(repr, names[:10])) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return (
        f"{directory}: has neither {peft.WEIGHTS_FILE} nor {mlx_lm.WEIGHTS_FILE}. It contains: {listing or 'nothing'}"
    )


def load(contents: Contents) -> Adapter:
    """Return the adapter of an open directory, from PEFT's file if there are two. Values are not checked."""
    parts = _parse(contents, "mlx" if contents.layout == "mlx" else "peft")
    template = None
    if os.path.lexists(contents.directory / TEMPLATE_FILE):
        path = file_in(contents.directory, TEMPLATE_FILE, "adapter")  # it is copied to merged models and bundles
        template = template_in(contents.files[TEMPLATE_FILE], path)
    return Adapter(
        parts.spec, parts.tensors, parts.base_model, contents.layout, contents.manifest or {}, parts.notes, template,
        contents.naming, parts.fan_in_fan_out, _tokenizer(contents),
    )  # fmt: skip


def _tokenizer(contents: Contents) -> dict[str, bytes]:
    """Return the files of the tokenizer that the manifest lists, which were checked by their hashes."""
    listed = fields.subtable(contents.manifest or {}, "files", MANIFEST_FILE)
    files = {name: contents.files[name] for name in TOKENIZER_FILES if name in listed and name in contents.files}
    for file in files.values():
        file.seek(0)
    return {name: file.read() for name, file in files.items()}


def _parse(contents: Contents, layout: str) -> canonical.Parts:
    """Return the adapter in one of the weight files, by its canonical names."""
    directory = contents.directory
    name = peft.WEIGHTS_FILE if layout == "peft" else mlx_lm.WEIGHTS_FILE
    tensors = tensors_in(contents.files[name], directory / name)
    if layout == "peft":
        parts = peft.read_peft(contents.config, tensors, directory, contents.naming)
        parts = parts._replace(tensors=_without_copy(parts.tensors, contents))
    else:
        parts = mlx_lm.read_mlx(contents.config, tensors, directory, contents.naming)
    tensors, spec = _in_names(parts.spec, parts.tensors, reversed_(contents.naming.prefixes(layout)))
    return parts._replace(spec=_as_recorded(spec, contents), tensors=tensors)


def _without_copy(tensors: Tensors, contents: Contents) -> Tensors:
    """Return the tensors without those of an output head that is the embedding: see `Naming.tied_head`."""
    head = contents.naming.tied_head
    if head is None:
        return tensors
    copy = tensors.get(parameter_name(f"{head}.weight"))
    if copy is None or not any(x.shape == copy.shape and np.array_equal(x, copy) for x in _embeddings(tensors)):
        raise FormatError(f"{contents.directory}: {head} and the embedding are one, but their tensors differ")
    return {name: x for name, x in tensors.items() if x is not copy}


def _embeddings(tensors: Tensors) -> list[np.ndarray]:
    return [x for name, x in tensors.items() if is_embedding(name.removeprefix(PREFIX))]


def _as_recorded(spec: AdapterSpec, contents: Contents) -> AdapterSpec:
    """Return the spec with what only dualtune.json records: see `_recorded`."""
    where = f"{contents.directory / MANIFEST_FILE}: adapter"
    facts = fields.subtable(contents.manifest or {}, "adapter", where)
    if "dropout" in facts:
        spec = replace(spec, dropout=fields.probability(facts, "dropout", where))
    if contents.layout == "mlx" and facts == {"method": spec.method, "scaling": "rank_stabilized"}:
        return canonical.rescaled(spec, "rank_stabilized", ())
    return spec


def agreement_problems(contents: Contents, adapter: Adapter) -> list[str]:
    """Return where mlx-lm's file of a dual directory computes another function than the adapter from PEFT's file."""
    other = _parse(contents, "mlx")
    in_peft = canonical.to_pairs(adapter.tensors, contents.directory / peft.WEIGHTS_FILE)
    in_mlx = canonical.to_pairs(other.tensors, contents.directory / mlx_lm.WEIGHTS_FILE)
    problems = [f"{module} is adapted in one weight file only" for module in sorted(in_peft.keys() ^ in_mlx.keys())]
    for module in sorted(in_peft.keys() & in_mlx.keys()):
        if in_peft[module].delta_shape != in_mlx[module].delta_shape:
            problems.append(f"{module}: the weight files adapt matrices of different shapes")
            continue
        distance = canonical.delta_distance(
            in_peft[module], adapter.spec.scale_of(module), in_mlx[module], other.spec.scale_of(module)
        )
        if distance > SAME_FUNCTION:
            problems.append(f"{module}: the updates of the two weight files differ by {distance:.1e} of their norm")
    extras = [canonical.extra_tensors(tensors) for tensors in (adapter.tensors, other.tensors)]
    if canonical.extras_distance(*extras) > SAME_FUNCTION:
        method = adapter.spec.method_spec
        problems.append(
            f"the two weight files differ in the parameters that {method.title} trains in addition to A and B"
        )
    return problems


def write_adapter(
    path: str | os.PathLike[str], adapter: Adapter, *, layout: str = "dual", metadata: Mapping[str, Any] | None = None
) -> None:
    """Write a new adapter directory, whole or not at all.

    `metadata` goes into dualtune.json; the default is the metadata that the adapter was read with. Raises ConfigError
    if the path exists, DiskError if it cannot be written, NonFiniteError and FormatError if the adapter is unusable.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"layout: got {layout!r}, must be one of {', '.join(LAYOUTS)}")
    if layout == "mlx" and (why := _not_in_mlx(adapter)):
        raise ConfigError(f"layout: got mlx, but {why}; allowed: peft, or merge it for mlx-lm")
    if layout == vllm.LAYOUT:
        vllm.check_for_vllm(adapter.spec, adapter.tensors, adapter.naming)
    target = Path(path).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: already exists and is not an empty directory. Choose another path or remove it.")
    write_directory(target, render(adapter, layout, adapter.metadata if metadata is None else metadata))


def _not_in_mlx(adapter: Adapter) -> str | None:
    """Return why mlx-lm has no file for an adapter; None if it has one."""
    if canonical.of_base(adapter.tensors):
        return "mlx-lm has no file for parameters of the base that are trained beside an adapter"
    return "mlx-lm's trainer has no adapter for routers of this family" if adapter.naming.own_router else None


def render(adapter: Adapter, layout: str, metadata: Mapping[str, Any]) -> dict[str, Content]:
    """Return the content of each file of the directory, dualtune.json last."""
    spec, notes, pairs = adapter.spec, list(adapter.notes), canonical.to_pairs(adapter.tensors, "adapter")
    for module, pair in pairs.items():
        canonical.check_rank(module, pair, spec.rank_of(module), "adapter")
    canonical.check_extras(spec.method_spec, extras := canonical.extra_tensors(adapter.tensors), pairs, "adapter")
    own, fan_in_fan_out = canonical.of_base(adapter.tensors), adapter.fan_in_fan_out
    tensors = canonical.to_tensors(pairs) | extras | own
    if layout == "dual" and (why := _not_in_mlx(adapter)):
        layout = "peft"
        notes.append(f"written for PEFT alone: {why}")
    if layout == vllm.LAYOUT:
        spec, tensors, unified = canonical.unified(spec, tensors)
        notes += unified
    # What is written is what is checked: the alpha is made an integer first.
    if layout != "mlx":  # mlx-lm's scale may be any number, PEFT's lora_alpha is an integer
        spec, tensors, folded = canonical.with_integral_alpha(spec, tensors)
        notes += folded
    _check_values(tensors)
    config, files, naming = dict[str, Any](), dict[str, Content](), adapter.naming
    if layout != "mlx":
        in_peft, named = peft_layout(replace(adapter, spec=spec, tensors=tensors), apart=layout == vllm.LAYOUT)
        config |= in_peft
        files[peft.WEIGHTS_FILE] = _safetensors(named, "pt")
    if layout not in ("peft", vllm.LAYOUT):
        uniform, padded, unified = canonical.unified(spec, tensors)
        _check_values(padded)
        notes += [f"mlx-lm's file: {note}" for note in unified]
        named, own = _in_names(uniform, padded, naming.mlx)
        config |= mlx_lm.mlx_config(own, modules_of(named), fan_in_fan_out=fan_in_fan_out, experts=naming.experts)
        files[mlx_lm.WEIGHTS_FILE] = _safetensors(
            mlx_lm.mlx_tensors(named, spec.method, fan_in_fan_out=fan_in_fan_out, experts=naming.experts), "mlx"
        )
    if layout == "mlx" and adapter.base_model is not None:
        config["model"] = adapter.base_model  # mlx-lm's trainer uses this key
    files[CONFIG_FILE] = json_bytes(config)
    files |= adapter.tokenizer
    if adapter.template is not None:
        files[TEMPLATE_FILE] = adapter.template.encode()
    # dualtune.json is last, because it lists the others with their hashes.
    facts: dict[str, Any] = {"adapter": _recorded(spec, config)}
    if naming != PLAIN:
        facts["naming"] = naming.as_json()
    files[MANIFEST_FILE] = json_bytes(make_manifest(files, notes, {**metadata, **facts}))
    return files


def peft_layout(adapter: Adapter, *, apart: bool = False) -> tuple[dict[str, Any], Tensors]:
    """Return the adapter_config.json of an adapter with an integer alpha, and its tensors in PEFT's names.

    `apart`: with each expert as layers of its own, as vLLM reads them.
    """
    tensors, head = adapter.tensors, adapter.naming.tied_head
    if head is not None:  # PEFT copies each module that it trains, also one that is another
        tensors = tensors | {parameter_name(f"{head}.weight"): x for x in _embeddings(tensors)}
    named, spec = _in_names(adapter.spec, tensors, adapter.naming.peft)
    if apart and not vllm.holds_stacks(adapter.naming):
        return vllm.vllm_config(spec, named, adapter.base_model), named
    linear, of_experts, forms = stacks.to_parameters(named, adapter.naming.experts, spec.scale_of)
    config = peft.peft_config(
        spec,
        modules_of(linear),
        adapter.base_model,
        of_base=[*canonical.of_base(named)],
        fan_in_fan_out=adapter.fan_in_fan_out,
        naming=adapter.naming,
        of_experts=forms,
    )
    return config, peft.written_names(linear | of_experts, spec)


def _in_names(spec: AdapterSpec, tensors: Tensors, prefixes: Prefixes) -> tuple[Tensors, AdapterSpec]:
    """Return canonical tensors, and the targets of a spec that are whole paths, in the names of another tool."""
    paths = renamed(filter(None, map(owner_of, tensors)), prefixes)
    return rename_tensors(tensors, prefixes), spec.renamed(paths)


def _recorded(spec: AdapterSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the config cannot say: mlx-lm's has no scaling, PEFT's no dropout for adapted parameters."""
    facts: dict[str, Any] = {"method": spec.method, "scaling": spec.scaling}
    if spec.dropout and "target_parameters" in config:
        facts["dropout"] = spec.dropout
    return facts


def _check_values(tensors: Tensors) -> None:
    if names := canonical.non_finite(tensors):
        raise NonFiniteError(f"adapter: {names[0]} holds NaN or Inf; nothing is written. Use an earlier checkpoint.")
    if modules := canonical.zero_filled(tensors):
        raise FormatError(f"adapter: {modules[0]}: A and B are all zeros; nothing is written")


def _safetensors(tensors: Tensors, framework: str) -> Pieces:
    """Add `format` to the header, where transformers and PEFT look for it."""
    return safetensors_pieces(tensors, {"format": framework})


# ----------------------------------------------------------------------------------------------------------------------
# dualtune.json: the files of the directory when it was written, and all other recorded facts.
#
#     {"schema_version": 1, "files": {"<name>": {"bytes": …, "sha256": …}, …}, "notes": [what was converted], …}
#
# The other keys are metadata of the writer: fingerprints of the base model, a summary of the training.


def make_manifest(files: Mapping[str, Content], notes: Collection[str], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of dualtune.json for these files. Metadata from another directory may be passed as it is."""
    return {
        **metadata,
        "schema_version": SCHEMA_VERSION,
        "files": listing(files),
        "notes": [*(metadata.get("notes") or []), *notes],
    }


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the content of dualtune.json, None if there is none."""
    path = directory / MANIFEST_FILE
    if not path.is_file():
        return None
    manifest = read_json(path, max_bytes=MAX_BYTES)
    if (version := fields.rank(manifest, "schema_version", path)) > SCHEMA_VERSION:
        raise FormatError(f"{path}: schema_version {version} is newer than {SCHEMA_VERSION}. Update dualtune.")
    fields.texts(manifest, "notes", path)
    return manifest


def integrity_problems(directory: Path, manifest: Mapping[str, Any], files: Mapping[str, BufferedReader]) -> list[str]:
    """Return where the open files differ from the manifest. Names that are not in FILES are refused and never read."""
    listed = fields.subtable(manifest, "files", directory / MANIFEST_FILE)
    problems = [
        f"{MANIFEST_FILE} lists {fields.shown(name)!r}, which is not part of an adapter"
        for name in listed
        if name not in (*FILES, *TOKENIZER_FILES)
    ]
    for name in (*FILES, *TOKENIZER_FILES):
        if name not in listed:
            if name in TOKENIZER_FILES:
                continue  # trainers put that of the base there, which nothing reads
            exists = (directory / name).exists()
            problems += [f"{name} is not listed in {MANIFEST_FILE}: it was added later"] if exists else []
        elif name not in files:
            problems.append(f"{name} is missing, though {MANIFEST_FILE} lists it")
        else:
            entry = fields.subtable(listed, name, directory / MANIFEST_FILE)
            problems += _file_problems(name, files[name], entry)
    return problems


def _file_problems(name: str, file: BufferedReader, entry: Mapping[str, Any]) -> list[str]:
    file.seek(0)
    if file.read(len(LFS_MAGIC)) == LFS_MAGIC:
        return [f"{name} {LFS_ADVICE}"]
    if (size := os.fstat(file.fileno()).st_size) != entry.get("bytes"):
        expected = fields.shown(fields.text_of(entry.get("bytes")))
        return [f"{name} has {size} bytes, expected {expected}: truncated or replaced. Copy it again."]
    file.seek(0)
    if hashlib.file_digest(file, "sha256").hexdigest() != entry.get("sha256"):
        return [f"{name} was changed: its sha256 is not the one in {MANIFEST_FILE}. Copy it again."]
    return []
