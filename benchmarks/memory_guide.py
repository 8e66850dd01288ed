"""Which base fits which machine, by the memory planner: the tables of docs/MEMORY_OPTIMIZATION_GUIDE.md.

    python benchmarks/memory_guide.py

Nothing is measured: no GPU was at hand. The adapter is that of the default config (rank 16 on seven modules, dropout),
in micro-batches of one document. Writes results/memory_guide.json, which scripts/draw_results.py draws, and the tables
of the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import page_tables
import record
from validation_results import config as gpt2

from dualtune.config.schema import AdapterConfig
from dualtune.engine.card import ActivationCheckpointing
from dualtune.engine.machine import Budget, budget
from dualtune.engine.machines import named
from dualtune.engine.memory.estimate import Ask, estimate, last_that_fits
from dualtune.engine.memory.plan import MemoryPlan, choose_checkpointing
from dualtune.engine.memory.shapes import KNOWN, Decoder, decoder_of
from dualtune.model.methods import FULL

PAGE = Path(__file__).parents[1] / "docs" / "MEMORY_OPTIMIZATION_GUIDE.md"
TOKENS = 2048
GIB = 2**30
MISTRAL, LLAMA_70B, FIFTY = "mistralai/Mistral-7B-Instruct-v0.3", "meta-llama/Llama-3.3-70B-Instruct", "50B"
MODELS: Mapping[str, Mapping[str, Any]] = {
    "GPT-2, 124M": gpt2("small"),
    "GPT-2 medium, 355M": gpt2("medium"),
    "TinyLlama 1.1B": KNOWN["TinyLlama/TinyLlama-1.1B-Chat-v1.0"],
    "Qwen3 4B": KNOWN["Qwen/Qwen3-4B"],
    "Mistral 7B": KNOWN[MISTRAL],
    "Qwen3 14B": KNOWN["Qwen/Qwen3-14B"],
    "Qwen3 32B": KNOWN["Qwen/Qwen3-32B"],
    FIFTY: dict(KNOWN[LLAMA_70B]) | {"num_hidden_layers": 56},  # no model of the tables has this size
    "Llama 3.3 70B": KNOWN[LLAMA_70B],
}
NVIDIA = (
    "rtx-4060-8",
    "rtx-3060-12",
    "rtx-5080-16",
    "rtx-4090-24",
    "rtx-5090-32",
    "rtx-6000-ada-48",
    "h100-80",
    "h200",
)
MACS = ("m4-16", "m4-32", "m4-max-64", "m4-max-128")
BASES = {"torch": ("none", "int8", "nf4"), "mlx": ("none", "affine8", "affine4")}  # the most exact first
SHOWN = {"none": "bfloat16", "nf4": "NF4"}
MOST_TIME = 1.25  # of a step by recomputation, before a base with fewer bits is the better choice
ALL = ActivationCheckpointing("all")


def main() -> None:
    found = figures()
    path = record.write("memory_guide", found)
    print(path, page_tables.write(PAGE, tables(found)), sep="\n")


def figures() -> dict[str, Any]:
    return {
        "choices": {name: {model: choice(model, name) for model in MODELS} for name in (*NVIDIA, *MACS)},
        "techniques": [*techniques()],
        "fifty": [*fifty()],
    }


# --- the base to start with -------------------------------------------------------------------------------------------


def choice(model: str, machine: str) -> dict[str, Any] | None:
    """Return the most exact base that fits without losing much time, else with streamed layers; None if none fits."""
    decoder, backend = decoder_of(MODELS[model]), "mlx" if machine in MACS else "torch"
    device = "metal" if backend == "mlx" else "cuda"
    has = budget(named(machine), device)

    plans: list[MemoryPlan] = []
    for base in BASES[backend]:
        ask = _ask(backend, device, base)
        plans.append(_plan(decoder, replace(ask, checkpointing=choose_checkpointing(decoder, ask, has.bytes)), has))
    fitting = [plan for plan in plans if plan.fits]
    if fitting:
        return _described(next((plan for plan in fitting if plan.time <= MOST_TIME), fitting[-1]))

    def streamed(layers: int) -> MemoryPlan:
        return _plan(decoder, replace(plans[-1].ask, checkpointing=ALL, resident_layers=layers), has)

    if not streamed(1).fits:
        return None
    return _described(streamed(last_that_fits(lambda layers: streamed(layers).fits, 1, decoder.layers)))


def _plan(decoder: Decoder, ask: Ask, has: Budget) -> MemoryPlan:
    return MemoryPlan(decoder, ask, estimate(decoder, ask), has, ())


def _ask(backend: str, device: str, base: str) -> Ask:
    adapter = AdapterConfig()
    return Ask(backend, device, base, "bfloat16", adapter.rank, adapter.targets, TOKENS, TOKENS)


def _described(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "base": plan.ask.quantization,
        "needs_bytes": plan.estimate.total_bytes,
        "recomputed": plan.recomputed,
        "time": round(plan.time, 3),
        "resident_layers": plan.ask.resident_layers,
    }


# --- one technique after another, and 50 billion parameters -----------------------------------------------------------


def techniques() -> Iterator[dict[str, Any]]:
    """Yield the parts of a step of Mistral-7B on CUDA, each row with one technique more than the last."""
    decoder, ask = decoder_of(KNOWN[MISTRAL]), _ask("torch", "cuda", "none")
    for name, change in (
        ("base in bfloat16", {}),
        ("base in NF4", {"quantization": "nf4"}),
        ("adapter inputs recomputed", {"checkpointing": ActivationCheckpointing(adapter_inputs=True)}),
        ("half of the layers recomputed", {"checkpointing": ActivationCheckpointing(decoder.layers // 2)}),
        ("all layers recomputed", {"checkpointing": ALL}),
        ("two layers on the device", {"resident_layers": 2}),
    ):
        ask = replace(ask, **change)
        yield {"technique": name, "parts": {part.name: part.bytes for part in estimate(decoder, ask).parts}}


def fifty() -> Iterator[dict[str, Any]]:
    """Yield what ways to train the shape of 50 billion parameters take, and the smallest NVIDIA card each fits."""
    decoder, lora = decoder_of(MODELS[FIFTY]), _ask("torch", "cuda", "none")
    whole = replace(lora, method=FULL, dropout=False, checkpointing=ALL)
    ways = {
        "everything trained, AdamW": whole,
        "everything trained, 8-bit AdamW": replace(whole, optimizer="adamw_8bit"),
        "LoRA, base in bfloat16": replace(lora, checkpointing=ALL),
        "LoRA, base in int8": replace(lora, quantization="int8", checkpointing=ALL),
        "LoRA, base in NF4": replace(lora, quantization="nf4", checkpointing=ALL),
        "LoRA, base in NF4, two layers on the device": replace(
            lora, quantization="nf4", checkpointing=ALL, resident_layers=2
        ),
    }
    for name, ask in ways.items():
        needs = estimate(decoder, ask).total_bytes
        fits = [card for card in NVIDIA if _plan(decoder, ask, budget(named(card))).fits]
        yield {"way": name, "needs_bytes": needs, "smallest_card": fits[0] if fits else None}


# --- the tables -------------------------------------------------------------------------------------------------------


def tables(found: dict[str, Any]) -> dict[str, str]:
    ways = [
        (row["way"], f"{row['needs_bytes'] / GIB:,.0f} GiB", f"`{card}`" if (card := row["smallest_card"]) else "none")
        for row in found["fifty"]
    ]
    return {
        "nvidia": _by_machine(found["choices"], NVIDIA),
        "macs": _by_machine(found["choices"], MACS),
        "fifty": page_tables.table(("way", "a step takes", "the smallest card of the table that it fits"), ways),
    }


def _by_machine(choices: dict[str, Any], machines: tuple[str, ...]) -> str:
    rows = [(model, *(_cell(choices[name][model]) for name in machines)) for model in MODELS]
    return page_tables.table(("model", *(f"`{name}`" for name in machines)), rows)


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    base = SHOWN.get(found["base"], found["base"])
    if layers := found["resident_layers"]:
        return f"{base}, {layers} resident"
    return f"{base}, {found['time']:.2f}×" if found["time"] > 1 else base


if __name__ == "__main__":
    main()
