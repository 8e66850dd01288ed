"""Both engines against what is outside of dualtune: PEFT's autograd, transformers, NumPy in float64."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, FormatError
from dualtune.engine.backend import IGNORE_INDEX, LoadRequest
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, gradient, random_adapter
from dualtune.engine.testing.oracles import llama_oracle, loss_of
from dualtune.engine.testing.tiny_models import random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune.show.run import run
from dualtune.train.generation.inference import load_model
from dualtune.train.state.metrics import read_rows

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SPEC = AdapterSpec(rank=4, alpha=6.0, dropout=0.0, targets=("all-linear",))  # scale 1.5
BATCH = random_batch([9, 16, 5, 12], 96)
REAL = BATCH.segments_BT > 0
SEEN = 1e-3  # what a wrong config must change at least
PEFT_GRADIENT = {"torch": 1e-5, "mlx": 1e-4}
QUANTIZED = {"torch": "nf4", "mlx": "affine4"}


def load(backend, model_dir, *, spec=SPEC, dtype="float32", quantization="auto", init="pretrained"):
    """An engine whose adapter is not zero."""
    engine = backend.load(LoadRequest(model_dir, dtype, quantization, init, spec, OptimizerSpec(), seed=4))
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    return engine


def gap(a, b):
    return float(np.abs(a - b)[REAL].max())


def cosine(a, b):
    x, y = (np.concatenate([tensors[n].ravel() for n in sorted(tensors)]).astype(np.float64) for tensors in (a, b))
    return x @ y / np.sqrt((x @ x) * (y @ y))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("llama") / "model")


# --- gradients --------------------------------------------------------------------------------------------------------


def peft_gradient(model_dir, spec, state):
    """(gradient of the mean loss, mean loss) by PEFT and torch's autograd."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32", attn_implementation="eager")
    targets = "all-linear" if spec.targets == ("all-linear",) else list(spec.targets)
    model = peft.get_peft_model(base, peft.LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=targets))
    found = peft.set_peft_model_state_dict(model, {n: torch.from_numpy(w) for n, w in state.items()})
    assert not found.unexpected_keys
    logits = model(torch.from_numpy(BATCH.tokens_BT).long(), attention_mask=torch.from_numpy(REAL).long()).logits
    labels = torch.from_numpy(BATCH.labels_BT).long()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
    loss.backward()
    grads = {n.replace(".default", ""): p.grad.numpy() for n, p in model.named_parameters() if p.requires_grad}
    return grads, loss.item()


