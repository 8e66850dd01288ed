"""Real data through the whole pipeline. The oracle counts anew: its own reading, its own ChatML, plain `tokenizers`."""

import json
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from dualtune.config import parse_config
from dualtune.data.batches import micro_batches
from dualtune.data.documents import Data
from dualtune.data.order import MOST_TOKENS, Order
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import IGNORE_INDEX
from dualtune.train.evaluation import layout_of
from dualtune.train.state.resume import with_tokens

ROOT = Path(__file__).parents[2]
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
END = "<|im_end|>"


def chatml(turns, system=SYSTEM):
    """Pieces of text, and whether they are targets."""
    yield system, False
    for role, text in turns:
        yield f"<|im_start|>{role}\n", False
        yield text + END, role == "assistant"
        yield "\n", False


def gsm8k(path):
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        yield chatml([("user", row["question"]), ("assistant", row["answer"])])


def wikisql(path):
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        yield [(row["text"] + END, True)]


def sharegpt(path):
    roles = {"human": "user", "gpt": "assistant"}
    for row in json.loads(path.read_text(encoding="utf-8")):
        yield chatml((roles[turn["from"]], turn["value"]) for turn in row["conversations"])


def demo(path):
    """The rows of the demo, whose template writes no system message of its own."""
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        yield chatml(((turn["role"], turn["content"]) for turn in row["messages"]), system="")


SETS = {
    "demo": (demo, []),
    "data/gsm8k/train.jsonl": (gsm8k, ["data.columns={prompt: question, completion: answer}"]),
    "data/wikisql/train.jsonl": (wikisql, []),
    "data/misc/sharegpt_conversations.json": (sharegpt, []),
}


@pytest.fixture(scope="module", params=SETS)
def real(request, shared):
    """(config, documents, the pieces of each row) of a set; the demo's lies in the repository."""
    if request.param == "demo":
        path, model = (ROOT / "dualtune" / "demo" / name for name in ("data/train.jsonl", "model"))
    else:
        path, model = shared(request.param), shared("tokenizers/smollm2")
    read, settings = SETS[request.param]
    settings = [*settings, f"model.name={model}", f"data.train={path}", "data.eval=0", "train.epochs=1"]
    config = parse_config("model: {}", overrides=settings)
    documents, held_out = Data(config).train_and_eval(Tokenizer(model))
    assert not len(held_out)
    return config, documents, read(path)


def test_rows_tokens_and_targets_are_those_of_an_independent_count(real):
    config, documents, rows = real
    plain = tokenizers.Tokenizer.from_file(f"{config.model.name}/tokenizer.json")
    num_rows = num_tokens = num_targets = 0
    for pieces in rows:
        runs = [(hit, "".join(text for text, _ in run)) for hit, run in groupby(pieces, lambda piece: piece[1])]
        mask = [hit for hit, text in runs for _ in plain.encode(text).ids]
        num_rows += 1
        num_tokens += len(mask)
        num_targets += sum(mask[1:])  # nothing precedes the first token, so it is no target
    assert (documents.num_rows, documents.num_tokens, documents.num_targets) == (num_rows, num_tokens, num_targets)


def test_the_packed_rows_of_an_epoch_have_all_tokens_and_targets_and_are_98_percent_full(real):
    config, documents, _ = real
    config = with_tokens(config, MOST_TOKENS)  # a small set has smaller steps, which fill rows less well
    order, layout = Order(config, documents.lengths), layout_of(config)
    seen = np.zeros(3, np.int64)
    for step in range(order.num_steps):
        for batch in micro_batches(documents, order.step(step).documents.tolist(), layout, seed=0, step=step):
            assert batch.tokens_BT.shape[1] <= config.data.max_length
            seen += ((batch.segments_BT > 0).sum(), (batch.labels_BT != IGNORE_INDEX).sum(), batch.tokens_BT.size)
    tokens, targets, cells = seen.tolist()
    assert (tokens, targets) == (documents.num_tokens, documents.num_targets)
    assert tokens / cells >= 0.98
