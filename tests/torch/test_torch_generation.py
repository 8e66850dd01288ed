"""The cache of texts that are continued together: rows are put, moved and forgotten in rooms of their own."""

from dataclasses import replace

import numpy as np
import pytest

from dualtune.train.fingerprints import plain_batch
from dualtune.train.generation.inference import BASE_ONLY, load_model


@pytest.fixture(scope="module")
def engine(open_backend, tiny_llama):
    return load_model(open_backend("torch"), str(tiny_llama), spec=replace(BASE_ONLY, targets=())).engine


def layers_of(decoding):
    return decoding._cache.layers


def test_rows_in_any_order_of_events_compute_what_new_ones_compute(engine, monkeypatch):
    """Rooms are small here, so that they are full, half empty and cut again and again."""
    monkeypatch.setattr("dualtune_torch.host.generation.SPARE", 2)
    rng, decoding, texts, seen = np.random.default_rng(0), engine.decoding(), [], set()
    for _ in range(80):
        event = rng.choice(["enter", "leave", *["advance"] * 4]) if texts else "enter"
        if event == "leave":
            staying = rng.permutation(len(texts))[rng.integers(0, len(texts)) :].tolist()
            decoding.leave(staying)
            texts = [texts[i] for i in staying]
            if texts:
                rooms = layers_of(decoding)[0]._rooms
                seen.add(len(rooms[0]) > len(texts))
                assert len(rooms[0]) < 2 * len(texts)
            continue
        if event == "enter" and len(texts) < 8:
            new = [rng.integers(3, 250, rng.integers(1, 12)).astype(np.int32) for _ in range(rng.integers(1, 4))]
            decoding.enter(new)
            texts += new
        tokens = rng.integers(3, 250, len(texts)).astype(np.int32)
        texts = [np.append(text, token) for text, token in zip(texts, tokens, strict=True)]
        found, expected = decoding.advance(tokens).rows(), engine.decoding().enter(texts).rows()
        assert np.abs(found - expected).max() < 1e-5
    assert seen == {True, False}


def test_few_rows_that_leave_move_few_others(engine):
    """The last one takes a place that is free: the cache of all is not copied."""
    decoding = engine.decoding()
    decoding.enter([np.arange(3, 3 + n, dtype=np.int32) for n in (4, 9, 6, 5)])
    decoding.advance(np.array([5, 6, 7, 8], np.int32))
    rooms = [room for layer in layers_of(decoding) for room in layer._rooms]
    before = [room.clone() for room in rooms]
    decoding.leave([0, 3, 2])
    assert all(new is old for new, old in zip((r for x in layers_of(decoding) for r in x._rooms), rooms, strict=True))
    for room, old in zip(rooms, before, strict=True):
        assert (room[[0, 2]] == old[[0, 2]])[:, :, :10].all() and (room[1, :, 3:10] == old[3, :, 3:10]).all()
    assert {layer.keys.shape[:3] for layer in layers_of(decoding)} == {(3, rooms[0].shape[1], 7)}  # 6 + 1: no padding


def test_few_rows_are_products_of_their_own_while_texts_are_continued_and_then_only(
    open_backend, tiny_llama, monkeypatch
):
    """Wide layers alone gain by them; they are the same but for rounding, also of a row alone."""
    monkeypatch.setattr("dualtune_torch.kernels.products.is_faster", lambda: True)
    engine, plain = (
        load_model(open_backend("torch"), str(tiny_llama), kernels=kernels).engine for kernels in ("auto", "reference")
    )
    layers = engine._few_rows.layers
    assert layers and {layer.out_features > layer.in_features for layer in layers} == {True}
    assert engine.model.get_output_embeddings() in layers and plain._few_rows is None
    texts, tokens = [np.arange(3, 3 + n, dtype=np.int32) for n in (4, 9)], np.array([5, 6], np.int32)
    calls, found = [], {}
    for layer in layers:
        layer.register_forward_hook(lambda layer, args, y: calls.append("forward" in vars(layer)))
    for name, each in (("own", engine), ("plain", plain)):
        decoding = each.decoding()
        decoding.enter(texts)
        found[name] = decoding.advance(tokens).rows()
        decoding.leave([1])
        found[name] = np.concatenate([found[name], decoding.advance(tokens[1:]).rows()])
    assert calls and all(calls) and np.abs(found["own"] - found["plain"]).max() < 1e-5
    with pytest.raises(IndexError):
        engine.decoding().enter([np.array([10**6], np.int32)])
    calls.clear()
    engine.logprobs(plain_batch(texts[1]))
    assert calls and not any(calls) and not any("forward" in vars(layer) for layer in layers)
