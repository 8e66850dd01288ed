"""The figures of docs/performance.md are those of the results beside it, and of one machine."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PARTS = json.loads((RESULTS / "peers.json").read_text())["parts"]
TABLE = [line for line in (ROOT / "docs" / "performance.md").read_text().splitlines() if line.startswith("| ")]

# (how a row of the table begins, the parts whose ratios it gives, in its order)
ROWS = [
    ("Hugging Face + PEFT, its best", ["cpu/llama-19m/gsm8k/hf_peft/best", "cpu/smollm2-135m/gsm8k/hf_peft/best"]),
    ("TRL, packed", ["cpu/smollm2-135m/gsm8k/trl/packed"]),
    ("TRL, its best", ["cpu/smollm2-135m/gsm8k/trl/best"]),
    ("TRL, its defaults", ["cpu/smollm2-135m/gsm8k/trl/defaults"]),
    ("LLaMA-Factory, its best", ["cpu/smollm2-135m/gsm8k/llamafactory/best"]),
    ("Unsloth on the CPU", ["cpu/llama-19m/gsm8k/unsloth/best", "cpu/smollm2-135m/gsm8k/unsloth/best"]),
    ("at their defaults", [f"cpu/llama-19m/gsm8k/{peer}/defaults" for peer in ("trl", "hf_peft", "llamafactory")]),
    ("mlx-lm, its best", ["mlx/llama-1m/gsm8k-masked/mlx_lm/best", "mlx/llama-1m/wikisql/mlx_lm/best"]),
]  # fmt: skip


@pytest.mark.parametrize(("begins", "parts"), ROWS, ids=[row[0] for row in ROWS])
def test_the_ratios_in_the_text_are_those_that_were_measured(begins, parts):
    (row,) = (line for line in TABLE if line.startswith(f"| {begins}"))
    stated = re.findall(r"(\d+\.\d+)x", row.split("|")[2])
    measured = [PARTS[part]["tokens_per_s"]["ratio"]["median"] for part in parts]
    assert stated == [f"{x:.{len(text.partition('.')[2])}f}" for x, text in zip(measured, stated, strict=True)]


def test_all_figures_are_of_the_same_kind_of_machine():
    cpus = {part["machine"].get("cpu") for part in PARTS.values()} - {None}
    assert len(cpus) == 1 and "amx_bf16" in cpus.pop()
