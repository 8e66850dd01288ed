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
(`scripts/families.py`), `make families FAMILIES="gemma3 qwen3_5"` measures some anew: all else on the page stays, and a
row names each commit at which it was measured. docs/families.md sums it up.

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
    """Return the page as Markdown. Of several results of a stage the last one counts."""
    found = {(line["family"], line["stage"], line["backend"]): line for line in results}
    families = sorted({line["family"] for line in results})
    made = [family for family in families if _outcome(found, family, "make", "both") == "ok"]
    faulty = [line for line in found.values() if line["outcome"] in FAULTS]
    parts = [
        *_summary(found, made),
        "",
        *_table(found, made),
        "",
        *_reasons(found, made, families),
        *_faults(faulty),
    ]
    return "\n".join([HEAD, *parts]).rstrip() + "\n"


def lines_of(page: str) -> list[Line]:
    """Return the results that a page shows. Of a column that sums up several stages, each has the outcome of all."""
    _, table, reasons, *others = re.split(r"^## .*$", page, flags=re.MULTILINE)
    outcomes = {sign: outcome for outcome, sign in SIGNS.items()}
    found: dict[tuple[str, str, str], dict[str, Any]] = {}

    def note(family: str, stage: str, backend: str, **values: str) -> None:
        key = {"family": family, "stage": stage, "backend": backend}
        found[family, stage, backend] = found.get((family, stage, backend), {}) | key | values

    for family, *signs, commit in _cells(table):
        note(family, "make", "both", outcome="ok", commit=commit)
        for (stage, backend), sign in zip(COLUMNS.values(), signs, strict=True):
            for each in FIRST.get(stage, (stage,)):
                note(family, each, backend, outcome=outcomes[sign], commit=commit)
    for family, backend, why in _cells(reasons):
        note(family, "train", backend, shown=why)
    for family, why in re.findall(r"^- `(.+?)`: (.*)$", page, flags=re.MULTILINE):
        note(family, "make", "both", outcome="not made", commit="", shown=why)
    for family, stage, backend, fault in _cells(others[-1]):
        outcome, _, why = fault.partition(": ")
        note(family, stage, backend, outcome=outcome, commit=found[family, "make", "both"]["commit"], shown=why)
    return list(found.values())


def _cells(table: str) -> list[list[str]]:
    """Return the cells of the rows of a table that begin with a family."""
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def _outcome(found: BY_KEY, family: str, stage: str, backend: str) -> str:
    """Return the outcome of a column: that of the first of its stages that is not ok."""
    outcomes = [
        found[family, each, backend]["outcome"] if (family, each, backend) in found else "-"
        for each in FIRST.get(stage, (stage,))
    ]
    return next((each for each in outcomes if each != "ok"), "ok")


def _summary(found: BY_KEY, made: Sequence[str]) -> list[str]:
    packages = ", ".join(f"{name} {version(name)}" for name in ("transformers", "mlx-lm", "torch", "mlx", "peft"))
    rows = [
        f"{len(made)} families, with {packages}.",
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


def _commits(found: BY_KEY, family: str) -> str:
    """Return the commits that the stages of a family ran on."""
    named = (line["commit"] for key, line in found.items() if key[0] == family and line["outcome"] != "-")
    return ", ".join(dict.fromkeys(commit for names in named for commit in names.split(", ")))


def _table(found: BY_KEY, made: Sequence[str]) -> list[str]:
    rows = ["## Every family", "", f"| family | {' | '.join(COLUMNS)} | commit |", "|---" * (len(COLUMNS) + 2) + "|"]
    for family in made:
        cells = [SIGNS[_outcome(found, family, *column)] for column in COLUMNS.values()]
        rows.append(f"| `{family}` | {' | '.join(cells)} | {_commits(found, family)} |")
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
    if "shown" in line:  # on a page
        return line["shown"]
    why = str(line.get("why", ""))
    words = [word.rsplit("/", 1)[-1] if word.startswith("/") else word for word in why.split()]
    text = " ".join(words).replace("model.name: model: ", "").replace("model: ", "", 1)
    text = re.sub(r"/\S*/(?=\w+/model\b)", "", text)  # where this machine keeps what it measures
    for sign in "|<>[]*_`":
        text = text.replace(sign, f"\\{sign}")
    text = text[:200].strip()
    return f"{line['error']}: {text}" if line.get("error") and line["outcome"] == "CRASH" else text
