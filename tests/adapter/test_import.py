"""Every broken or foreign directory is read exactly, repaired exactly, or refused by name. The oracle is PEFT."""

import contextlib
import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dualtune.base.errors import FormatError
from dualtune.engine.testing.oracles import llama_oracle
from dualtune.engine.testing.tiny_models import random_batch, write_tiny_llama
from dualtune.model.formats.canonical import Pair
from dualtune.model.formats.directory import read_adapter
from dualtune.model.importing.diagnose import missing_modules
from dualtune.model.importing.foreign import base_shapes
from dualtune.model.importing.repair import import_adapter

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

_spec = importlib.util.spec_from_file_location("damage_cases", Path(__file__).with_name("damage_cases.py"))
damage = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(damage)

TOLERANCE = 1e-5  # of log-probabilities
SEEN = 1e-2  # what the adapter changes in them
ROUNDED = {  # what these directories hold is the adapter in 16 bits
    "bfloat16_as_integers": lambda x: (damage.as_bfloat16_bits(x).astype(np.uint32) << 16).view(np.float32),
    "float16_as_integers": lambda x: x.astype(np.float16).astype(np.float32),
}
BATCH = random_batch([12, 12], 48)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny_llama(
        tmp_path_factory.mktemp("base") / "llama", vocab_size=48, hidden_size=32, intermediate_size=64, head_dim=8,
        num_hidden_layers=damage.NUM_LAYERS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def by_peft(base, tmp_path_factory):
    """(the directory that PEFT saved, the log-probabilities that PEFT computes with it)."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(
        r=damage.RANK, lora_alpha=damage.ALPHA, target_modules=list(damage.TARGETS), task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, config).eval()
    for name, x in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(x, std=0.2)
    path = tmp_path_factory.mktemp("peft") / "a"
    model.save_pretrained(path)
    with torch.no_grad():
        logits = model(torch.tensor(BATCH.tokens_BT, dtype=torch.long)).logits
    return path, logits.log_softmax(-1).numpy()


@pytest.fixture(scope="module")
def reference(by_peft):
    path, _ = by_peft
    config = json.loads((path / "adapter_config.json").read_text())
    return damage.Reference(config, safetensors.numpy.load_file(path / "adapter_model.safetensors"))


@pytest.fixture(scope="module")
def logprobs(base):
    return lambda tensors, scale=damage.SCALE: llama_oracle(base)(BATCH, tensors, scale)


def test_the_oracle_is_peft_and_the_adapter_matters(by_peft, reference, logprobs):
    _, expected = by_peft
    assert np.abs(logprobs(reference.tensors) - expected).max() <= TOLERANCE
    assert np.abs(logprobs({}) - expected).max() > SEEN


def test_there_are_more_than_ninety_of_them_each_with_its_own_name():
    names = [case.name for case in damage.CASES]
    assert len(names) == len(set(names)) and len(names) > 90
    kinds = [case.expected for case in damage.CASES]
    assert min(kinds.count(kind) for kind in ("exact", "repaired", "refused")) >= 10
    assert all(case.words for case in damage.CASES if case.expected != "exact")


@pytest.mark.parametrize("case", damage.CASES, ids=lambda case: case.name)
def test_a_directory_is_read_repaired_or_refused(case, tmp_path, base, reference, logprobs, dualtune_main):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    case.make(source, reference)
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    command = ["adapter", "import", source, out, *(["--base", base] if case.base else [])]

    plain = dualtune_main(*command)
    if case.expected != "exact":
        assert plain.returncode == 6 and not out.exists(), plain.stdout
        assert re.search(case.words, plain.stderr.replace("\n", " ")), plain.stderr
        plain = dualtune_main(*command, "--repair")
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    if case.expected == "refused":
        assert plain.returncode == 6 and [path.name for path in tmp_path.iterdir()] == ["source"], plain.stdout
        return
    assert plain.returncode == 0, plain.stderr
    repaired = [line for line in plain.stdout.splitlines() if line.startswith("repaired")]
    assert bool(repaired) == (case.expected == "repaired"), plain.stdout
    assert case.expected == "exact" or re.search(case.words, " ".join(repaired))

    adapter = read_adapter(out)
    assert len(adapter.metadata["import"]["fixed"]) == len(repaired)
    expected = damage.REMAINING.get(case.name, dict)(reference.tensors)
    expected = {name: ROUNDED.get(case.name, np.asarray)(x) for name, x in expected.items()}
    gap = np.abs(logprobs(adapter.tensors, adapter.spec.scale) - logprobs(expected)).max()
    assert adapter.tensors.keys() == expected.keys() and gap <= TOLERANCE


def test_what_mlx_lm_itself_saves_is_imported_exactly(tmp_path, base, logprobs, dualtune_main):
    """Its own layers, file and config; no keys, so that every linear layer of the last two is adapted."""
    mx, mlx_lm, tuner = (pytest.importorskip(name) for name in ("mlx.core", "mlx_lm.utils", "mlx_lm.tuner.utils"))
    mlx = pytest.importorskip("mlx.utils")
    model, _ = mlx_lm.load_model(base)
    model.freeze()
    parameters = {"rank": 4, "scale": 1.5, "dropout": 0.0}
    tuner.linear_to_lora_layers(model, 2, parameters)
    mx.random.seed(0)
    found = dict(mlx.tree_flatten(model.trainable_parameters()))
    model.update(mlx.tree_unflatten([(n, mx.random.normal(x.shape) * 0.2) for n, x in found.items() if "lora_b" in n]))
    (tmp_path / "a").mkdir()
    mx.save_safetensors(str(tmp_path / "a" / damage.MLX_FILE), dict(mlx.tree_flatten(model.trainable_parameters())))
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters, "iters": 3, "model": "org/base"}
    mlx_lm.save_config(config, tmp_path / "a" / damage.CONFIG)
    logits_BTV = model(mx.array(BATCH.tokens_BT))
    expected = np.array(logits_BTV - mx.logsumexp(logits_BTV, axis=-1, keepdims=True))
    result = dualtune_main("adapter", "import", tmp_path / "a", tmp_path / "out", "--base", base)
    assert result.returncode == 0 and "read as an adapter of mlx-lm" in result.stdout, result.stderr
    adapter = read_adapter(tmp_path / "out")
    assert len(adapter.tensors) == 2 * 2 * 7 and adapter.base_model == "org/base"
    assert np.abs(logprobs(adapter.tensors, adapter.spec.scale) - expected).max() <= TOLERANCE
    assert np.abs(logprobs({}) - expected).max() > SEEN


def test_a_small_layer_is_not_turned_to_fit_a_wrong_rank(tmp_path):
    """A [4, 8] and B [8, 4] under r 8 are rank 4, not the transposes of rank 8 on a layer of 4×4."""
    noise = np.random.default_rng(0)
    names = [f"{damage.PREFIX}model.layers.0.self_attn.q_proj.lora_{part}.weight" for part in "AB"]
    tensors = {n: noise.normal(size=shape).astype(np.float32) for n, shape in zip(names, [(4, 8), (8, 4)], strict=True)}
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
    damage.write(tmp_path, config | {"lora_parameters": {"rank": 8, "scale": 2.0}}, peft=tensors)
    found = import_adapter(tmp_path, repair=True)
    assert (found.adapter.spec.rank, found.adapter.spec.scale) == (4, 2.0)
    np.testing.assert_array_equal(found.adapter.tensors[names[0]], tensors[names[0]])


def test_the_shapes_of_a_base_are_known_packed_and_tied(tmp_path):
    packed = {
        "model.embed_tokens.weight": np.zeros((96, 8), np.uint32),
        "a.q_proj.weight": np.zeros((32, 16), np.uint32), "a.q_proj.scales": np.zeros((32, 2), np.float16),
        "b.q_proj.weight": np.zeros((24, 64), np.float32), "b.norm.weight": np.zeros(64, np.float32),
        "c.q_proj.weight": np.zeros((512, 1), np.uint8), "c.q_proj.weight.absmax": np.zeros(4, np.uint8),
    }  # fmt: skip
    safetensors.numpy.save_file(packed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization": {"bits": 4, "group_size": 64}}')
    shapes = {"a.q_proj": (32, 128), "b.q_proj": (24, 64), "c.q_proj": None, "lm_head": None}
    assert base_shapes(tmp_path) == shapes


def test_the_base_decides_what_is_missing():
    """In hybrid models some layers have no q_proj; experts that the file holds singly are no modules of PEFT's."""
    name = "model.layers.{}.self_attn.q_proj".format
    pair = Pair(np.ones((2, 8), np.float32), np.ones((8, 2), np.float32))
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj", "up_proj"]}
    base = dict.fromkeys([name(1), name(3), "model.layers.3.mlp.experts.0.up_proj"], (8, 8))
    pairs = {name(1): pair, name(3): pair}
    assert missing_modules(config, pairs, base) == []
    assert [finding.repair for finding in missing_modules(config, pairs, {})] == [None, None]
    [lost] = missing_modules(config, {name(1): pair}, base)
    assert lost.fault.startswith(f"the weights of {name(3)} are missing") and lost.repair is None


json_values = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(-3, 40), st.floats(allow_nan=False), st.just(10**400), st.just([])),
        st.sampled_from(["4", "1e999", "q_proj", "(", "all-linear", "model.layers.0.self_attn.q_proj"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(["rank", "x"]), inner)),
    max_leaves=3,
)
KEYS = (
    *("peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "layers_pattern", "use_rslora", "num_layers", "fine_tune_type", "lora_parameters"),
    *("rank", "scale", "alpha", "dropout", "keys"),
)


@settings(report_multiple_bugs=False)
@example(key="r", value=10**400, kind="peft", inside=False)
@example(key="scale", value=10**400, kind="mlx", inside=True)
@given(
    key=st.sampled_from(KEYS), value=json_values, kind=st.sampled_from(["peft", "mlx", "both"]), inside=st.booleans()
)
def test_any_value_in_a_config_is_imported_or_a_format_error(
    tmp_path_factory, reference, base, key, value, kind, inside
):
    path = tmp_path_factory.mktemp("fuzz")
    config = {"peft": reference.config, "mlx": damage.mlx_config(), "both": reference.config | damage.mlx_config()}[
        kind
    ]
    config = json.loads(json.dumps(config))
    (config["lora_parameters"] if inside and kind != "peft" else config)[key] = value
    mlx = damage.as_mlx(reference.tensors)
    damage.write(path, config, peft=None if kind == "mlx" else reference.tensors, mlx=None if kind == "peft" else mlx)
    with contextlib.suppress(FormatError):
        found = import_adapter(path, base=base if inside else None, repair=True)
        assert found.adapter.spec.rank == damage.RANK
