"""What exact_match asks of an engine takes the memory of few logits, not of all tokens times the vocabulary."""

import numpy as np
import pytest

from dualtune.engine.backend import IGNORE_INDEX, LoadRequest
from dualtune.engine.testing.tiny_models import random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")

from dualtune_torch.card.memory import LOSS_ROWS  # noqa: E402

VOCAB, TOKENS = 16384, 128
SPEC = AdapterSpec(rank=1, alpha=1.0, dropout=0.0, targets=("q_proj",))
ALL_LOGITS = 4 * 2 * TOKENS * VOCAB


def batch():
    """Two rows, each with an answer of few tokens."""
    found = random_batch([TOKENS, TOKENS], VOCAB)
    found.labels_BT[:, : TOKENS - 8] = IGNORE_INDEX
    return found


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_the_peak_is_that_of_the_targets(name, kernels, open_backend, tmp_path, monkeypatch):
    monkeypatch.setitem(LOSS_ROWS, "cpu", 7)  # so that torch needs several chunks
    backend, given = open_backend(name), batch()
    path = write_tiny_llama(tmp_path / "model", vocab_size=VOCAB)
    request = LoadRequest(path, "float32", "auto", "pretrained", SPEC, OptimizerSpec(), seed=0, kernels=kernels)
    engine, answers = backend.load(request), []
    expected = np.where(given.labels_BT == IGNORE_INDEX, -1, engine.logprobs(given).argmax(-1))

    def ask():
        answers.append(engine.most_probable(given))

    if name == "torch":
        from dualtune_torch.profile import bytes_held

        before = bytes_held()
        peak = backend.profile(ask, tmp_path).peak_bytes
    else:
        mx.clear_cache()
        backend.reset_peak_memory()
        before = backend.memory().used_bytes
        ask()
        peak = backend.memory().peak_bytes
    assert np.array_equal(answers[0], expected)
    assert peak - before <= (0.4 if kernels == "auto" else 1.2) * ALL_LOGITS  # logprobs() takes twice ALL_LOGITS
