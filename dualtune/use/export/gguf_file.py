"""GGUF files by pip's `gguf` package alone, which needs no compiler: decoders like Llama's, in the types that it packs.

What it writes is read back and computed (`unpack`), so that a wrong file is noticed here. llama.cpp's own converter
knows more families and tokenizers, and is preferred where it is.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from dualtune.base.errors import ConfigError, FormatError
from dualtune.base.fields import shown
from dualtune.base.tensors import FLOATS, StoredForm, bytes_of, floats_of, write_model_weights
from dualtune.base.untrusted import read_json
from dualtune.base.versions import import_extra
from dualtune.data.tokens.stop_tokens import StopTokens, stop_tokens
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.data.tokens.tokenizer_files import TOKENIZER
from dualtune.data.tokens.tokenizer_vetting import MAX_FILE_BYTES, MAX_STRUCTURES
from dualtune.model.base_model import find_weights
from dualtune.model.config_file import read_config
from dualtune.model.copies import copy_without_weights
from dualtune.model.gguf import (
    CONTROL,
    END_KEYS,
    FAMILIES,
    IGNORES_MERGES,
    NORMAL,
    REGEX,
    UNUSED,
    USER,
    heads_of,
    interleaved,
    llama3_factors,
)
from dualtune.model.weight_files import BaseWeights, StoredTensor

KINDS = ("f32", "f16", "bf16", "q8_0")
BLOCK = 32  # numbers that share a scale in q8_0
# llama.cpp's name for the way in which a regular expression splits a text.
_REGEX = {regex: name for name, regex in REGEX.items()}


def gguf_package() -> Any:
    """Import pip's `gguf`. EnvironmentFault if it is not installed."""
    return import_extra("gguf", "gguf", "--to gguf")


def check(model: Path) -> None:
    """Raise ConfigError, with every reason, if the package alone cannot write this model directory."""
    if reasons := problems_of(model):
        raise ConfigError(
            f"{model}: pip's gguf alone cannot write this model: {'; '.join(reasons)}. llama.cpp's converter may: give "
            "a checkout of it with --llama-cpp DIR, or export to another format: --to hf or --to mlx"
        )


def problems_of(model: Path) -> list[str]:
    """Return why a model directory cannot be written by the package alone; empty if it can."""
    config = read_config(model)
    problems = [*_config_problems(config)]
    if not (model / TOKENIZER).is_file():
        return [*problems, "its tokenizer is not a tokenizer.json"]
    if _splitting(_tokenizer_json(model)) is None:
        problems.append("its tokenizer splits texts in a way that is none of those of GPT-2, SmolLM, Llama 3 and Qwen")
    return problems


def _config_problems(config: Mapping[str, Any]) -> Iterator[str]:
    family, rope = str(config.get("model_type")), _rope(config)
    if family not in FAMILIES:
        yield f"model_type is {shown(family)}, not one of {', '.join(FAMILIES)}"
    if config.get("hidden_act", "silu") != "silu":
        yield f"hidden_act is {shown(str(config['hidden_act']))}, not silu"
    slides = config.get("sliding_window") if family == "mistral" else config.get("use_sliding_window")
    if slides:
        yield "its attention slides over a window"
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        yield f"its positions are scaled by {shown(str(rope['rope_type']))}, not by linear or llama3"


def write(model: Path, out: Path, kind: str) -> None:
    """Write a model directory as GGUF, in one of KINDS: matrices in that type, the rest in float32.

    ConfigError with every reason why it cannot be written.
    """
    check(model)
    gguf, config, weights = gguf_package(), read_config(model), find_weights(model)
    writer = gguf.GGUFWriter(out, FAMILIES[str(config["model_type"])].name)
    _add_shape(writer, gguf, config, kind)
    _add_vocabulary(writer, model, int(config["vocab_size"]))
    readers = _readers(gguf, config, weights)
    types = {name: _type(gguf, shape, kind) for name, (shape, _) in readers.items()}
    for name, (shape, _) in readers.items():
        num_bytes = math.prod(gguf.quants.quant_shape_to_byte_shape(shape, types[name]))
        writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes, raw_dtype=types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, (_, read) in readers.items():  # one tensor in memory at a time
        writer.write_tensor_data(gguf.quants.quantize(read(), types[name]))
    writer.close()


