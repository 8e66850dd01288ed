"""The lines E03 to G10 of the early validation plan: what it says, what is ours, and why the two differ.

Numbers come from `validation_results.figures`; the text here has none of ours.
"""

from __future__ import annotations

from typing import Any

GB = 1e9
NOT_RUN = "not run: no GPU was available"


def rows(found: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    small, medium, large, xl = (found["sizes"][name] for name in ("small", "medium", "1B of 40 layers", "XL"))
    of_small, of_medium, of_large = (found["techniques"][name] for name in ("small", "medium", "1B of 40 layers"))
    parameters = [f"{size['parameters'] / 1e6:,.1f} M" for size in (small, medium, large, xl)]
    logits = gb(small["logits_bytes"])
    measured = found["measured"]
    cases = f"{measured['plan_counted']['cases']} cases on a CPU"
    return [
        ("E03", "GPT-2 small has ~124M parameters", parameters[0], "they agree"),
        ("E04", "350M; 1600 × 48 is ~1B", f"{parameters[1]}; {parameters[3]}; 1408 × 40 has {parameters[2]}",
         "1600 × 48 is GPT-2 XL. The model of about 1B is the one with 40 layers of width 1408"),
        ("E05", "1,000 steps of 8 × 512 tokens, a decreasing loss", NOT_RUN,
         "a uniform guess has the loss ln 50,257 = 10.8, so training has to begin near it"),
        ("E06", "peak below 5 GB, about 2 GB", f"{both(of_small)}; states alone {gb(small['state_bytes'])}",
         f"2 GB are the states. The logits of 8 × 512 tokens are {logits} in float32 if they are kept whole, and "
         "every layer keeps its activations"),
        ("E07", "2.0, 5.6 and 16 GB of states", ", ".join(gb(size["state_bytes"]) for size in (small, medium, large)),
         "they agree for 16 bytes a parameter; not for XL, " + gb(xl["state_bytes"])),
        ("G01", "mixed precision: 1 GB of 2", change(of_small, "bfloat16"),
         "it halves the activations. The states grow: weights, gradient and moments stay in float32, and a copy in 16 "
         "bits computes"),
        ("G02", "accumulation: 1.4 GB of 2", change(of_small, "4 micro-batches"),
         "it saves activations, which the 2 GB do not contain; the states stay as they are"),
        ("G03", "optimizer state on the CPU: 1 GB of 2 while predicting",
         "`hybrid.offload: optimizer`; it lowers no peak",
         "the moments wait on the CPU while steps are predicted, but a search takes the memory of an evaluation. "
         "`train.optimizer: adamw_8bit` takes a quarter of the state, and nothing has to move"),
        ("G04", "all: 0.6 GB of 2", change(of_small, "all"),
         "the plan adds up savings of different parts as if each were of the whole"),
        ("G05, G06", "strategies for the optimizer's state",
         "`dualtune memory strategies` shows what each saves, and costs at 12 and 24 GB/s, or why it is not offered",
         "upstream they were counters: nothing moved. Dropping the state changes the result"),
        ("G07", "each technique within 10 % of its estimate",
         f"`dualtune memory ablate`; counted tensors: {measured['plan_counted']['largest']:+.1%} at most in {cases}",
         "upstream nothing was measured"),
        ("G08", "medium below 2 GB with everything on", change(of_medium, "all"),
         f"states in 16 and 8 bits take {gb(6 * medium['parameters'])} without any activation"),
        ("G09", "1B below 14 GB on 16 GB, all steps", change(of_large, "all"),
         f"trained whole in float32 the states alone are {gb(large['state_bytes'])}, in 16 and 8 bits "
         f"{gb(6 * large['parameters'])}; XL needs {gb(6 * xl['parameters'])}"),
        ("G10", "fallbacks: smaller batch, checkpointing, 768M", "`dualtune plan` lists them, the cheapest first",
         "their model of 36 layers has " + f"{found['sizes']['768M']['parameters'] / 1e6:,.0f} M parameters"),
    ]  # fmt: skip


def change(techniques: dict[str, int], name: str) -> str:
    """Return a technique's memory beside that of the baseline, for the whole model and for LoRA."""
    ways = (f"{gb(techniques[f'{way}, {name}'])} of {gb(techniques[f'{way}, baseline'])}" for way in ("whole", "LoRA"))
    return "; LoRA: ".join(ways)


def both(techniques: dict[str, int]) -> str:
    baseline, recomputed = techniques["whole, baseline"], techniques["whole, all layers recomputed"]
    return f"{gb(baseline)}, {gb(recomputed)} if layers are recomputed"


def gb(size: float) -> str:
    return f"{size / GB:,.1f} GB"
