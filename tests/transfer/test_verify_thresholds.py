"""The limits of `dualtune verify`: where their numbers come from, and the arithmetic of the gaps."""

from pathlib import Path

import numpy as np
import pytest

from dualtune.engine.testing.oracles import llama_oracle
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.formats.directory import read_adapter
from dualtune.train.fingerprints import gap, kl_bound
from dualtune.use.verify.verdict import TABLE, Precision, pair_of
from dualtune.use.verify.verify import verify

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "verify_limits.md"
HERE = (
    ("torch", "none", "float32"), ("torch", "none", "bfloat16"), ("torch", "none", "float16"),
    ("torch", "nf4", "float32"), ("torch", "nf4", "bfloat16"),
    ("torch", "affine4", "float32"), ("torch", "affine4", "bfloat16"), ("torch", "affine8", "float32"),
    ("mlx", "none", "float32"), ("mlx", "none", "bfloat16"),
    ("mlx", "affine4", "float32"), ("mlx", "affine4", "bfloat16"),
    ("mlx", "affine8", "float32"), ("mlx", "affine8", "bfloat16"),
    ("torch", "int8", "float32"), ("mlx", "int8", "float32"),
)  # fmt: skip
RECORDED = (("torch", "none", "float32"), ("torch", "nf4", "float32"), ("mlx", "affine4", "float32"))


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.long  # the recorded table decides; these measure it again
@pytest.mark.parametrize("in_16_bits", ["alike", "all"])
def test_what_is_measured_is_what_the_table_says(train, open_backend, shared, in_16_bits):
    """On the pretrained model, one strong adapter for each recorded precision. `-s` prints the numbers.

    Between two quantizations 16 bits are no row of their own, and they are slow where a CPU emulates them.
    """
    name = str(shared("models/stories260k"))
    seen: dict[str, list] = {}
    for backend, quantization, dtype in RECORDED:
        strong = {"steps": 20, "documents_per_step": 4, "learning_rate": 3e-3, "warmup": 0}
        settings = {"name": name, "dtype": dtype, "quantization": quantization}
        directory = train(backend, name=f"stories-{quantization}", model=settings, train=strong)
        for here, *options in HERE:
            if in_16_bits == "alike" and options[0] != quantization and options[1] != "float32":
                continue
            found = verify(
                directory, name, lambda here=here: open_backend(here), quantization=options[0], dtype=options[1]
            )
            assert found.ok, found.sentence
            seen.setdefault(found.function.pair, []).append(found.function)
    assert seen.keys() == TABLE.keys()
    for pair, functions in seen.items():
        gaps = [gap for function in functions for gap in (function.base, function.adapter)]
        kl, logprob = max(g.kl for g in gaps), max(g.logprob for g in gaps)
        top1, effect = min(g.top1 for g in gaps), max(f.effect.error for f in functions)
        print(f"{pair:<28} KL {kl:.1e}  gap {logprob:.1e}  top-1 {top1:.2f}  effect {effect:.2f}  of {len(functions)}")
        measured, allowed = TABLE[pair]
        assert measured.kl / 100 < kl <= allowed.kl, "the row says nothing about this machine"
        assert measured.logprob / 20 < logprob <= allowed.logprob


def test_limits_lie_above_what_was_measured_and_below_what_must_be_seen():
    for measured, allowed in TABLE.values():
        assert 2 * measured.kl < allowed.kl
        assert 2 * measured.logprob < allowed.logprob
        assert measured.top1 > allowed.top1
        if allowed.effect is not None:
            assert measured.effect < allowed.effect < 1, "an adapter with B = 0 has an error of 1"


def test_the_page_shows_the_table():
    def number(x):
        return "–" if x is None else f"{x:g}"

    page = PAGE.read_text(encoding="utf-8")
    for pair, row in TABLE.items():
        pairs = [(getattr(row.measured, key), getattr(row.allowed, key)) for key in ("kl", "logprob", "top1", "effect")]
        assert " | ".join([f"| {pair}", *(number(x) for both in pairs for x in both)]) + " |" in page
    assert page.count("\n| ") == 1 + len(TABLE), "a row that the data do not have"