def can_unpack(model: Path) -> bool:
    """Return whether `unpack` can turn a GGUF of this model directory into a directory again."""
    return importlib.util.find_spec("gguf") is not None and not [*_config_problems(read_config(model))]


def unpack(file: Path, model: Path, out: Path) -> None:
    """Write a GGUF that `write` or llama.cpp has made of `model` as a new model directory in float32, to compute with.

    FormatError for a type that the package cannot unpack, and for a file that lacks a tensor of the model.
    """
    gguf, config, weights = gguf_package(), read_config(model), find_weights(model)
    family = FAMILIES[str(config["model_type"])]
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    names = {gguf_name: name for name, gguf_name in _named_pairs(gguf, config, weights)}
    if lost := sorted(names.keys() - stored.keys()):
        raise FormatError(f"{file}: lacks {shown(lost[0])}")
    forms = {name: StoredForm("F32", weights.tensors[name].shape) for name in names.values()}
    sources = {name: gguf_name for gguf_name, name in names.items()}

    def read(name: str) -> memoryview:
        tensor = stored[sources[name]]
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise FormatError(f"{file}: {error}") from error
        values = np.asarray(values, np.float32).reshape(forms[name].shape)
        heads = heads_of(name, config, family)
        return bytes_of(interleaved(values, heads, back=True) if heads else values)

    copy_without_weights(model, out)
    (out / "config.json").write_text(json.dumps({**config, "dtype": "float32", "torch_dtype": "float32"}), "utf-8")
    write_model_weights(out, forms, read)


# --- tensors ---------------------------------------------------------------------------------------------------------


def _named_pairs(gguf: Any, config: Mapping[str, Any], weights: BaseWeights) -> list[tuple[str, str]]:
    """Return (name in the model, name in GGUF) of each tensor. ConfigError for one that the architecture lacks."""
    architecture = FAMILIES[str(config["model_type"])].name
    [number] = [number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    table = gguf.get_tensor_name_map(number, int(config["num_hidden_layers"]))
    pairs = list[tuple[str, str]]()
    for name in sorted(weights.tensors):
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.get("tie_word_embeddings")):
            continue  # computed from the config; the embedding
        if (gguf_name := table.get_name(name, try_suffixes=(".weight", ".bias"))) is None:
            raise ConfigError(f"{weights.directory}: {shown(name)}: has no name in GGUF's {architecture}")
        pairs.append((name, gguf_name))
    return pairs


def _readers(
    gguf: Any, config: Mapping[str, Any], weights: BaseWeights
) -> dict[str, tuple[tuple[int, ...], Callable[[], np.ndarray]]]:
    """Return name in GGUF -> (shape, what reads the tensor as float32)."""
    family = FAMILIES[str(config["model_type"])]

    def reader(name: str) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            values = _read(weights.tensors[name])
            return interleaved(values, heads) if (heads := heads_of(name, config, family)) else values

        return read

    readers = {
        gguf_name: (weights.tensors[name].shape, reader(name))
        for name, gguf_name in _named_pairs(gguf, config, weights)
    }
    if (rope := _rope(config))["rope_type"] == "llama3":  # Llama 3.1's divisors of the frequencies
        factors = llama3_factors(rope, _head_size(config))
        readers["rope_freqs.weight"] = (factors.shape, lambda: factors)
    return readers


