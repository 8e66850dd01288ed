"""Training speed against peers: TRL, a Hugging Face + PEFT loop, LLaMA-Factory, axolotl, Unsloth, mlx-lm.

    python benchmarks/peers.py --make-envs [--envs build/peers] [--peers trl,unsloth]
    python benchmarks/peers.py --shared ../shared [--platform cpu|cuda|mlx] [--shape NAME] [--dtype float32]
                               [--peers a,b] [--pairs 5] [--parts defaults,packed,best,dropout]

Every side is the real program in a fresh process and a separate environment: `dualtune train` with a config, the
trainer of TRL, of LLaMA-Factory and so on. All have the same base weights (random, in a named shape, or those of
SmolLM2-135M-Instruct: --shape smollm2-135m-instruct), initial adapter
(rank 16 on seven modules), documents and tokens in every step, AdamW, learning rate and clipping. So the losses must
agree, and the gap between them is reported.

defaults   dualtune against the peer at its defaults
packed     against TRL's and LLaMA-Factory's rows without padding
best       against the peer's fastest settings (peers_settings.py), chosen in a few steps; the first pair is longer, for
           the loss curves
dropout    dualtune with a dropout of 0.05 against dualtune without

Sides take turns, forth and back, so that a drift of the machine affects both. Only tokens of documents count, not
padding, and `--warmup` steps are left out. Before and after each run, a large matrix product in the dtype of the base
measures what the machine reaches at that time: the utilisation is the share of it. Writes results/peers.json
(peers_no_amx.json on a CPU without AMX, peers_avx2.json without AVX-512), with a table and a plot next to it. Parts
that do not run keep their old result; each has its own date, commit and versions.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import peers_report
import psutil
import record
from peers_inputs import DOCUMENTS_PER_STEP, SEED, SHAPES, WORKLOADS, data_and_steps, make_inputs
from peers_settings import BEST, BEST_IN_FLOAT32, DEFAULTS, PACKED, Settings, environment, make_env, python_of

from dualtune.doctor.bench.measure import peak_flops
from dualtune.engine.backend import Backend, get_backend

ROOT = Path(__file__).parents[1]
SIDES = Path(__file__).with_name("peers_sides.py")
OPTIMIZER = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "max_grad_norm": 1.0}
FIXED = {"defaults": DEFAULTS, "packed": PACKED}
PARTS = (*FIXED, "best", "dropout")
TUNING_STEPS = 3
DROPOUT = 0.05


@dataclass(frozen=True, slots=True)
class Platform:
    shape: str
    dtype: str  # of the base weights
    workloads: tuple[str, ...]
    max_grad_norm: float | None  # mlx-lm clips nothing


PLATFORMS = {
    "cpu": Platform("smollm2-135m", "bfloat16", ("gsm8k",), 1.0),
    "cuda": Platform("tinyllama-1.1b", "bfloat16", ("gsm8k",), 1.0),
    "mlx": Platform("llama-1m", "float32", ("gsm8k-masked", "wikisql"), None),  # on the CPU faster than bfloat16
}


class NotRun(Exception):
    """Why a side gave no figures."""


@dataclass(slots=True)
class Run:
    """One process. Lists have an entry a step."""

    side: str
    losses: list[float]
    step_s: list[float]
    first_step_s: float  # from exec to the end of the first step
    limit_flops: float = 0.0  # a second, that a large matrix product reached before or after the run
    peak_bytes: int = 0  # VmHWM: mapped files included (Linux)
    peak_anonymous_bytes: int = 0
    peak_device_bytes: int = 0
    targets: list[int] = field(default_factory=list)  # as the side counts them, where it says so
    arguments: dict[str, Any] = field(default_factory=dict)

    def per_second(self, counts: Sequence[float], warmup: int) -> float:
        return sum(counts[warmup : len(self.step_s)]) / sum(self.step_s[warmup:])


class Bench:
    """One shape and workload, on one machine."""

    def __init__(self, args: argparse.Namespace, workload: str) -> None:
        self.args = args
        self.platform = PLATFORMS[args.platform]
        self.workload = WORKLOADS[workload]
        self.optimizer = OPTIMIZER | {"max_grad_norm": self.platform.max_grad_norm}
        longest = max(args.steps, args.curve)
        self.dtype = args.dtype or self.platform.dtype
        self.inputs = make_inputs(
            args.work, args.shared, args.shape, self.workload, longest, self.dtype, as_mlx_lm=args.platform == "mlx"
        )
        self.machine = machine_of(args.platform, args.threads)
        in_float32 = args.platform == "cpu" and self.dtype == "float32"
        self.best = BEST_IN_FLOAT32 if in_float32 else BEST[args.platform]

    # --- one process ---

    def ours(self, steps: int, dropout: float = 0.0, name: str = "dualtune") -> Run:
        folder = self._scratch()
        run_dir, config = folder / "run", folder / "config.yaml"
        common, clipping = data_and_steps(self.inputs.rows, self.workload), self.optimizer["max_grad_norm"]
        settings = common | {
            "model": {"name": str(self.inputs.model), "dtype": self.dtype, "quantization": self.args.quantization},
            "adapter": {"init_from": str(self.inputs.adapter), "dropout": dropout},
            "train": common["train"] | {
                "steps": steps, "learning_rate": self.optimizer["lr"], "schedule": "constant", "warmup": 0.0,
                "weight_decay": self.optimizer["weight_decay"], "max_grad_norm": clipping,
            },
            "run": {"dir": str(run_dir), "seed": SEED, "log_every": 1, "eval_every": None, "save_every": None},
        }  # fmt: skip
        config.write_text(json.dumps(settings))  # JSON is YAML
        command = [sys.executable, "-m", "dualtune.cli.main", "train", config, "--platform", self.args.platform]
        command += [word for override in self.args.set for word in ("--set", override)]
        metrics = run_dir / "metrics.jsonl"
        try:
            child = self._run(command, folder, lambda: metrics.exists() and metrics.stat().st_size > 0)
        except NotRun as reason:
            raise SystemExit(f"dualtune failed: {reason}") from None
        rows = [row for line in metrics.read_text().splitlines() if "loss" in (row := json.loads(line))]
        counted = [row["num_targets"] for row in rows]
        assert counted == self.inputs.num_targets[:steps], "the peers have other documents than dualtune"
        # The row of a step is written when the next one is done, which took its own step_s.
        first_step_s = child["seen_s"] - rows[1]["step_s"]
        return Run(
            name, [row["loss"] for row in rows], [row["step_s"] for row in rows], first_step_s,
            child["limit_flops"], child["peak_bytes"], child["peak_anonymous_bytes"], rows[-1]["peak_bytes"],
            counted, settings | {"--set": self.args.set},
        )  # fmt: skip

    def theirs(self, peer: str, settings: Settings, steps: int) -> Run:
        python = python_of(peer, self.args.envs)
        if python is None:
            raise NotRun(f"there is no environment {self.args.envs / peer}; to create it: peers.py --make-envs")
        folder = self._scratch()
        job, result = folder / "job.json", folder / "result.json"
        description = {
            "model": str(self.inputs.model), "adapter": str(self.inputs.adapter),
            "documents": str(self.inputs.documents), "order": self.inputs.order,
            "documents_per_step": DOCUMENTS_PER_STEP, "steps": steps, "seed": SEED, "optimizer": self.optimizer,
            "quantization": self.args.quantization, "device": "cuda" if self.args.platform == "cuda" else "cpu",
            "settings": settings, "scratch": str(folder), "result": str(result),
        }  # fmt: skip
        job.write_text(json.dumps(description))
        child = self._run([python, SIDES, peer, job], folder)
        found = json.loads(result.read_text())
        ends = [child["began_at"], *found["ended_at"]]
        step_s = [end - start for start, end in pairwise(ends)]
        return Run(
            peer, found["losses"], step_s, step_s[0], child["limit_flops"], child["peak_bytes"],
            child["peak_anonymous_bytes"], found["peak_device_bytes"], found["targets"],
            {"versions": found["versions"]} | found["arguments"],
        )  # fmt: skip

    def _scratch(self) -> Path:
        folder = self.args.work / "scratch"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def _run(self, command: list[Any], folder: Path, seen: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """When the process began and when `seen` was first true, and its most memory; NotRun if it fails."""
        variables = environment(self.args.work, self.args.platform, self.args.threads)
        log = folder / "log"
        limit = peak_flops(self.machine, self.dtype)
        most, seen_s, began_at = {"VmHWM": 0, "RssAnon": 0}, 0.0, time.time()
        with (
            log.open("w") as out,
            subprocess.Popen([*map(str, command)], env=variables, stdout=out, stderr=subprocess.STDOUT) as process,
        ):
            while process.poll() is None:
                for name, value in memory_of(process.pid).items():
                    most[name] = max(most[name], value)
                if not seen_s and seen():
                    seen_s = time.time() - began_at
                if time.time() - began_at > self.args.limit:
                    process.kill()
                    raise NotRun(f"took longer than {self.args.limit} s")
                time.sleep(0.02)
        if process.returncode:
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise NotRun(lines[-1] if lines else f"exit status {process.returncode}")
        limit = max(limit, peak_flops(self.machine, self.dtype))
        peaks = {"peak_bytes": most["VmHWM"], "peak_anonymous_bytes": most["RssAnon"]}
        return {"began_at": began_at, "seen_s": seen_s, "limit_flops": limit} | peaks

    # --- pairs ---

    def part(self, peer: str, part: str) -> dict[str, Any]:
        """The figures of one peer at its defaults or best; or the reason why there are none."""
        try:
            settings, tried = self._settings(peer, part)
            first_steps = self.args.curve if part == "best" else self.args.steps
            pairs = self._pairs(lambda steps: self.theirs(peer, settings, steps), first_steps)
        except NotRun as reason:
            return {"not_run": str(reason)}
        return {"settings": settings, "tried": tried} | self._figures(pairs)

    def dropout(self) -> dict[str, Any]:
        name = f"dualtune, dropout {DROPOUT}"
        return self._figures(self._pairs(lambda steps: self.ours(steps, DROPOUT, name), first_steps=self.args.steps))

    def _settings(self, peer: str, part: str) -> tuple[Settings, list[dict[str, Any]]]:
        if part in FIXED:
            return FIXED[part][peer], []
        candidates = self.best[peer]
        candidates = candidates[: self.args.tries]
        if len(candidates) == 1:
            return candidates[0], []
        tried: list[dict[str, Any]] = []
        for settings in candidates:
            try:
                run = self.theirs(peer, settings, TUNING_STEPS)
                tried.append({"settings": settings, "tokens_per_s": run.per_second(self.inputs.num_tokens, 1)})
            except NotRun as reason:
                tried.append({"settings": settings, "tokens_per_s": 0.0, "not_run": str(reason)})
            print(f"  tried {peer}", tried[-1], flush=True)
        fastest = max(tried, key=lambda trial: trial["tokens_per_s"])
        if not fastest["tokens_per_s"]:
            raise NotRun(fastest["not_run"])
        return fastest["settings"], tried

    def _pairs(self, other: Callable[[int], Run], first_steps: int) -> list[tuple[Run, Run]]:
        """(ours, theirs), measured as ours, theirs, theirs, ours, …"""
        pairs: list[tuple[Run, Run]] = []
        for number in range(self.args.pairs):
            turn = [self.ours, other][:: -1 if number % 2 else 1]
            first, second = (side(self.args.steps if number else first_steps) for side in turn)
            pairs.append((second, first) if number % 2 else (first, second))
            speeds = [f"{r.side} {r.per_second(self.inputs.num_tokens, self.args.warmup):.0f}" for r in pairs[-1]]
            print(f"  pair {number + 1}, tokens/s: {', '.join(speeds)}", flush=True)
        return pairs

    def _figures(self, pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
        warmup, inputs = self.args.warmup, self.inputs
        measures: dict[str, Callable[[Run], float]] = {
            "tokens_per_s": lambda run: run.per_second(inputs.num_tokens, warmup),
            "target_tokens_per_s": lambda run: run.per_second(inputs.num_targets, warmup),
            "utilisation": lambda run: run.per_second(inputs.flops, warmup) / run.limit_flops,
            "limit_flops": lambda run: run.limit_flops,
            "first_step_s": lambda run: run.first_step_s,
            "peak_bytes": lambda run: run.peak_bytes,
            "peak_anonymous_bytes": lambda run: run.peak_anonymous_bytes,
            "peak_device_bytes": lambda run: run.peak_device_bytes,
        }
        ours, theirs = pairs[0]
        gaps = [abs(b - a) / a for a, b in zip(ours.losses, theirs.losses, strict=True)]
        more = [counted - made for counted, made in zip(theirs.targets, inputs.num_targets, strict=False)]
        return {
            "threads": self.args.threads,
            "steps": self.args.steps,
            "warmup": warmup,
            **{name: summary(pairs, measure) for name, measure in measures.items()},
            "losses": {run.side: run.losses for run in pairs[0]},
            "worst_loss_gap": max(gaps),
            "losses_agree": max(gaps) <= peers_report.SAME_LOSS,
            "targets_counted_beyond_the_documents": statistics.mean(more) if more else 0,
            "arguments": {run.side: run.arguments for run in pairs[0]},
            "step_s": [{run.side: run.step_s for run in pair} for pair in pairs],
        }


def machine_of(platform: str, threads: int) -> Backend:
    """The backend whose products measure the machine, with as many threads as the sides have."""
    if platform == "mlx":
        return get_backend("mlx")
    import torch

    torch.set_num_threads(threads)
    return get_backend("torch", platform)


def summary(pairs: list[tuple[Run, Run]], measure: Callable[[Run], float]) -> dict[str, Any]:
    """Both sides of each pair, and ours over theirs; None where there is nothing to measure."""
    ours, theirs = zip(*((measure(a), measure(b)) for a, b in pairs), strict=True)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if b]
    return {"ours": list(ours), "theirs": list(theirs), "ratio": spread(ratios) if ratios else None}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def memory_of(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has just ended, or this is no Linux
        return {}
    pairs = (line.split()[:2] for line in lines if line.startswith(("VmHWM:", "RssAnon:")))
    return {name.rstrip(":"): int(kib) * 1024 for name, kib in pairs}


def main() -> None:
    args = parse()
    if args.make_envs:
        for peer in args.peers:
            make_env(peer, args.envs, args.platform)
        return
    name = result_name(args.platform)
    parts = record.runs(name, "parts") if args.record else {}
    measured: dict[str, Any] = {}
    for workload in args.workloads:
        bench = Bench(args, workload)
        variant = [bench.dtype] * (bench.dtype != bench.platform.dtype) + ["nf4"] * (args.quantization == "nf4")
        place = "/".join([args.platform, args.shape, workload, *variant])
        offered = {part: FIXED.get(part, bench.best) for part in args.parts if part != "dropout"}
        wanted = [(peer, part) for peer in args.peers for part in offered if peer in offered[part]]
        for peer, part in wanted + [("dualtune", "dropout")] * ("dropout" in args.parts):
            key = f"{place}/{peer}/{part}"
            print(key, flush=True)
            figures = bench.dropout() if part == "dropout" else bench.part(peer, part)
            measured[key] = parts[key] = record.origin() | without_paths(figures, args)
            if args.record:  # what is measured stays, whatever becomes of the rest
                peers_report.write(parts, record.write(name, {"made_by": "benchmarks/peers.py", "parts": parts}))
    print(peers_report.table(measured))


def result_name(platform: str) -> str:
    """CPUs with AMX, with AVX-512 and with neither have a result each: their products differ so much."""
    units = record.bfloat16_units()
    if platform == "cuda" or units is None or "amx_bf16" in units:  # None: not known of other systems
        return "peers"
    from dualtune_torch.kernels.products import has_avx512

    return "peers_no_amx" if has_avx512() else "peers_avx2"


def without_paths(figures: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The arguments and errors of the sides name folders of this machine."""
    words = json.dumps(figures).replace(str(args.work), "WORK").replace(str(args.envs), "ENVS")
    return json.loads(words.replace(str(args.shared), "SHARED").replace(str(ROOT), "."))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, help="a folder with data/gsm8k, data/wikisql and tokenizers/smollm2")
    parser.add_argument(
        "--envs", type=Path, default=ROOT / "build" / "peers", help="folder with one environment per peer, by name"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "peers-work", help="folder for weights, data and temporary files"
    )
    parser.add_argument("--make-envs", action="store_true", help="only create the environments")
    parser.add_argument("--platform", choices=PLATFORMS, default="cpu")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="dtype of the base weights")
    parser.add_argument("--quantization", choices=("none", "nf4"), default="none")
    parser.add_argument("--peers", help="default: all of the platform")
    parser.add_argument("--workloads", help=f"some of {', '.join(WORKLOADS)}; default: those of the platform")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="steps of each run")
    parser.add_argument("--warmup", type=int, default=2, help="first steps of each run that are not measured")
    parser.add_argument("--curve", type=int, default=50, help="steps of the first pair against a peer's best")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False))
    parser.add_argument("--limit", type=int, default=3600, help="seconds after which a process is stopped")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of dualtune's config"
    )
    parser.add_argument("--tries", type=int, help="try only the first so many of a peer's best settings")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print the table, write nothing")
    args = parser.parse_args()
    args.shape = args.shape or PLATFORMS[args.platform].shape
    args.peers = listed(parser, "peers", args.peers or ",".join(BEST[args.platform]), BEST[args.platform])
    args.parts = listed(parser, "parts", args.parts, PARTS)
    names = args.workloads or ",".join(PLATFORMS[args.platform].workloads)
    args.workloads = listed(parser, "workloads", names, WORKLOADS)
    if not args.make_envs and not (args.shared and (args.shared / "tokenizers").is_dir()):
        parser.error(f"--shared: got {args.shared}, must be a folder with data/ and tokenizers/smollm2")
    if args.dtype == "float32" and args.platform == "cuda":
        parser.error("--dtype: on a GPU all sides train in bfloat16; remove this option")
    if args.warmup >= args.steps or args.steps < 2:
        parser.error(f"--steps: got {args.steps}, must be at least 2 and above --warmup ({args.warmup})")
    args.envs, args.work, args.shared = args.envs.resolve(), args.work.resolve(), args.shared and args.shared.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    return args


def listed(parser: argparse.ArgumentParser, name: str, given: str, allowed: Any) -> list[str]:
    names = given.split(",")
    if unknown := [item for item in names if item not in allowed]:
        parser.error(f"--{name}: got {unknown[0]!r}, allowed: {', '.join(allowed)}")
    return names


if __name__ == "__main__":
    main()
