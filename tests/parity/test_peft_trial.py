"""What PEFT does not load of an adapter is told: exactly where it computes something else, a family for each cause."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

from dualtune.engine import peft_trial
from dualtune.engine.peft_trial import named, peft_notes
from dualtune.model.adapter import AdapterSpec, tensor_name
from dualtune.model.base_model import find_weights
from dualtune.model.config_file import read_config
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.model.formats.naming import Naming, is_fan_in_fan_out
from dualtune.model.places import canonical_names
from dualtune.model.targets import is_text

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

import tiny_families as families  # noqa: E402

SPEC = AdapterSpec(rank=2, alpha=3.0, dropout=0.0, targets=("all-linear",))
IDS = torch.arange(3, 15)[None]
CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MORE = {
    "hy_v3": families.SIZES | EXPERTS | {"num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
    "ctrl": {"vocab_size": 96, "n_embd": 32, "dff": 48, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4},
}
CAUSES = {
    "hy_v3": "drops",  # PEFT's table renames shared experts, and not the targets that select them
    "mamba": "incompatible with Mamba",  # PEFT refuses out_proj
    "qwen3_5": "not of AutoModelForCausalLM",  # the text alone is another class, and PEFT does not rename for it
}


@pytest.fixture
def write(monkeypatch, tmp_path):
    for family, config in MORE.items():
        monkeypatch.setitem(families.FAMILIES, family, config)
    return lambda family: families.write_family(family, tmp_path / "base")


def adapted(base):
    """Return an adapter of all linear layers, and what each auto class computes with it."""
    from dualtune_torch.weights.places import find_places

    found, adapter = {}, None
    config = transformers.AutoConfig.from_pretrained(base)
    for kind in (auto for auto in CLASSES if type(config) in getattr(transformers, auto)._model_mapping):
        model = getattr(transformers, kind).from_pretrained(base, dtype=torch.float32).eval()
        linear = {p: m for p, m in model.named_modules() if hasattr(m, "weight") and m.weight.dim() == 2 and is_text(p)}
        linear = {p: m for p, m in linear.items() if type(m) in (torch.nn.Linear, transformers.Conv1D)}
        linear = {p: m for p, m in linear.items() if "lm_head" not in p}
        names = canonical_names(find_places(model, find_weights(base), linear))
        tensors = {}
        with torch.no_grad():
            for path, name in sorted(names.items()):
                weight = linear[path].weight
                is_conv = type(linear[path]) is transformers.Conv1D
                out_dim, in_dim = weight.shape[::-1] if is_conv else weight.shape
                rng = np.random.default_rng(len(tensors))
                a, b = (rng.normal(0, 0.2, shape).astype(np.float32) for shape in ((2, in_dim), (out_dim, 2)))
                tensors |= {tensor_name(name, "A"): a, tensor_name(name, "B"): b}
                delta = torch.from_numpy(SPEC.scale * (b @ a))
                weight += delta.T if is_conv else delta
        found[kind] = computed(model)
        adapter = adapter or Adapter(SPEC, tensors, str(base), fan_in_fan_out=is_fan_in_fan_out(read_config(base)))
    assert adapter is not None
    return adapter, found


def computed(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits.log_softmax(-1)


def is_loaded(base, directory, kind, expected):
    model = getattr(transformers, kind).from_pretrained(base, dtype=torch.float32).eval()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = computed(peft.PeftModel.from_pretrained(model, str(directory)))
    except ValueError:
        return False
    return bool((found - expected).abs().max() <= 1e-4)


@pytest.mark.parametrize("family", [*CAUSES, "llama", "gpt2", "qwen3_moe", "deepseek_v3", "gemma3", "qwen2_vl", "ctrl"])
def test_it_is_told_exactly_where_peft_computes_something_else(family, write, tmp_path):
    base = write(family)
    adapter, expected = adapted(base)
    write_adapter(tmp_path / "adapter", named(adapter, base))
    found = read_adapter(tmp_path / "adapter")
    told = " ".join(found.naming.notes)
    for kind, logprobs in expected.items():
        is_told = peft_trial.NO_MODEL in told or kind in told.partition("not of")[2]
        assert is_told is not is_loaded(base, tmp_path / "adapter", kind, logprobs), (kind, told)
    assert CAUSES.get(family, "") in told and bool(told) is (family in CAUSES)
    assert peft_notes(found, base) == found.naming.notes


def test_without_peft_the_names_tell(write, monkeypatch):
    monkeypatch.setattr(peft_trial, "find_spec", lambda name: None)
    base = write("mamba")
    adapter, _ = adapted(base)
    assert "refuses adapters of out_proj" in " ".join(named(adapter, base).naming.notes)


def test_a_family_that_transformers_does_not_know_is_told_of_by_its_names(write):
    base = write("mamba")
    adapter, _ = adapted(base)
    config = base / "config.json"
    config.write_text(config.read_text().replace('"model_type": "mamba"', '"model_type": "unheard"'))
    assert named(adapter, base).naming.notes == ()
    noted = replace(adapter, naming=replace(adapter.naming, notes=("as recorded",)))
    assert peft_notes(noted, base) == ("as recorded",)


@pytest.mark.parametrize(
    ("notes", "chosen"),
    [([()], (True, ())), ([("a",), ()], (False, ())), ([("a",), ("b",)], (True, ("a",)))],
    ids=["as stored", "as the class has them", "neither way"],
)
def test_the_names_in_a_wrapper_are_tried_both_ways_and_each_once(notes, chosen, monkeypatch, tmp_path):
    prefixes, tried = (("model.language_model.", "model."),), []

    def answer(adapter, directory):
        tried.append(adapter.naming.peft)
        return notes[len(tried) - 1]

    monkeypatch.setattr(peft_trial, "naming_of", lambda directory, modules: Naming(peft=prefixes))
    monkeypatch.setattr(peft_trial, "peft_notes", answer)
    naming = named(Adapter(SPEC, {}, "base"), tmp_path).naming
    assert (naming.peft == prefixes, naming.notes) == chosen
    assert tried == [prefixes, ()][: len(notes)]
