"""Layer streaming on MLX: the same numbers bit for bit, and never more layers in memory than asked for."""

import gc
import importlib
import json
import os
from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.config import parse_config
from dualtune.engine.backend import LoadRequest
from dualtune.engine.capabilities import check_capabilities
from dualtune.engine.card import KEEP_ALL, ActivationCheckpointing
from dualtune.engine.testing.conformance import random_adapter
from dualtune.engine.testing.tiny_models import pack, random_batch, write_tiny_gpt2, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune.show.run import run

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")
tree_flatten = importlib.import_module("mlx.utils").tree_flatten
card = importlib.import_module("dualtune_mlx.card")
passes = importlib.import_module("dualtune_mlx.streaming")

FULL = ActivationCheckpointing("all")
LAYERS = 4
SPEC = AdapterSpec(4, 6.0, 0.3, ("all-linear",))
DOCUMENTS = random_batch([9, 16, 5, 12], 96)
PACKED = pack(DOCUMENTS, [[2, 0, 3], [1]], pad=2)
WIDE = {"hidden_size": 128, "intermediate_size": 1024, "num_hidden_layers": 6}  # layers are large beside all else
WIDE_LAYER = 4 * (3 * 128 * 1024 + 128 * 64 * 2 + 128 * 32 * 2 + 2 * 128)  # bytes in float32
GEMMA4 = {
    "model_type": "gemma4_text", "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 64, "head_dim": 8,
    "num_attention_heads": 4, "global_head_dim": 8, "vocab_size": 96, "vocab_size_per_layer_input": 96,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "sliding_window_pattern": 2,
}  # fmt: skip


@pytest.fixture
def load(open_backend, tmp_path):
    """An engine with a tiny Llama of four layers, or with another model, of which `resident` layers are in memory."""

    tiny = write_tiny_llama(tmp_path / "model", num_hidden_layers=LAYERS)

    def load_(resident, model_dir=tiny, **changes):
        request = LoadRequest(
            model_dir, "float32", "auto", "pretrained", SPEC, OptimizerSpec(), seed=4, checkpointing=FULL,
            resident_layers=resident,
        )  # fmt: skip
        engine = open_backend("mlx").load(replace(request, **changes))
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        return engine

    return load_


@pytest.fixture
def stored_in_4_bits(load, tmp_path):
    """A model as mlx_lm.convert writes it."""
    store(load(None, quantization="affine4").model, tmp_path / "packed")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization"] = {"group_size": 64, "bits": 4}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    return tmp_path / "packed"


def store(model, path):
    path.mkdir(exist_ok=True)
    weights = {name.replace(".base.", "."): weight for name, weight in tree_flatten(model.parameters())}
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "pt"})


def learned(engine, *batches):
    """(gradient, loss) of accumulated micro-batches."""
    engine.discard()
    for batch in batches:
        engine.forward_backward(batch, divisor=7.0)
    return np.array(engine._grads), engine._loss.item()


def assert_same_bits(resident, streamed, batches=(DOCUMENTS, PACKED)):
    """Of gradient and loss, of an evaluation, and of what the model continues."""
    expected, loss = learned(resident, *batches)
    assert np.isfinite(loss) and all(g.any() for g in resident._layout.named(mx.array(expected)).values())
    found, found_loss = learned(streamed, *batches)
    assert np.array_equal(found, expected) and found_loss == loss
    assert streamed.evaluate(PACKED).loss_sum == resident.evaluate(PACKED).loss_sum
    for dropout in (False, True):
        logprobs = [engine.target_logprobs(PACKED, dropout=dropout) for engine in (resident, streamed)]
        assert np.array_equal(*logprobs) and logprobs[0].any()
    prompt = DOCUMENTS.tokens_BT[0, :4]
    texts = [
        [token for token, _ in zip(engine.generate(prompt, choose=lambda v: int(v.argmax())), range(5), strict=False)]
        for engine in (resident, streamed)
    ]
    assert texts[0] == texts[1]


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_streamed_base_computes_the_same_bits(dtype, load):
    """With dropout, padded and packed, in two micro-batches; bfloat16 is cast from float32 each time."""
    resident = load(None, dtype=dtype)
    for layers in (1, 2, LAYERS):
        assert_same_bits(resident, load(layers, dtype=dtype))


