"""The inputs of every side of peers.py: the same base weights, documents and initial adapter, made once in a folder.

The weights are random, in a named shape, or those of SmolLM2-135M-Instruct (`dualtune.model.package`).

dualtune reads rows and a config, like a user's. The peers read the tokens that dualtune makes of these rows, so that
only training is measured.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_overhead import SHAPE
from safetensors import safe_open

from dualtune.config import Config, parse_config
from dualtune.data.documents import Data, Documents
from dualtune.data.order import Order
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.doctor.bench.measure import read_shape, training_flops
from dualtune.model.adapter import AdapterSpec, init_adapter
from dualtune.model.formats.directory import Adapter, write_adapter
from dualtune.model.gguf import model_from_gguf
from dualtune.model.package import fetch_model

TOKENIZER = "tokenizers/smollm2"
VOCABULARY = 49152  # of this tokenizer, for all shapes
MAX_LENGTH = 1024
DOCUMENTS_PER_STEP = 8
SPEC = AdapterSpec(
    rank=16, alpha=32.0, dropout=0.0,
    targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)  # fmt: skip
SEED = 42


def llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": hidden // heads,
        "vocab_size": VOCABULARY, "max_position_embeddings": 8192, "tie_word_embeddings": tied,
        "initializer_range": 0.02,
    }  # fmt: skip


REAL = "smollm2-135m-instruct"
SHAPES: dict[str, dict[str, Any]] = {
    "llama-1m": llama(16, 512, 8, 2, 2, tied=True),  # four fifths of it are the vocabulary
    "llama-19m": llama(256, 688, 8, 4, 4, tied=True),
    "smollm2-135m": SHAPE,
    REAL: SHAPE,
    "tinyllama-1.1b": llama(2048, 5632, 22, 32, 4, tied=False),
    "llama-2-7b": llama(4096, 11008, 32, 32, 32, tied=False),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows of ../shared, and which of their tokens are targets."""

    rows: str
    loss_on: str  # data.loss_on
    columns: dict[str, str]  # data.columns
    by_length: bool = False  # whether a step takes documents of like length, so that a peer pads little


