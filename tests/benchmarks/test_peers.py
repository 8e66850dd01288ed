"""The comparison with peers compares like with like: the same documents in every step, ratios of pairs, honest gaps."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import peers
    import peers_inputs
    import peers_report
    import peers_sides

    return SimpleNamespace(peers=peers, inputs=peers_inputs, report=peers_report, sides=peers_sides)


@pytest.fixture
def rows(tmp_path):
    words = np.random.default_rng(0).integers(1, 40, size=80)
    lines = [json.dumps({"question": f"{n} " * count, "answer": "yes"}) + "\n" for n, count in enumerate(words)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(lines))
    return path


def test_the_shuffle_of_dualtune_brings_the_rows_into_the_order_of_the_peers(peers, rows, tiny_llama):
    from dualtune.data.documents import Data
    from dualtune.data.order import Order
    from dualtune.data.tokens.tokenizer import Tokenizer

    workload, wanted = peers.inputs.WORKLOADS["gsm8k"], rows.read_text().splitlines(keepends=True)
    config = peers.inputs.configure(tiny_llama, rows, workload)
    rows.write_text("".join(peers.inputs.unshuffled(wanted, config)))
    documents, _ = Data(config).train_and_eval(Tokenizer(tiny_llama, config.data.template))
    order = Order(config, documents.lengths)
    found = [document for step in range(order.num_steps) for document in order.step(step).documents]
    texts = [Tokenizer(tiny_llama).decode(documents[i].tokens).split()[0] for i in found]
    assert texts == [json.loads(line)["question"].split()[0] for line in wanted]


def test_our_steps_are_those_of_mlx_lm(peers):
    """As its command makes them: through the cache, which does not see how long a row is."""
    trainer, datasets = pytest.importorskip("mlx_lm.tuner.trainer"), pytest.importorskip("mlx_lm.tuner.datasets")
    inputs = peers.inputs
    lengths = np.random.default_rng(1).integers(3, 60, size=64)
    documents = [{"input_ids": [n] * length, "labels": [-100] + [n] * (length - 1)} for n, length in enumerate(lengths)]
    cached = datasets.CacheDataset(peers.sides.Tokenized(documents))
    batches = trainer.iterate_batches(cached, inputs.DOCUMENTS_PER_STEP, 2048, seed=inputs.SEED)
    assert [row[0] for tokens, _ in batches for row in tokens.tolist()] == inputs.shuffled_batches(
        np.zeros(len(documents))
    )


def test_a_ratio_is_of_the_sides_of_one_pair_and_warm_up_is_left_out(peers):
    def run(side, *step_s):
        return peers.peers.Run(side, [1.0] * 3, list(step_s), step_s[0])

    pairs = [
        (run("dualtune", 9.0, 1.0, 1.0), run("peer", 9.0, 2.0, 2.0)),
        (run("dualtune", 1.0, 10.0, 10.0), run("peer", 5.0, 40.0, 40.0)),
        (run("dualtune", 1.0, 2.0, 2.0), run("peer", 1.0, 2.0, 2.0)),
    ]
    speed = peers.peers.summary(pairs, lambda run: run.per_second([7, 100, 100], warmup=1))
    assert speed["ours"] == [100.0, 10.0, 50.0]
    assert speed["ratio"] == {"median": 2.0, "lowest": 1.0, "highest": 4.0}


def test_the_report_says_who_trains_differently_and_who_did_not_run(peers):
    def figure(ours, theirs):
        ratio = ours / theirs
        return {"ours": [ours], "theirs": [theirs], "ratio": {"median": ratio, "lowest": ratio, "highest": ratio}}

    measured = {
        name: figure(4.0, 2.0) for name in ("tokens_per_s", "target_tokens_per_s", "peak_bytes", "first_step_s")
    }
    measured |= {"losses": {"dualtune": [3.0, 2.0], "odd": [3.0, 2.5]}, "worst_loss_gap": 0.25, "losses_agree": False}
    parts = {"cpu/tiny/rows/odd/best": measured | {"targets_counted_beyond_the_documents": 8.0}}
    parts["cpu/tiny/rows/absent/best"] = {"not_run": "there is no <environment>"}
    table = peers.report.table(parts)
    assert "odd divides by 8 target tokens a step more than the documents have, losses differ by up to 25.0%." in table
    assert "| absent | best | not run: there is no <environment> |" in table
    assert "**2.00**" in table
    lines = ElementTree.fromstring(peers.report.plot(parts)).findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2
