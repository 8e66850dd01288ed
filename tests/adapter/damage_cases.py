"""Broken and foreign adapter directories, all made from one adapter that PEFT itself saved.

Each case says how the directory is made and what import must do with it: read it as it is (exact), repair it with
--repair (repaired), or refuse it even then (refused), in words that name what is wrong.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.numpy

RANK, ALPHA, NUM_LAYERS = 4, 6, 4
SCALE = ALPHA / RANK
TARGETS = ("q_proj", "v_proj", "down_proj")  # square, wide and tall on the tiny model
PREFIX = "base_model.model."
PEFT_FILE, MLX_FILE, CONFIG = "adapter_model.safetensors", "adapters.safetensors", "adapter_config.json"
Tensors = dict[str, np.ndarray]


class Reference(NamedTuple):
    """PEFT's own directory: its config and its tensors."""

    config: dict
    tensors: Tensors


class Case(NamedTuple):
    name: str
    expected: str  # exact | repaired | refused
    words: str  # a regular expression found in the message; of the finding, where it is repaired
    make: Callable[[Path, Reference], None]
    base: bool = False  # whether --base is given


# --- how a directory is made -----------------------------------------------------------------------------------------


def contiguous(tensors):
    return {name: np.ascontiguousarray(x) for name, x in tensors.items()}


def write(path, config, peft=None, mlx=None, name=MLX_FILE):
    if config is not None:
        (path / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config))
    for file, tensors in ((PEFT_FILE, peft), (name, mlx)):
        if tensors is not None:
            safetensors.numpy.save_file(contiguous(tensors), path / file)


def as_mlx(tensors):
    """mlx-lm's names and orientation, written down here once more, independent of the code under test."""
    renamed = {}
    for name, x in tensors.items():
        module, part = name.removeprefix(PREFIX).removesuffix(".weight").rsplit(".lora_", 1)
        renamed[f"{module}.lora_{part.lower()}"] = x.T
    return renamed


def mlx_config(**changes):
    parameters = {"rank": RANK, "scale": SCALE, "dropout": 0.0}
    keys = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]
    parameters |= {"keys": keys} | changes.pop("parameters", {})
    parameters = {k: v for k, v in parameters.items() if v is not None}
    return {"fine_tune_type": "lora", "num_layers": NUM_LAYERS, "lora_parameters": parameters} | changes


def peft_case(name, expected, words="", *, tensors=lambda t: t, drop=(), base=False, **config):
    """PEFT's directory with other tensors, without some keys of the config, with others changed."""

    def make(path, ref):
        kept = {k: v for k, v in ref.config.items() if k not in drop}
        write(path, kept | config, peft=tensors(ref.tensors))

    return Case(name, expected, words, make, base)


def mlx_case(name, expected, words="", *, tensors=lambda t: t, config=mlx_config, base=False, file=MLX_FILE):
    """mlx-lm's directory of the same adapter."""
    return Case(
        name,
        expected,
        words,
        lambda path, ref: write(path, config(), mlx=tensors(as_mlx(ref.tensors)), name=file),
        base,
    )


def dual_case(name, expected, words="", *, peft=lambda t: t, mlx=lambda t: t, extra=None, **changes):
    """Both weight files beside one config, without hashes."""

    def make(path, ref):
        config = ref.config | mlx_config() | (extra or {})
        write(path, config | changes, peft=peft(ref.tensors), mlx=mlx(as_mlx(ref.tensors)))

    return Case(name, expected, words, make)


# --- what is done to tensors -----------------------------------------------------------------------------------------


def each(change, only=""):
    """Apply a change to the tensors whose name contains a text."""
    return lambda tensors: {n: change(x) if only in n else x for n, x in tensors.items()}


def renamed(*replacements):
    def rename(tensors):
        for old, new in replacements:
            tensors = {n.replace(old, new): x for n, x in tensors.items()}
        return tensors

    return rename


def without(*texts):
    return lambda tensors: {n: x for n, x in tensors.items() if not any(text in n for text in texts)}


def only(text):
    return lambda tensors: {n: x for n, x in tensors.items() if text in n}


def swapped(tensors):
    swap = {"A": "B", "B": "A"}
    return {n: tensors[n.replace(f"lora_{p}", f"lora_{swap[p]}")] for n in tensors for p in "AB" if f"lora_{p}" in n}


def transposed(x):
    return x.T


