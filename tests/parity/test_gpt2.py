"""GPT-2, whose linear layers transformers, PEFT and mlx-lm store and call differently: one adapter on all of them."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, gradient, random_adapter
from dualtune.engine.testing.tiny_models import pack, write_tiny_gpt2
from dualtune.model.adapter import AdapterSpec, modules_of
from dualtune.model.formats.directory import read_adapter, write_adapter
from dualtune.model.optimizer import OptimizerSpec
from dualtune.show.run import run
from dualtune.train.generation.inference import load_model, stream_text
from dualtune.train.generation.sampling import Sampling
from dualtune.train.hooks import Hook
from dualtune.train.model_checks import check_packing

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
mlx_lm = pytest.importorskip("mlx_lm")

from dualtune_torch.weights.frozen import weight_of  # noqa: E402

TARGETS = ["c_attn", "c_proj", "c_fc"]
NUM_MODULES = 2 * 4  # c_proj is in attention and in the feed-forward block
SEEN = 1e-2  # what an adapter does that is not zero
ROWS = [[3, 0, 2], [1]]


def engine_of(backend, model_dir, *, quantization="auto", init="pretrained", dropout=0.1):
    spec = AdapterSpec(4, 6.0, dropout, ("all-linear",))
    engine = backend.load(LoadRequest(model_dir, "float32", quantization, init, spec, OptimizerSpec(), seed=4))
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    return engine


def config_of(material, run_dir, **sections):
    """A short run in packed rows, with dropout."""
    train = {"steps": 12, "learning_rate": 1e-2, "warmup": 0, "schedule": "constant", "micro_batch_tokens": 80}
    adapter = {"rank": 4, "alpha": 8, "dropout": 0.1, "targets": TARGETS}
    defaults = {"adapter": adapter, "data": {}, "train": train, "run": {"save_every": 3, "dir": str(run_dir)}}
    return material.config(run_dir, **{name: values | sections.get(name, {}) for name, values in defaults.items()})


@pytest.fixture(scope="module")
def peft_of(gpt2, peft_logprobs):
    """The log-probabilities of PEFT's own model with an adapter directory, and how many layers it wraps."""

    def logprobs(adapter):
        base = transformers.AutoModelForCausalLM.from_pretrained(gpt2.model_dir, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, adapter)
        assert sum(hasattr(module, "lora_A") for module in model.modules()) == NUM_MODULES
        return peft_logprobs(model, gpt2.batch())

    return logprobs


@pytest.fixture(scope="module")
def base_logprobs(gpt2, peft_logprobs):
    return peft_logprobs(
        transformers.AutoModelForCausalLM.from_pretrained(gpt2.model_dir, dtype=torch.float32), gpt2.batch()
    )


@pytest.fixture(scope="module")
def trained(backend, gpt2, tmp_path_factory):
    """An adapter directory that a short run wrote."""
    return run(config_of(gpt2, tmp_path_factory.mktemp("run") / "r"), backend).adapter_dir


# --- one function everywhere ------------------------------------------------------------------------------------------


def test_a_trained_adapter_is_one_function_in_peft_mlx_lm_and_both_engines(
    trained, gpt2, backends, peft_of, base_logprobs, mlx_lm_logprobs
):
    expected = peft_of(trained)
    model = mlx_lm.load(str(gpt2.model_dir), adapter_path=str(trained))[0]
    assert sum(hasattr(module, "lora_a") for module in model.modules()) == NUM_MODULES
    found = {"mlx-lm": mlx_lm_logprobs(model, gpt2.batch())}
    for name, backend in backends.items():
        found[name] = load_model(backend, str(gpt2.model_dir), trained).engine.logprobs(gpt2.batch())
    gaps = {tool: gpt2.gap(logprobs, expected) for tool, logprobs in found.items()}
    assert max(gaps.values()) <= gpt2.tolerance, gaps
    assert gpt2.gap(base_logprobs, expected) > SEEN, "B is zero, so nothing is shown"


