"""Write docs/GPU_TIERS.md from the tiers' data and from the results in benchmarks/results/tiers_*.json.

To record results:   dualtune validate --tier all --keep-going --out runs/tiers
                     scripts/gpu_tiers_page.py --record h100 runs/tiers/report.json …
`--check` writes nothing and exits with 1 if the page is not up to date.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dualtune.config import load_config
from dualtune.config.examples import example_path
from dualtune.validate.criteria import shown
from dualtune.validate.tiers import TIERS, Tier

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "GPU_TIERS.md"
RESULTS = ROOT / "benchmarks" / "results"

HEAD = """# The five validation tiers

Written by `scripts/gpu_tiers_page.py`: change the script or its data, not this page.

`dualtune validate --tier NAME` trains by the config of a tier, through the same code as `dualtune train`, and judges
the run by the tier's criteria: exit code 0 if all are met, 1 if one is not, 4 if the machine lacks the memory, the
device or the model. `--tier all` runs all tiers but `full`. With `--random-weights` a tier runs in its real shape
without a download; criteria that need real weights are then skipped. On a GPU machine
`scripts/gpu-test.sh` runs them and checks the driver first: `scripts/gpu-test.sh help`.

The data are synthetic: rows that ask to "Explain concept number i", with answers that end in random keywords,
so that the loss falls far and then settles above zero. `dualtune validate --write-data PATH` writes them. Real data on
a strong base model may not let the loss fall by 30 % at all."""
TWINS = """On a CPU each tier has a twin: the same criteria on the small model that is part of dualtune, with another
learning rate, fewer steps where it says so, and separate memory limits. Twins show that the tiers and their
criteria work; their seconds say nothing about a GPU, nor about how fast dualtune is."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    parser.add_argument("--record", metavar="NAME", help="store the reports as benchmarks/results/tiers_NAME.json")
    parser.add_argument("reports", nargs="*", type=Path, help="what to record: report.json of `dualtune validate`")
    options = parser.parse_args()
    if bool(options.record) != bool(options.reports):
        parser.error("--record needs reports, and reports need --record NAME")
    if options.record:
        record(options.record, options.reports)
    text = page(results())
    if options.check:
        is_current = PAGE.read_text(encoding="utf-8") == text
        state = "up to date" if is_current else "out of date: run scripts/gpu_tiers_page.py"
        print(f"{PAGE.relative_to(ROOT)} is {state}")
        return 0 if is_current else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


def record(name: str, reports: list[Path]) -> None:
    """Save reports in one file, with losses that a person can read."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in reports]
    for tier in [tier for report in found for tier in report["tiers"]]:
        tier["losses"] = [round(loss, 4) if isinstance(loss, float) else loss for loss in tier.get("losses", [])]
    text = json.dumps({"reports": found}, indent=1)
    (RESULTS / f"tiers_{name}.json").write_text(text + "\n", encoding="utf-8")


def results() -> list[dict[str, Any]]:
    """Return all recorded reports, by file name."""
    files = sorted(RESULTS.glob("tiers_*.json"))
    return [report for file in files for report in json.loads(file.read_text(encoding="utf-8"))["reports"]]


def page(reports: list[dict[str, Any]]) -> str:
    on_gpu = [report for report in reports if not any(tier["twin"] for tier in report["tiers"])]
    on_cpu = [report for report in reports if report not in on_gpu]
    none = "No GPU results have been recorded yet, so there are no figures for seconds or memory."
    sections = [
        HEAD,
        "## What each tier is",
        *tiers_table(),
        "## The criteria of each tier",
        *criteria_table(),
        "## Measured on GPUs",
        *(measured(on_gpu) if on_gpu else [none]),
        "## The twins on a CPU",
        TWINS,
        *(measured(on_cpu) if on_cpu else ["None recorded yet."]),
    ]
    return "\n\n".join(sections) + "\n"


def tiers_table() -> list[str]:
    rows = []
    for tier in TIERS.values():
        config = load_config(example_path(tier.config))
        train = config.train
        rows.append(
            [f"`{tier.name}`", tier.title, f"`configs/{tier.config}`", config.model.name, str(train.steps),
             f"{train.documents_per_step} × {config.data.max_length}", config.model.quantization,
             shown(tier.peak_bytes, "bytes").replace(".0 ", " ")]
        )  # fmt: skip
    return [markdown(["tier", "proves", "config", "model", "steps", "batch × length", "base", "memory limit"], rows)]


def criteria_table() -> list[str]:
    rows: dict[str, dict[str, str]] = {}
    for tier in TIERS.values():
        for criterion in tier.criteria:
            limit = f"{criterion.relation} {shown(criterion.limit, criterion.unit)}".replace("== ", "")
            rows.setdefault(criterion.name, {})[tier.name] = limit.replace(".0 ", " ")
    return [
        markdown(["criterion", *TIERS], [[name, *(row.get(tier, "") for tier in TIERS)] for name, row in rows.items()]),
        "Means of the loss and the growth of memory are over windows of 50 steps; tokens/s are those of ten steps. On "
        "MLX the base is affine4 instead of nf4; its scales and biases take more, so the limit is 0.57 bytes per "
        "weight there.",
    ]


def measured(reports: list[dict[str, Any]]) -> list[str]:
    """Return a table, and a line for each machine."""
    rows, machines = [], []
    for report in reports:
        for tier in report["tiers"]:
            rows.append([report["platform"], *row_of(tier, report)])
        gpus = ", ".join(gpu["name"] for gpu in report["machine"]["gpus"])
        names = [each["tier"] for each in report["tiers"]]
        packages = report["tiers"][0]["environment"]["packages"]
        versions = ", ".join(
            f"{name} {packages[name]}" for name in ("torch", "bitsandbytes", "mlx") if name in packages
        )
        machines.append(
            f"- {report['platform']}, {', '.join(names)}: {report['date']}, {gpus or report['machine']['cpu']}, "
            f"{report['machine']['cores']} cores, {versions}"
        )
    head = [
        "platform",
        "tier",
        "verdict",
        "weights",
        "steps",
        "seconds",
        "tokens/s",
        "peak memory",
        "loss, first and last ten",
    ]
    return [markdown(head, rows), "\n".join(machines)]


def row_of(tier: dict[str, Any], report: dict[str, Any]) -> list[str]:
    steps = tier["config"]["train"]["steps"]
    asked = steps_of(TIERS[tier["tier"]])
    weights = "twin" if tier["twin"] else "random" if report["random_weights"] else "pretrained"
    start = [f"`{tier['tier']}`", tier["state"], weights, f"{steps}" if steps == asked else f"{steps} for {asked}"]
    if tier["state"] == "not run":
        return [*start, "", "", "", tier["checks"][-1]["found"].replace("|", "\\|")]
    losses = tier["losses"]
    trend = f"{sum(losses[:10]) / 10:.2f} → {sum(losses[-10:]) / 10:.2f}" if len(losses) >= 20 else ""
    return [
        *start, f"{tier['elapsed_s']:.1f}", f"{tier['tokens_per_s']:,.0f}", shown(tier["peak_bytes"], "bytes"), trend,
    ]  # fmt: skip


def steps_of(tier: Tier) -> int | None:
    return load_config(example_path(tier.config)).train.steps


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


if __name__ == "__main__":
    sys.exit(main())
