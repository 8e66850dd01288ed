"""`dualtune bench attention`: three ways to compute the same, their times and their memory, on each backend."""

import json
import statistics

import numpy as np
import pytest

from dualtune.doctor.bench.attention import AttentionShape, time_attention

SMALL = ("--tokens", 600, "--heads", 4, "--kv-heads", 2, "--head-size", 16)  # more than a block of queries
PLATFORMS = {"torch": "cpu", "mlx": "mlx"}


@pytest.mark.parametrize("name", PLATFORMS)
def test_each_is_timed_beside_eager(open_backend, dualtune_main, name):
    open_backend(name)
    process = dualtune_main("bench", "attention", "--platform", PLATFORMS[name], "--rounds", 3, *SMALL, "--json")
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert (found["device"], found["backend"]) == ("cpu", name)
    assert found["shape"] == {"tokens": 600, "heads": 4, "kv_heads": 2, "head_size": 16, "dtype": "float32"}
    eager = found["works"]["eager"]
    assert found["works"].keys() == {"ours", "sdpa", "eager"} and eager["peak_bytes"] > 4 * 600 * 600 * 4
    for work in found["works"].values():
        assert len(work["seconds"]) == 3 and work["ms"] == pytest.approx(1000 * statistics.median(work["seconds"]))
        assert work["time_ratio"] == pytest.approx(work["ms"] / eager["ms"])
        assert work["memory_ratio"] == pytest.approx(work["peak_bytes"] / eager["peak_bytes"])


def arrays(results):
    return [np.array(each) for each in results]


@pytest.mark.parametrize("name", PLATFORMS)
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=str)
def test_all_compute_the_same_output_and_gradients(open_backend, name, heads):
    works = open_backend(name).attention_works(AttentionShape(600, *heads, 16, "float32"))
    expected = arrays(works["eager"]())
    for other in ("ours", "sdpa"):
        for ours, theirs in zip(arrays(works[other]()), expected, strict=True):
            assert ours.shape == theirs.shape
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


def test_our_memory_grows_with_the_length_and_eager_memory_with_its_square(open_backend):
    """Counted by torch's allocator, so the same on every CPU."""
    backend = open_backend("torch")
    short, long = (time_attention(backend, AttentionShape(T, 2, 1, 64, "float32"), rounds=1) for T in (1024, 2048))
    growth = {name: long["works"][name]["peak_bytes"] / short["works"][name]["peak_bytes"] for name in short["works"]}
    assert growth["ours"] < 2.3 and growth["sdpa"] < 2.3 and growth["eager"] > 3.5
    assert long["works"]["ours"]["memory_ratio"] < 0.3


def test_a_table_says_whose_figures_these_are(open_backend, dualtune_main):
    open_backend("torch")
    process = dualtune_main("bench", "attention", "--platform", "cpu", "--rounds", 1, *SMALL)
    assert process.returncode == 0, process.stderr
    assert "600 tokens, 4 heads of 16, 2 of keys and values, float32" in process.stdout
    assert "These are figures of a CPU" in process.stdout


@pytest.mark.parametrize(("words", "message"), [
    (("--platform", "numpy"), "the backend 'numpy' has no attention to time"),
    (("--platform", "cpu", "--heads", 6, "--kv-heads", 4), "--kv-heads: got 4, must divide --heads (6)"),
    (("--platform", "cpu", "--tokens", 10**6), "--tokens 1000000, --heads 4: eager attention keeps about"),
])  # fmt: skip
def test_what_cannot_be_timed_is_refused(open_backend, dualtune_main, words, message):
    open_backend("torch")
    process = dualtune_main("bench", "attention", *words)
    assert process.returncode == 2 and message in process.stderr
