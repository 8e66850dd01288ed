"""affine4 on both backends: one base bit for bit, so that logits, gradients and losses agree, and a run moves."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dualtune.base.errors import EnvironmentFault
from dualtune.engine.backend import LoadRequest, get_backend
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, gradient, norm_of, random_adapter
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune.show.run import run
from dualtune.train.hooks import Hook
from dualtune.use.verify.verify import verify

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm")
tree_flatten = pytest.importorskip("mlx.utils").tree_flatten
transformers = pytest.importorskip("transformers")

from dualtune_torch.weights.affine_model import FAMILIES  # noqa: E402

LOGITS = 1e-4
MIXTURES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
ALL = AdapterSpec(8, 12.0, 0.0, ("all-linear",))


@pytest.fixture(scope="module")
def converted(material, tmp_path_factory):
    """The material's model as mlx_lm.convert writes it."""
    path = tmp_path_factory.mktemp("converted") / "model"
    mlx_lm.convert(str(material.model_dir), mlx_path=str(path), quantize=True)
    return path


@pytest.fixture(scope="module")
def load(backends):
    def load_(name, model_dir, quantization="affine4", *, spec=ALL, **options):
        settings = {"dtype": "float32", "init": "pretrained", "optimizer": OptimizerSpec(), "seed": 4} | options
        request = LoadRequest(model_dir=model_dir, quantization=quantization, adapter=spec, **settings)
        engine = backends[name].load(request)
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        return engine

    return load_


def base_bytes(engine):
    """Tensors of the base in the names of mlx-lm, a tied head left out as there."""
    if not isinstance(engine.model, torch.nn.Module):
        return {n.replace(".base.", "."): np.array(w).tobytes() for n, w in tree_flatten(engine.model.parameters())}
    tied = {name.removesuffix(".weight") for name in engine.model.all_tied_weights_keys}
    weights = {n.replace(".base.", "."): w for n, w in engine.model.state_dict().items() if ".lora_" not in n}
    return {n: w.cpu().numpy().tobytes() for n, w in weights.items() if n.rpartition(".")[0] not in tied}


def gap(found, expected):
    """The largest difference of log-probabilities, absolute."""
    return float(np.abs(found - expected).max())


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("made_by", ["mlx_lm.convert", "us"])
def test_logits_are_those_of_mlx(load, material, converted, made_by, kernels):
    """With an adapter, on the stored bytes and on those that each backend makes of the plain model."""
    model_dir, quantization = (converted, "auto") if made_by == "mlx_lm.convert" else (material.model_dir, "affine4")
    here, there = (load(name, model_dir, quantization, kernels=kernels) for name in ("torch", "mlx"))
    assert base_bytes(here) == base_bytes(there)
    batch = material.batch()
    real = batch.segments_BT > 0
    found, expected = here.logprobs(batch)[real], there.logprobs(batch)[real]
    assert gap(found, expected) <= LOGITS
    plain = load("torch", material.model_dir, "none").logprobs(batch)[real]
    assert gap(found, plain) > 100 * LOGITS, "as without quantization, so nothing is shown"


@pytest.mark.parametrize("made_by", ["mlx_lm.convert", "us"])
def test_raw_mlx_lm_computes_the_same(load, material, converted, mlx_lm_logprobs, made_by):
    """Without our MLX engine: the base alone, as mlx-lm loads what it wrote."""
    model_dir, quantization = (converted, "auto") if made_by == "mlx_lm.convert" else (material.model_dir, "affine4")
    engine, batch = load("torch", model_dir, quantization), material.batch()
    engine.load_adapter_state({n: 0 * w for n, w in engine.adapter_state().items()})
    raw, _ = mlx_lm.utils.load_model(converted)
    real = batch.segments_BT > 0
    assert gap(engine.logprobs(batch)[real], mlx_lm_logprobs(raw, batch)[real]) <= LOGITS


def mixed(path, module, *config):
    """A rule for mlx-lm: some layers plain, some in 8 bits."""
    return {"group_size": 64, "bits": 8} if path.endswith("down_proj") else "v_proj" not in path