@pytest.mark.parametrize(
    ("recorded", "here", "pair"),
    [
        (("none", "float32"), ("none", "float32"), "float32"),
        (("none", "float64"), ("none", "float32"), "float32"),
        (("none", "float16"), ("none", "float32"), "float16"),
        (("none", "float32"), ("none", "bfloat16"), "bfloat16"),
        (("none", "float16"), ("none", "bfloat16"), "bfloat16"),
        (("none", None), ("none", "float32"), "bfloat16"),
        (("nf4", "float32"), ("nf4", "float32"), "float32"),
        (("nf4", "float32"), ("nf4", "float16"), "16 bits on a quantized base"),
        (("affine4", None), ("affine4", "float32"), "16 bits on a quantized base"),
        (("nf4", "bfloat16"), ("affine4", "float32"), "affine4 / nf4"),
        (("none", "float32"), ("nf4", "float32"), "nf4 / none"),
        (("int8", "float32"), ("none", "float32"), "int8 / none"),
        (("fp8", "float32"), ("none", "float32"), "fp8 / none"),
    ],
)
def test_the_row_of_two_precisions(recorded, here, pair):
    assert pair_of(Precision(*recorded), Precision(*here)) == pair
    assert pair_of(Precision(*here), Precision(*recorded)) == pair
    assert (pair in TABLE) == (pair != "fp8 / none")


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def test_the_bound_by_hand():
    """p = (½, ¼ | ¼), q = (¼, ¼ | ½): ½·log 2 + 0 + ¼·log ½ = ¼·log 2."""
    found = kl_bound(np.log([0.5, 0.25]), np.log([0.25, 0.25]))
    assert found == pytest.approx(0.25 * np.log(2))
    assert kl_bound(np.log([0.5, 0.25]), np.log([0.5, 0.25])) == 0
    assert kl_bound(np.log([0.5, 0.5]), np.array([np.nan, 0.0])) == np.inf
    assert np.isfinite(kl_bound(np.log([0.5, 0.5]), np.log([0.5, 0.25])))  # nothing is left to the others in p


@pytest.mark.parametrize("num_recorded", [1, 5, 30, 63, 64])
def test_the_bound_is_below_the_divergence_and_reaches_it_when_all_is_recorded(num_recorded):
    rng = np.random.default_rng(0)
    for _ in range(50):
        p, q = (x - np.logaddexp.reduce(x) for x in rng.normal(0, 2, (2, 64)))
        top = np.argsort(-p)[:num_recorded]
        found, true = kl_bound(p[top], q[top]), float(np.sum(np.exp(p) * (p - q)))
        assert 0 <= found <= true + 1e-5
        if num_recorded >= 63:
            assert found == pytest.approx(true, abs=1e-4)


def test_the_gap_of_a_record_is_that_of_a_float64_oracle(train, model):
    """Against an oracle whose adapter is twice as strong: the numbers are those of the whole distributions."""
    import json

    directory = train("torch", name="for-gaps")
    entries = json.loads((directory / "dualtune.json").read_text())["fingerprints"]["adapter"]
    adapter, oracle = read_adapter(directory), llama_oracle(model)
    scale, found, kls, same = adapter.spec.scale, [], [], []
    for entry in entries:
        batch = random_batch([len(entry["tokens"])], 262)
        batch.tokens_BT[0] = entry["tokens"]
        p, q = (oracle(batch, adapter.tensors, factor * scale)[0, -8:] for factor in (1, 2))
        found.append(q)
        kls += np.sum(np.exp(p) * (p - q), axis=-1).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
    result = gap(entries, found)
    assert result.num_positions == len(kls) == 40
    assert result.top1 == np.mean(same)
    assert 0.01 * np.mean(kls) < result.kl < np.mean(kls)
    assert result.max_kl < max(kls)


def test_a_model_that_computes_nan_is_infinitely_far():
    entries = [{"tokens": [1], "top": [[0, -0.1], [1, -3.0]]}]
    result = gap(entries, [np.full((1, 4), np.nan, np.float32)])
    assert (result.kl, result.logprob) == (np.inf, np.inf)
