"""What fits on a card of 16 GB, by the memory planner: the tables of results/rtx_5080.md.

    python benchmarks/rtx_5080.py

Nothing is measured: no GPU was at hand. The adapter is that of the default config (rank 16 on seven modules, dropout),
in micro-batches of one document. Writes results/rtx_5080.json and the tables of the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import page_tables
import record

from dualtune.config.schema import AdapterConfig
from dualtune.engine.card import ActivationCheckpointing
from dualtune.engine.machine import Budget, budget
from dualtune.engine.machines import named
from dualtune.engine.memory.estimate import Ask, longest_that_fits
from dualtune.engine.memory.plan import ROOM, make_plan
from dualtune.engine.memory.shapes import KNOWN, decoder_of

MACHINE, TOKENS, LARGEST = "rtx-5080-16", 2048, 15e9  # parameters
BASES = ("none", "int8", "nf4")
GIB = 2**30
LONGEST = 131072  # tokens; no model here has more positions


def main() -> None:
    rows = [*fits()]
    path = record.write("rtx_5080", {"machine_planned_for": MACHINE, "tokens": TOKENS, "rows": rows})
    print(path, page_tables.write(page_tables.RESULTS / "rtx_5080.md", tables(rows)), sep="\n")


def fits() -> Iterator[dict[str, Any]]:
    """Yield the plan of each model with each base, with `memory.checkpointing: auto`."""
    have, adapter = budget(named(MACHINE)).bytes, AdapterConfig()
    for name, config in KNOWN.items():
        decoder = decoder_of(config)
        if decoder.num_parameters > LARGEST:
            continue
        for base in BASES:
            ask = Ask("torch", "cuda", base, "bfloat16", adapter.rank, adapter.targets, TOKENS, TOKENS)
            plan = make_plan(decoder, ask, Budget(have, ""), auto=True)
            all_again = replace(ask, checkpointing=ActivationCheckpointing("all"))
            longest = longest_that_fits(decoder, all_again, int(ROOM * have))
            yield {
                "model": name,
                "parameters": decoder.num_parameters,
                "base": base,
                "fits": plan.fits,
                "needs_bytes": plan.estimate.total_bytes,
                "available_bytes": have,
                "recomputed": plan.recomputed,
                "time": plan.time,
                "longest": min(longest, config["max_position_embeddings"], LONGEST),
                "weights_bytes": plan.estimate["weights"],
            }


def tables(rows: list[dict[str, Any]]) -> dict[str, str]:
    models = dict.fromkeys(row["model"] for row in rows)
    by_case = {(row["model"], row["base"]): row for row in rows}
    header = ("model", "parameters", *(f"{base} base" for base in ("bfloat16", "int8", "NF4")))
    found = [
        (
            model.split("/")[1], f"{by_case[model, 'none']['parameters'] / 1e9:.2f} billion",
            *(_cell(by_case[model, base]) for base in BASES),
        )
        for model in models
    ]  # fmt: skip
    lengths = [
        (model.split("/")[1], *(_length(by_case[model, base]) for base in BASES))
        for model in models
    ]  # fmt: skip
    return {
        "fits": page_tables.table(header, found),
        "longest": page_tables.table(("model", "bfloat16 base", "int8 base", "NF4 base"), lengths),
    }


def _cell(row: dict[str, Any]) -> str:
    needs = f"{row['needs_bytes'] / GIB:.1f} GiB"
    if not row["fits"]:
        return f"does not fit: {needs}"
    return (
        f"{needs}, {row['recomputed'].removesuffix(' are recomputed')}: {row['time']:.2f}"
        if row["recomputed"]
        else needs
    )


def _length(row: dict[str, Any]) -> str:
    return f"{row['longest']:,}" if row["longest"] >= 64 else "none"


if __name__ == "__main__":
    main()
