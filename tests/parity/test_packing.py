"""Packed rows on both engines, against the same documents alone and each other; and the check that sees a leak."""

from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.backend import IGNORE_INDEX, LoadRequest, LossSum
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, gradient, random_adapter
from dualtune.engine.testing.tiny_models import pack, random_batch, row_of, write_softmax_model, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.model_checks import check_causality, check_packing

SPEC = AdapterSpec(rank=4, alpha=6.0, dropout=0.1, targets=("all-linear",))
ROWS = [[3, 0, 2], [1]]
QUANTIZED = {"torch": "nf4", "mlx": "affine4"}


def load(backend, model_dir, *, dtype="float32", quantization="auto", longest=0):
    """An engine whose adapter is not zero."""
    request = LoadRequest(model_dir, dtype, quantization, "pretrained", SPEC, OptimizerSpec(), seed=4, longest=longest)
    engine = backend.load(request)
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    return engine


def glue(batch):
    """The documents of each row made one."""
    real_BT = np.minimum(batch.segments_BT, 1)
    return replace(batch, segments_BT=real_BT, positions_BT=np.cumsum(real_BT, axis=1, dtype=np.int32) - real_BT)


def losses(engine, batch):
    """The mean loss of each document of a batch: in a packed row, alone, and in that row made one document."""
    packed, found = pack(batch, ROWS), {"packed": [], "alone": [], "glued": []}
    glued = glue(packed)
    for b, row in enumerate(ROWS):
        for number, document in enumerate(row, start=1):
            there = (packed.segments_BT == number) & (np.arange(len(ROWS)) == b)[:, None]
            its = np.where(there, packed.labels_BT, IGNORE_INDEX)
            shown = {"packed": replace(packed, labels_BT=its), "alone": row_of(batch, document),
                     "glued": replace(glued, labels_BT=its)}  # fmt: skip
            for name, one in shown.items():
                loss = engine.evaluate(one)
                found[name].append(loss.loss_sum / loss.num_targets)
    return {name: np.array(values) for name, values in found.items()}


def test_real_documents_lose_in_a_packed_row_what_they_lose_alone(backend, material):
    engine = load(backend, material.model_dir)
    check_packing(engine)
    found = losses(engine, material.batch())
    assert np.abs(found["packed"] - found["alone"]).max() <= 1e-5
    assert np.abs(found["glued"] - found["alone"]).max() > 1e-2, "it would not have been seen"


def test_both_engines_learn_the_same_from_packed_rows(backends, material):
    packed = pack(material.batch(), ROWS)
    torch, mlx = (load(backends[name], material.model_dir) for name in ("torch", "mlx"))
    found, expected = (engine.logprobs(packed)[packed.segments_BT > 0] for engine in (torch, mlx))
    assert (np.abs(found - expected) / np.maximum(1, np.abs(expected))).max() <= material.tolerance
    assert_close(gradient(torch, packed), gradient(mlx, packed), tolerances.GRADIENT)  # with dropout


@pytest.mark.parametrize("quantization", ["none", "quantized"])
def test_half_precision_and_quantized_models_are_packed(quantization, backend, tiny):
    wanted = QUANTIZED[backend.name] if quantization == "quantized" else quantization
    engine = load(backend, tiny.model_dir, dtype="bfloat16", quantization=wanted)
    assert (engine.description.dtype, engine.description.quantization) == ("bfloat16", wanted)
    check_packing(engine)
    found = losses(engine, tiny.batch())
    assert np.abs(found["packed"] - found["alone"]).max() <= 1e-2
    assert np.abs(found["glued"] - found["alone"]).max() > 1e-1, "it would not have been seen"
    grads = [gradient(load(backend, tiny.model_dir, dtype="bfloat16", quantization=wanted), batch)
             for batch in (pack(tiny.batch(), ROWS), tiny.batch())]  # fmt: skip
    assert_close(*grads, 2e-2)


