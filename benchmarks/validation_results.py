"""The figures of the early GPT-2 validation plan beside ours: the tables of results/validation_results.md.

    python benchmarks/validation_results.py

A figure of ours is computed by the memory planner, or is from a JSON in results/. Writes
results/validation_results.json and the tables of the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import page_tables
import record
import validation_lines

from dualtune.cli.hybrid import in_percent
from dualtune.doctor.bench.intervals import Interval
from dualtune.engine.card import ActivationCheckpointing
from dualtune.engine.memory.estimate import Ask, estimate
from dualtune.engine.memory.shapes import KNOWN, Decoder, decoder_of
from dualtune.model.methods import FULL

GB, GIB, MB = 1e9, 2**30, 1e6
VOCAB, POSITIONS = 50257, 1024
STATES = 4 + 4 + 8  # bytes of a float32 weight, its gradient and AdamW's two moments
SMALL_STATES = 2 + 2 + 2  # of a bfloat16 weight and gradient, and of two moments in 8 bits, without their scales
# name -> (width, layers, heads), what the documents say of its parameters and of model / gradient / optimizer in GB
SIZES = {
    "small": ((768, 12, 12), "~124M", "0.5 / 0.5 / 1.0 = 2 GB"),
    "medium": ((1024, 24, 16), "~350M", "1.4 / 1.4 / 2.8 = 5.6 GB"),
    "768M": ((1280, 36, 20), "768M", "—"),
    "1B of 40 layers": ((1408, 40, 22), "~1B", "4 / 4 / 8 = 16 GB"),
    "XL": ((1600, 48, 25), "~1B", "4 / 4 / 8 = 16 GB"),
}


def gpt2(size: str) -> Decoder:
    return decoder_of(config(size))


def config(size: str) -> dict[str, Any]:
    """Return the config.json of a GPT-2."""
    width, layers, heads = SIZES[size][0]
    return {
        "model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": POSITIONS,
        "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def main() -> None:
    found = figures()
    path = record.write("validation_results", found)
    print(path, page_tables.write(page_tables.RESULTS / "validation_results.md", tables(found)), sep="\n")


def figures() -> dict[str, Any]:
    return {
        "sizes": {name: _of_size(gpt2(name)) for name in SIZES},
        "techniques": {name: _techniques(gpt2(name)) for name in ("small", "medium", "1B of 40 layers")},
        "lora_7b": _lora_7b(),
        "measured": _measured(),
        "presets": [without_trials(row) for row in result("digits")["rows"] if "verdict" in row],
        "engines": {case: [*map(without_trials, each["arms"])] for case, each in result("hybrid")["cases"].items()},
    }


def _of_size(decoder: Decoder) -> dict[str, Any]:
    n = decoder.num_parameters
    return {"parameters": n, "state_bytes": STATES * n, "logits_bytes": 4 * 8 * 512 * decoder.vocab}


def _techniques(decoder: Decoder) -> dict[str, Any]:
    """Bytes of a step of 8 documents of 512 tokens, for the whole model and for a LoRA adapter."""
    return {name: total(decoder, ask) for name, ask in asks("cuda").items()}


def asks(device: str) -> dict[str, Ask]:
    """The setups of the table of techniques."""
    lora = Ask("torch", device, "none", "float32", 16, "all-linear", 8 * 512, 512)
    whole = replace(lora, method=FULL, dropout=False)
    found = {f"whole, {name}": ask for name, ask in _changes(whole).items()}
    return found | {f"LoRA, {name}": ask for name, ask in _changes(lora).items()}


def _changes(ask: Ask) -> dict[str, Ask]:
    """One technique at a time, then all of them."""
    full = ActivationCheckpointing("all")
    changes: dict[str, Any] = {
        "baseline": {}, "bfloat16": {"dtype": "bfloat16"}, "4 micro-batches": {"micro_batch_tokens": 1024},
        "all layers recomputed": {"checkpointing": full},
    }  # fmt: skip
    if ask.trains_model:
        changes["8-bit AdamW"] = {"optimizer": "adamw_8bit"}
    changes["all"] = {key: value for change in changes.values() for key, value in change.items()}
    return {name: replace(ask, **change) for name, change in changes.items()}


def total(decoder: Decoder, ask: Ask) -> int:
    """Return the bytes of tensors at the peak of a step: the documents leave the CUDA context out, too."""
    found = estimate(decoder, ask)
    return found.total_bytes - found["reserve"]


def _lora_7b() -> dict[str, int]:
    """Mistral-7B with an adapter, documents of 2,048 tokens, one at a time; and its states when trained whole."""
    decoder = decoder_of(KNOWN["mistralai/Mistral-7B-Instruct-v0.3"])
    ask = Ask("torch", "cuda", "none", "bfloat16", 16, "all-linear", 2048, 2048)
    full = ActivationCheckpointing("all")
    return {
        "states of the whole model in float32": STATES * decoder.num_parameters,
        "bfloat16 base": total(decoder, ask),
        "NF4 base": total(decoder, replace(ask, quantization="nf4")),
        "NF4 base, all layers recomputed": total(decoder, replace(ask, quantization="nf4", checkpointing=full)),
        "weights in NF4": estimate(decoder, replace(ask, quantization="nf4"))["weights"],
    }


def _measured() -> dict[str, Any]:
    """What was measured on a CPU, from other results."""
    recomputed = result("checkpointing")["torch"]["settings"]["full"]
    plan = result("memory_plan")["gaps"]
    return {
        "recomputed_peak_ratio": recomputed["peak_ratio"],
        "recomputed_time_ratio": recomputed["processor_time_ratio"],
        "gpt2": record.runs("gpt2_memory"),
        "plan_counted": plan["torch counted"],
        "plan_process": plan["torch process"],
    }


def result(name: str) -> dict[str, Any]:
    return json.loads((record.RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def without_trials(row: dict[str, Any]) -> dict[str, Any]:
    """Return an arm of another result without its single runs."""
    return {name: value for name, value in row.items() if name not in ("trials", "controls")}


# --- the tables -------------------------------------------------------------------------------------------------------


def tables(found: dict[str, Any]) -> dict[str, str]:
    return {
        "lines": page_tables.table(("line", "documents", "ours", "why they differ"), validation_lines.rows(found)),
        "sizes": _sizes_table(found["sizes"]),
        "techniques": _techniques_table(found),
        "seven": page_tables.table(
            ("Mistral-7B, by formula", "ours"), [(name, _gb(size)) for name, size in found["lora_7b"].items()]
        ),
        "measured": _measured_table(found["measured"]),
        "presets": _presets_table(found["presets"]),
        "engines": _engines_table(found["engines"]),
    }


def _sizes_table(sizes: dict[str, Any]) -> str:
    rows: list[Iterable[str]] = []
    for name, (shape, said_parameters, said_bytes) in SIZES.items():
        of, ours = " × ".join(map(str, shape)), sizes[name]
        millions = f"{ours['parameters'] / MB:,.1f} M"
        rows.append((f"GPT-2 {name}", of, said_parameters, millions, said_bytes, _gb(ours["state_bytes"])))
    header = ("model", "width × layers × heads", "documents", "ours", "states, documents", "states, ours")
    return page_tables.table(header, [tuple(row) for row in rows])


def _techniques_table(found: dict[str, Any]) -> str:
    models = found["techniques"]
    names = list(dict.fromkeys(name for each in models.values() for name in each))
    rows = [(name, *(_gb(each[name]) for each in models.values())) for name in names]
    states = [found["sizes"][name]["parameters"] for name in models]
    rows.append(("states alone, in float32", *(_gb(STATES * n) for n in states)))
    rows.append(("states alone, in bfloat16 with moments in 8 bits", *(_gb(SMALL_STATES * n) for n in states)))
    return page_tables.table(("a step of 8 × 512 tokens", *(f"GPT-2 {name}" for name in models)), rows)


def _measured_table(found: dict[str, Any]) -> str:
    counted, process = found["plan_counted"], found["plan_process"]
    rows = [
        (
            "recomputing all layers, of the peak above the state",
            f"{found['recomputed_peak_ratio']:.1%}",
            "checkpointing",
        ),
        ("recomputing all layers, processor time of a step", f"{found['recomputed_time_ratio']:.2f}", "checkpointing"),
        (f"plan and counted tensors, {counted['cases']} cases: median", f"{counted['median']:.2%}", "memory_plan"),
        ("plan and counted tensors: largest difference", f"{counted['largest']:+.2%}", "memory_plan"),
        (f"plan and process, {process['cases']} cases: median", f"{process['median']:.2%}", "memory_plan"),
        ("plan and process: largest difference", f"{process['largest']:+.2%}", "memory_plan"),
    ]
    rows += [
        (f"GPT-2 {name}", f"{_gb(row['counted'])}, {row['difference']:+.1%} by plan", "gpt2_memory")
        for name, row in found["gpt2"].items()
    ]
    linked = [(what, figure, f"[{name}.json]({name}.json)") for what, figure, name in rows]
    return page_tables.table(("measured on a CPU", "figure", "from"), linked)


def _presets_table(rows: list[dict[str, Any]]) -> str:
    header = ("rate", "preset", "cost", "backward passes skipped", "accuracy", "against its control", "peak memory")
    gaps = [row["accuracy_minus_control"] for row in rows]
    cells = [
        (
            f"{row['learning_rate']:g} ({row['case']})", row["arm"], f"{row['cost_ratio']:.2f}",
            f"{row['backward_reduction_pct']:.1f} %", f"{100 * row['accuracy']['mean']:.2f} %",
            f"{100 * gap['mean']:+.2f} ± {100 * gap['margin_95']:.2f}",
            f"{row['peak_bytes']['mean'] / 1024:.0f} KiB",
        )
        for row, gap in zip(rows, gaps, strict=True)
    ]  # fmt: skip
    return page_tables.table(header, cells)


def _engines_table(cases: dict[str, Any]) -> str:
    header = ("corpus and rate", "arm", "cost", "perplexity", "against a run of equal cost")
    cells = [
        (case, arm["arm"], f"{arm['cost']:.3f}", f"{arm['perplexity']:.2f}", in_percent(_interval(arm)))
        for case, arms in cases.items()
        for arm in arms
        if arm["arm"] != "baseline"
    ]
    return page_tables.table(header, cells)


def _interval(arm: dict[str, Any]) -> Interval:
    found = arm["loss_minus_control"]
    return Interval(found["mean"], found["margin_95"])


def _gb(size: float) -> str:
    return f"{size / GB:,.1f} GB"


if __name__ == "__main__":
    main()
