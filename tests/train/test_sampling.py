"""Sampling: the same tokens from all logits or the likely ones, on every backend; log-probabilities as in training."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dualtune.engine.decoding import likely_rows
from dualtune.engine.testing.conformance import random_adapter
from dualtune.engine.testing.numpy_engine import NumpyNextLogits
from dualtune.train.fingerprints import plain_batch
from dualtune.train.generation.batched import Bounds, continue_all, sample_all
from dualtune.train.generation.inference import BASE_ONLY, load_model
from dualtune.train.generation.sampling import LIKELY_TOKENS, Chooser, Sampling, choose_all

TEXTS = ("Hello", "1 plus 1?", "a", "Hello")
HOT = Sampling(max_tokens=6, temperature=1.0, seed=3)
WAYS = [
    {}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"top_k": 1}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.6},
    {"top_p": 0.99, "min_p": 0.02}, {"temperature": 3.0}, {"temperature": 3.0, "top_k": 400, "top_p": 0.95},
    {"temperature": 1e-300}, {"temperature": 0.0},
]  # fmt: skip


# --- one token -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_likely_tokens_decide_what_all_logits_decide(way, monkeypatch):
    """Also where they do not suffice: flat logits have most of their probability outside of them.

    A row that leaves tokens out lies between the others, of which two are computed at once.
    """
    monkeypatch.setattr("dualtune.train.generation.sampling.BLOCK", 8 * LIKELY_TOKENS)
    of_way, rng = replace(HOT, max_tokens=10**6, tempered_logprobs=True, **way), np.random.default_rng(1)
    samplings = [of_way, replace(of_way, top_p=0.8), of_way, of_way, of_way]
    scales_B1 = np.array([[3.0], [0.1], [1.0], [0.1], [0.1]])
    logits_BV = rng.normal(0, scales_B1, (5, 4 * LIKELY_TOKENS)).astype(np.float32)
    logits_BV[0, :9] = logits_BV[0, 0]  # equals
    likely, all_of_them = (
        [Chooser(each, frozenset(), numbers=(n,), keeps_logprobs=True) for n, each in enumerate(samplings)]
        for _ in range(2)
    )
    for _ in range(60):
        expected = [chooser(logits_V) for chooser, logits_V in zip(all_of_them, logits_BV, strict=True)]
        assert choose_all(likely, NumpyNextLogits(logits_BV)) == expected
    ours, theirs = ([chooser.logprobs for chooser in choosers] for choosers in (likely, all_of_them))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_tokens_beyond_the_likely_ones_come_as_often_as_the_softmax_says():
    logits_V = np.random.default_rng(0).normal(0, 0.5, 4 * LIKELY_TOKENS).astype(np.float32)
    probs_V = np.exp(logits_V) / np.exp(logits_V).sum()
    choose = Chooser(replace(HOT, max_tokens=4000), frozenset())
    drawn = np.array([choose(logits_V) for _ in range(4000)])
    for tokens in (np.argsort(-probs_V)[:LIKELY_TOKENS], np.arange(200), np.arange(700, 1024)):
        expected = float(probs_V[tokens].sum())
        # Four standard errors.
        assert np.isin(drawn, tokens).mean() == pytest.approx(expected, abs=4 * np.sqrt(expected / 4000))


@pytest.mark.parametrize(("way", "warpers"), [
    ({"top_k": 4}, lambda t: [t.TopKLogitsWarper(4)]),
    ({"min_p": 0.2}, lambda t: [t.MinPLogitsWarper(0.2)]),
    ({"temperature": 0.8, "top_k": 6, "top_p": 0.7, "min_p": 0.1},
     lambda t: [t.TemperatureLogitsWarper(0.8), t.TopKLogitsWarper(6), t.TopPLogitsWarper(0.7),
                t.MinPLogitsWarper(0.1)]),
])  # fmt: skip
def test_what_is_left_out_is_what_transformers_leaves_out(way, warpers):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    logits_V = np.random.default_rng(0).normal(0, 1, 20).astype(np.float32)
    scores = torch.tensor(logits_V[None])
    for warper in warpers(transformers):
        scores = warper(torch.zeros(1, 1, dtype=int), scores)
    expected_V = scores.softmax(-1)[0].numpy()
    choose = Chooser(replace(HOT, max_tokens=5_000, **way), frozenset())
    drawn_V = np.bincount([choose(logits_V) for _ in range(5_000)], minlength=20) / 5_000
    assert set(np.flatnonzero(drawn_V)) == set(np.flatnonzero(expected_V))
    np.testing.assert_allclose(drawn_V, expected_V, atol=0.03)  # four standard errors are 0.028


def test_likely_rows_are_in_order_whatever_a_device_gives():
    row, signed = likely_rows(np.array([[7, 2, 5, 9], [4, 3, 2, 1]]),
                              np.array([[1.0, 2.0, 1.0, -np.inf], [-2.0, 0.0, -0.0, -3.0]], np.float32),
                              np.array([4.0, 5.0]), np.array([6.0, 7.0]))  # fmt: skip
    assert (row.tokens_K.tolist(), row.log_sum, row.tempered_sum) == ([2, 5, 7, 9], 4, 6)
    assert row.logits_K.tolist() == [2, 1, 1, -np.inf]
    assert (signed.tokens_K.tolist(), signed.logits_K.tolist()) == ([2, 3, 4, 1], [0, 0, -2, -3])


# --- whole continuations ---------------------------------------------------------------------------------------------


def loaded(open_backend, path, name):
    model = load_model(open_backend(name), str(path), spec=replace(BASE_ONLY, rank=4, targets=("all-linear",)))
    model.engine.load_adapter_state(random_adapter(model.engine.adapter_state(), 1))
    return model


def prompts_of(model):
    return [model.tokenizer.encode_prompt(text) for text in TEXTS]


def samples(model, sampling=HOT, **options):
    return {
        (each.prompt, each.number): each for each in sample_all(model, prompts_of(model), sampling, 3, **options)
    }  # fmt: skip


@pytest.fixture(params=["torch", "mlx"])
def model(request, open_backend, tiny_llama):
    return loaded(open_backend, tiny_llama, request.param)


def test_a_seed_draws_the_same_on_both_backends(open_backend, tiny_llama):
    torch, mlx = (samples(loaded(open_backend, tiny_llama, name)) for name in ("torch", "mlx"))
    assert torch.keys() == mlx.keys() == {(prompt, number) for prompt in range(4) for number in range(3)}
    for key, each in torch.items():
        np.testing.assert_array_equal(each.tokens, mlx[key].tokens)
        np.testing.assert_allclose(each.logprobs, mlx[key].logprobs, atol=2e-5)
    assert len({each.tokens.tobytes() for each in torch.values()}) == 12  # also those of equal prompts


def test_logprobs_are_those_of_the_training_forward_pass(model):
    """Whatever is left out; those of the model, or at the temperature as what is drawn from."""
    warm = replace(HOT, temperature=0.6, top_k=7, top_p=0.9)
    greedy = replace(HOT, temperature=0.0, tempered_logprobs=True)
    for sampling in (HOT, warm, replace(warm, tempered_logprobs=True), greedy):
        temperature = 0.6 if sampling.tempered_logprobs and sampling.temperature else 1.0
        for (prompt, _), each in samples(model, sampling).items():
            text = np.concatenate([prompts_of(model)[prompt], each.tokens])
            batch = replace(plain_batch(text), temperature=temperature)
            logprobs_TV = model.engine.logprobs(batch)[0, -len(each.tokens) - 1 : -1]
            np.testing.assert_allclose(each.logprobs, logprobs_TV[np.arange(len(each.tokens)), each.tokens], atol=2e-5)


def test_samples_are_a_function_of_seed_prompt_sample_and_position(model):
    whole = samples(model)
    for options in ({"bounds": Bounds(rows=2)}, {"bounds": Bounds(rows=5)}):
        for key, each in samples(model, **options).items():
            np.testing.assert_array_equal(each.tokens, whole[key].tokens)
    only = list(sample_all(model, prompts_of(model)[1:2], HOT, 3, numbers=[(1,)]))
    for each in only:
        np.testing.assert_array_equal(each.tokens, whole[1, each.number].tokens)
    shorter = samples(model, replace(HOT, max_tokens=2))
    assert all((each.tokens == whole[key].tokens[:2]).all() for key, each in shorter.items())
    # The first sample is what one continuation is.
    singles = {each.number: each.text for each in continue_all(model, prompts_of(model), HOT)}
    assert singles == {prompt: whole[prompt, 0].text for prompt in range(4)}


def stopping(model, *stop_ids):
    names = {"stop_ids": frozenset(stop_ids), "stop_text": None, "decode": model.tokenizer.decode,
             "encode_prompt": model.tokenizer.encode_prompt}  # fmt: skip
    return replace(model, tokenizer=SimpleNamespace(**names))


def test_a_sample_has_the_token_that_ended_it(model):
    whole = samples(stopping(model))
    stop = int(whole[0, 0].tokens[2])
    for key, each in samples(stopping(model, stop)).items():
        ends = np.flatnonzero(whole[key].tokens == stop)[:1] + 1
        length = int(ends[0]) if ends.size else HOT.max_tokens
        np.testing.assert_array_equal(each.tokens, whole[key].tokens[:length])
        np.testing.assert_allclose(each.logprobs, whole[key].logprobs[:length], atol=1e-5)
        assert each.is_whole == bool(ends.size)


def test_samples_end_at_a_stop_text(model):
    """The tokens up to the one that completes it."""
    model = stopping(model)
    model.tokenizer.decode = lambda ids: "".join(chr(0x4E00 + id) for id in ids)
    whole = samples(model)
    stop = whole[1, 2].text[2:4]
    each = samples(model, stops=(stop,))[1, 2]
    assert (each.text, each.is_whole, len(each.logprobs)) == (whole[1, 2].text[:4], True, 4)


def test_a_prompt_of_several_samples_is_computed_once(model, monkeypatch):
    entered, decoding = [], model.engine.decoding

    def counted():
        inner = decoding()
        enter = inner.enter
        inner.enter = lambda texts, text_of: entered.append((len(texts), len(text_of))) or enter(texts, text_of)
        return inner

    samples(model)  # also the trial of the batch
    monkeypatch.setattr(model.engine, "decoding", counted)
    samples(model)
    assert entered == [(3, 12)]


# --- what the model says of given tokens, and of others in their place ------------------------------------------------


def test_prompts_and_samples_are_scored_with_the_most_probable_tokens(model):
    """As the whole log-probabilities say; of a prompt of one token there is nothing to say."""
    prompts = [*prompts_of(model), np.array([5], np.int32)]
    for each in sample_all(model, prompts, HOT, 2, prompt_logprobs=True, top_logprobs=4):
        text = np.concatenate([prompts[each.prompt], each.tokens])
        logprobs_TV = model.engine.logprobs(plain_batch(text))[0, :-1]
        said, count = each.of_prompt, len(prompts[each.prompt])
        logprobs = np.concatenate([said.logprobs, each.logprobs])
        tokens, likely = (np.concatenate(pair) for pair in zip(said.top, each.top, strict=True))
        assert np.isnan(logprobs[0]) and np.isnan(likely[0]).all() and (tokens[0] == -1).all()
        assert [len(said.logprobs), *said.top.tokens_Tk.shape] == [count, count, 4]
        np.testing.assert_allclose(logprobs[1:], logprobs_TV[np.arange(len(text) - 1), text[1:]], atol=2e-5)
        np.testing.assert_allclose(likely[1:], -np.sort(-logprobs_TV, -1)[:, :4], atol=2e-5)
        np.testing.assert_allclose(np.take_along_axis(logprobs_TV, tokens[1:], -1), likely[1:], atol=2e-5)


def test_more_likely_tokens_than_leave_the_device_are_refused(model):
    with pytest.raises(ValueError, match="allowed: 0 to 256"):
        next(sample_all(model, prompts_of(model), HOT, top_logprobs=LIKELY_TOKENS + 1))


def test_rows_that_the_likely_tokens_do_not_decide_leave_the_device_together():
    asked = []

    class Counted(NumpyNextLogits):
        def rows(self, indices=None):
            asked.append(len(indices))
            return super().rows(indices)

    flat_BV = np.random.default_rng(0).normal(0, 0.1, (6, 4 * LIKELY_TOKENS)).astype(np.float32)
    flat_BV[0, 3] = 50  # one row is decided
    assert len(choose_all([Chooser(HOT, frozenset(), numbers=(n,)) for n in range(6)], Counted(flat_BV))) == 6
    assert len(asked) == 1 and 1 < asked[0] < 6