def test_a_row_may_be_longer_than_a_window_that_mlx_lm_ignores(backends, tmp_path):
    """Both engines agree as long as no document is longer than the window, however long the rows are."""
    path = write_tiny_llama(
        tmp_path / "model", model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=8
    )
    batch = random_batch([8, 7, 8, 6], 96)
    for name, backend in backends.items():
        found = losses(load(backend, path, longest=8), batch)
        assert np.abs(found["packed"] - found["alone"]).max() <= 1e-5, name
    with pytest.raises(ConfigError, match="the longest document has 9 tokens"):
        load(backends["mlx"], path, longest=9)


# --- what the check sees ----------------------------------------------------------------------------------------------


class Faulty:
    """An engine whose loss of packed rows is made by `fault(engine, batch)`."""

    def __init__(self, engine, fault, **description):
        self._engine, self._fault = engine, fault
        self.description = replace(engine.description, **{"model_class": "Leaky", "dtype": "float32"} | description)
        self.logprobs = engine.logprobs

    def evaluate(self, batch):
        return (self._fault if batch.segments_BT.max() > 1 else type(self._engine).evaluate)(self._engine, batch)


def off_by(gap):
    """Every token's loss is wrong by as much."""

    def evaluate(engine, batch):
        loss = engine.evaluate(batch)
        return LossSum(loss.loss_sum + gap * loss.num_targets, loss.num_targets)

    return evaluate


def stumbles(engine, batch):
    raise TypeError("'PackedRows' object\nis not subscriptable")


def leaks(engine, batch):
    return engine.evaluate(glue(batch))


@pytest.fixture
def softmax(open_backend, tmp_path):
    """The NumPy engine, whose tokens see nothing but themselves: gluing documents changes none of its losses."""
    request = LoadRequest(write_softmax_model(tmp_path), "auto", "auto", "pretrained", SPEC, OptimizerSpec(), seed=0)
    return open_backend("numpy").load(request)


def test_the_check_lets_rounding_go_and_nothing_else(softmax):
    check_packing(softmax)
    check_packing(Faulty(softmax, off_by(5e-5)))
    check_packing(Faulty(softmax, off_by(1e-2), dtype="bfloat16"))
    for fault, dtype, message in (
        (off_by(5e-4), "float32", r"computes another loss for packed documents \(packed 7.43038, separate 7.42988\)"),
        (off_by(3e-2), "bfloat16", "computes another loss"),
        (off_by(np.nan), "float32", "computes another loss for packed documents .packed nan"),
        (stumbles, "float32", r"fails on packed documents \(TypeError: 'PackedRows' object is not subscriptable\)"),
    ):
        with pytest.raises(ConfigError, match=rf"^data.packing: this model \(Leaky\) {message}.*packing: false$"):
            check_packing(Faulty(softmax, fault, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_check_sees_documents_that_see_each_other(dtype, backend, stories):
    engine = load(backend, stories.model_dir, dtype=dtype)
    check_packing(engine)
    with pytest.raises(ConfigError, match="computes another loss"):
        check_packing(Faulty(engine, leaks, dtype=dtype))


def test_a_model_that_reads_later_tokens_or_padding_is_refused(open_backend, tmp_path):
    """BERT as a decoder of one text is a class of transformers, and reads the whole row."""
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    for is_decoder in (False, True):
        config = BertConfig(vocab_size=128, is_decoder=is_decoder, initializer_range=0.2, **sizes)
        BertLMHeadModel(config).save_pretrained(tmp_path / str(is_decoder))
    check_causality(load(open_backend("torch"), tmp_path / "True"))
    with pytest.raises(ConfigError, match=r"^model\.name: this model \(BertLMHeadModel\) is not causal"):
        check_causality(load(open_backend("torch"), tmp_path / "False"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_causal_model_passes_in_every_dtype(dtype, backend, tmp_path):
    check_causality(load(backend, write_tiny_llama(tmp_path), dtype=dtype))
