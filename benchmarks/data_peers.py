"""The processes that data.py measures: each does one thing in a fresh interpreter and prints one line of JSON.

    python data_peers.py dualtune ROWS.jsonl TOKENIZER     from the file to packed rows, with an empty cache
    python data_peers.py trl ROWS.jsonl TOKENIZER [PROCS]  the same by datasets and TRL, in a separate environment
    python data_peers.py start ROWS.jsonl TOKENIZER        from a config to the batches of the first step, and of others

Clocks start after the imports and the loading of the tokenizer. This file imports only what all environments have.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MAX_LENGTH = 2048
SOME_STEPS, MANY_STEPS = 100, 1500


def dualtune(rows: str, tokenizer_dir: str) -> dict[str, Any]:
    from dualtune.config import parse_config
    from dualtune.data.batches import micro_batches, plan, sizes_of
    from dualtune.data.documents import Data
    from dualtune.data.order import Order
    from dualtune.data.tokens.tokenizer import Tokenizer
    from dualtune.train.evaluation import layout_of

    overrides = [f"model.name={tokenizer_dir}", f"data.train={rows}", "data.eval=0", "train.epochs=1"]
    config = parse_config("model: {}", overrides=overrides)
    tokenizer = Tokenizer(Path(tokenizer_dir))

    began = time.perf_counter()
    documents, _ = Data(config).train_and_eval(tokenizer)
    order, layout = Order(config, documents.lengths), layout_of(config)
    steps = [order.step(s).documents.tolist() for s in range(order.num_steps)]
    plans = [plan(sizes_of(documents), ids, layout) for ids in steps]
    packed_s = time.perf_counter() - began

    for s, ids in enumerate(steps):
        micro_batches(documents, ids, layout, seed=config.run.seed, step=s)
    return {
        "seconds": packed_s,
        "seconds_with_arrays": time.perf_counter() - began,
        "documents": len(documents),
        "tokens": documents.num_tokens,
        "trained_tokens": documents.num_targets,
        "packed_rows": sum(len(rows) for groups in plans for rows in groups),
    }


def trl(rows: str, tokenizer_dir: str, num_proc: str | None = None) -> dict[str, Any]:
    import datasets
    import numpy as np
    import transformers
    import trl as peer

    # The preparation is a method of the trainer, so there must be one: of a model as small as it gets, and one row.
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), **shape))
    with Path(rows).open(encoding="utf-8") as file:
        first = datasets.Dataset.from_list([json.loads(file.readline())])
    with tempfile.TemporaryDirectory() as output_dir:
        args = peer.SFTConfig(
            output_dir, packing=True, max_length=MAX_LENGTH, dataset_num_proc=int(num_proc) if num_proc else None,
            use_cpu=True, bf16=False, report_to="none",
        )  # fmt: skip
        trainer = peer.SFTTrainer(model, args, train_dataset=first, processing_class=tokenizer)

    began = time.perf_counter()
    read = datasets.load_dataset("json", data_files=rows, split="train")
    packed = trainer._prepare_dataset(read, tokenizer, args, args.packing, None, "train")
    packed_s = time.perf_counter() - began

    table = packed.with_format("numpy")
    return {
        "seconds": packed_s,
        "documents": sum(len(lengths) for lengths in table["seq_lengths"]),
        "tokens": sum(len(ids) for ids in table["input_ids"]),
        "trained_tokens": int(sum(np.count_nonzero(labels != -100) for labels in table["labels"])),
        "packed_rows": len(packed),
        "versions": {module.__name__: module.__version__ for module in (peer, datasets, transformers)},
    }


def start(rows: str, tokenizer_dir: str) -> dict[str, Any]:
    """As `prepare` does it, without the model. The first start of a file tokenizes it, later ones find that done."""
    import numpy as np

    from dualtune.config import parse_config
    from dualtune.data.batches import micro_batches
    from dualtune.data.documents import Data
    from dualtune.data.order import Order
    from dualtune.data.tokens.tokenizer import Tokenizer
    from dualtune.train.evaluation import layout_of

    config = parse_config("model: {}", overrides=[f"model.name={tokenizer_dir}", f"data.train={rows}"])
    tokenizer = Tokenizer(Path(tokenizer_dir))
    layout, seed = layout_of(config), config.run.seed
    at_rest = peak_bytes()

    began = time.perf_counter()
    train, held_out = Data(config).train_and_eval(tokenizer)
    documents_s = time.perf_counter() - began
    train.fingerprint(), held_out.fingerprint()
    fingerprints_s = time.perf_counter() - began - documents_s
    order = Order(config, train.lengths, train.sources, train.weights)
    micro_batches(train, order.step(0).documents.tolist(), layout, seed=seed, step=0)
    ready_s = time.perf_counter() - began
    ready = peak_bytes()

    # Of one epoch: to jump between epochs is to plan them again, which no run does.
    steps = np.random.default_rng(0).integers(0, int(order.num_steps / config.train.epochs), MANY_STEPS).tolist()
    peaks: dict[str, int] = {}
    began = time.perf_counter()
    for done, step in enumerate(steps, start=1):
        micro_batches(train, order.step(step).documents.tolist(), layout, seed=seed, step=step)
        if done in (SOME_STEPS, MANY_STEPS):
            peaks[f"after_{done}_random_steps"] = peak_bytes()
    return {
        "documents": len(train) + len(held_out),
        "tokens": train.num_tokens + held_out.num_tokens,
        "steps": order.num_steps,
        "ready_s": ready_s,
        "of_it_documents_s": documents_s,
        "of_it_fingerprints_s": fingerprints_s,
        "of_it_order_and_first_step_s": ready_s - documents_s - fingerprints_s,
        "random_step_s": (time.perf_counter() - began) / len(steps),
        "peak_bytes": {"imports_and_tokenizer": at_rest, "ready": ready} | peaks,
    }


def peak_bytes() -> int:
    """The most memory this process has had, pages of mapped files included (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    print(json.dumps({"dualtune": dualtune, "trl": trl, "start": start}[what](*arguments)))