def test_so_does_the_plain_code(load):
    assert_same_bits(load(None, kernels="reference"), load(2, kernels="reference"))


def test_so_does_a_base_that_is_stored_in_4_bits(load, stored_in_4_bits):
    resident = load(None, stored_in_4_bits)
    for layers in (1, 2, LAYERS):
        streamed = load(layers, stored_in_4_bits)
        assert streamed.description.quantization == "affine4"
        assert streamed.description.adapted_weights == resident.description.adapted_weights
        assert_same_bits(resident, streamed)


def test_so_does_gpt2(load, tmp_path):
    """Its files have other names and transposed matrices."""
    gpt2 = write_tiny_gpt2(tmp_path / "gpt2", n_layer=3)
    assert_same_bits(load(None, gpt2), load(1, gpt2))


@pytest.mark.parametrize("targets", [("layers.1.self_attn.q_proj", "layers.2.mlp.up_proj"), ("lm_head",)])
def test_layers_without_adapter_are_streamed_too(targets, load):
    spec = replace(SPEC, targets=targets)
    assert_same_bits(load(None, adapter=spec), load(1, adapter=spec))


@pytest.mark.parametrize(
    "changes",
    [{"method": "dora"}, {"init": "pissa"}, {"init": "olora"}, {"merge_for": "q4_0", "method": "dora"}],
    ids=["dora", "pissa", "olora", "merge of dora"],
)
def test_so_does_what_reads_the_numbers_of_the_base(changes, load, tmp_path):
    """Its start too, and what is merged."""
    spec = replace(SPEC, dropout=0.0 if changes.get("init") else SPEC.dropout, **changes)
    resident, streamed = (load(layers, adapter=spec, dtype="bfloat16") for layers in (None, 1))
    starts = [engine._initial(spec) for engine in (resident, streamed)]
    assert all(np.array_equal(starts[0][name], starts[1][name]) for name in starts[0])
    assert_same_bits(resident, streamed)
    assert len(streamed._residency._resident) == 1 and not streamed._derived
    for name, engine in (("resident", resident), ("streamed", streamed)):
        engine.save_merged(tmp_path / name)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("resident", "streamed")]
    assert files[0] == files[1]


def test_steps_of_the_optimizer_lead_to_the_same_adapter(load):
    states = []
    for layers in (None, 2):
        engine = load(layers)
        for batch in (DOCUMENTS, PACKED):
            engine.forward_backward(batch, divisor=3.0)
            engine.optim_step(lr=1e-2, max_grad_norm=1.0)
        states.append(engine.adapter_state())
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])


# --- what is in memory ------------------------------------------------------------------------------------------------


