"""The cache of texts that are continued together: a mask only where rows have unlike lengths."""

from dataclasses import replace

import numpy as np
import pytest

from dualtune.train.fingerprints import plain_batch
from dualtune.train.generation.inference import BASE_ONLY, load_model


@pytest.fixture(scope="module")
def engine(open_backend, tiny_llama):
    return load_model(open_backend("mlx"), str(tiny_llama), spec=replace(BASE_ONLY, targets=())).engine


def test_rows_are_masked_where_they_have_unlike_lengths_and_compute_what_each_computes_alone(engine):
    rng, decoding, texts, masked = np.random.default_rng(0), engine.decoding(), [], []

    def entered(*lengths):
        new = [rng.integers(3, 250, length).astype(np.int32) for length in lengths]
        decoding.enter(new)
        texts.extend(new)
        advance()

    def left(*staying):
        decoding.leave(staying)
        texts[:] = [texts[i] for i in staying]
        advance()

    def advance():
        tokens = rng.integers(3, 250, len(texts)).astype(np.int32)
        texts[:] = [np.append(text, token) for text, token in zip(texts, tokens, strict=True)]
        found = decoding.advance(tokens).rows()
        expected = [engine.logprobs(plain_batch(text))[0, -1] for text in texts]
        shift = found - np.stack(expected)  # the same for all tokens of a row: the logits are no log-probabilities
        assert np.abs(shift - shift[:, :1]).max() < 1e-4
        masked.append([layer.make_mask(1) is not None for layer in decoding._cache])

    entered(5)
    entered(6)  # as long as the one that is there
    entered(7, 7)
    entered(4, 9)  # of unlike lengths
    left(4, 5)
    left(1)
    left(0)
    entered(2)
    assert masked == [[each] * 2 for each in (False, False, False, True, True, False, False, True)]