def _read(tensor: StoredTensor) -> np.ndarray:
    """Return a stored tensor as float32, exactly."""
    if tensor.dtype not in FLOATS:
        raise ConfigError(f"{tensor.file}: holds tensors in {tensor.dtype}; allowed: {', '.join(FLOATS)}")
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.begin)
        values = floats_of(stream.read(tensor.num_bytes), tensor.dtype)
    return values.astype(np.float32, copy=False).reshape(tensor.shape)


def _type(gguf: Any, shape: tuple[int, ...], kind: str) -> Any:
    """Return the type of a tensor: vectors stay in float32, rows that no block fits in float16."""
    types = gguf.GGMLQuantizationType
    if len(shape) == 1:
        return types.F32
    return types.F16 if kind == "q8_0" and shape[-1] % BLOCK else types[kind.upper()]


# --- the shape -------------------------------------------------------------------------------------------------------


def _add_shape(writer: Any, gguf: Any, config: Mapping[str, Any], kind: str) -> None:
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    width, rope = _head_size(config), _rope(config)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_context_length(int(config.get("max_position_embeddings", 2048)))
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(float(config.get("rms_norm_eps", 1e-6)))
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_vocab_size(int(config["vocab_size"]))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))


def _head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"]))


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of rotary positions, under today's key or the older ones."""
    settings: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    table = cast("dict[str, Any]", settings) if isinstance(settings, dict) else {"rope_type": settings}
    base = table.get("rope_theta", config.get("rope_theta", 10000.0))
    return {**table, "rope_theta": base, "rope_type": table.get("rope_type", table.get("type", "default"))}


# --- the tokenizer ---------------------------------------------------------------------------------------------------


def _splitting(table: Any) -> str | None:
    """Return llama.cpp's name for the way in which a tokenizer.json splits texts, None if it has none."""
    model: Any = table.get("model") or {}
    normalizer: Any = table.get("normalizer") or {}
    step: Any = table.get("pre_tokenizer") or {}
    steps: list[Any] = step.get("pretokenizers") or [step]
    last = steps[-1]
    if model.get("type") != "BPE" or model.get("byte_fallback") or normalizer.get("type", "NFC") != "NFC":
        return None
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    name = None
    if last.get("use_regex", True):
        digits = [{"type": "Digits", "individual_digits": True}]
        name = "gpt-2" if len(steps) == 1 else "smollm" if steps[:-1] == digits else None
    elif len(steps) == 2 and (steps[0].get("type"), steps[0].get("behavior")) == ("Split", "Isolated"):
        pattern: Any = steps[0].get("pattern") or {}
        name = _REGEX.get(str(pattern.get("Regex")))
    return name if bool(model.get("ignore_merges")) == (name == IGNORES_MERGES) else None


def _tokenizer_json(model: Path) -> dict[str, Any]:
    return read_json(model / TOKENIZER, max_bytes=MAX_FILE_BYTES, strict=False, allowance=MAX_STRUCTURES)


def _add_vocabulary(writer: Any, model: Path, size: int) -> None:
    table: Any = _tokenizer_json(model)
    tokenizer = Tokenizer(model)
    texts, kinds = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for text, token in table["model"]["vocab"].items():
        texts[token], kinds[token] = text, NORMAL
    added: list[Any] = table.get("added_tokens") or []
    for entry in added:
        texts[entry["id"]] = entry["content"]
        kinds[entry["id"]] = CONTROL if entry["id"] in tokenizer.special_ids else USER
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_splitting(table))
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in table["model"]["merges"]]
    )
    plain = tokenizer.encode("a", special=True)
    writer.add_add_bos_token(tokenizer.bos_id is not None and int(plain[0]) == tokenizer.bos_id)
    writer.add_add_eos_token(tokenizer.eos_id is not None and int(plain[-1]) == tokenizer.eos_id)
    if tokenizer.bos_id is not None:
        writer.add_bos_token_id(tokenizer.bos_id)
    for key, value in stop_keys(stop_tokens(tokenizer)).items():
        writer.add_uint32(key, value)
    if tokenizer.template is not None:
        writer.add_chat_template(tokenizer.template.source)