@pytest.mark.parametrize(
    "targets",
    [("all-linear",), ("q_proj", "down_proj"), ("model.layers.1.self_attn.v_proj", "k_proj"), ("lm_head", "up_proj")],
    ids=lambda targets: targets[0],
)
def test_the_gradient_is_that_of_peft(targets, backend, llama):
    spec = replace(SPEC, targets=targets)
    engine = load(backend, llama, spec=spec)
    expected, loss = peft_gradient(llama, spec, engine.adapter_state())
    found = engine.evaluate(BATCH)
    assert abs(found.loss_sum / found.num_targets - loss) <= tolerances.LOGPROBS
    assert_close(gradient(engine, BATCH), expected, PEFT_GRADIENT[backend.name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close_to_float32(dtype, backend, llama):
    half, exact = load(backend, llama, dtype=dtype), load(backend, llama)
    assert half.description.dtype == dtype
    losses = [engine.evaluate(BATCH).loss_sum / BATCH.num_targets for engine in (half, exact)]
    assert 0 < abs(losses[0] - losses[1]) <= 2e-2
    expected = loss_of(half.logprobs(BATCH), BATCH) / BATCH.num_targets  # the sum itself is float32
    assert abs(losses[0] - expected) <= tolerances.LOGPROBS
    assert cosine(gradient(half, BATCH), gradient(exact, BATCH)) > 0.99


def test_float16_gradients_do_not_underflow(backend, llama):
    """In a step of 100,000 targets the loss of each is divided by as much, and float16 ends at 6e-8."""
    grads = []
    for dtype in ("float16", "float32"):
        engine = load(backend, llama, dtype=dtype)
        engine.forward_backward(BATCH, divisor=100_000)
        engine.optim_step(lr=0.0, max_grad_norm=None)
        grads.append(engine.optimizer_state().slots["m"])
    assert cosine(*grads) > 0.999
    assert_close(*grads, 2e-2)


# --- dropout ----------------------------------------------------------------------------------------------------------


def observed_mask(backend, module, dropout_seeds_BT, channels, dropout):
    """What the engine's own layer keeps: with W = 0, A = B = I and x = 1 its output is mask / (1 − p)."""
    spec = AdapterSpec(channels, float(channels), dropout, ())
    eye = np.eye(channels, dtype=np.float32)
    if backend.name == "torch":
        from dualtune_torch.lora import DropoutSeeds, LoRALinear

        seeds, base = DropoutSeeds(), torch.nn.Linear(channels, channels, bias=False)
        torch.nn.init.zeros_(base.weight)
        layer = LoRALinear(base, module, spec, seeds)
        layer.lora_A.data, layer.lora_B.data = torch.from_numpy(eye), torch.from_numpy(eye)
        seeds.seeds_BT = torch.from_numpy(dropout_seeds_BT.view(np.int32))
        y = layer(torch.ones(*dropout_seeds_BT.shape, channels)).detach().numpy()
    else:
        import mlx.core as mx
        from mlx import nn

        from dualtune_mlx.lora import DropoutSeeds, LoRALinear

        seeds, base = DropoutSeeds(), nn.Linear(channels, channels, bias=False)
        base.weight = mx.zeros((channels, channels))
        layer = LoRALinear(base, module, spec, seeds)
        layer.weights.lora_A_rI, layer.weights.lora_B_Or = mx.array(eye), mx.array(eye)
        seeds.seeds_BT = mx.array(dropout_seeds_BT)
        y = np.array(layer(mx.ones((*dropout_seeds_BT.shape, channels))))
    kept = y != 0
    assert np.allclose(y[kept], 1 / (1 - dropout), rtol=1e-6)
    return kept


def hash_keeps(seeds, key, dropout):
    """The rule of docs/decisions/0001 in Python's integers."""
    x = (seeds ^ key) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 15)) * 0xC2B2AE35 % 2**32
    return (x if x < 2**31 else x - 2**32) >= round(dropout * 2**32) - 2**31


@pytest.mark.parametrize("dropout", [0.1, 0.6])
def test_the_dropout_mask_is_the_documented_hash(dropout, backend):
    from dualtune.model.dropout import channel_keys, keep_mask

    dropout_seeds_BT = np.random.default_rng(0).integers(0, 1 << 32, (2, 128), np.uint32)
    mask = observed_mask(backend, "model.layers.0.q", dropout_seeds_BT, 64, dropout)
    keys = channel_keys("model.layers.0.q", 64)
    assert np.array_equal(mask, keep_mask(dropout_seeds_BT, keys, dropout))
    for b, t, i in np.ndindex(2, 16, 16):
        assert mask[b, t, i] == hash_keeps(int(dropout_seeds_BT[b, t]), int(keys[i]), dropout)


def test_the_dropout_mask_looks_like_chance(backend):
    """The right share is kept, and tokens, channels and modules do not go together."""
    dropout_seeds_BT = np.random.default_rng(1).integers(0, 1 << 32, (1, 384), np.uint32)
    masks = [observed_mask(backend, name, dropout_seeds_BT, 384, 0.1)[0] for name in ("a.q_proj", "a.o_proj")]
    for mask in (masks[0], masks[0].T):
        assert abs(mask.mean() - 0.9) < 0.01
        assert np.abs(mask.mean(0) - 0.9).max() < 6 * np.sqrt(0.09 / 384)
        correlations = np.corrcoef(mask)[np.triu_indices(384, 1)]
        assert abs(correlations.std() * np.sqrt(384) - 1) < 0.1
        assert abs(correlations.mean()) < 0.01
    assert abs(np.corrcoef(masks[0].ravel(), masks[1].ravel())[0, 1]) < 5 / 384


