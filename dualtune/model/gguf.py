"""A GGUF file as a base model: weights dequantized, tokenizer and chat template rebuilt from its metadata.

The result is a model directory in the cache, made once for each file: every command and both backends read it as they
read any other. A key or a tensor that is not understood is refused, because the model would not be the one in the file.

Keys and names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from dualtune.base.errors import DiskError, FormatError
from dualtune.base.fields import shown
from dualtune.base.files import cache_dir, json_bytes, new_directory
from dualtune.base.hub import Tell
from dualtune.base.tensors import StoredForm, bytes_of, write_model_weights
from dualtune.base.versions import import_extra

SUFFIX = ".gguf"


class Architecture(NamedTuple):
    """A family's name in GGUF, and whether its queries and keys are stored with the halves of a head interleaved."""

    name: str
    interleaves: bool


FAMILIES = {
    "llama": Architecture("llama", True), "mistral": Architecture("llama", True), "qwen2": Architecture("qwen2", False),
    "qwen3": Architecture("qwen3", False),
}  # fmt: skip
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Key of config.json -> key of the architecture, and the value where the file has none.
_NUMBERS: Mapping[str, tuple[str, Any]] = {
    "hidden_size": ("embedding_length", None), "num_hidden_layers": ("block_count", None),
    "intermediate_size": ("feed_forward_length", None), "num_attention_heads": ("attention.head_count", None),
    "max_position_embeddings": ("context_length", None), "rms_norm_eps": ("attention.layer_norm_rms_epsilon", None),
}  # fmt: skip
_OTHERS = {
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base", "rope.scaling.type",
    "rope.scaling.factor", "rope.dimension_count", "vocab_size",
}  # fmt: skip
_MODULES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies
# How Llama 3.1 to 3.3 and Llama 3.2 stretch the frequencies: a file holds only the divisors that follow from it.
_LLAMA3 = [
    {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192} for factor in (8.0, 32.0)
]  # fmt: skip
_ROWS = 1 << 12  # of a matrix that are dequantized at a time


class GgufFile(NamedTuple):
    """A GGUF file: what it says of itself, and its tensors by name."""

    path: Path
    gguf: Any
    metadata: dict[str, Any]
    tensors: dict[str, Any]

    def refused(self, reason: str) -> FormatError:
        return FormatError(
            f"model.name: {self.path}: {reason}. Read are Llama, Mistral, Qwen 2, Qwen 3 and what shares their "
            "architecture; of another model, use the original directory or hub id that the file was made from"
        )


def is_gguf(name: str | Path) -> bool:
    return str(name).lower().endswith(SUFFIX)


def model_from_gguf(file: Path, tell: Tell = lambda share: None) -> Path:
    """Return the model directory that a GGUF file holds, which is made in the cache when it is first used.

    Matrices keep their precision if they are plain, and are stored in float16 if they were quantized. FormatError, with
    the reason, for a file that is damaged, or that has an architecture, a tokenizer, a key or a tensor that is not
    read; EnvironmentFault if the package `gguf` is not installed.
    """
    stat = file.stat()
    identity = f"1 {file.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    directory = cache_dir() / "gguf" / f"{file.stem[:40]}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if not directory.is_dir():
        try:
            with new_directory(directory, by_library=True) as temporary:
                _unpack(_read(file), temporary, tell)
        except DiskError:
            if not directory.is_dir():  # another process of the run may have made it meanwhile
                raise
    return directory


def _read(path: Path) -> GgufFile:
    gguf = import_extra("gguf", "gguf", f"model.name: {path}")
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except FormatError:
        raise
    except Exception as error:  # the package has no class of errors for a damaged file
        raise FormatError(f"model.name: {path}: is not a GGUF file, or it is damaged ({shown(str(error))})") from error
    return GgufFile(path, gguf, metadata, tensors)


