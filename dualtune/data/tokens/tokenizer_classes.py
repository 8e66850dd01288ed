"""The class of transformers 5 that loads a tokenizer.json, and the changes it makes.

Most classes leave the file unchanged. Some rebuild the tokenizer: vocabulary and merges come from the file, normalizer,
pre-tokenizer and decoder from the class. The common ones are reimplemented here; `Unknown` is raised for all others,
which only transformers can load. `tests/data/test_tokenizer_files.py` compares every table entry with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

Table = Mapping[str, Any]

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PLAIN = "TokenizersBackend"
# The tokenizer class of transformers for each model type. Many have none, nor has the example of engine.testing.
_TYPES_OF_CLASS: dict[str | None, tuple[str, ...]] = {
    None: (
        "apertus", "arcee", "bamba", "bitnet", "bloom", "cwm", "deepseek_v2", "deepseek_v3", "diffllama", "dots1",
        "exaone4", "falcon", "falcon_h1", "gemma4", "gemma4_text", "gpt_oss", "helium", "hunyuan_v1_dense", "lfm2",
        "llama", "llama4", "llama4_text", "longcat_flash", "minimax", "nanochat", "nemotron_h", "seed_oss", "smollm3",
        "zamba2", "dualtune-softmax",
    ),
    PLAIN: (
        "ernie4_5", "glm", "glm4", "glm4_moe", "gpt_bigcode", "granite", "granitemoe", "granitemoehybrid", "internlm3",
        "jamba", "minicpm3", "minimax_m2", "ministral", "mistral", "mixtral", "nemotron", "olmo2", "olmo3", "phi3",
        "phimoe", "stablelm",
    ),
    "GPT2Tokenizer": ("gpt2", "gpt_neo", "gptj", "opt", "phi", "starcoder2"),
    "GPTNeoXTokenizer": ("gpt_neox", "mamba", "olmo", "olmoe"),
    "Qwen2Tokenizer": ("qwen2", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_moe", "qwen3_next"),
    "Qwen3_5Tokenizer": ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
    "GemmaTokenizer": ("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n"),
}  # fmt: skip
CLASS_OF_TYPE = {model_type: name for name, types in _TYPES_OF_CLASS.items() for model_type in types}
# Model types for which transformers ignores the class that the model names.
OVERRULED = {
    "ernie4_5", "internlm3", "jamba", "minicpm3", "minimax_m2", "nemotron", "phi3", "phimoe", "qwen2", "qwen3_5",
    "qwen3_5_moe", "qwen3_5_moe_text",
}  # fmt: skip
PLAIN_NAMES = {PLAIN, "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer"}


class Unknown(Exception):
    """Only transformers can load this tokenizer: the way it does so is not implemented here."""


@dataclass(frozen=True, slots=True)
class Family:
    """A transformers class. `rebuild(table, names, config)` builds its tokenizer; None keeps the file unchanged."""

    rebuild: Callable[[Table, Table, Table], Any] | None = None
    defaults: Table = field(default_factory=dict[str, Any])  # special tokens if the config names none
    marks_all: bool = False  # whether special tokens are added again, without their whitespace rules
    adds_nothing: bool = False  # whether the file's post-processor (BOS) is dropped

    def build(self, table: Table, data: bytes, names: Table, config: Table) -> Any:
        if self.rebuild is None:
            return Tokenizer.from_buffer(data)
        model: dict[str, Any] = table["model"]
        if model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict) or "merges" not in model:
            raise Unknown
        rust = self.rebuild(model, {**self.defaults, **names}, config)
        # Only the post-processor, from the file without its vocabulary.
        small: Table = {**table, "added_tokens": [], "model": {**model, "vocab": {}, "merges": []}}
        post_processor = Tokenizer.from_str(json.dumps(small)).post_processor
        if self.adds_nothing:
            post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
        if post_processor is not None:
            rust.post_processor = post_processor
        return rust


def family_of(model_config: Table, config: Table, data: bytes) -> Family:
    """Return the class that AutoTokenizer selects by the model type and the config files."""
    model_type = model_config.get("model_type")
    is_known = model_type is None or (isinstance(model_type, str) and model_type in CLASS_OF_TYPE)
    if not is_known or "model_name" in model_config:
        raise Unknown
    registered = CLASS_OF_TYPE.get(model_type) if model_type is not None else None
    own, named = config.get("tokenizer_class"), model_config.get("tokenizer_class")
    if not isinstance(own or named or "", str):
        raise Unknown
    chosen = (own or named or "").removesuffix("Fast")
    if chosen == "LlamaTokenizer" and model_type not in OVERRULED and b'"ByteLevel"' in data:
        return FAMILIES[PLAIN]
    if chosen and registered and registered != chosen:
        if registered == PLAIN:
            return FAMILIES[PLAIN]
        return _family(registered if model_type in OVERRULED else chosen)
    if not own and named:
        raise Unknown
    return _family(chosen or registered or PLAIN)


def _family(name: str) -> Family:
    name = PLAIN if name in PLAIN_NAMES else name
    if name not in FAMILIES:
        raise Unknown
    return FAMILIES[name]


def _bpe(model: Table, **options: Any) -> Any:
    merges: Any = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    return Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, dropout=None, **options))


def _byte_bpe(model: Table) -> Any:
    rust = _bpe(model, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    rust.decoder = decoders.ByteLevel()
    return rust


def _llama(model: Table, names: Table, config: Table) -> Any:
    prefix = config.get("add_prefix_space")
    prefix = prefix if prefix is not None else True
    rust = _bpe(model, fuse_unk=True, byte_fallback=True)
    scheme = ("always" if config.get("legacy", False) else "first") if prefix else "never"
    rust.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return rust


def _gpt2(model: Table, names: Table, config: Table) -> Any:
    rust = _byte_bpe(model)
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=config.get("add_prefix_space", False))
    return rust


def _gpt_neox(model: Table, names: Table, config: Table) -> Any:
    rust = _byte_bpe(model)
    rust.normalizer = normalizers.NFC()
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=config.get("add_prefix_space", False), trim_offsets=config.get("trim_offsets", True)
    )
    return rust


def _qwen(pattern: str) -> Callable[[Table, Table, Table], Any]:
    def rebuild(model: Table, names: Table, config: Table) -> Any:
        rust = _byte_bpe(model)
        rust.normalizer = normalizers.NFC()
        prefix = config.get("add_prefix_space")
        rust.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix if prefix is not None else False, use_regex=False),
        ])  # fmt: skip
        return rust

    return rebuild


def _gemma(model: Table, names: Table, config: Table) -> Any:
    rust = _bpe(model, fuse_unk=True, unk_token=str(names["unk_token"]), byte_fallback=True)
    rust.normalizer = normalizers.Replace(" ", "▁")
    rust.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return rust


_END = "<|endoftext|>"
_QWEN_TOKENS = {"unk_token": _END, "bos_token": None, "eos_token": _END, "pad_token": _END}
FAMILIES = {
    PLAIN: Family(),
    "LlamaTokenizer": Family(_llama, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}),
    "GPT2Tokenizer": Family(_gpt2, {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": None}),
    "GPTNeoXTokenizer": Family(
        _gpt_neox,
        {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": "<|padding|>"},
        adds_nothing=True,
    ),
    "Qwen2Tokenizer": Family(_qwen(QWEN2), _QWEN_TOKENS, marks_all=True),
    "Qwen3_5Tokenizer": Family(_qwen(QWEN3_5), _QWEN_TOKENS),
    "GemmaTokenizer": Family(
        _gemma,
        {name: f"<{name.removesuffix('_token')}>" for name in ("unk_token", "bos_token", "eos_token", "pad_token",
                                                                "mask_token")},
    ),
}  # fmt: skip
