"""Models trained whole (adapter.method: full) on torch: every gradient, the masters, and what is written."""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import load_file

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import IGNORE_INDEX, LoadRequest
from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance_case import assert_close, assert_equal, gradient, norm_of
from dualtune.engine.testing.conformance_losses import weighted
from dualtune.engine.testing.tiny_models import (
    GPT2_CONFIG,
    pack,
    random_batch,
    row_of,
    write_tiny_gpt2,
    write_tiny_llama,
)
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dualtune_torch.kernels import cross_entropy  # noqa: E402

VOCAB = 96
FULL = AdapterSpec(rank=1, alpha=1.0, dropout=0.0, targets=(), method="full")
MODELS = {
    "gpt2": (write_tiny_gpt2, {}),
    "llama": (write_tiny_llama, {}),
    "llama, tied": (write_tiny_llama, {"tie_word_embeddings": True}),
    "qwen3": (write_tiny_llama, {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}),
}


@pytest.fixture
def engine_of(open_backend):
    def load(directory, *, dtype="float32", kernels="auto", init="pretrained", checkpointing=KEEP_ALL, seed=0):
        request = LoadRequest(
            directory, dtype, "auto", init, FULL, OptimizerSpec("adamw"), seed, kernels=kernels,
            checkpointing=checkpointing,
        )  # fmt: skip
        return open_backend("torch").load(request)

    return load


@pytest.fixture(params=MODELS)
def directory(request, tmp_path):
    write, changes = MODELS[request.param]
    if request.param == "qwen3":  # its norms of queries and keys are not in the file
        return write_with_transformers(tmp_path / "model", changes)
    return write(tmp_path / "model", **changes)


def write_with_transformers(path, changes):
    write_tiny_llama(path, **changes)
    config = transformers.AutoConfig.from_pretrained(path)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def plain_gradient(directory, batch):
    """By autograd on transformers' own model: the mean loss over the targets, row by row without its padding."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    total = 0.0
    for b in range(len(batch.tokens_BT)):
        length = int(np.count_nonzero(batch.segments_BT[b]))
        tokens, labels = (torch.from_numpy(x[b : b + 1, :length]).long() for x in (batch.tokens_BT, batch.labels_BT))
        logits = model(tokens).logits[0]
        total += torch.nn.functional.cross_entropy(logits, labels[0], reduction="sum", ignore_index=IGNORE_INDEX)
    (total / batch.num_targets).backward()
    return by_names_of_files({name: parameter.grad.numpy() for name, parameter in model.named_parameters()})


def by_names_of_files(tensors):
    """What states have: the files of GPT-2 lack what transformers' class puts before its names."""
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def test_every_gradient_is_that_of_autograd(engine_of, directory):
    """A head that is the embedding gets the sum of both."""
    batch = random_batch([9, 16, 5, 12], VOCAB)
    expected = plain_gradient(directory, batch)
    for kernels in ("auto", "reference"):
        found = gradient(engine_of(directory, kernels=kernels), batch)
        assert found.keys() == expected.keys()
        for name, wanted in expected.items():
            assert np.any(wanted), name
            assert np.abs(found[name] - wanted).max() <= 1e-5 * max(1.0, np.abs(wanted).max()), name


def test_the_gradient_of_a_head_with_several_chunks_and_loss_weights(engine_of, tmp_path, monkeypatch):
    monkeypatch.setitem(cross_entropy.LOSS_ROWS, "cpu", 7)
    directory = write_tiny_gpt2(tmp_path / "model")
    batch = weighted(random_batch([9, 16, 5, 12], VOCAB), 0.25, 0.0, -1.5, 3.0)
    found, plain = (gradient(engine_of(directory, kernels=kernels), batch) for kernels in ("auto", "reference"))
    assert_close(found, plain, tolerances.GRADIENT)