def test_the_directory_holds_what_peft_writes_of_a_conv1d_model(trained):
    assert json.loads((trained / "adapter_config.json").read_text())["fan_in_fan_out"] is True
    shapes = {name: x.shape for name, x in load_file(trained / "adapter_model.safetensors").items()}
    layer = "base_model.model.transformer.h.0.attn.c_attn"
    assert (shapes[f"{layer}.lora_A.weight"], shapes[f"{layer}.lora_B.weight"]) == ((4, 64), (192, 4))
    assert {"model.h.0.attn.c_attn.lora_a", "model.h.1.mlp.c_proj.lora_b"} <= {
        *load_file(trained / "adapters.safetensors")
    }


@pytest.mark.parametrize("layout", ["dual", "peft", "mlx"])
def test_each_layout_reads_back_as_the_same_adapter(trained, layout, tmp_path):
    adapter = read_adapter(trained)
    write_adapter(tmp_path / layout, adapter, layout=layout)
    again = read_adapter(tmp_path / layout)
    assert again.fan_in_fan_out and adapter.fan_in_fan_out
    assert all(np.array_equal(x, again.tensors[name]) for name, x in adapter.tensors.items())
    assert again.tensors.keys() == adapter.tensors.keys()


@pytest.mark.parametrize("says", [True, False])
def test_an_adapter_of_peft_is_read_whatever_its_fan_in_fan_out_says(says, gpt2, backend, peft_of, tmp_path):
    """PEFT looks at the layer and corrects the field, so both mean the same function."""
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_pretrained(gpt2.model_dir, dtype=torch.float32)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM", fan_in_fan_out=True,
                           init_lora_weights=False)  # fmt: skip
    peft.get_peft_model(base, lora).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"fan_in_fan_out": says}))
    found = load_model(backend, str(gpt2.model_dir), tmp_path).engine.logprobs(gpt2.batch())
    assert gpt2.gap(found, peft_of(tmp_path)) <= gpt2.tolerance


def test_transformers_names_of_the_weights_load_on_both_backends(gpt2, backends, tmp_path):
    """`transformer.h.0…`, as save_pretrained writes them, beside OpenAI's `h.0…`, which are all that mlx-lm knows."""
    shutil.copytree(gpt2.model_dir, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file({f"transformer.{n}": w for n, w in load_file(file).items()}, file, {"format": "pt"})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    del config["n_ctx"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    for backend in backends.values():
        found, expected = (
            engine_of(backend, path).logprobs(gpt2.batch()) for path in (tmp_path / "model", gpt2.model_dir)
        )
        assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    "change", [{"activation_function": "relu"}, {"scale_attn_by_inverse_layer_idx": True}, {"n_inner": 32}]
)
def test_what_mlx_lm_would_compute_otherwise_is_refused_by_name(change, backends, tmp_path):
    (key,) = change
    path = write_tiny_gpt2(tmp_path, **change)
    with pytest.raises(ConfigError, match=rf"{key} is .* mlx-lm .*--platform cpu or cuda"):
        engine_of(backends["mlx"], path, init="random")


# --- merging ----------------------------------------------------------------------------------------------------------


def test_a_merged_model_is_base_and_adapter_in_transformers_and_mlx_lm(
    trained, backend, gpt2, peft_of, peft_logprobs, mlx_lm_logprobs, tmp_path
):
    out = tmp_path / "merged"
    load_model(backend, str(gpt2.model_dir), trained, dtype="float32").engine.save_merged(out)
    merged = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    expected = peft_of(trained)
    assert gpt2.gap(peft_logprobs(merged, gpt2.batch()), expected) <= gpt2.tolerance
    assert gpt2.gap(mlx_lm_logprobs(mlx_lm.load(str(out))[0], gpt2.batch()), expected) <= gpt2.tolerance
    base, stored = (load_file(path / "model.safetensors") for path in (gpt2.model_dir, out))
    assert {name: w.shape for name, w in stored.items()} == {name: w.shape for name, w in base.items()}


# --- training ---------------------------------------------------------------------------------------------------------


def losses_of(run_dir):
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return np.array([row["loss"] for row in rows if "loss" in row])


def test_both_backends_lose_the_same_at_every_step(gpt2, backends, tmp_path):
    """In packed rows that are twice as long as the table of positions."""
    losses = {}
    for name, backend in backends.items():
        losses[name] = losses_of(run(config_of(gpt2, tmp_path / name, train={"steps": 20}), backend).run_dir)
    assert losses["torch"][-1] < 0.8 * losses["torch"][0], "nothing was learned, so nothing is shown"
    assert np.abs(losses["torch"] - losses["mlx"]).max() <= tolerances.STEP_LOSS


class Stop(Hook):
    def on_step(self, record):
        if record.step == 8:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("first", "second"), [("torch", "mlx"), ("mlx", "torch")])