def scrambled(x):
    """What safetensors makes of a transposed view: the shape of the view, the bytes of what lies under it."""
    return np.ascontiguousarray(x.T).reshape(x.shape)


def as_bfloat16_bits(x):
    return (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)


def as_float16_bits(x):
    return np.ascontiguousarray(x).astype(np.float16).view(np.uint16)


def nan_at_first(x):
    return np.where(np.arange(x.size).reshape(x.shape) == 0, np.nan, x).astype(np.float32)


def shifted(by):
    """The layers named as if the stack began later."""
    return lambda tensors: {
        n.replace(f"layers.{i}.", f"layers.{i + by}."): x for n, x in tensors.items() for i in range(9) if f".{i}." in n
    }


def with_manifest_of(change):
    def make(path, ref):
        from dualtune.model.adapter import AdapterSpec
        from dualtune.model.formats.directory import Adapter, write_adapter

        adapter = Adapter(AdapterSpec(RANK, ALPHA, 0.0, TARGETS), dict(ref.tensors))
        path.rmdir()
        write_adapter(path, adapter)
        change(path)

    return make


def truncate(path, ref):
    write(path, ref.config, peft=ref.tensors)
    data = (path / PEFT_FILE).read_bytes()
    (path / PEFT_FILE).write_bytes(data[: len(data) // 2])


def pickled(path, ref):
    write(path, ref.config)
    (path / "adapter_model.bin").write_bytes(b"\x80\x02}q\x00.")


def two_intermediate_saves(path, ref):
    for step in (100, 200):
        write(path, mlx_config(), mlx=as_mlx(ref.tensors), name=f"{step:07d}_adapters.safetensors")


def flip_last_bit(path):
    data = bytearray((path / MLX_FILE).read_bytes())
    data[-1] ^= 1
    (path / MLX_FILE).write_bytes(data)


LAST = without("layers.0.", "layers.1.")
FIRST = without("layers.2.", "layers.3.")
PEFT_KEYS = {"r": RANK, "lora_alpha": ALPHA, "peft_type": "LORA"}

CASES = [
    # --- foreign, and whole ---
    peft_case("peft", "exact"),
    peft_case("peft_float_alpha", "exact", lora_alpha=6.0),
    peft_case("peft_with_base", "exact", base=True),
    peft_case("peft_rank_stabilized", "exact", use_rslora=True, lora_alpha=3),
    peft_case("peft_alpha_pattern", "exact", lora_alpha=12, alpha_pattern={"q_proj": 6, ".*v_proj": 6, "mlp.*": 6}),
    peft_case("peft_of_soup", "exact", soup_converted_from="mlx", lora_alpha=6.0),
    peft_case("peft_names_in_mlx_spelling_are_transposes", "repaired", "mlx-lm's lora_a and lora_b",
              tensors=lambda t: {PREFIX + n: x for n, x in as_mlx(t).items()}),
    mlx_case("mlx", "exact"),
    mlx_case("mlx_with_base", "exact", base=True),
    mlx_case("mlx_of_soup_without_keys", "exact",
             config=lambda: mlx_config(parameters={"keys": None}, soup_converted_from="peft")),
    mlx_case("mlx_tune_with_full_paths", "exact",
             config=lambda: mlx_config(parameters={"keys": [
                 f"model.layers.{i}.{name}" for i in range(NUM_LAYERS)
                 for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")]})),
    mlx_case("unsloth_mlx_with_its_own_keys", "exact",
             config=lambda: mlx_config(unsloth_version="2026.9", base_model_name_or_path="org/base", iters=3)),
    dual_case("dual_without_hashes", "exact"),
    Case("ours", "exact", "", with_manifest_of(lambda path: None)),
    # --- names ---
    peft_case("names_with_default", "repaired", r"24 names contain the adapter's name \(default\)",
              tensors=renamed((".weight", ".default.weight"))),
    peft_case("names_without_weight", "repaired", "24 names lack .weight at the end",
              tensors=renamed((".weight", ""))),
    peft_case("names_without_prefix", "repaired", r"24 names lack base_model\.model\. at the start",
              tensors=renamed((PREFIX, ""))),
    peft_case("names_with_two_prefixes", "repaired", r"24 names start with an extra base_model\.model\.",
              tensors=renamed((PREFIX, PREFIX * 2))),
    peft_case("names_of_ddp_and_compile", "repaired", r"24 names start with an extra module\._orig_mod\.",
              tensors=renamed((PREFIX, "module._orig_mod." + PREFIX))),
    peft_case("names_two_adapters", "refused", r"several adapters \(first, second\)",
              tensors=lambda t: renamed((".weight", ".first.weight"))(t) | renamed((".weight", ".second.weight"))(t)),
    peft_case("names_twice_alike", "repaired", "2 names repeat a tensor under another name",
              tensors=lambda t: t | renamed((".weight", ".default.weight"))(only("layers.0.self_attn.q_proj")(t))),
    peft_case("names_twice_otherwise", "refused", "two names for lora_., with different numbers",
              tensors=lambda t: t | renamed((".weight", ".default.weight"))(each(lambda x: 2 * x)(t))),
    peft_case("names_model_level_dropped", "repaired", "different names in the base model: layers.0",
              tensors=renamed((f"{PREFIX}model.", PREFIX)), base=True),
    peft_case("names_model_level_twice_without_base", "refused", "starts with model. twice. Give --base",
              tensors=renamed((f"{PREFIX}model.", f"{PREFIX}model.model."))),
    peft_case("names_model_level_twice", "repaired", "different names in the base model: model.model.layers.0",
              tensors=renamed((f"{PREFIX}model.", f"{PREFIX}model.model.")), base=True),
    mlx_case("names_of_a_vision_model", "repaired", "different names in the base model: language_model.model",
             tensors=renamed(("model.layers", "language_model.model.layers")), base=True),
    mlx_case("full_paths_of_a_vision_model", "repaired", "different names in the base model: language_model.model",
             tensors=renamed(("model.layers", "language_model.model.layers")), base=True,
             config=lambda: mlx_config(num_layers=-1, parameters={"keys": [
                 f"language_model.model.layers.{i}.{name}" for i in range(NUM_LAYERS)
                 for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")]})),
    mlx_case("mlx_names_with_peft_prefix", "repaired", r"24 names start with base_model\.model\.",
             tensors=renamed(("model.layers", PREFIX + "model.layers"))),
    mlx_case("mlx_names_with_weight", "repaired", "24 names end in .weight",
             tensors=renamed(("lora_a", "lora_a.weight"), ("lora_b", "lora_b.weight"))),
    peft_case("another_model", "refused", "is not a linear layer of the base model. Check that --base is the model",
              tensors=renamed(("self_attn.q_proj", "attention.wq")), target_modules=["wq", "v_proj", "down_proj"],
              base=True),
    # --- orientation ---
    peft_case("transposed", "repaired", "lora_A and lora_B are transposed in all modules", tensors=each(transposed)),
    peft_case("transposed_with_rank_pattern", "repaired", "are transposed in all modules",
              tensors=each(transposed), r=8, rank_pattern={".*_proj": 4}),
    mlx_case("mlx_transposed", "repaired", "lora_A and lora_B are transposed in all modules", tensors=each(transposed)),
    peft_case("only_A_transposed", "repaired", "lora_A is transposed in all", tensors=each(transposed, "lora_A")),
    peft_case("only_B_transposed", "repaired", "lora_B is transposed in all", tensors=each(transposed, "lora_B")),
    peft_case("swapped", "repaired", "lora_A and lora_B are swapped in all", tensors=swapped, base=True),
    peft_case("swapped_without_base", "repaired", "lora_A and lora_B are swapped in all", tensors=swapped),
    peft_case("one_wide_layer_transposed", "repaired", r"are transposed in 1 modules \(model.layers.1.self_attn.v_proj",
              tensors=each(transposed, "layers.1.self_attn.v_proj")),
    peft_case("square_transposed_alone", "refused", "transposed or .* swapped: the shapes allow both",
              tensors=lambda t: each(transposed)(only("q_proj")(t)), target_modules=["q_proj"]),
    peft_case("square_transposed_alone_with_base", "refused", "the shapes allow both",
              tensors=lambda t: each(transposed)(only("q_proj")(t)), target_modules=["q_proj"], base=True),
    peft_case("square_layer_among_others", "refused", "the shapes allow both",
              tensors=each(transposed, "layers.2.self_attn.q_proj"), base=True),
    peft_case("no_way_to_read", "refused", r"lora_A \[5, 32\]", tensors=each(lambda x: np.pad(x, ((0, 1), (0, 0))),
              "layers.2.self_attn.q_proj.lora_A")),
    # --- rank and scale ---
    peft_case("rank_missing", "repaired", "r: missing, the matrices have rank 4", drop=["r"]),
    peft_case("rank_wrong", "refused", "r: got 8, the matrices have rank 4.* 1.5 if r is a typo, 0.75 if .* resized",
              r=8),
    peft_case("rank_wrong_and_transposed", "refused", "r: got 8", r=8, tensors=each(transposed)),
    peft_case("rank_as_text", "repaired", "r: got '4', must be a number", r="4"),
    peft_case("alpha_missing", "refused", r"lora_alpha: missing.*PEFT would use 8", drop=["lora_alpha"]),
    peft_case("alpha_missing_beside_scale", "repaired", "lora_alpha: missing", drop=["lora_alpha"],
              lora_parameters={"rank": 4, "scale": 1.5}),
    peft_case("type_missing", "repaired", "peft_type: missing", drop=["peft_type"]),
    mlx_case("mlx_rank_missing", "repaired", "rank: got nothing, the matrices have rank 4",
             config=lambda: mlx_config(parameters={"rank": None})),
    mlx_case("mlx_rank_wrong", "repaired", "rank: got 16, the matrices have rank 4",
             config=lambda: mlx_config(parameters={"rank": 16})),
    mlx_case("mlx_rank_missing_and_transposed", "repaired", "transposed in all", tensors=each(transposed),
             config=lambda: mlx_config(parameters={"rank": None})),
    mlx_case("mlx_scale_missing", "refused", "scale: missing, and mlx-lm ignores 'alpha'",
             config=lambda: mlx_config(parameters={"scale": None, "alpha": 6})),
    mlx_case("mlx_dropout_missing", "repaired", "dropout: missing",
             config=lambda: mlx_config(parameters={"dropout": None})),
    mlx_case("alpha_used_as_scale", "repaired", "alpha was used as scale",
             config=lambda: mlx_config(parameters={"scale": 6.0}, **PEFT_KEYS)),
    mlx_case("mlx_scale_missing_beside_alpha", "repaired", "lora_parameters.scale: missing",
             config=lambda: mlx_config(parameters={"scale": None}, **PEFT_KEYS)),
    mlx_case("alpha_perhaps_used_as_scale", "refused", "scale and alpha are both 6",
             config=lambda: mlx_config(parameters={"scale": 6.0, "alpha": 6.0})),
    peft_case("scale_used_as_alpha", "repaired", "scale was used as alpha", lora_alpha=1.5,
              lora_parameters={"rank": 4, "scale": 1.5}),
    peft_case("scales_contradict", "refused", "does not show which one is right",
              lora_parameters={"rank": 4, "scale": 20.0}),
    dual_case("dual_scales_contradict", "refused", "does not show which one is right",
              extra={"lora_parameters": {"rank": 4, "scale": 6.0, "dropout": 0.0}}),
    Case("peft_weights_beside_mlx_config", "exact", "", lambda p, ref: write(p, mlx_config(), peft=ref.tensors)),
    Case("mlx_weights_beside_peft_config", "exact", "", lambda p, ref: write(p, ref.config, mlx=as_mlx(ref.tensors))),
    # --- layers, modules, values ---
    peft_case("lost_layer", "refused", "layers.1.mlp.down_proj and 2 more are missing", tensors=without("layers.1.")),
    peft_case("lost_first_layer", "refused", "layers.0.mlp.down_proj and 2 more", tensors=without("layers.0.")),
    peft_case("lost_last_layer", "refused", "layers.3.mlp.down_proj and 2 more", tensors=without("layers.3."),
              base=True),
    peft_case("lost_projection", "refused", "no weights for v_proj", tensors=without("v_proj")),
    peft_case("lost_B", "refused", "lora_A is there, but lora_B is missing",
              tensors=without("layers.1.self_attn.q_proj.lora_B")),
    peft_case("B_is_zero", "refused", "lora_B is zero in all modules", tensors=each(np.zeros_like, "lora_B")),
    peft_case("B_holds_nan", "refused", "NaN or Inf", tensors=each(nan_at_first, "lora_B")),
    mlx_case("mlx_lost_layers", "refused", "but only 2 layers have tensors", tensors=LAST),
    mlx_case("num_layers_missing", "repaired", "num_layers: missing",
             config=lambda: {k: v for k, v in mlx_config().items() if k != "num_layers"}),
    mlx_case("num_layers_too_small", "repaired", "num_layers: 2 means the last 2",
             config=lambda: mlx_config(num_layers=2)),
    # --- storage and second files ---
    peft_case("bfloat16_as_integers", "repaired", "16-bit integers.*only BF16 gives plausible weights",
              tensors=each(lambda x: as_bfloat16_bits(x))),
    peft_case("float16_as_integers", "repaired", "16-bit integers.*only F16 gives plausible weights",
              tensors=each(as_float16_bits)),
    peft_case("integers_of_no_format", "refused", "neither BF16 nor F16 is plausible",
              tensors=each(lambda x: np.full(x.shape, 7, np.uint16))),
    mlx_case("one_intermediate_save", "repaired", "intermediate save of an unfinished",
             file="0000100_adapters.safetensors"),
    Case("two_intermediate_saves", "refused", "2 intermediate saves", two_intermediate_saves),
    dual_case("twin_is_a_copy", "repaired", "24 names contain PEFT's lora_A and lora_B",
              mlx=lambda t: {PREFIX + n.replace("lora_a", "lora_A.weight").replace("lora_b", "lora_B.weight"): x.T
                             for n, x in t.items()}),
    dual_case("twin_not_transposed", "repaired", "adapters.safetensors: .* transposed in all", mlx=each(transposed)),
    dual_case("square_twin_not_transposed", "repaired", "adapters.safetensors: .* transposed in all",
              peft=only("q_proj"), mlx=lambda t: each(transposed)(only("q_proj")(t)), target_modules=["q_proj"]),
    dual_case("square_twins_both_not_transposed", "refused", "the shapes allow both", target_modules=["q_proj"],
              peft=lambda t: each(transposed)(only("q_proj")(t)), mlx=lambda t: each(transposed)(only("q_proj")(t))),
    dual_case("twin_transposed_in_name_only", "repaired", "in the header only", mlx=each(scrambled)),
    dual_case("twin_lost_a_layer", "repaired", "adapters.safetensors lacks 6 tensors", mlx=without("layers.3.")),
    dual_case("twins_that_each_lost_a_layer", "refused", "each lack tensors that the other has", num_layers=-1,
              peft=without("layers.3."), mlx=without("layers.1.", "layers.2.mlp")),
    dual_case("twin_of_another_training", "refused", "hold different adapters", mlx=each(lambda x: x + 1)),
    Case("truncated", "refused", "is truncated", truncate),
    Case("ours_changed", "refused", "was changed", with_manifest_of(flip_last_bit)),
    Case("pickle", "refused", "is a pickle", pickled),
    Case("config_lost", "refused", "adapter_config.json is missing", lambda p, ref: write(p, None, peft=ref.tensors)),
    Case("config_cut_off", "refused", "not valid JSON", lambda p, ref: write(p, '{"r": 4', peft=ref.tensors)),
    peft_case("dora_without_magnitudes", "refused", "lora_magnitude_vector' is missing; DoRA needs it", use_dora=True),
    peft_case("whole_modules_without_tensors", "refused", "modules_to_save .* no tensor", modules_to_save=["lm_head"]),
]  # fmt: skip

# The same function as the reference, cut to some layers or modules: name -> which tensors remain.
REMAINING = {"square_twin_not_transposed": only("q_proj")}
PARTIAL = [
    mlx_case("last_layers_by_num_layers", "exact", tensors=LAST, config=lambda: mlx_config(num_layers=2)),
    mlx_case("last_layers_with_base", "exact", tensors=LAST, config=lambda: mlx_config(num_layers=2), base=True),
    mlx_case("first_layers_misread_as_last", "repaired", "means the last 2 layers, but .* to layers 0 to 1",
             tensors=FIRST, config=lambda: mlx_config(num_layers=2), base=True),
    peft_case("layers_to_transform", "exact", tensors=LAST, layers_to_transform=[2, 3]),
    peft_case("layers_by_expression", "exact", tensors=LAST, target_modules=r".*\.[23]\..*_proj"),
    peft_case("layers_by_numbered_names", "exact", tensors=LAST,
              target_modules=[f"{n}.{name}" for n in (2, 3)
                              for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")]),
]  # fmt: skip
REMAINING |= {case.name: LAST for case in PARTIAL} | {"first_layers_misread_as_last": FIRST}
CASES += PARTIAL