def test_modules_with_the_same_input_share_a_mask():
    from dualtune.model.dropout import channel_keys

    keys = {
        name: channel_keys(f"a.{name}", 64).tolist() for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    }
    assert keys["q_proj"] == keys["k_proj"] == keys["v_proj"] != keys["gate_proj"] == keys["up_proj"]
    assert keys["q_proj"] != channel_keys("b.q_proj", 64).tolist()


# --- model directories ------------------------------------------------------------------------------------------------


def rewrite_config(model_dir, remove=(), **changes):
    file = model_dir / "config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if k not in remove} | changes
    file.write_text(json.dumps(config))
    return model_dir


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("first", "second"), [("torch", "mlx"), ("mlx", "torch")])
def test_a_merged_model_is_the_same_on_the_other_backend(first, second, tied, backends, tmp_path, peft_logprobs):
    model_dir = write_tiny_llama(tmp_path / "model", tie_word_embeddings=tied)
    engine = load(backends[first], model_dir)
    engine.save_merged(tmp_path / "merged")
    expected = llama_oracle(model_dir)(BATCH, engine.adapter_state(), SPEC.scale)
    merged = backends[second].load(
        LoadRequest(tmp_path / "merged", "auto", "auto", "pretrained", SPEC, OptimizerSpec(), seed=0)
    )
    assert gap(merged.logprobs(BATCH), expected) <= tolerances.MERGE
    hugging_face = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert gap(peft_logprobs(hugging_face, BATCH), expected) <= tolerances.MERGE