def peak_of(work):
    """Bytes of MLX at the peak of the work, above what is there before."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    result = work()
    mx.synchronize()
    return mx.get_peak_memory() - before, result


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_no_more_layers_are_in_memory_than_asked_for(load, tmp_path, method):
    """While the base is loaded, trained, evaluated and generates. A base of six layers trains in 0.4 of itself."""
    wide, batch = write_tiny_llama(tmp_path / "wide", **WIDE), random_batch([6], 96)
    spec = replace(SPEC, rank=1, method=method)

    def work(layers):
        engine = load(layers, wide, adapter=spec)
        for _ in range(2):
            engine.forward_backward(batch, divisor=1.0)
        mx.eval(engine._grads)
        engine.evaluate(batch).loss_sum, engine.target_logprobs(batch), engine.logprobs(batch)
        list(zip(range(2), engine.generate(batch.tokens_BT[0, :4], choose=lambda logits: 5), strict=False))
        return engine

    peaks = {layers: peak_of(lambda layers=layers: work(layers))[0] for layers in (None, 1, 2, 3)}
    beside = peaks[None] - 6 * WIDE_LAYER
    assert 0 < beside < 1.2 * WIDE_LAYER
    for layers in (1, 2, 3):
        assert peaks[layers] <= layers * WIDE_LAYER + beside
        assert peaks[layers] - peaks[1] == pytest.approx((layers - 1) * WIDE_LAYER, rel=0.05)
    assert peaks[1] < 0.4 * 6 * WIDE_LAYER


def test_a_layer_is_read_only_if_it_is_not_in_memory(load, tmp_path):
    """The layers at each end of a pass stay for the next one."""
    wide, batch = write_tiny_llama(tmp_path / "wide", **WIDE), random_batch([6], 96)
    for layers in (1, 2, 4, 6):
        engine = load(layers, wide)
        residency = engine._recomputation.residency
        engine.forward_backward(batch, divisor=1.0)
        before = residency.bytes_read
        engine.forward_backward(batch, divisor=1.0)
        assert residency.bytes_read - before == 2 * (6 - layers) * WIDE_LAYER
        assert len(residency._resident) == layers


def test_a_prefetched_layer_is_one_of_those_in_memory(load, monkeypatch):
    engine = load(2)
    residency, seen = engine._recomputation.residency, []
    start = residency._start
    monkeypatch.setattr(residency, "_start", lambda number: start(number) or seen.append([*residency._resident]))
    engine.evaluate(DOCUMENTS)
    engine.evaluate(DOCUMENTS)
    assert seen[-7:] == [[3, 0], [0, 1], [0, 1], [1, 2], [1, 2], [2, 3], [2, 3]]


def test_the_description_says_what_is_done(load):
    found = load(2).description
    assert found.checkpointing == "4 of 4 layers are recomputed"
    assert found.checkpointing_reason == "memory.resident_layers: 2 of 4 layers are in memory at once"
    assert "nothing is compiled: its layers are read while it computes (memory.resident_layers)" in found.kernels


@pytest.mark.parametrize("name", ["value_and_grad", "vjp"])
def test_an_exception_leaves_nothing_behind(name, load, monkeypatch):
    engine, other = load(2), load(2)
    expected = learned(other, PACKED)[0], other.evaluate(PACKED).loss_sum
    calls, plain = [], getattr(mx, name)

    def fails(function, *args, **options):
        calls.append(function)
        if len(calls) == (1 if name == "value_and_grad" else 3):
            raise MemoryError
        return plain(function, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(mx, name, fails)
        with pytest.raises(MemoryError):
            engine.forward_backward(PACKED, divisor=7.0)
    streaming = engine._recomputation
    assert streaming._end is None and streaming._recording is None and engine._dropout_seeds.seeds_BT is None
    assert engine.evaluate(PACKED).loss_sum == expected[1]
    assert np.array_equal(learned(engine, PACKED)[0], expected[0])


def test_a_run_that_streams_writes_the_same_adapter(open_backend, make_config, write_rows, qa_rows, tmp_path):
    """With `memory.checkpointing: auto`, evaluation, packing and several micro-batches for a step."""
    settings = {"data.eval": 0.25, "train.steps": 2, "train.micro_batch_tokens": 64, "adapter.dropout": 0.2}
    files = []
    for layers in ("all", 1):
        changes = {"memory.resident_layers": layers, "run.dir": tmp_path / f"resident {layers}"}
        done = run(make_config(write_rows(qa_rows), settings | changes), open_backend("mlx"))
        files.append((done.adapter_dir / "adapter_model.safetensors").read_bytes())
    assert files[0] == files[1]
    engine = json.loads((done.run_dir / "environment.json").read_text())["engine"]
    assert engine["checkpointing"] == "2 of 2 layers are recomputed"
    assert engine["checkpointing_reason"] == "memory.resident_layers: 1 of 2 layers are in memory at once"


# --- files ------------------------------------------------------------------------------------------------------------


def replaced(file):
    other = file.with_suffix(".new")
    other.write_bytes(file.read_bytes())
    other.replace(file)


def changed(file):
    content = bytearray(file.read_bytes())
    content[-4:] = b"\0\0\0\0"
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))  # a write within the same tick of the clock


@pytest.mark.parametrize("change", [changed, replaced, os.remove])
def test_a_file_that_changes_ends_the_run_with_its_name(change, load, tmp_path):
    engine = load(1)
    engine.forward_backward(DOCUMENTS, divisor=1.0)
    change(tmp_path / "model" / "model.safetensors")
    message = r"model.safetensors: this file has changed or is gone since.*Restore"
    with pytest.raises(EnvironmentFault, match=message):
        engine.forward_backward(DOCUMENTS, divisor=1.0)
    residency = engine._recomputation.residency
    residency._unread = {number: residency._held[number] for number in range(LAYERS)}  # the headers were read before
    with pytest.raises(EnvironmentFault, match=message):
        residency.use(next(number for number in range(LAYERS) if number not in residency._resident))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [KEEP_ALL, ActivationCheckpointing(2), ActivationCheckpointing(adapter_inputs=True), replace(FULL, every=2)]
)
def test_checkpointing_that_contradicts_is_refused(how, load):
    with pytest.raises(ConfigError, match=r"memory.checkpointing: got .*with memory.resident_layers.*allowed: auto"):
        load(1, checkpointing=how)


def test_all_layers_may_be_counted(load):
    engine = load(1, checkpointing=ActivationCheckpointing(LAYERS))
    assert engine.description.checkpointing == "4 of 4 layers are recomputed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": "affine4"}, "Store the quantized model once, with mlx_lm.convert --hf-path .* --q-bits 4"),
        ({"quantization": "affine8"}, "--q-bits 8 --q-group-size 64, and set model.name: NEW"),
        ({"quantization": "int8"}, "For int8 there is none: set model.quantization: none, or memory.resident_layers: "),
        ({"init": "random"}, "with model.init: random the weights are in no file"),
        ({"kernels": "fused"}, "nothing is compiled: its layers are read while it computes"),
        ({"adapter": replace(SPEC, method="full")}, "adapter.method: full trains the base"),
    ],
)
def test_what_cannot_be_streamed_is_refused(changes, message, load):
    with pytest.raises(ConfigError, match=message):
        load(2, **changes)


def test_layers_that_exchange_more_than_hidden_states_are_refused(load, tmp_path):
    """Gemma 4, where the last layers take keys and values of earlier ones."""
    spec = replace(SPEC, targets=("q_proj",))
    gemma4 = tmp_path / "gemma4"
    gemma4.mkdir()
    (gemma4 / "config.json").write_text(json.dumps(GEMMA4))
    store(load(None, gemma4, init="random", adapter=spec, checkpointing=KEEP_ALL).model, gemma4)
    with pytest.raises(ConfigError, match=r"model \(mlx_lm.models.gemma4_text\) exchange more.*resident_layers: all"):
        load(2, gemma4, adapter=spec)


def test_models_whose_layers_are_no_chain_are_recognized():
    """Each is called once, in order, with the result of the one before; other arguments are masks."""
    first, second, third = (mx.zeros((1, 2, 4)) for _ in range(3))
    mask = mx.zeros((2, 2), dtype=mx.bool_)

    def is_chain(*calls):
        recording = passes.Recording(0)
        for number, *arrays in calls:
            recording.add(number, None, arrays)
        return recording.is_chain

    assert is_chain((0, first, second, mask, None, "causal"), (1, second, third, mask))
    assert not is_chain((0, first, second), (1, first, third))  # something is computed between them
    assert not is_chain((0, first, second), (0, second, third))
    assert not is_chain((1, first, second))
    assert not is_chain((0, first, second), (1, second, third, first))  # an argument with a gradient
    assert not is_chain((0, first, (second, mask)))


def test_merging_reads_the_files_not_the_device(load, tmp_path):
    for name, engine in (("streamed", load(2)), ("whole", load(None))):
        engine.load_adapter_state({n: w + 0.01 for n, w in engine.adapter_state().items()})
        engine.save_merged(tmp_path / name)
    streamed, whole = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("streamed", "whole"))
    assert streamed == whole


@pytest.mark.parametrize("value", ["all", "1", "40"])
def test_every_value_is_honoured(value):
    text = f"model: {{name: m}}\ndata: {{train: t.jsonl}}\nmemory: {{resident_layers: {value}}}\n"
    check_capabilities(card.CARD, parse_config(text))
