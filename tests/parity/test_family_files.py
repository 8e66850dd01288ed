"""The files of a family, whatever its classes make of them: names, merges, and adapters in PEFT."""

import numpy as np
import pytest

from dualtune.engine.backend import Batch, LoadRequest
from dualtune.model.adapter import AdapterSpec, modules_of, parse_name, tensor_name
from dualtune.model.base_model import find_weights
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.model.optimizer import OptimizerSpec
from dualtune.model.places import canonical_names, naming_of
from dualtune.model.targets import is_target, is_text

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")
peft = pytest.importorskip("peft")
import tiny_families as families  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import (  # noqa: E402  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

FAMILIES, write_family = families.FAMILIES, families.write_family

SPEC = AdapterSpec(rank=2, alpha=3.0, dropout=0.0, targets=("all-linear",))
IDS = np.arange(3, 15, dtype=np.int32)[None]
EXACT = 2e-5  # log p in float32, on two frameworks
BOTH = ("llama", "gpt2", "mixtral", "deepseek_v3", "granitemoe", "nemotron_h")
STOCK = {*BOTH} - {"gpt2"}  # whose config.json, as transformers saves it, stock mlx-lm reads
WRAPPERS = ("gemma3", "mistral3", "qwen2_vl", "qwen3_5")
WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v3", "glm4_moe", "granitemoe")


def logprobs_of(logits):
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def load_transformers(directory):
    config = AutoConfig.from_pretrained(directory)
    is_wrapper = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    assert is_wrapper or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto = AutoModelForImageTextToText if is_wrapper else AutoModelForCausalLM
    model, info = auto.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model.eval()


def in_transformers(model):
    with torch.no_grad():
        return logprobs_of(model(torch.tensor(IDS.astype(np.int64))).logits)


def of_engine(engine):
    ones = np.ones_like(IDS)
    positions = np.arange(IDS.size, dtype=np.int32)[None]
    return engine.logprobs(Batch(IDS, ones * -100, ones, positions, ones.astype(np.uint32)))


def random_state(shapes, seed=1):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in sorted(shapes.items())}


@pytest.mark.parametrize("family", BOTH)
def test_both_backends_name_the_same_layers_and_merge_to_the_same_files(family, open_backend, tmp_path):
    base, names = write_family(family, tmp_path / "base"), {}
    before = load_file(base / "model.safetensors")
    for backend in ("torch", "mlx"):
        request = LoadRequest(base, "float32", "auto", "pretrained", SPEC, OptimizerSpec(), seed=0)
        engine = open_backend(backend).load(request)
        engine.load_adapter_state(random_state({n: x.shape for n, x in engine.adapter_state().items()}))
        names[backend] = modules_of(engine.adapter_state())
        engine.save_merged(tmp_path / backend)
        after = load_file(tmp_path / backend / "model.safetensors")
        assert after.keys() == before.keys()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {f"{module}.weight" for module in names[backend]}
        expected = of_engine(engine)
        assert np.abs(in_transformers(load_transformers(tmp_path / backend)) - expected).max() <= EXACT
        if family in STOCK:
            stock = logprobs_of(np.array(load_model(tmp_path / backend)[0](mx.array(IDS))))
            assert np.abs(stock - expected).max() <= EXACT
    # mlx-lm splits DeepSeek's kv_b_proj into two stacks of heads, and has no linear layer for it.
    assert [n for n in names["torch"] if not n.endswith("kv_b_proj")] == names["mlx"]


def adapted_by_transformers(family, base):
    """Return a model of transformers, and an adapter of all linear layers of its text part by their names in files."""
    from dualtune_torch.weights.places import find_places

    model = load_transformers(base)
    linear = [p for p, m in model.named_modules() if type(m) is torch.nn.Linear and is_text(p) and "lm_head" not in p]
    names = canonical_names(find_places(model, find_weights(base), linear))
    assert sorted(names) == sorted(linear)
    shapes = {}
    for path, name in names.items():
        out_dim, in_dim = model.get_submodule(path).weight.shape
        shapes |= {tensor_name(name, "A"): (SPEC.rank, in_dim), tensor_name(name, "B"): (out_dim, SPEC.rank)}
    state = random_state(shapes)
    return model, names, Adapter(SPEC, state, str(base), naming=naming_of(base, names.values()))