def test_the_spelling_of_transformers_5_is_understood(backend, tmp_path):
    """`rope_parameters` without a `rope_theta` beside it, and no word about tied embeddings."""
    old = write_tiny_llama(tmp_path / "old", rope_theta=500000.0)
    new = write_tiny_llama(tmp_path / "new")
    rope = {"rope_theta": 500000.0, "rope_type": "default"}
    rewrite_config(new, remove=("rope_theta", "tie_word_embeddings"), rope_parameters=rope)
    engine = load(backend, new)
    expected = llama_oracle(old)(BATCH, engine.adapter_state(), SPEC.scale)
    assert gap(engine.logprobs(BATCH), expected) <= tolerances.LOGPROBS
    for wrong in ({"rope_theta": 10000.0}, {"tie_word_embeddings": True}):  # mlx-lm's defaults
        other = llama_oracle(rewrite_config(old, **{"rope_theta": 5e5, "tie_word_embeddings": False} | wrong))
        assert gap(other(BATCH, engine.adapter_state(), SPEC.scale), expected) > SEEN


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SAVED = {  # architecture -> what differs from its defaults
    "Llama": {"rope_parameters": {"rope_theta": 5e5} | LLAMA3 | {"original_max_position_embeddings": 16}},
    "Mistral": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "Qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "Qwen3": {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "Phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    "Olmo2": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", SAVED)
def test_a_model_that_transformers_saved_is_the_same_on_both_backends(name, backends, peft_logprobs, tmp_path):
    config = getattr(transformers, f"{name}Config")(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        **SAVED[name],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5) if p.ndim == 2 else torch.nn.init.normal_(p, 1.0, 0.1)
    model.save_pretrained(tmp_path / "model")
    expected = peft_logprobs(model, BATCH)
    engines = [backend.load(LoadRequest(tmp_path / "model", "float32", "auto", "pretrained", SPEC, OptimizerSpec(), 0))
               for backend in backends.values()]  # fmt: skip
    for engine in engines:
        assert gap(engine.logprobs(BATCH), expected) <= tolerances.LOGPROBS
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
    assert gap(engines[0].logprobs(BATCH), engines[1].logprobs(BATCH)) <= tolerances.LOGPROBS
    assert_close(gradient(engines[0], BATCH), gradient(engines[1], BATCH), tolerances.GRADIENT)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_unknown_target_lists_the_available_names(tied, backend, tmp_path):
    """A tied output head is the embedding, so it cannot be adapted and is not listed."""
    model_dir = write_tiny_llama(tmp_path / "model", tie_word_embeddings=tied)
    names = f"down_proj, gate_proj, k_proj, {'' if tied else 'lm_head, '}o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(ConfigError, match=f"no linear layer is called 'qproj'. This model has: {names}\\. Use "):
        load(backend, model_dir, spec=replace(SPEC, targets=("q_proj", "qproj")))


def test_a_tied_model_is_the_oracle_s(backend, tmp_path):
    model_dir = write_tiny_llama(tmp_path / "model", tie_word_embeddings=True)
    engine = load(backend, model_dir)
    assert not [name for name in engine.adapter_state() if "lm_head" in name]
    state = engine.adapter_state()
    assert gap(engine.logprobs(BATCH), llama_oracle(model_dir)(BATCH, state, SPEC.scale)) <= tolerances.LOGPROBS
    expected, _ = peft_gradient(model_dir, SPEC, state)
    assert_close(gradient(engine, BATCH), expected, PEFT_GRADIENT[backend.name])


@pytest.mark.parametrize("quantize", [False, True], ids=["plain", "4-bit"])
def test_random_init_needs_no_weights_and_learns(quantize, tiny, backend, tmp_path):
    shutil.copytree(tiny.model_dir, tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    quantization = QUANTIZED[backend.name] if quantize else "none"
    config = tiny.config(
        tmp_path / "run",
        model={"name": str(tmp_path / "model"), "init": "random", "quantization": quantization},
        train={"steps": 12, "learning_rate": 3e-2, "warmup": 0},
    )
    result = run(config, backend)
    losses = [row["loss"] for row in read_rows(result.run_dir / "metrics.jsonl") if "loss" in row]
    assert abs(losses[0] - np.log(96)) < 0.5  # knows nothing
    assert losses[-1] < losses[0] - 0.2
    environment = json.loads((result.run_dir / "environment.json").read_text())
    assert environment["engine"]["quantization"] == quantization


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_stored_head_is_used_although_the_config_ties_it(quantization, backend, tmp_path):
    """transformers unties it; mlx-lm drops it, and what loads module by module would tie it."""
    model_dir = write_tiny_llama(tmp_path / "model", tie_word_embeddings=False)
    expected = load(backend, model_dir, quantization=quantization).logprobs(BATCH)
    rewrite_config(model_dir, tie_word_embeddings=True)
    assert np.array_equal(load(backend, model_dir, quantization=quantization).logprobs(BATCH), expected)


@pytest.mark.parametrize(("model_type", "refused"), [("llama", True), ("unheard_of", True), ("llama", False)])
def test_code_in_a_model_directory_is_never_executed(model_type, refused, tiny, backend, tmp_path):
    model_dir, canary = tmp_path / "model", tmp_path / "executed"
    shutil.copytree(tiny.model_dir, model_dir)
    (model_dir / "canary.py").write_text(f"import pathlib\npathlib.Path({str(canary)!r}).touch()\nclass Canary: pass\n")
    auto_map = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "canary.Canary")
    rewrite_config(model_dir, model_type=model_type, model_file="canary.py" if refused else None, auto_map=auto_map)
    file = model_dir / "tokenizer_config.json"
    tokenizer = json.loads(file.read_text()) | {"auto_map": {"AutoTokenizer": [None, "canary.Canary"]}}
    file.write_text(json.dumps(tokenizer))

    def expected():
        return pytest.raises(FormatError, match="runs no code of a model") if refused else nullcontext()

    with expected():
        load_model(backend, str(model_dir))
    for init in ("pretrained", "random"):
        with expected():
            load(backend, model_dir, init=init)
    assert not canary.exists()


def test_an_impossible_config_json_is_a_format_error(tiny, backend, tmp_path):
    shutil.copytree(tiny.model_dir, tmp_path / "model")
    rewrite_config(tmp_path / "model", num_hidden_layers="three")
    with pytest.raises(FormatError, match=str(tmp_path)):
        load_model(backend, str(tmp_path / "model"))
    with pytest.raises(FormatError, match=str(tmp_path)):
        load(backend, tmp_path / "model")