def _unpack(file: GgufFile, directory: Path, tell: Tell) -> None:
    config, family = _config(file), FAMILIES[_architecture(file)]
    directory.mkdir(parents=True)
    contents = {"config.json": config, **tokenizer_files(file, config)}
    for name, table in contents.items():
        (directory / name).write_bytes(json_bytes(table))
    forms, readers = dict[str, StoredForm](), dict[str, Callable[[], np.ndarray]]()
    for ours, tensor in file.tensors.items():
        if ours == _FACTORS:
            continue
        name = _name(file, ours)
        kind, shape = _kind(file, tensor), tuple(int(size) for size in reversed(tensor.shape))
        forms[name] = StoredForm(kind, shape)
        readers[name] = _reader(file, tensor, kind, shape, heads_of(name, config, family))
    done = 0

    def read(name: str) -> memoryview:
        nonlocal done
        tell((done := done + forms[name].num_bytes) / total)
        return bytes_of(readers[name]())

    total = sum(form.num_bytes for form in forms.values())
    write_model_weights(directory, forms, read)


# --- tensors ---------------------------------------------------------------------------------------------------------


def _name(file: GgufFile, ours: str) -> str:
    """Return the name in a model directory of a tensor of the file."""
    module, _, part = ours.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    path = _MODULES.get(layer[2]) if layer else _WHOLE.get(module)
    if path is None or part not in ("weight", "bias"):
        raise file.refused(f"holds the tensor {shown(ours)}, which is not read")
    return f"model.layers.{layer[1]}.{path}.{part}" if layer else f"{path}.{part}"


def _kind(file: GgufFile, tensor: Any) -> str:
    """Return the type in which a tensor is stored in the directory."""
    types = file.gguf.GGMLQuantizationType
    return {types.F32: "F32", types.F16: "F16", types.BF16: "BF16"}.get(tensor.tensor_type, "F16")


def _reader(
    file: GgufFile, tensor: Any, kind: str, shape: tuple[int, ...], heads: int | None
) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        if kind == "BF16":
            values = np.asarray(tensor.data).view(np.uint16).reshape(shape)
        else:
            values = _dequantized(file, tensor, np.float32 if kind == "F32" else np.float16).reshape(shape)
        return np.ascontiguousarray(interleaved(values, heads, back=True) if heads else values)

    return read


def _dequantized(file: GgufFile, tensor: Any, dtype: type[np.floating[Any]]) -> np.ndarray:
    """Return a tensor's numbers. Some thousand rows are float32 at a time, not the whole matrix."""
    rows = tensor.data if tensor.data.ndim > 1 else tensor.data[None]
    pieces = list[np.ndarray]()
    for begin in range(0, len(rows), _ROWS):
        try:
            values = file.gguf.quants.dequantize(rows[begin : begin + _ROWS], tensor.tensor_type)
        except NotImplementedError as error:
            raise file.refused(f"{tensor.name} is stored as {tensor.tensor_type.name}, which is not read") from error
        with np.errstate(over="ignore"):
            piece = np.asarray(values).astype(dtype)
        if not np.isfinite(piece).all():
            raise file.refused(f"{tensor.name} has numbers that are not finite in {np.dtype(dtype).name}")
        pieces.append(piece)
    return np.concatenate(pieces)


def heads_of(name: str, config: Mapping[str, Any], family: Architecture) -> int | None:
    """Return the number of heads of a tensor whose rows GGUF orders in another way; None for the others."""
    if not family.interleaves:
        return None
    module = name.rpartition(".")[0].rpartition(".")[2]
    heads = int(config["num_attention_heads"])
    return {"q_proj": heads, "k_proj": int(config.get("num_key_value_heads") or heads)}.get(module)