@pytest.mark.parametrize("material", ["tiny"], indirect=True)
def test_a_mixed_directory_is_read_as_mlx_reads_it(load, material, tmp_path):
    mlx_lm.convert(
        str(material.model_dir), mlx_path=str(tmp_path / "mixed"), quantize=True, quant_predicate=mixed, q_bits=4
    )
    here, there = (load(name, tmp_path / "mixed", "auto") for name in ("torch", "mlx"))
    assert base_bytes(here) == base_bytes(there)
    assert here.description.adapted_weights == there.description.adapted_weights
    assert here.description.adapted_weights["four_bit"] == 3 * 5  # of seven modules of a layer
    batch = material.batch()
    real = batch.segments_BT > 0
    assert gap(here.logprobs(batch)[real], there.logprobs(batch)[real]) <= LOGITS


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_the_gradient_is_that_of_the_unpacked_weights(load, material, converted, tmp_path, kernels):
    """Unpacked by NumPy from mlx-lm's file, on the plain engine; and MLX's own."""
    words = load_file(converted / "model.safetensors")
    plain = dict(words)
    for name in [name.removesuffix(".scales") for name in words if name.endswith(".scales")]:
        scales, biases = (plain.pop(f"{name}.{part}")[..., None] for part in ("scales", "biases"))
        codes = (words[f"{name}.weight"][..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
        groups = codes.reshape(len(codes), -1, 64).astype(np.float32)
        plain[f"{name}.weight"] = (groups * scales + biases).reshape(len(codes), -1)
    shutil.copytree(material.model_dir, tmp_path / "plain")
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    batch = material.batch()
    found = gradient(load("torch", converted, "auto", kernels=kernels), batch)
    expected = gradient(load("torch", tmp_path / "plain", "none", kernels="reference"), batch)
    assert_close(found, expected, tolerances.GRADIENT)
    assert_close(found, gradient(load("mlx", converted, "auto"), batch), tolerances.GRADIENT)
    exact = gradient(load("torch", material.model_dir, "none"), batch)
    difference = norm_of({n: found[n] - exact[n] for n in found})
    assert difference > 100 * tolerances.GRADIENT * norm_of(exact), "as without quantization, so nothing is shown"


@pytest.mark.gpu
def test_a_gpu_makes_the_bytes_and_the_logits_of_the_cpu(load, material):
    try:
        gpu = get_backend("torch", "cuda")
    except EnvironmentFault as error:
        pytest.skip(str(error))
    here = load("torch", material.model_dir)
    there = gpu.load(LoadRequest(material.model_dir, "float32", "affine4", "pretrained", ALL, OptimizerSpec(), seed=4))
    there.load_adapter_state(here.adapter_state())
    assert base_bytes(here) == base_bytes(there)
    batch = material.batch()
    real = batch.segments_BT > 0
    assert gap(here.logprobs(batch)[real], there.logprobs(batch)[real]) <= LOGITS


# --- families ---------------------------------------------------------------------------------------------------------


# Experts, which the backends pack in other shapes, are compared in test_affine_experts.py.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in MIXTURES])
def test_the_same_layers_of_a_family_are_quantized_to_the_same_bytes(load, tmp_path, family):
    """A model that transformers wrote. mlx-lm's Gemma is always tied."""
    small = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "max_position_embeddings": 128,
        "tie_word_embeddings": family.startswith("gemma"), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **small))
    model.save_pretrained(tmp_path / family)
    spec = AdapterSpec(4, 6.0, 0.0, ("o_proj",))
    here, there = (load(name, tmp_path / family, spec=spec) for name in ("torch", "mlx"))
    assert base_bytes(here) == base_bytes(there)
    assert any(name.endswith("lm_head.scales") for name in base_bytes(here)) == (not family.startswith("gemma"))
    batch = random_batch([20, 20], 96)
    assert gap(here.logprobs(batch), there.logprobs(batch)) <= LOGITS


# --- runs -------------------------------------------------------------------------------------------------------------

RUN = {"steps": 8, "learning_rate": 1e-3}


class Stop(Hook):
    def on_step(self, record):
        if record.step == 5:
            raise KeyboardInterrupt


def losses(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def config(material, run_dir, model_dir=None):
    name = {"name": str(model_dir)} if model_dir else {}
    quantization = "auto" if model_dir else "affine4"
    return material.config(
        run_dir, model={"quantization": quantization} | name, adapter={"dropout": 0.3, "targets": "all-linear"},
        train=RUN, run={"dir": str(run_dir), "save_every": 2, "eval_every": None},
    )  # fmt: skip


@pytest.mark.parametrize("material", ["tiny"], indirect=True)
@pytest.mark.parametrize(("first", "second"), [("mlx", "torch"), ("torch", "mlx")])
def test_a_run_trains_alike_and_goes_on_on_the_other_backend(backends, material, converted, tmp_path, first, second):
    """With dropout and the optimizer's state. On the bytes that mlx-lm stored, and on those that each backend makes."""
    straight = run(config(material, tmp_path / "straight"), backends[first])
    other = run(config(material, tmp_path / "other", converted), backends[second])
    assert losses(other.run_dir) == pytest.approx(losses(straight.run_dir), abs=tolerances.STEP_LOSS)
    with pytest.raises(KeyboardInterrupt):
        run(config(material, tmp_path / "moved"), backends[first], [Stop()])
    moved = run(config(material, tmp_path / "moved"), backends[second])
    assert len(losses(moved.run_dir)) == RUN["steps"]
    assert losses(moved.run_dir) == pytest.approx(losses(straight.run_dir), abs=tolerances.RESUMED_LOSS)
    weights = [load_file(result.adapter_dir / "adapter_model.safetensors") for result in (moved, straight)]
    learned = [{n: w for n, w in tensors.items() if "lora_B" in n} for tensors in weights]  # which began at zero
    assert_close(*learned, tolerances.GRADIENT)


@pytest.mark.parametrize("material", ["tiny"], indirect=True)
def test_verify_finds_the_same_function_on_the_other_backend(backends, material, converted, tmp_path):
    """By the limits of float32, whether the bytes are read or made."""
    trained = run(config(material, tmp_path / "run", converted), backends["mlx"]).adapter_dir
    for base, quantization in ((converted, "auto"), (material.model_dir, "affine4")):
        result = verify(trained, str(base), lambda: backends["torch"], dtype="float32", quantization=quantization)
        assert (result.verdict, result.ok, result.function.pair) == ("same", True, "float32")
        assert not [check for check in result.checks if check.level == "fail"]
    gone = verify(trained, str(material.model_dir), lambda: backends["torch"], dtype="float32", quantization="none")
    assert gone.function.pair == "affine4 / none" and gone.verdict != "same"
