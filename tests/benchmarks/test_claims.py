"""The figures of docs/performance.md, families.md and claims.md are those of the results; claims have commands."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PARTS = json.loads((RESULTS / "peers.json").read_text())["parts"]
TABLE = [line for line in (ROOT / "docs" / "performance.md").read_text().splitlines() if line.startswith("| ")]

SHAPES = ("llama-19m", "smollm2-135m")
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


def test_the_figures_with_utilisation_are_those_that_were_measured():
    peers = {"trl": "TRL", "hf_peft": "Hugging Face + PEFT", "llamafactory": "LLaMA-Factory", "unsloth": "Unsloth",
             "axolotl": "axolotl", "mlx_lm": "mlx-lm"}  # fmt: skip
    shapes = {"smollm2-135m-instruct": "SmolLM2-135M-Instruct", "llama-19m": "18.9M shape"}
    usual, rows = {"cpu": "bfloat16", "mlx": "float32"}, {"wikisql": "WikiSQL", "gsm8k": "GSM8K"}
    measured = set()
    for cpu, name in {"AVX-512": "peers_no_amx", "AVX2": "peers_avx2"}.items():
        for key, part in json.loads((RESULTS / f"{name}.json").read_text())["parts"].items():
            platform, shape, workload, *dtype, peer, _ = key.split("/")
            speed, shares = part["tokens_per_s"], part["utilisation"]
            cells = [", ".join([cpu, *["MLX"] * (platform == "mlx")]), shapes[shape]]
            cells += [f"{dtype[0] if dtype else usual[platform]}, {rows[workload]}", peers[peer]]
            cells += [f"{median(speed[side]):.0f}" for side in ("ours", "theirs")]
            cells += [f"{speed['ratio']['median']:.2f}x"]
            cells += [f"{median(shares[side]):.0%}" for side in ("ours", "theirs")]
            measured.add(f"| {' | '.join(cells)} |")
    assert {line for line in TABLE if line.startswith("| AVX")} == measured


def test_the_figures_of_a_cpu_with_avx2_alone_are_those_that_were_measured():
    parts = json.loads((RESULTS / "fast_pieces.json").read_text())["parts"]
    small, large = (parts[f"{shape}, 2 threads, without AVX-512"] for shape in SHAPES)
    page = (ROOT / "docs" / "performance.md").read_text()
    assert f"{small['median_ratio']['products=torch']:.1f} times as long with torch's own products" in page
    assert f"bfloat16 then takes {large['median_ratio']['']:.2f} times the time of float32" in page
    small, large = (parts[f"{shape}, 2 threads, without AVX-512, 12 to 60 tokens"] for shape in SHAPES)
    by_document = "dtype=float32,short=0"
    assert f"takes {large['median_ratio'][by_document]:.2f} times as long in float32" in page
    assert f"(18.9M shape: {small['median_ratio'][by_document]:.2f} times)" in page


def test_all_figures_are_of_the_same_kind_of_machine():
    cpus = {part["machine"].get("cpu") for part in PARTS.values()} - {None}
    assert len(cpus) == 1 and "amx_bf16" in cpus.pop()


# --- claims.md ---

PAGE = (ROOT / "benchmarks" / "results" / "claims.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CLAIMS = [
    tuple(cell.strip() for cell in line.strip("| ").rsplit(" | ", 1))
    for line in PAGE.partition("## The data")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| claim |")
]


def ratios(*parts: str) -> list[float]:
    return [PARTS[part]["tokens_per_s"]["ratio"]["median"] for part in parts]


def test_the_claims_are_all_there():
    assert len(CLAIMS) >= 28 and len({claim for claim, _ in CLAIMS}) == len(CLAIMS)


@pytest.mark.parametrize(("claim", "shown_by"), CLAIMS, ids=[claim[:40] for claim, _ in CLAIMS])
def test_each_claim_has_commands_and_they_exist(claim, shown_by):
    commands = [shlex.split(command) for command in re.findall(r"`([^`]+)`", shown_by)]
    assert commands, claim
    for command, *words in commands:
        if command == "make":
            assert re.search(rf"^{words[0]}:", MAKEFILE, re.M), words
        elif words[0] == "-m":
            markers = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]
            assert words[1] in [text.partition(":")[0] for text in markers["ini_options"]["markers"]]
        else:
            assert command in ("pytest", "python"), command
            paths = words if command == "pytest" else words[:1]
            assert paths and all((ROOT / path).exists() for path in paths), paths


@pytest.mark.parametrize(("claim", "shown_by"), CLAIMS, ids=[claim[:40] for claim, _ in CLAIMS])
def test_a_claim_says_whether_its_commands_need_data(claim, shown_by):
    """Those of make that pass the directory on, and the benchmarks that take it."""
    needs = []
    for command, *words in (shlex.split(each) for each in re.findall(r"`([^`]+)`", shown_by)):
        recipe = re.search(rf"^{re.escape(words[0])}:.*\n((?:\t.*\n)*)", MAKEFILE, re.M) if command == "make" else None
        needs.append(
            "$(SHARED)" in recipe[1] if recipe else command == "python" and "--shared" in (ROOT / words[0]).read_text()
        )
    assert any(needs) == ("(with [the data](#the-data))" in shown_by)


def test_the_speeds_among_the_claims_are_those_that_were_measured():
    (claim,) = (claim for claim, _ in CLAIMS if claim.startswith("a step on a CPU with AMX"))
    cpu, mlx = "cpu/smollm2-135m/gsm8k", "mlx/llama-1m"
    packed = PARTS[f"{cpu}/trl/packed"]
    expected = [
        packed["tokens_per_s"]["ratio"]["median"],
        packed["peak_bytes"]["ratio"]["median"],
        *sorted(ratios(f"{cpu}/hf_peft/best", "cpu/llama-19m/gsm8k/hf_peft/best")),
        min(ratios(f"{cpu}/trl/best", f"{cpu}/llamafactory/best")),
        *sorted(ratios(f"{cpu}/unsloth/best", "cpu/llama-19m/gsm8k/unsloth/best")),
        *sorted(ratios(f"{mlx}/wikisql/mlx_lm/best", f"{mlx}/gsm8k-masked/mlx_lm/best")),
    ]
    assert re.findall(r"\d+\.\d", claim) == [f"{ratio:.1f}" for ratio in expected]


def test_the_demo_of_a_real_model_took_what_is_claimed():
    (claim,) = (claim for claim, _ in CLAIMS if claim.startswith("`make demo-real`"))
    record = json.loads((RESULTS / "demo_real.json").read_text(encoding="utf-8"))
    right = record["shares"]["queries that give the right rows"]
    assert f"takes {record['demo_s'] / 60:.1f} minutes" in claim and f"{record['peak_bytes'] / 2**30:.1f} GiB" in claim
    assert f"{right['after_pct']:.0f} % of" in claim and f"{right['before_pct']:.0f} % before" in claim
    assert record["demo_s"] < 8 * 60 and record["peak_bytes"] < 2 * 2**30


# --- docs/families.md ---


def cells_of(path: Path) -> list[list[str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def test_the_page_of_families_sums_up_the_record():
    record = cells_of(RESULTS / "families.md")
    works = {name: int(cells[0]) for name, *cells in record if len(cells) == 5 and cells[0].isdigit()}
    page = [row[1:] for row in cells_of(ROOT / "docs" / "families.md") if len(row) == 3 and row[1].isdigit()]
    asked = ["torch", "packs, torch", "PEFT, torch", "merge, torch", "generates, torch", "plan, torch"]
    assert page == [[str(works[name]), str(works[name.replace("torch", "MLX")])] for name in asked]
    families = [cells for name, *cells in record if name.startswith("`") and len(cells) == 16]
    num_whole = sum(set(cells[:-1]) == {"✓"} for cells in families)
    text = " ".join((ROOT / "docs" / "families.md").read_text(encoding="utf-8").split())
    assert f"| of {len(families)} families |" in text and f"train {works['same steps']} families" in text
    assert f"{num_whole} of them pass everything above" in text
    assert works["same steps"] == works["torch → MLX"] == works["MLX → torch"]