def stop_keys(stops: StopTokens) -> dict[str, int]:
    """Return the keys of a GGUF that name the first three tokens that end an answer: llama.cpp stops at each."""
    return {f"tokenizer.ggml.{name}_token_id": token for name, token in zip(END_KEYS, stops.ids, strict=False)}


# ----------------------------------------------------------------------------------------------------------------------
# Numbers in the header of a GGUF file: a converter does not name every token that ends a turn.
#
# The layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3, little-endian.

_MAGIC, _VERSION, _UINT32, _STRING, _ARRAY = b"GGUF", 3, 4, 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by its type
_ALIGNMENT, _ALIGNMENT_KEY = 32, b"general.alignment"
_MOST = 1 << 30  # bytes of a text or an array, beyond which the file is damaged


def set_numbers(file: Path, numbers: Mapping[str, int]) -> None:
    """Set uint32 keys in the header of a GGUF file, which is written anew. FormatError if it is none of version 3."""
    new = {key.encode(): struct.pack("<I", value) for key, value in numbers.items()}
    patched = file.with_name(f"{file.name}.patched")
    with file.open("rb") as source, patched.open("xb") as target:
        header = _Header(source, file)
        tensors, count = header.number("Q"), header.number("Q")
        stored = [header.entry() for _ in range(count)]
        alignment = next((struct.unpack("<I", raw[-4:])[0] for key, raw in stored if key == _ALIGNMENT_KEY), _ALIGNMENT)
        begin = source.tell()
        for _ in range(tensors):
            header.tensor()
        infos = header.since(begin)
        unchanged = [raw for key, raw in stored if key not in new]
        added = [_text(key) + struct.pack("<I", _UINT32) + value for key, value in new.items()]
        head = (
            _MAGIC
            + struct.pack("<IQQ", _VERSION, tensors, len(unchanged) + len(added))
            + b"".join([*unchanged, *added])
            + infos
        )
        target.write(head + bytes(-len(head) % alignment))
        source.seek(source.tell() + -source.tell() % alignment)
        shutil.copyfileobj(source, target, 1 << 20)
    patched.replace(file)


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


class _Header:
    """Reads what stands before the tensors of a GGUF file, entry by entry."""

    def __init__(self, source: BinaryIO, file: Path) -> None:
        self._source, self._file = source, file
        if self._bytes(4) != _MAGIC or self.number("I") != _VERSION:
            raise FormatError(f"{file}: is not a GGUF file of version {_VERSION}")

    def number(self, form: str) -> int:
        return int(struct.unpack(f"<{form}", self._bytes(struct.calcsize(form)))[0])

    def entry(self) -> tuple[bytes, bytes]:
        """Return a key, and all bytes of its entry."""
        begin = self._source.tell()
        key = self._bytes(self.number("Q"))
        self._skip(self.number("I"))
        return key, self.since(begin)

    def tensor(self) -> None:
        """Read the description of one tensor: name, dimensions, type, offset."""
        self._bytes(self.number("Q"))
        self._bytes(8 * self.number("I") + 4 + 8)

    def since(self, begin: int) -> bytes:
        """Return the bytes from there to the present place."""
        end = self._source.tell()
        self._source.seek(begin)
        return self._bytes(end - begin)

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._bytes(self.number("Q"))
        elif kind == _ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner in _SIZES:
                self._bytes(_SIZES[inner] * count)
            else:
                for _ in range(count):
                    self._skip(inner)
        elif kind in _SIZES:
            self._bytes(_SIZES[kind])
        else:
            raise FormatError(f"{self._file}: its header has a value of type {kind}, which GGUF does not know")

    def _bytes(self, count: int) -> bytes:
        content = self._source.read(count) if count <= _MOST else b""
        if len(content) != count:
            raise FormatError(f"{self._file}: its header ends early. Export again")
        return content