def interleaved(values: np.ndarray, heads: int, *, back: bool = False) -> np.ndarray:
    """Interleave the two halves of each head's rows, which rotate together; `back` separates them again."""
    parts = (heads, -1, 2) if back else (heads, 2, values.shape[0] // heads // 2)
    return values.reshape(*parts, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


# --- config.json -----------------------------------------------------------------------------------------------------


def _architecture(file: GgufFile) -> str:
    name = file.metadata.get("general.architecture")
    if name not in CLASSES:
        raise file.refused(f"its architecture is {shown(str(name))}, which is not read")
    return str(name)


def _config(file: GgufFile) -> dict[str, Any]:
    """Return the config.json of the model in the file, which says everything that its architecture's keys say."""
    family = _architecture(file)
    own = {
        key.removeprefix(f"{family}."): value for key, value in file.metadata.items() if key.startswith(f"{family}.")
    }
    known = {key for key, _ in _NUMBERS.values()} | _OTHERS
    if unknown := sorted(key for key, value in own.items() if key not in known and value):
        raise file.refused(f"its key {shown(f'{family}.{unknown[0]}')} is not read")
    config: dict[str, Any] = {"model_type": family, "architectures": [CLASSES[family]], "hidden_act": "silu"}
    for key, (name, default) in _NUMBERS.items():
        config[key] = own.get(name, default)
        if not isinstance(config[key], int | float) or config[key] <= 0:
            raise file.refused(f"its key {family}.{name} is {shown(str(config[key]))}, not a number > 0")
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = own.get("attention.head_count_kv", heads)
    config["head_dim"] = own.get("attention.key_length", config["hidden_size"] // heads)
    if not isinstance(config["num_key_value_heads"], int):
        raise file.refused("its layers have different numbers of heads")
    sizes = {own.get(key, config["head_dim"]) for key in ("attention.value_length", "rope.dimension_count")}
    if sizes != {config["head_dim"]}:
        raise file.refused("its keys, values and rotary positions have different sizes")
    biases = {name.split(".", 2)[-1] for name in file.tensors if name.endswith(".bias")}
    if family == "llama":
        attention = {f"attn_{part}.bias" for part in ("q", "k", "v", "output")}
        mlp = {f"ffn_{part}.bias" for part in ("gate", "up", "down")}
        if biases not in (set[str](), attention, mlp, attention | mlp):
            raise file.refused("some of its linear layers have a bias and others do not")
        config |= {"attention_bias": attention <= biases, "mlp_bias": mlp <= biases}
    config |= {"rope_parameters": _rope(file, own, config), "tie_word_embeddings": "output.weight" not in file.tensors}
    tokens = tokens_of(file)
    config |= {f"{kind}_token_id": file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")}
    matrices = {_kind(file, tensor) for tensor in file.tensors.values() if len(tensor.shape) > 1}
    dtype = next((name for kind, name in {"F32": "float32", "BF16": "bfloat16"}.items() if kind in matrices), "float16")
    return {**config, "vocab_size": len(tokens), "dtype": dtype}


def _rope(file: GgufFile, own: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": own.get("rope.freq_base", 10000.0)}
    kind = own.get("rope.scaling.type", "none")
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": own.get("rope.scaling.factor", 1.0)}
    elif kind != "none":
        raise file.refused(f"its positions are scaled by {shown(str(kind))}, which is not read")
    if _FACTORS not in file.tensors:
        return rope
    stored = np.asarray(file.tensors[_FACTORS].data, np.float32)
    for known in _LLAMA3:
        factors = llama3_factors({**rope, **known}, config["head_dim"])
        if factors.shape == stored.shape and np.allclose(factors, stored, rtol=1e-5):
            return {**rope, **known}
    raise file.refused("its rotary frequencies are scaled in a way that is none of Llama 3.1's and 3.2's")


def llama3_factors(rope: Mapping[str, Any], width: int) -> np.ndarray:
    """Return Llama 3.1's divisors of the frequencies, float32 [width / 2].

    Wavelengths that fit `high_freq_factor` times into the original context stay, those that do not fit
    `low_freq_factor` times are stretched by `factor`, and between them the frequency is blended.
    """
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    exponents = np.arange(0, width, 2) / width
    fits = float(rope["original_max_position_embeddings"]) * float(rope["rope_theta"]) ** -exponents / (2 * np.pi)
    share = np.clip((fits - low) / (high - low), 0.0, 1.0)  # of the frequency as it is
    return (1 / ((1 - share) / factor + share)).astype(np.float32)


# --- the tokenizer and its chat template, as the files that a model directory has -------------------------------------

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # llama.cpp's types of tokens
END_KEYS = ("eos", "eot", "eom")  # of tokenizer.ggml.…_token_id: llama.cpp stops at each
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
REGEX = {"llama-bpe": _WORDS.replace("NUMBERS", r"\p{N}{1,3}"), "qwen2": _WORDS.replace("NUMBERS", r"\p{N}")}
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "gpt2": "gpt-2"}
IGNORES_MERGES = "llama-bpe"


def tokens_of(file: GgufFile) -> list[str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise file.refused("it holds no tokenizer")
    return cast("list[str]", tokens)


def tokenizer_files(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokenizer's files by name, with the chat template and every token that ends an answer."""
    metadata, tokens = file.metadata, tokens_of(file)
    kind = metadata.get("tokenizer.ggml.model")
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(str(kind))
    if build is None:
        raise file.refused(f"its tokenizer is of the kind {shown(str(kind))}, which is not read")
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    model = build(file, tokens, types)
    added = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": kind == CONTROL}
        for i, (text, kind) in enumerate(zip(tokens, types, strict=True)) if kind in (CONTROL, USER)
    ]  # fmt: skip
    names: dict[str, Any] = {}
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            names[f"{name}_token"] = tokens[token]
    # Files of Llama 3 have no such key: llama.cpp knows by the name of the splitting that texts begin with BOS.
    usual = kind == "llama" or _splitting(file) == IGNORES_MERGES
    begins = metadata.get("tokenizer.ggml.add_bos_token", usual) and "bos_token" in names
    ends = metadata.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in names
    table = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **model}
    if begins or ends:
        table["post_processor"] = _template(tokens, names["bos_token"] if begins else None,
                                            names["eos_token"] if ends else None)  # fmt: skip
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names,
                "model_max_length": config["max_position_embeddings"]}  # fmt: skip
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    stops = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in END_KEYS)
    generation: dict[str, Any] = {"eos_token_id": sorted({token for token in stops if token is not None}),
                                  "bos_token_id": config["bos_token_id"]}  # fmt: skip
    return {"tokenizer.json": table, "tokenizer_config.json": settings, "generation_config.json": generation}


def _template(tokens: list[str], first: str | None, last: str | None) -> dict[str, Any]:
    """Return a post-processor that puts special tokens around a text."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    ends = [{"SpecialToken": {"id": token, "type_id": 0}} if token else None for token in (first, last)]
    used = {token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in (first, last) if token}
    single = [part for part in (ends[0], text, ends[1]) if part]
    second: list[Any] = [{"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": single + second, "special_tokens": used}


def _splitting(file: GgufFile) -> str:
    """Return llama.cpp's name for the way in which a tokenizer splits texts, one of several for the same."""
    name = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    return _SAME.get(name, name)


def _byte_level(file: GgufFile, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """Return GPT-2's kind of tokenizer: byte pairs in the file's order, over pieces that a regular expression cuts."""
    pre = _splitting(file)
    steps: list[dict[str, Any]] = [
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre not in REGEX}
    ]
    if pre in REGEX:
        steps.insert(0, {"type": "Split", "pattern": {"Regex": REGEX[pre]}, "behavior": "Isolated", "invert": False})
    elif pre == "smollm":
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    elif pre != "gpt-2":
        raise file.refused(f"its tokenizer splits texts as {shown(pre)}, which is not read")
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": pre == IGNORES_MERGES, "vocab": {text: i for i, text in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in file.metadata.get("tokenizer.ggml.merges", [])],
        },
    }  # fmt: skip


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """Return SentencePiece's kind of tokenizer: byte pairs by score, with bytes for what the vocabulary lacks."""
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(cast("list[float]", scores)) != len(tokens):
        raise file.refused("its tokenizer has no score for each token")
    prefix: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}]
    has_prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip: list[dict[str, Any]] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    unknown = next((text for text, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *(strip if has_prefix else [])]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*(prefix if has_prefix else []), spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": BYTE in types, "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(tokens)},
            "merges": list(_merges(tokens, cast("list[float]", scores), types)),
        },
    }  # fmt: skip


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> Iterator[list[str]]:
    """Yield the pairs that SentencePiece joins, first those that give a token of a higher score."""
    ids = {text: i for i, text in enumerate(tokens)}
    joins = list[tuple[float, int, int]]()
    for text, score, kind in zip(tokens, scores, types, strict=True):
        if kind in (NORMAL, USER):
            pairs = ((ids.get(text[:i]), ids.get(text[i:])) for i in range(1, len(text)))
            joins += [(-score, left, right) for left, right in pairs if left is not None and right is not None]
    for _, left, right in sorted(joins):
        yield [tokens[left], tokens[right]]