def test_the_kernels_are_used(engine_of, tmp_path):
    engine = engine_of(write_tiny_gpt2(tmp_path / "model"))
    found = engine.description
    assert found.kernels.startswith("fused: attention, loss") and found.adapted_modules is None
    assert found.trainable_parameters == found.num_parameters == sum(w.size for w in engine.adapter_state().values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputation_changes_no_bit_of_a_gradient(engine_of, tmp_path, dtype):
    directory, batch = write_tiny_gpt2(tmp_path / "model"), random_batch([9, 16], VOCAB)
    kept, recomputed = (
        gradient(engine_of(directory, dtype=dtype, checkpointing=value), batch)
        for value in (KEEP_ALL, ActivationCheckpointing("all"))
    )
    assert_equal(kept, recomputed)


def test_packing_and_accumulation_change_nothing(engine_of, tmp_path):
    directory, batch = write_tiny_gpt2(tmp_path / "model"), random_batch([9, 16, 5, 12], VOCAB)
    whole = gradient(engine_of(directory), batch)
    assert_close(gradient(engine_of(directory), *(row_of(batch, b) for b in range(4))), whole, tolerances.GRADIENT)
    assert_close(gradient(engine_of(directory), pack(batch, [[0, 2], [1, 3]])), whole, tolerances.GRADIENT)


def test_16_bits_compute_with_a_copy_of_float32_masters(engine_of, tmp_path):
    """Updates below the precision of bfloat16 add up in the masters, and the gradient is near that of float32."""
    directory, batch = write_tiny_gpt2(tmp_path / "model"), random_batch([9, 16], VOCAB)
    exact = gradient(engine_of(directory), batch)
    engine = engine_of(directory, dtype="bfloat16")
    before = engine.adapter_state()
    assert_equal(before, engine_of(directory).adapter_state())
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.bfloat16}
    gap = norm_of({n: g - exact[n] for n, g in gradient(engine, batch).items()})
    assert gap <= 0.05 * norm_of(exact)
    engine.forward_backward(batch, divisor=batch.num_targets)
    engine.optim_step(lr=1e-7, max_grad_norm=None)
    moved = {n: np.abs(w - before[n]).max() for n, w in engine.adapter_state().items()}
    assert all(0 < step <= 1e-6 for step in moved.values()), moved


def test_a_random_gpt2_starts_at_the_loss_of_a_uniform_guess(engine_of, tmp_path):
    """ln 50257 = 10.82, for the vocabulary of GPT-2; and the loss falls."""
    (tmp_path / "config.json").write_text(json.dumps(GPT2_CONFIG | {"vocab_size": 50257}))
    engine, batch = engine_of(tmp_path, init="random", seed=5), random_batch([64], 50257)
    before = engine.evaluate(batch).loss_sum / batch.num_targets
    assert before == pytest.approx(10.8, abs=0.3)
    for _ in range(3):
        engine.forward_backward(batch, divisor=batch.num_targets)
        engine.optim_step(lr=1e-2, max_grad_norm=1.0)
    assert engine.evaluate(batch).loss_sum / batch.num_targets < before - 0.2


@pytest.mark.long
def test_gpt2_small_in_its_real_size_starts_at_the_documented_loss(open_backend, tmp_path):
    """10.8 ± 0.3. Logits of deviation 0.02 · √768 over a normed state make ln 50257 + 768 · 0.02² / 2 = 10.98."""
    shape = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps(GPT2_CONFIG | shape))
    adapter = AdapterSpec(rank=1, alpha=1.0, dropout=0.0, targets=("c_attn",))  # no optimizer state of the whole model
    engine = open_backend("torch").load(LoadRequest(tmp_path, "float32", "auto", "random", adapter, OptimizerSpec(), 5))
    assert round(engine.description.num_parameters / 1e6, 1) == 124.4
    batch = random_batch([128] * 4, 50257)
    loss = engine.evaluate(batch).loss_sum / batch.num_targets
    assert loss == pytest.approx(10.8, abs=0.3)
    assert loss == pytest.approx(math.log(50257) + 768 * 0.02**2 / 2, abs=0.1)  # four deviations of 504 targets


def test_the_neutral_state_of_random_weights_is_drawn_again(engine_of, tmp_path):
    engine = engine_of(write_tiny_gpt2(tmp_path / "model"), init="random", seed=5)
    start, batch = engine.adapter_state(), random_batch([9], VOCAB)
    engine.forward_backward(batch, divisor=batch.num_targets)
    engine.optim_step(lr=1e-2, max_grad_norm=None)
    assert_equal(engine.neutral_state(), start)
    assert any(np.any(w != start[n]) for n, w in engine.adapter_state().items())


def test_what_is_written_is_a_model_of_transformers(engine_of, directory, tmp_path):
    """With exactly the trained numbers, in the names of the model's own files."""
    engine, batch = engine_of(directory), random_batch([9, 16], VOCAB)
    engine.forward_backward(batch, divisor=batch.num_targets)
    engine.optim_step(lr=1e-2, max_grad_norm=None)
    engine.save_merged(tmp_path / "written")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "written", dtype=torch.float32)
    written = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    assert_equal(by_names_of_files(written), engine.adapter_state())
    assert {*load_file(tmp_path / "written" / "model.safetensors")} == {*load_file(directory / "model.safetensors")}


def test_a_base_that_is_stored_quantized_is_refused(engine_of, tmp_path):
    quantized = {"quantization": {"group_size": 64, "bits": 4}}
    directory = write_tiny_llama(tmp_path / "model", **quantized)
    with pytest.raises(ConfigError, match=r"adapter.method: got full, but the base is stored quantized \(affine4\)"):
        engine_of(directory)
