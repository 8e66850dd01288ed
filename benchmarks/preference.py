"""What preference training does on a real model: SmolLM2-135M-Instruct, right against corrupted WikiSQL queries.

    python benchmarks/preference.py [--shared ../shared] [--arms dpo,orpo,kto] [--seeds 1 2 3] [--threads 1]
    python benchmarks/preference.py --cost [--pairs 4]    # the time of a step of dpo over one of sft on the same tokens
    python benchmarks/preference.py --beside-trl [--envs build/peers] [--pairs 4]    # and beside TRL's DPOTrainer
    python benchmarks/preference.py --table    # writes the table of docs/objectives.md from the recorded result

Each seed first learns the task by sft; the other arms start from that adapter, which is also the reference of dpo and
kto, and learn pairs of other rows. A rejected query is the right one with another column selected, another condition,
or another function, by a fixed rule. Measured on held-out rows: the share of pairs in which the right query is the more
probable one, the objective's own accuracy, and the share of questions that greedy decoding answers exactly.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import page_tables
import psutil
import record
from peers import OPTIMIZER
from peers_inputs import save_adapter
from peers_settings import python_of

from dualtune.config import load_config
from dualtune.data.documents import Data
from dualtune.doctor.bench.intervals import interval
from dualtune.engine.choose import choose, open_backend
from dualtune.model.gguf import model_from_gguf
from dualtune.model.package import fetch_model
from dualtune.train.evaluation import layout_of
from dualtune.train.generation.inference import load_model
from dualtune.train.objectives.comparison import AnswerComparison, evaluate_answers
from dualtune.train.objectives.preference import Cpo
from dualtune.train.prepare import prepare
from dualtune.train.recovery import Recovery
from dualtune.train.start import load_comparison, load_engine
from dualtune.train.step import TrainingStep

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "objectives.md"
SIDES = Path(__file__).with_name("peers_sides.py")
SFT_STEPS, STEPS, ROWS, HELD_OUT = 40, 30, 4, 60
TIMED_STEPS = 4  # of a run beside TRL's
TIMED = {"dpo": ("long pairs", 2), "kto": ("labelled", 4)}  # the rows of steps by themselves, and how many a step has
AT_MOST = {"dpo": 1.6, "prompts once": 1.25}  # times sft on the same tokens; times the share of tokens that are left
START = "sft"
# Of an arm, what its config has besides the common settings. A rate for each kind of objective, found on seed 0.
ARMS: dict[str, dict[str, Any]] = {
    "dpo": {"train": {"objective": "dpo", "learning_rate": 1e-4}},
    "dpo-slow": {"train": {"objective": "dpo", "learning_rate": 3e-5}},
    "rpo": {"train": {"objective": "dpo", "learning_rate": 1e-4}, "preference": {"sft_weight": 1.0}},
    "ipo": {"train": {"objective": "dpo", "learning_rate": 1e-4}, "preference": {"loss": "ipo"}},
    "simpo": {"train": {"objective": "simpo", "learning_rate": 1e-4}},
    "orpo": {"train": {"objective": "orpo", "learning_rate": 5e-4}},
    "kto": {"train": {"objective": "kto", "learning_rate": 1e-4}},
}
_SELECT = re.compile(r"SELECT (?P<what>.+?) FROM (?P<table>\S+)(?: WHERE (?P<where>.+))?")
FUNCTIONS = ("COUNT", "MAX", "MIN", "SUM", "AVG")


def corrupted(query: str, columns: list[str], rng: random.Random) -> str:
    """Return a query like this one that answers another question."""
    match = _SELECT.fullmatch(query)
    assert match is not None, query
    what, where = match["what"], match["where"]
    function = next((name for name in FUNCTIONS if what.startswith(f"{name} ")), None)
    column = what.removeprefix(f"{function} ") if function else what
    kinds = ["column", "function", *(["condition"] if where else [])]
    kind = rng.choice(kinds)
    if kind == "condition":
        conditions = where.split(" AND ")
        name = next((name for name in columns if conditions[0].startswith(f"{name} ")), columns[0])
        other = rng.choice([c for c in columns if c != name] or [column])
        where = " AND ".join([conditions[0].replace(name, other, 1), *conditions[1:]])
    elif kind == "column":
        column = rng.choice([name for name in columns if name != column] or [f"{column} 2"])
    else:
        function = rng.choice([name for name in (None, *FUNCTIONS) if name != function])
    result = f"SELECT {f'{function} ' if function else ''}{column} FROM {match['table']}"
    result = f"{result} WHERE {where}" if where else result
    return corrupted(query, columns, rng) if result == query else result  # another column of the same name


def rows_of(path: Path, start: int, stop: int) -> list[dict[str, str]]:
    """Return rows of WikiSQL as a prompt, its query, and a corrupted one."""
    rows: list[dict[str, str]] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(islice(file, start, stop), start):
            prompt, query = json.loads(line)["text"].split("\nA:")
            columns = re.search(r"columns: (.*)\n", prompt)
            assert columns is not None
            rng = random.Random(number)
            wrong = corrupted(query.strip(), columns[1].split(", "), rng)
            rows.append({"prompt": f"{prompt}\nA:", "chosen": query, "rejected": f" {wrong}"})
    return rows


class Bench:
    """The data, in one folder."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.folder, self.model = folder, model_from_gguf(fetch_model())
        self.backend = open_backend(choose("cpu"))
        wikisql = args.shared / "data" / "wikisql"
        sft, pairs = SFT_STEPS * ROWS, STEPS * ROWS
        train = rows_of(wikisql / "train.jsonl", 0, sft + pairs)
        self.held_out = rows_of(wikisql / "valid.jsonl", 0, HELD_OUT)
        self.files = {
            "sft": self._write("sft", [_answer(row) for row in train[:sft]]),
            "held-out": self._write("held-out", [_answer(row) for row in self.held_out]),
            "held-out pairs": self._write("held-out-pairs", self.held_out),
            "pairs": self._write("pairs", train[sft:]),
            "long pairs": self._write("long-pairs", _with_examples(train[sft:])),
            # Both answers to a half of the prompts: as many answers as the other arms have pairs.
            "labelled": self._write(
                "labelled", [one for row in train[sft : sft + pairs // 2] for one in _labelled(row)]
            ),
            "held-out labelled": self._write("held-out-labelled", [x for row in self.held_out for x in _labelled(row)]),
        }

    def _write(self, name: str, rows: list[dict[str, Any]]) -> Path:
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    def _first(self, name: str, count: int) -> Path:
        """Write the first rows of a file alone: a reference is computed for all rows of the data."""
        lines = self.files[name].read_text(encoding="utf-8").splitlines()
        return self._write(f"first {name}", [json.loads(line) for line in lines[:count]])

    def config(self, arm: str, seed: int) -> dict[str, Any]:
        kind = "labelled" if arm == "kto" else "pairs"
        common: dict[str, dict[str, Any]] = {
            "model": {"name": str(self.model), "dtype": "float32"},
            "adapter": {"dropout": 0.0},
            "data": {"train": str(self.files[kind]), "eval": str(self.files[f"held-out {kind}"]), "max_length": 256,
                     "template": "none"},
            "train": {"steps": STEPS, "documents_per_step": ROWS},
            "run": {"dir": str(self.folder / f"{arm}-{seed}"), "seed": seed, "log_every": 1, "save_every": None,
                    "eval_every": None},
        }  # fmt: skip
        if arm == START:
            own = {"data": {"train": str(self.files["sft"]), "eval": 0},
                   "train": {"steps": SFT_STEPS, "learning_rate": 1e-3}}  # fmt: skip
        else:
            own = ARMS[arm] | {"adapter": {"init_from": str(self._adapter(START, seed))}}
        return {name: common.get(name, {}) | own.get(name, {}) for name in {**common, **own}}

    def _adapter(self, arm: str, seed: int) -> Path:
        return self.folder / f"{arm}-{seed}" / "adapter"

    def run(self, arm: str, seed: int) -> dict[str, Any]:
        """Train an arm, and measure its adapter."""
        config = self.folder / f"{arm}-{seed}.json"
        config.write_text(json.dumps(self.config(arm, seed)))
        self._call(["train", config])
        metrics = (self.folder / f"{arm}-{seed}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in metrics]
        evals = [{k: v for k, v in row.items() if k.startswith("eval_")} for row in rows if "eval_loss" in row]
        steps = [row for row in rows if "loss" in row]
        return {
            "losses": [row["loss"] for row in steps], "evals": evals,
            "seconds_a_step": sorted(row["step_s"] for row in steps)[len(steps) // 2],
        } | self.measure(self._adapter(arm, seed))  # fmt: skip

    def measure(self, adapter: Path | None) -> dict[str, Any]:
        """Return the share of held-out pairs whose right query is more probable, and of questions answered exactly."""
        pairs = load_config(self.config("dpo", 0) | {"adapter": {}})
        pairs = pairs.model_copy(update={"data": pairs.data.model_copy(update={"train": pairs.data.eval, "eval": 0})})
        model = load_model(self.backend, str(self.model), adapter, dtype="float32", template="none")
        documents, _ = Data(pairs).train_and_eval(model.tokenizer)
        recovery = Recovery(None, model.engine, layout_of(pairs))
        plain = AnswerComparison(Cpo(), None, None)  # compares log-probabilities without a reference
        found = evaluate_answers(model.engine, documents, recovery, comparison=plain).metrics
        config = self.folder / "eval.json"
        config.write_text(json.dumps(self.config(START, 1)))
        what = ["--adapter", adapter] if adapter else ["--base"]
        options = ["--data", self.files["held-out"], "--exact-match", "--no-leaks", "--json"]
        result = json.loads(self._call(["eval", config, *what, *options]))
        return {
            "preferred": found["eval_reward_accuracy"], "chosen_logp": found["eval_chosen_logp"],
            "rejected_logp": found["eval_rejected_logp"], "exact": result["exact_match"], "loss": result["loss"],
        }  # fmt: skip

    def cost(self, rounds: int) -> dict[str, Any]:
        """Return the time of a step of an objective with a cached reference over that of sft on both answers.

        By the same engine, in turns, in processor seconds; the first round does not count. The prompts of dpo have
        solved examples before them, so that they are about four times as long as an answer. `ratios`: of micro-batches
        with the prompt in each answer, the same tokens for both; `once`: of those with each prompt once, over sft on
        the same and on the others; the share of tokens that are left; and, `per token`, the share of the time by it.
        """
        settings = self.config("dpo", 0) | {"adapter": {"dropout": 0.0}}
        ratios: dict[str, Any] = {}
        for objective, (name, per_step) in TIMED.items():
            own = self.config(objective, 0)["data"] | {"max_length": 512, "eval": 0}
            own |= {"train": str(self._first(name, (1 + rounds) * per_step))}
            step_of = {"objective": objective, "documents_per_step": per_step}
            config = load_config(settings | {"data": own, "train": step_of})
            prepared = prepare(config, self.backend)
            engine = load_engine(prepared)
            compared = load_comparison(prepared, engine)
            train = prepared.data.train
            assert train.shares, train.why_not_shared
            kinds = [(name, shares) for shares in (False, True) for name in ("sft", objective)]
            seconds: dict[tuple[str, bool], list[float]] = {kind: [] for kind in kinds}
            tokens = {False: 0, True: 0}
            for step in range(1 + rounds):
                for name, shares in kinds:
                    train.shares = shares
                    batches = prepared.batches(step)
                    tokens[shares] += sum(batch.num_computed for batch in batches) if name == objective else 0
                    comparison = None if name == "sft" else compared
                    start = time.process_time()
                    taken = TrainingStep(prepared, engine, step, lambda _: batches, comparison=comparison)  # noqa: B023
                    taken.add_gradients()
                    taken.update()
                    seconds[name, shares].append(time.process_time() - start)

            def over(kind: tuple[str, bool], other: tuple[str, bool]) -> dict[str, Any]:
                pairs = [b / a for a, b in zip(seconds[other][1:], seconds[kind][1:], strict=True)]  # noqa: B023
                return {"ratios": pairs, "median": median(pairs)}

            once, share = (objective, True), tokens[True] / tokens[False]
            twice = over(once, (objective, False))
            ratios[objective] = over((objective, False), ("sft", False)) | {
                "dtype": engine.description.dtype,
                "once": {
                    "over sft on the same": over(once, ("sft", True)), "over sft": over(once, ("sft", False)),
                    "over prompts twice": twice, "tokens": share, "per token": twice["median"] / share,
                },
            }  # fmt: skip
            print(objective, f"{ratios[objective]['median']:.2f}x sft per token (at most {AT_MOST['dpo']}),",
                  f"prompts once: {share:.0%} of the tokens in {twice['median']:.0%} of the time,",
                  f"{twice['median'] / share:.2f}x (at most {AT_MOST['prompts once']})",
                  file=sys.stderr, flush=True)  # fmt: skip
        return ratios

    def beside_trl(self, python: Path, rounds: int) -> dict[str, Any]:
        """Return the time of TRL's steps of dpo over that of ours, and the losses of both, in turns.

        Both with their reference computed before, from the same adapter on the same pairs in the same order, as whole
        runs in processes of their own; the first step of each does not count. Nothing is padded on our side.
        """
        start = save_adapter(self.folder / "start", json.loads((self.model / "config.json").read_text()), 1)
        settings = self.config("dpo", 1) | {"adapter": {"init_from": str(start), "dropout": 0.0}}
        pairs = self._first("pairs", TIMED_STEPS * ROWS)
        settings["data"] |= {"train": str(pairs), "eval": 0}
        settings["train"] = {
            "objective": "dpo", "steps": TIMED_STEPS, "documents_per_step": ROWS, "learning_rate": OPTIMIZER["lr"],
            "schedule": "constant", "warmup": 0.0, "weight_decay": OPTIMIZER["weight_decay"],
            "max_grad_norm": OPTIMIZER["max_grad_norm"],
        }  # fmt: skip
        config, job = self.folder / "timed.json", self.folder / "job.json"
        config.write_text(json.dumps(settings))
        prepared = prepare(load_config(config), self.backend)
        order = [int(i) // 2 for step in range(TIMED_STEPS) for i in prepared.data.order.step(step).documents[::2]]
        job.write_text(json.dumps({
            "model": str(self.model), "adapter": settings["adapter"]["init_from"], "order": order,
            "documents": str(pairs), "documents_per_step": ROWS, "steps": TIMED_STEPS, "seed": 1,
            "optimizer": OPTIMIZER, "quantization": "none", "device": "cpu", "scratch": str(self.folder),
            "result": str(self.folder / "trl.json"),
            "settings": {"model": {"dtype": "float32"}, "arguments": {"bf16": False, "gradient_checkpointing": False}},
        }))  # fmt: skip
        ratios: list[float] = []
        steps: list[dict[str, Any]] = []
        theirs: dict[str, Any] = {}
        for _ in range(rounds):
            self._call(
                ["train", config, "--resume", "never", "--set", f"run.dir={tempfile.mkdtemp(dir=self.folder)}/run"]
            )
            newest = max(self.folder.glob("*/run/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
            steps = [row for row in map(json.loads, newest.read_text().splitlines()) if "loss" in row]
            subprocess.run([python, SIDES, "trl_dpo", job], check=True, stdout=sys.stderr)
            theirs = json.loads((self.folder / "trl.json").read_text())
            seconds = [b - a for a, b in zip(theirs["ended_at"], theirs["ended_at"][1:], strict=False)]
            ratios.append(sum(seconds) / sum(row["step_s"] for row in steps[1:]))
            print("trl / dualtune", ratios[-1], file=sys.stderr, flush=True)
        return {
            "ratios": ratios, "median": median(ratios),
            "losses": {"dualtune": [row["loss"] for row in steps], "trl": theirs["losses"]},
            "trl": {key: theirs[key] for key in ("arguments", "versions")},
        }  # fmt: skip

    def _call(self, command: list[Any]) -> str:
        words = [sys.executable, "-m", "dualtune.cli.main", *map(str, command), "--platform", "cpu"]
        return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def _with_examples(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows with the one before it, solved, before each prompt."""
    return [
        row | {"prompt": f"{before['prompt']}{before['chosen']}\n\n{row['prompt']}"}
        for before, row in zip([rows[-1], *rows], rows, strict=False)
    ]


def _answer(row: Mapping[str, str]) -> dict[str, str]:
    return {"prompt": row["prompt"], "completion": row["chosen"]}


def _labelled(row: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"} for name in ("chosen", "rejected")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False))
    parser.add_argument(
        "--rate", type=float, help="the learning rate of all arms, to look for one; nothing is recorded"
    )
    parser.add_argument("--cost", action="store_true", help="measure the time of steps instead")
    parser.add_argument("--beside-trl", action="store_true", help="measure the time of TRL's steps too")
    parser.add_argument("--envs", type=Path, default=ROOT / "build" / "peers", help="environments of peers.py")
    parser.add_argument("--pairs", type=int, default=4, help="steps of each kind, in turns; with TRL runs")
    parser.add_argument("--table", action="store_true", help="write the table of the recorded result")
    args = parser.parse_args()
    if args.table:
        return print(page_tables.write(PAGE, {"preference": table(record.runs("preference"))}))
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(args, Path(name))
        if args.cost:
            note("cost", bench.cost(args.pairs))
        if args.beside_trl:
            python = python_of("trl", args.envs.resolve())
            if python is None:
                raise SystemExit("trl is not installed; to create its environment: peers.py --make-envs --peers trl")
            note("beside-trl", bench.beside_trl(Path(python), args.pairs))
        if args.cost or args.beside_trl:
            return None
        if args.rate:
            for arm in ARMS:
                ARMS[arm]["train"]["learning_rate"] = args.rate
        elif "base" not in record.runs("preference"):
            note("base", bench.measure(None))
        for seed in args.seeds:
            figures = bench.run(START, seed)  # the adapter that the other arms need, recorded or not
            print(START, seed, _shown(figures), file=sys.stderr, flush=True)
            if not args.rate:
                note(f"{START}/{seed}", figures)
            for arm in args.arms.split(","):
                if args.rate or f"{arm}/{seed}" not in record.runs("preference"):
                    figures = bench.run(arm, seed)
                    print(arm, seed, args.rate or "", _shown(figures), file=sys.stderr, flush=True)
                    if not args.rate:
                        note(f"{arm}/{seed}", figures)
    return None


def _shown(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name not in ("losses",)}


def note(key: str, figures: Mapping[str, Any]) -> None:
    record.add_run("preference", key, dict(figures), steps=STEPS, rows_a_step=ROWS)


def table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the means of each arm over its seeds, each with a 95 % interval."""
    header = ["arm", "seeds", "right query preferred", "the objective's accuracy", "exactly right"]
    base = runs["base"]
    rows = [["base", "", f"{base['preferred']:.1%}", "", f"{base['exact']:.1%}"]]
    for arm in (START, *ARMS):
        mine = [run for key, run in runs.items() if key.startswith(f"{arm}/")]
        if mine:
            accuracies = [run["evals"][-1].get("eval_reward_accuracy") for run in mine if run["evals"]]
            against = _percent(accuracies) if accuracies and None not in accuracies else ""
            rows.append([
                f"`{arm}`", str(len(mine)), _percent([run["preferred"] for run in mine]), against,
                _percent([run["exact"] for run in mine]),
            ])  # fmt: skip
    return page_tables.table(header, rows)


def _percent(values: list[float]) -> str:
    mean = interval(values)
    return f"{mean.mean:.1%}" + ("" if mean.margin is None else f" ± {mean.margin:.1%}")


if __name__ == "__main__":
    main()