def test_a_run_started_on_one_backend_resumes_on_the_other(first, second, gpt2, backends, tmp_path):
    straight = losses_of(run(config_of(gpt2, tmp_path / "straight"), backends[first]).run_dir)
    with pytest.raises(KeyboardInterrupt):
        run(config_of(gpt2, tmp_path / "moved"), backends[first], [Stop()])
    moved = losses_of(run(config_of(gpt2, tmp_path / "moved"), backends[second]).run_dir)
    assert len(moved) == len(straight) == 12
    assert np.abs(moved - straight).max() <= tolerances.RESUMED_LOSS


def test_packed_documents_lose_what_they_lose_alone(gpt2, backend):
    engine, packed = engine_of(backend, gpt2.model_dir, dropout=0.0), pack(gpt2.batch(), ROWS)
    check_packing(engine)
    assert packed.tokens_BT.shape[1] > 40, "the rows are no longer than the table, so nothing is shown"
    again = engine_of(backend, gpt2.model_dir, dropout=0.0)
    assert_close(gradient(engine, packed), gradient(again, gpt2.batch()), tolerances.GRADIENT)


def test_padding_past_the_table_of_positions_is_no_token(gpt2, backend):
    """A row is padded to a multiple of 16, which may be more than the table has."""
    engine, batch = engine_of(backend, gpt2.model_dir), gpt2.batch()
    wide = pack(batch, [[0], [1], [2], [3]], pad=16)
    assert wide.tokens_BT.shape[1] > 40 and wide.segments_BT.max() == 1
    assert engine.evaluate(wide).loss_sum == pytest.approx(engine.evaluate(batch).loss_sum, rel=1e-6)


# --- the table of positions -------------------------------------------------------------------------------------------


def test_documents_beyond_the_table_are_refused_before_the_model_is_loaded(gpt2, backend, tmp_path, monkeypatch):
    monkeypatch.setattr(type(backend), "load", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError) as caught:
        run(config_of(gpt2, tmp_path / "r", data={"max_length": 41}), backend)
    assert str(caught.value) == (
        "data.max_length: got 41, but this model has only 40 positions. Use --set data.max_length=40"
    )


def test_a_continuation_ends_where_the_table_does(gpt2, backend):
    model, tokens = load_model(backend, str(gpt2.model_dir)), []
    generate = model.engine.generate
    model.engine.generate = lambda *args, **options: (tokens.append(t) or t for t in generate(*args, **options))
    model.tokenizer.stop_ids = frozenset()
    "".join(stream_text(model, np.full(30, 5), Sampling(99)))
    assert len(tokens) == 10
    with pytest.raises(ConfigError, match="the prompt has 41 tokens, but this model has positions up to 40"):
        "".join(stream_text(model, np.full(41, 5), Sampling(1)))


# --- quantized --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_nf4_packs_every_conv1d(gpt2, backends, init):
    pytest.importorskip("bitsandbytes")
    engine = engine_of(backends["torch"], gpt2.model_dir, quantization="nf4", init=init)
    weights = engine.description.adapted_weights
    assert weights["four_bit"] == weights["layers"] == NUM_MODULES
    assert modules_of(engine.adapter_state()) == modules_of(
        engine_of(backends["torch"], gpt2.model_dir).adapter_state()
    )
    if init == "pretrained":
        stored, layer = load_file(gpt2.model_dir / "model.safetensors"), "h.1.mlp.c_proj"
        found = weight_of(engine.model.get_submodule(f"transformer.{layer}").base, torch.float32).numpy()
        wanted = stored[f"{layer}.weight"].T
        assert np.abs(found - wanted).mean() < 0.1 * np.abs(wanted).mean()
    assert np.isfinite(engine.logprobs(gpt2.batch())).all()


def test_affine4_is_refused_by_name_on_torch(gpt2, backends):
    with pytest.raises(
        ConfigError,
        match=r"model.quantization: the backend 'torch' does not know which layers of a gpt2 model mlx-lm quantizes",
    ):
        engine_of(backends["torch"], gpt2.model_dir, quantization="affine4")
