"""benchmarks/results/families.md, made from the results of scripts/families.py."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

Line = Mapping[str, Any]
BY_KEY = dict[tuple[str, str, str], Line]

COLUMNS = {  # heading -> the stage, and the backend that it is about
    "torch": ("train", "torch"), "MLX": ("train", "mlx"),
    "packs, torch": ("packs", "torch"), "packs, MLX": ("packs", "mlx"),
    "plan, torch": ("memory", "torch"), "plan, MLX": ("memory", "mlx"),
    "same steps": ("parity", "both"),
    "torch → MLX": ("crosses", "torch"), "MLX → torch": ("crosses", "mlx"),
    "PEFT, torch": ("peft", "torch"), "PEFT, MLX": ("peft", "mlx"),
    "merge, torch": ("reload", "torch"), "merge, MLX": ("reload", "mlx"),
    "generates, torch": ("generates", "torch"), "generates, MLX": ("generates", "mlx"),
}  # fmt: skip
FIRST = {"train": ("train", "base"), "reload": ("merge", "reload")}  # stages that one column sums up, in order
SIGNS = {"ok": "✓", "refused": "–", "told": "told", "-": "", "CRASH": "crash", "WRONG": "wrong", "LOST": "lost"}
FAULTS = ("CRASH", "WRONG", "LOST")
HEAD = """\
# Families, as measured

What each family of the installed transformers does here, as a tiny model with random weights: the model is written as
transformers saves it, and taken through the stages below. `make families` measures it and writes this page
(`scripts/families.py`), `make families FAMILIES="gemma3 qwen3_5"` measures some anew. docs/families.md sums it up.

✓ works · – refused, with a message that says why · told: PEFT drops or refuses adapted layers of these classes, and the
start of a run, `inspect`, `verify` and the card say so (the merge works) · empty: nothing to look at, because an
earlier stage is not there · crash, wrong, lost: a fault of ours, listed at the end.

| column | what is compared |
|---|---|
| torch, MLX | the base computes what transformers does (log p within 1e-3), and four steps train |
| packs | the losses of packed rows are those of single ones, within 1e-4 |
| plan | the plan counts the engine's parameters, and plans 90 to 150 % of the peak of a packed step |
| same steps | both backends adapt the same layers, and their step losses agree within 1e-4 |
| torch → MLX, MLX → torch | `verify` accepts the adapter on the other backend |
| PEFT | in the model of each auto class PEFT computes the same, or the notes say that it does not; never both |
| merge | the merge has every tensor of the base, and transformers computes with it what the adapter does |
| generates | decoding with a cache gives the tokens that the whole text gives |
"""


def page_of(results: Sequence[Line]) -> str:
    """Return the page as Markdown."""
    found = {(line["family"], line["stage"], line["backend"]): line for line in results}
    families = sorted({line["family"] for line in results})
    made = [family for family in families if _outcome(found, family, "make", "both") == "ok"]
    faulty = [line for line in results if line["outcome"] in FAULTS]
    parts = [
        *_summary(results, found, made),
        "",
        *_table(found, made),
        "",
        *_reasons(found, made, families),
        *_faults(faulty),
    ]
    return "\n".join([HEAD, *parts]).rstrip() + "\n"


def _outcome(found: BY_KEY, family: str, stage: str, backend: str) -> str:
    """Return the outcome of a column: that of the first of its stages that is not ok."""
    outcomes = [
        found[family, each, backend]["outcome"] if (family, each, backend) in found else "-"
        for each in FIRST.get(stage, (stage,))
    ]
    return next((each for each in outcomes if each != "ok"), "ok")


def _summary(results: Sequence[Line], found: BY_KEY, made: Sequence[str]) -> list[str]:
    packages = ", ".join(f"{name} {version(name)}" for name in ("transformers", "mlx-lm", "torch", "mlx", "peft"))
    rows = [
        f"{len(made)} families, with {packages}; at {_commits(results)}.",
        "",
        "| | works | refused | told | fault | nothing to look at |",
        "|---|---|---|---|---|---|",
    ]
    for heading, (stage, backend) in COLUMNS.items():
        counts = Counter(_outcome(found, family, stage, backend) for family in made)
        faults = sum(counts[each] for each in FAULTS)
        rows.append(
            f"| {heading} | {counts['ok']} | {counts['refused']} | {counts['told']} | {faults} | {counts['-']} |"
        )
    return rows


def _commits(results: Sequence[Line]) -> str:
    """Return the commits that families were made on, with their number."""
    counts = Counter(line["commit"] for line in results if line["stage"] == "make" and line["outcome"] == "ok")
    return ", ".join(f"commit {commit} ({number})" for commit, number in counts.most_common())


def _table(found: BY_KEY, made: Sequence[str]) -> list[str]:
    rows = ["## Every family", "", f"| family | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for family in made:
        cells = [SIGNS[_outcome(found, family, *column)] for column in COLUMNS.values()]
        rows.append(f"| `{family}` | {' | '.join(cells)} |")
    return rows


def _reasons(found: BY_KEY, made: Sequence[str], families: Sequence[str]) -> list[str]:
    rows = ["## What is refused", "", "Of the families that do not train on a backend, the message, shortened.", ""]
    rows += ["| family | backend | why |", "|---|---|---|"]
    for family in made:
        for backend in ("torch", "mlx"):
            line = next(
                (
                    found[key]
                    for stage in FIRST["train"]
                    if found.get(key := (family, stage, backend), {}).get("outcome") == "refused"
                ),
                None,
            )
            if line is not None:
                rows.append(f"| `{family}` | {backend} | {_plain(line)} |")
    if missing := [family for family in families if family not in made]:
        rows += [
            "",
            "## Not made",
            "",
            "Families of which the script makes no tiny model, so that nothing is known of them here:",
            "",
        ]
        rows += [f"- `{family}`: {_plain(found[family, 'make', 'both'])}" for family in missing]
    return [*rows, ""]


def _faults(faulty: Sequence[Line]) -> list[str]:
    rows = ["## Faults", "", *([] if faulty else ["None."])]
    if faulty:
        rows += ["| family | stage | backend | fault |", "|---|---|---|---|"]
    return rows + [
        f"| `{line['family']}` | {line['stage']} | {line['backend']} | {line['outcome']}: {_plain(line)} |"
        for line in sorted(faulty, key=lambda line: (line["family"], line["stage"]))
    ]


def _plain(line: Line) -> str:
    """Return the reason as one cell of a table: without paths of this machine."""
    why = str(line.get("why", ""))
    words = [word.rsplit("/", 1)[-1] if word.startswith("/") else word for word in why.split()]
    text = " ".join(words).replace("model.name: model: ", "").replace("model: ", "", 1)
    text = re.sub(r"/\S*/(?=\w+/model\b)", "", text)  # where this machine keeps what it measures
    for sign in "|<>[]*_`":
        text = text.replace(sign, f"\\{sign}")
    return f"{line['error']}: {text[:200]}" if line.get("error") and line["outcome"] == "CRASH" else text[:200]