GSM8K_COLUMNS = {"prompt": "question", "completion": "answer"}
WORKLOADS = {
    "gsm8k": Workload("data/gsm8k/train.jsonl", "all", GSM8K_COLUMNS),
    "gsm8k-masked": Workload("data/gsm8k/train.jsonl", "assistant", GSM8K_COLUMNS),
    "wikisql": Workload("data/wikisql/train.jsonl", "all", {}, by_length=True),
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """Paths, and the documents in the order in which they are trained on."""

    model: Path
    adapter: Path
    rows: Path  # .jsonl, for dualtune: its shuffle brings them into the order
    documents: Path  # .jsonl of input_ids and labels, for the peers: as they come in the source
    order: list[int]  # of `documents`
    num_tokens: list[int]  # of each step
    num_targets: list[int]
    flops: list[float]  # of each step, by the formula of `training_flops`: the model's, for these tokens alone


def make_inputs(
    folder: Path, shared: Path, shape: str, workload: Workload, num_steps: int, dtype: str, *, as_mlx_lm: bool = False
) -> Inputs:
    """`as_mlx_lm`: in the order that mlx-lm takes, whatever the workload's is."""
    model = save_model(folder / f"{shape}-{dtype}", shared / TOKENIZER, shape, dtype)
    adapter = save_adapter(folder / f"{shape}-adapter", SHAPES[shape])
    with (shared / workload.rows).open(encoding="utf-8") as file:
        rows = list(islice(file, num_steps * DOCUMENTS_PER_STEP))
    if len(rows) < num_steps * DOCUMENTS_PER_STEP:
        raise SystemExit(f"{shared / workload.rows}: has {len(rows)} rows, too few for {num_steps} steps")
    content = hashlib.sha256(f"{workload}{''.join(rows)}".encode()).hexdigest()[:12]
    place = folder / f"rows-{content}"
    place.mkdir(exist_ok=True)
    natural = write_lines(place / "source.jsonl", rows)
    config = configure(model, natural, workload)
    found, _ = Data(config).train_and_eval(Tokenizer(model, config.data.template))
    if len(found) != len(rows):
        raise SystemExit(f"{shared / workload.rows}: {len(rows)} rows gave {len(found)} documents; must be one each")
    lengths = np.zeros(len(rows)) if as_mlx_lm else found.lengths
    order = shuffled_batches(lengths) if as_mlx_lm or workload.by_length else list(range(len(rows)))
    return Inputs(
        model,
        adapter,
        write_lines(place / "rows.jsonl", unshuffled([rows[i] for i in order], config)),
        write_lines(place / "documents.jsonl", tokens_of(found)),
        order,
        by_step(found.lengths[order]),
        by_step(found.targets[order]),
        flops_of(model, adapter, found.lengths[order].reshape(-1, DOCUMENTS_PER_STEP)),
    )


def tokens_of(documents: Documents) -> list[str]:
    """A line for each document, as the peers read them."""
    lines: list[str] = []
    for document in documents:
        labels = np.where(document.loss_mask, document.tokens, -100)
        labels[0] = -100  # nothing precedes it; in a packed row, a peer would predict it from another document
        lines.append(json.dumps({"input_ids": document.tokens.tolist(), "labels": labels.tolist()}) + "\n")
    return lines


def configure(model: Path, rows: Path, workload: Workload) -> Config:
    return parse_config(json.dumps({"model": {"name": str(model)}} | data_and_steps(rows, workload)))


def data_and_steps(rows: Path, workload: Workload) -> dict[str, dict[str, Any]]:
    """The part of dualtune's config that says which tokens a step takes."""
    data = {"train": str(rows), "eval": 0, "max_length": MAX_LENGTH, "template": "none"}
    return {
        "data": data | {"loss_on": workload.loss_on, "columns": workload.columns},
        "train": {"documents_per_step": DOCUMENTS_PER_STEP, "epochs": 1},
        "run": {"seed": SEED},
    }


def shuffled_batches(lengths: np.ndarray, per_step: int = DOCUMENTS_PER_STEP, seed: int = SEED) -> list[int]:
    """Sorted by length, cut into batches, the batches shuffled.

    So does mlx-lm (mlx_lm/tuner/trainer.py, iterate_batches), but its cache says that all lengths are equal: it counts
    the fields of a row. Its batches are neighbours in the file.
    """
    batches = np.argsort(lengths, kind="stable").reshape(-1, per_step)
    return batches[np.random.RandomState(seed).permutation(len(batches))].ravel().tolist()


def unshuffled(rows: list[str], config: Config) -> list[str]:
    """The rows in an order that dualtune's shuffle, which depends on their number and the seed, turns into this one."""
    order = Order(config, [1] * len(rows))
    places = np.concatenate([order.step(step).documents for step in range(order.num_steps)])
    return [rows[i] for i in np.argsort(places)]


def by_step(counts: np.ndarray) -> list[int]:
    return counts.reshape(-1, DOCUMENTS_PER_STEP).sum(axis=1).tolist()


def flops_of(model: Path, adapter: Path, lengths: np.ndarray) -> list[float]:
    """The operations of steps of documents of these lengths, [steps, documents]."""
    counts = [num_parameters(file) for file in (model / "model.safetensors", adapter / "adapter_model.safetensors")]
    shape = read_shape(model, num_parameters=counts[0], adapter_parameters=counts[1])
    return [training_flops(shape, step).total for step in lengths]


def num_parameters(file: Path) -> int:
    with safe_open(file, "numpy") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118


def save_model(folder: Path, tokenizer: Path, shape: str, dtype: str) -> Path:
    return saved(folder, lambda part: _save_model(part, tokenizer, shape, dtype))


def _save_model(folder: Path, tokenizer: Path, shape: str, dtype: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(tokenizer, folder, copy_function=shutil.copyfile)
    if shape == REAL:
        LlamaForCausalLM.from_pretrained(model_from_gguf(fetch_model()), dtype=dtype).save_pretrained(folder)
        return
    end = Tokenizer(tokenizer).eos_id
    torch.manual_seed(SEED)
    config = LlamaConfig(**SHAPES[shape], dtype=dtype, bos_token_id=None, eos_token_id=end, pad_token_id=end)
    LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)


def save_adapter(folder: Path, shape: dict[str, Any], seed: int = SEED) -> Path:
    hidden, intermediate = shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads = (shape[f"num_{name}_heads"] * shape["head_dim"] for name in ("attention", "key_value"))
    sizes = {
        "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden), "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (intermediate, hidden), "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }  # fmt: skip
    layers = range(shape["num_hidden_layers"])
    shapes = {f"model.layers.{layer}.{module}": size for layer in layers for module, size in sizes.items()}
    tensors = init_adapter(shapes, SPEC.rank, seed)
    return saved(folder, lambda part: write_adapter(part, Adapter(SPEC, tensors)))


def saved(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, made if it is not there: under another name until it is whole."""
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        make(part)
        part.rename(folder)
    return folder


def write_lines(path: Path, lines: list[str]) -> Path:
    """Not written again, so that what dualtune has tokenized stays in its cache."""
    if not path.exists():
        path.write_text("".join(lines), encoding="utf-8")
    return path
