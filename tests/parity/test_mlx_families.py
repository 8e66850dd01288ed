"""mlx-lm's classes compute what transformers computes, for tiny random models as transformers saves them.

The families here differ in how they get there: config keys under other names, rotary embeddings by kind of layer, other
layouts of experts, wrappers, text parts alone, corrected modules. `scripts/families.py` goes through all families.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, DualtuneError
from dualtune.model.base_model import find_weights
from dualtune.model.merging import write_merged
from dualtune.show.run import run

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-3  # of log-probabilities, relative below −1
FAMILIES = [
    "apertus", "ernie4_5_moe", "exaone4", "gemma3", "gemma4", "glm", "gpt_oss", "jamba", "kimi_linear", "mistral3",
    "minimax_m2", "olmo3", "phi", "qwen3_5", "qwen3_moe",
]  # fmt: skip
MORE = [
    "afmoe", "cohere2", "deepseek_v2", "deepseek_v3", "dots1", "exaone_moe", "falcon_h1", "gemma3_text", "gemma4_text",
    "gemma4_unified", "glm4_moe", "gpt_neox", "gptj", "granitemoehybrid", "laguna", "lfm2",
    "longcat_flash", "mamba2", "mellum", "mimo_v2_flash", "minimax_m3_vl", "mixtral",
    "muse_glimmer", "nanochat", "nemotron_h", "olmo_hybrid", "phimoe", "qwen2_moe", "qwen2_vl", "qwen3_5_moe",
    "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "recurrent_gemma", "solar_open", "stablelm",
]  # fmt: skip
# Their config.json as transformers 5 writes it is none that mlx-lm reads, the files are.
WRITTEN_ANEW = ["granitemoehybrid", "lfm2", "minimax_m2", "olmo3", "qwen3_moe", "qwen3_vl"]
REFUSED = ["bitnet", "minimax", "minicpm3", "olmo"]


@pytest.fixture
def case(tmp_path, monkeypatch):
    """Make a tiny model of a family."""
    pytest.importorskip("torch")
    pytest.importorskip("mlx_lm")
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    from family.case import Case
    from family.make import make

    def made(family: str) -> Case:
        found = Case(family, tmp_path)
        found.model_dir.mkdir()
        make(family, found.model_dir)
        return found

    return made


def check(case) -> None:
    found, expected = case.logprobs("mlx"), case.stock
    width = min(found.shape[-1], expected.shape[-1])  # heads padded to a round number
    gap = np.abs(found - expected)[..., :width] / np.maximum(1, np.abs(expected[..., :width]))
    assert gap.max() < TOLERANCE
    assert expected[case.real].std() > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_what_transformers_computes(family, case):
    check(case(family))


@pytest.mark.long
@pytest.mark.parametrize("family", MORE)
def test_other_families_compute_what_transformers_computes(family, case):
    check(case(family))


@pytest.mark.parametrize("family", WRITTEN_ANEW)
def test_stock_mlx_lm_and_transformers_read_the_config_of_a_merge(family, case, tmp_path):
    made, out = case(family), tmp_path / "merged"
    with pytest.raises((TypeError, ValueError, KeyError)):
        made.of_mlx_lm(made.model_dir)
    out.mkdir()
    write_merged(find_weights(made.model_dir), out, {}, lambda module: np.zeros(0), "float32")
    gap = np.abs(made.of_mlx_lm(out) - made.stock) / np.maximum(1, np.abs(made.stock))
    assert gap.max() < TOLERANCE
    model, told = made.stock_model(out)
    assert not told["missing_keys"]
    assert np.array_equal(made.of_transformers(model), made.stock)


@pytest.mark.parametrize("family", REFUSED)
def test_what_mlx_lm_computes_otherwise_is_refused(family, case):
    made = case(family)
    with pytest.raises(DualtuneError, match=r"mlx-lm|not those of the model"):
        made.logprobs("mlx")


NO_CLASS = r"^/.*: mlx-lm cannot load this model: mlx-lm [\d.]+ knows no model_type 'opt'\. If "
NO_KEY = r"cannot load this model: its class for 'bailing_hybrid' needs group_norm_size in config\.json\. If "
NO_LAYER = r"has no linear layer that this backend adapts: .* named: lm_head\. Take the other backend$"


@pytest.mark.parametrize(("family", "sentence"), [("opt", NO_CLASS), ("bailing_hybrid", NO_KEY), ("bitnet", NO_LAYER)])
def test_a_refusal_says_what_is_so(family, sentence, case):
    made = case(family)
    importlib.import_module("family.make").write_data(made.data)
    with pytest.raises(DualtuneError, match=sentence):
        run(made.config("mlx"), made.backend("mlx"), resume="never")


def test_a_class_that_computes_wrong_numbers_is_refused():
    pytest.importorskip("mlx_lm")
    keys = {"model_type": "phi3small", "vocab_size": 320, "gegelu_limit": 20.0, "layer_norm_epsilon": 1e-5}
    sizes = {"hidden_size": 64, "ff_intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "dense_attention_every_n_layers": 2}
    model_class, args_class = importlib.import_module("dualtune_mlx.families.classes").classes(keys | sizes | more)
    with pytest.raises(ConfigError, match=r"wrong numbers for a Phi-3 small \(phi3small\.py"):
        model_class(args_class.from_dict(keys | sizes | more))


def test_a_stored_head_that_differs_is_used_though_the_config_ties_it(case):
    made = case("llama")
    file = made.model_dir / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    check(made)