@pytest.mark.parametrize("family", [*WITH_EXPERTS, *WRAPPERS])
@pytest.mark.parametrize("layout", ["dual", "peft"])
def test_peft_applies_every_tensor(family, layout, tmp_path):
    """PEFT 0.21 drops the adapters of MLP layers beside experts if they are named as modules."""
    base = write_family(family, tmp_path / "base")
    model, names, adapter = adapted_by_transformers(family, base)
    without = in_transformers(model)
    write_adapter(tmp_path / "adapter", adapter, layout=layout)
    found = in_transformers(peft.PeftModel.from_pretrained(load_transformers(base), tmp_path / "adapter"))
    with torch.no_grad():
        for path, name in names.items():
            a, b = (torch.tensor(adapter.tensors[tensor_name(name, part)]) for part in "AB")
            model.get_submodule(path).weight += SPEC.scale * (b @ a)
    expected = in_transformers(model)
    assert np.abs(found - expected).max() <= EXACT
    assert np.abs(without - expected).max() > 0.05


@pytest.mark.parametrize("family", ["qwen3_next", "qwen2_vl", "gemma3"])
@pytest.mark.parametrize("layout", ["dual", "peft", "mlx"])
def test_every_layout_is_read_back_by_canonical_names(family, layout, tmp_path):
    base = write_family(family, tmp_path / "base")
    _, names, adapter = adapted_by_transformers(family, base)
    spec = AdapterSpec(2, 3.0, 0.1, tuple(sorted({name.rpartition(".")[2] for name in names.values()})))
    written = Adapter(spec, adapter.tensors, adapter.base_model, naming=adapter.naming)
    write_adapter(tmp_path / "adapter", written, layout=layout)
    found = read_adapter(tmp_path / "adapter")
    assert found.tensors.keys() == adapter.tensors.keys()
    assert all((found.tensors[name] == x).all() for name, x in adapter.tensors.items())
    assert (found.naming, found.spec.dropout) == (written.naming, 0.1)
    assert {m for m in names.values() if is_target(m, found.spec.targets)} == {*names.values()}
    if family != "qwen3_next":  # whose layers are of two kinds: then the config lists them one by one
        assert {*found.spec.targets} == {*spec.targets}


def test_peft_applies_an_adapter_of_some_layers_of_a_wrapper(tmp_path):
    """Its config selects them by paths, which are neither those of the files nor also those of the vision tower."""
    base = write_family("gemma3", tmp_path / "base")
    model, names, adapter = adapted_by_transformers("gemma3", base)
    some = {path: name for path, name in names.items() if ".layers.1." in name and not name.endswith("up_proj")}
    tensors = {n: x for n, x in adapter.tensors.items() if parse_name(n)[0] in some.values()}
    spec = AdapterSpec(2, 3.0, 0.0, tuple(sorted(some.values())))
    write_adapter(tmp_path / "adapter", Adapter(spec, tensors, str(base), naming=adapter.naming))
    found = peft.PeftModel.from_pretrained(load_transformers(base), tmp_path / "adapter")
    adapted = {n.partition(".lora_A")[0] for n, _ in found.named_modules() if n.endswith(".lora_A.default")}
    assert {name.removeprefix("base_model.model.") for name in adapted} == {*some}
    with torch.no_grad():
        for path, name in some.items():
            a, b = (torch.tensor(tensors[tensor_name(name, part)]) for part in "AB")
            model.get_submodule(path).weight += SPEC.scale * (b @ a)
    assert np.abs(in_transformers(found) - in_transformers(model)).max() <= EXACT
    assert {*modules_of(read_adapter(tmp_path / "adapter").tensors)} == {*some.values()}


def test_families_are_as_they_claim(tmp_path):
    """Each wrapper has towers, and each model with experts says so."""
    for family in (*WRAPPERS, *WITH_EXPERTS, "llama"):
        naming = naming_of(write_family(family, tmp_path / family), ["model.layers.0.mlp.up_proj"])
        assert bool(naming.towers) is (family in WRAPPERS), family
        assert naming.has_experts is (family in WITH_EXPERTS), family
    assert {*BOTH, *WRAPPERS, *WITH_EXPERTS} == {*FAMILIES}
