"""Train the same small configs with two versions of dualtune and compare all written numbers bit for bit.

    .venv/bin/python scripts/same_bits.py OLD NEW [--only 'torch-*'] [--jobs 2] [--keep DIR]

OLD and NEW are commits, or directories with a tree of dualtune. The script uses only the command line of each, with its
own code and entry points, so their layouts may differ. It compares

- the adapter: the bytes of its safetensors files, and the values of adapter_config.json that OLD writes;
- every checkpoint: its tensors, by name, and by content where only one version has the name;
- metrics.jsonl: every number except those in NOT_COMPARED;
- a run that resumes in the middle: each version from its own checkpoint, and NEW from the checkpoint of OLD.

It prints one line per config and a summary, and exits with 1 if anything differs or fails. It needs the packages of the
backends, but no GPU and no network. Configs with missing packages are not run, and the summary lists them.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).parents[1]
# Time, throughput and memory.
NOT_COMPARED = {"step_s", "tokens_per_s", "documents_per_min", "peak_bytes", "elapsed_s", "seconds"}
STEPS, MIDDLE = 6, 3
TIMEOUT_S = 900  # of one run: a safety net, far above the slowest run
PACKAGES = {"numpy": (), "cpu": ("torch",), "mlx": ("mlx", "mlx_lm")}


@dataclass(frozen=True)
class Case:
    """A config: its changes to the common settings, and how to run it."""

    name: str
    platform: str
    settings: dict[str, Any] = field(default_factory=dict)
    processes: int = 1
    resumes: bool = False
    packages: tuple[str, ...] = ()
    event: str = ""  # what must happen in the run

    @property
    def missing(self) -> list[str]:
        return [name for name in (*PACKAGES[self.platform], *self.packages) if importlib.util.find_spec(name) is None]


COMMON: dict[str, Any] = {
    "adapter.rank": 4, "adapter.alpha": 8, "adapter.dropout": 0, "data.max_length": 96,
    "data.packing": False, "train.steps": STEPS, "train.documents_per_step": 6, "train.micro_batch_tokens": 4096,
    "train.learning_rate": 1e-2, "train.warmup": 2, "train.max_grad_norm": 1.0, "run.log_every": 1,
    "run.save_every": MIDDLE, "run.eval_every": MIDDLE, "run.keep": 9, "run.seed": 5,
}  # fmt: skip
PACKED = {"data.packing": True}
DROPOUT = {"adapter.dropout": 0.25}
ACCUMULATED = {"train.micro_batch_tokens": 192}  # several micro-batches a step
EVERYTHING = PACKED | DROPOUT | ACCUMULATED
ROLLBACK = {  # a threshold so low that the normal noise of two documents a step is a spike
    "train.steps": 26, "train.documents_per_step": 2, "train.schedule": "constant", "train.learning_rate": 1e-3,
    "guards.on_spike": "rollback", "guards.spike_threshold": 0.5, "guards.restore_best": True,
    "train.max_grad_norm": None, "run.eval_every": 5, "run.save_every": 4,
}  # fmt: skip

CASES = (
    Case("numpy-padded", "numpy", {"train.schedule": "linear", "train.weight_decay": 0.1}),
    Case("numpy-packed-dropout-accumulated", "numpy", EVERYTHING, resumes=True),
    Case("numpy-rollback", "numpy", DROPOUT | ROLLBACK, event="rollback"),
    Case("torch-padded", "cpu", {"train.schedule": "constant", "train.max_grad_norm": None, "data.loss_on": "all"}),
    Case("torch-packed-dropout-accumulated", "cpu", EVERYTHING, resumes=True),
    Case("torch-reference", "cpu", {"model.kernels": "reference"} | EVERYTHING),
    Case("torch-bfloat16", "cpu", {"model.dtype": "bfloat16"} | PACKED),
    Case("torch-nf4", "cpu", {"model.quantization": "nf4"} | EVERYTHING, packages=("bitsandbytes",)),
    Case("torch-affine4", "cpu", {"model.quantization": "affine4"} | EVERYTHING),
    Case("torch-two-processes", "cpu", EVERYTHING, processes=2),
    Case("mlx-padded", "mlx", {"train.schedule": "linear", "train.max_grad_norm": 0.1}),
    Case("mlx-packed-dropout-accumulated", "mlx", EVERYTHING, resumes=True),
    Case("mlx-reference", "mlx", {"model.kernels": "reference"} | EVERYTHING),
    Case("mlx-affine4", "mlx", {"model.quantization": "affine4"} | EVERYTHING),
)


# --- the two versions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """A version of dualtune that runs with its own code, not with an installed one."""

    name: str
    path: Path
    environment: dict[str, str]

    def dualtune(self, *words: str) -> str:
        """Run `dualtune WORDS` and return its standard output. Raises RuntimeError if it fails."""
        command = [sys.executable, "-m", "dualtune", *words]
        done = subprocess.run(command, env=self.environment, cwd=self.path, capture_output=True, timeout=TIMEOUT_S)
        if done.returncode:
            output = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines()
            raise RuntimeError(f"{self.name}: exit {done.returncode}: {' | '.join(output[-3:])}")
        return done.stdout.decode()


def open_tree(name: str, given: str, home: Path) -> Tree:
    """Open the tree of a commit, unpacked below `home`, or of a directory, in place."""
    home.mkdir(parents=True)
    path = Path(given).resolve()
    if not (path / "pyproject.toml").is_file():
        path = home / "tree"
        packed = subprocess.run(["git", "-C", str(ROOT), "archive", given], capture_output=True)
        if packed.returncode:
            sys.exit(f"{given!r} is neither a directory with a tree of dualtune nor a commit: {packed.stderr.decode()}")
        path.mkdir()
        subprocess.run(["tar", "-x", "-C", str(path)], input=packed.stdout, check=True)
    tree = Tree(name, path, _environment(path, home))
    _check_own_code(tree)
    return tree


def _environment(tree: Path, home: Path) -> dict[str, str]:
    """Return variables that make Python find the tree's packages and entry points before installed ones."""
    project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))
    info = home / "metadata" / "dualtune-0.0.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: dualtune\nVersion: 0.0\n")
    groups = project["project"].get("entry-points", {})
    lines = [f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in points.items()) for group, points in groups.items()]
    info.joinpath("entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    roots = [tree / root for root in project["tool"]["hatch"]["build"]["dev-mode-dirs"]]
    own = {
        "PYTHONPATH": os.pathsep.join(map(str, [info.parent, *roots])), "DUALTUNE_CACHE": str(home / "cache"),
        "PYTHONPYCACHEPREFIX": str(home / "bytecode"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    return {**os.environ, **own}


def _check_own_code(tree: Tree) -> None:
    """Exit if Python would import a dualtune that is not the tree's."""
    code = "import dualtune; print(dualtune.__file__)"
    done = subprocess.run([sys.executable, "-c", code], env=tree.environment, cwd=tree.path, capture_output=True)
    found = done.stdout.decode().strip()
    if not found or not Path(found).resolve().is_relative_to(tree.path):
        sys.exit(f"{tree.name}: imports {found or done.stderr.decode()!r}, not {tree.path}")


# --- models, data and runs --------------------------------------------------------------------------------------------


def write_material(home: Path, tree: Path) -> None:
    """Write one config, the data and a model for each engine. Both versions read them."""
    home.mkdir()
    demo = next(path.parent for path in tree.glob("**/model.safetensors") if path.parents[1].name == "demo")
    shutil.copytree(demo, home / "llama")
    _write_softmax(home / "softmax", demo)
    rows = (demo.parent / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (home / "train.jsonl").write_text("".join(rows[:60]), encoding="utf-8")
    (home / "held_out.jsonl").write_text("".join(rows[60:70]), encoding="utf-8")
    data = {"train": str(home / "train.jsonl"), "eval": str(home / "held_out.jsonl")}
    softmax = {"model": {"name": str(home / "softmax")}, "adapter": {"targets": "all-linear"}, "data": data}
    llama = {"model": {"name": str(home / "llama"), "dtype": "float32"}, "data": data}
    for model, config in {"softmax": softmax, "llama": llama}.items():
        (home / f"{model}.yaml").write_text(json.dumps(config), encoding="utf-8")


def _write_softmax(path: Path, demo: Path) -> None:
    """Write a random model for the NumPy engine, with the demo's tokenizer."""
    shutil.copytree(demo, path, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    vocab = json.loads((demo / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    rng = np.random.default_rng(0)
    shapes = {"embedding.weight": (vocab, 8), "mixer.weight": (8, 8), "head.weight": (vocab, 8)}
    weights = {name: rng.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text('{"model_type": "dualtune-softmax"}', encoding="utf-8")


def settings_as_words(settings: Mapping[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def train(tree: Tree, case: Case, material: Path, run: Path, resume: Path | None = None) -> Path:
    """Train into the run directory `run`, from a checkpoint or from the start; returns `run`."""
    config = material / ("softmax.yaml" if case.platform == "numpy" else "llama.yaml")
    verb = ["train"] if case.processes == 1 else ["launch", "--on", "local", "--procs", str(case.processes)]
    words = [verb[0], str(config), *verb[1:], "--platform", case.platform]
    words += settings_as_words(COMMON | case.settings | {"run.dir": str(run)})
    tree.dualtune(*words, "--resume", "never" if resume is None else str(resume))
    return run


# --- the comparison ---------------------------------------------------------------------------------------------------


def differences(old: Path, new: Path) -> Iterator[str]:
    """Yield the differences of two run directories, one line each."""
    yield from _adapter_differences(old / "adapter", new / "adapter")
    steps = [sorted(path.name for path in run.glob("checkpoints/step-*")) for run in (old, new)]
    if steps[0] != steps[1] or not steps[0]:
        yield f"checkpoints: {steps[0]} and {steps[1]}"
    for step in sorted({*steps[0]} & {*steps[1]}):
        yield from _tensor_differences(old / "checkpoints" / step, new / "checkpoints" / step)
    yield from _metric_differences(_numbers(old), _numbers(new))


def _adapter_differences(old: Path, new: Path) -> Iterator[str]:
    names = {path.name for path in (*old.glob("*.safetensors"), *new.glob("*.safetensors"))}
    if not names:
        yield "adapter: no safetensors file"
    for name in sorted(names):
        if not (old / name).is_file() or not (new / name).is_file():
            yield f"adapter/{name}: only one version writes it"
        elif (old / name).read_bytes() != (new / name).read_bytes():
            yield f"adapter/{name}: different bytes"
    configs = [json.loads((path / "adapter_config.json").read_text(encoding="utf-8")) for path in (old, new)]
    for key in configs[0]:
        if configs[0][key] != configs[1].get(key):
            yield f"adapter_config.json: {key} is {configs[0][key]} and {configs[1].get(key)}"


def _tensor_differences(old: Path, new: Path) -> Iterator[str]:
    """Compare tensors by name if both have it; the rest must be the same tensors under other names."""
    left, right = _tensors(old), _tensors(new)
    changed = [name for name in left.keys() & right.keys() if left[name] != right[name]]
    if changed:
        yield f"{old.name}: {len(changed)} of {len(left)} tensors differ, such as {min(changed)}"
    only_left = Counter(left[name] for name in left.keys() - right.keys())
    only_right = Counter(right[name] for name in right.keys() - left.keys())
    if only_left != only_right:
        yield f"{old.name}: different tensors under different names"
    if not left:
        yield f"{old.name}: no tensors"


def _tensors(checkpoint: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Return (dtype, shape, digest) by file/name."""
    found = {}
    for path in sorted(checkpoint.rglob("*.safetensors")):
        for name, tensor in load_file(path).items():
            digest = hashlib.sha256(np.ascontiguousarray(tensor).tobytes()).hexdigest()
            found[f"{path.relative_to(checkpoint)}/{name}"] = (str(tensor.dtype), tensor.shape, digest)
    return found


def _numbers(run: Path) -> list[dict[str, float]]:
    """Return the rows of metrics.jsonl with only the compared numbers. NaN becomes text, so that it equals itself."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {key: repr(value) if value != value else value for key, value in row.items()
         if isinstance(value, int | float) and key not in NOT_COMPARED}
        for row in rows
    ]  # fmt: skip


def _metric_differences(old: list[dict[str, float]], new: list[dict[str, float]]) -> Iterator[str]:
    if not any("loss" in row for row in old):
        yield "metrics: no losses"
    if len(old) != len(new):
        yield f"metrics: {len(old)} and {len(new)} rows"
    changed = [(a, b) for a, b in zip(old, new, strict=False) if a != b]
    if changed:
        before, after = changed[0]
        keys = [key for key in before | after if before.get(key) != after.get(key)]
        values = ", ".join(f"{key} {before.get(key)} and {after.get(key)}" for key in keys[:2])
        yield f"metrics: {len(changed)} rows differ, first at step {before.get('step')}: {values}"


# --- a case -----------------------------------------------------------------------------------------------------------


def compare(case: Case, old: Tree, new: Tree, material: Path, home: Path) -> list[str]:
    """Train a case with both versions. Returns the differences, each with its part of the case."""
    try:
        runs = [train(tree, case, material, home / tree.name) for tree in (old, new)]
        found = list(differences(*runs))
        if f'"event": "{case.event}"' not in (runs[0] / "metrics.jsonl").read_text(encoding="utf-8") and case.event:
            found.append(f"metrics: no event {case.event!r}, which this config tests")
        if case.resumes:
            found += _compare_resumed(case, old, new, material, runs)
    except (RuntimeError, subprocess.TimeoutExpired, OSError, ValueError) as error:
        return [f"failed: {error}"]
    return found


def _compare_resumed(case: Case, old: Tree, new: Tree, material: Path, runs: list[Path]) -> list[str]:
    """Runs that resume in the middle: OLD and NEW from their own checkpoints, and NEW from that of OLD."""
    step = f"checkpoints/step-{MIDDLE:08}"
    plan = {"old": (old, runs[0] / step), "new": (new, runs[1] / step), "new-from-old": (new, runs[0] / step)}
    resumed = {
        name: train(tree, case, material, runs[0].with_name(f"resumed-{name}"), checkpoint)
        for name, (tree, checkpoint) in plan.items()
    }
    found = [f"resumed: {line}" for line in differences(resumed["old"], resumed["new"])]
    found += [f"NEW from OLD's checkpoint: {line}" for line in differences(resumed["old"], resumed["new-from-old"])]
    whole = _adapter_differences(runs[0] / "adapter", resumed["new-from-old"] / "adapter")
    return found + [f"resumed against uninterrupted: {line}" for line in whole]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a commit, or a directory with a tree")
    parser.add_argument("new", help="the same for the other version")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a config, or a pattern of names")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="configs at a time (default: one per core)"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep all written files in this new directory")
    args = parser.parse_args()
    chosen = [case for case in CASES if not args.only or any(fnmatch(case.name, pattern) for pattern in args.only)]
    if not chosen:
        parser.error(f"--only: got {', '.join(args.only)}, allowed: {', '.join(case.name for case in CASES)}")
    if args.keep is not None:
        args.keep.mkdir(parents=True)
        return run(args.old, args.new, chosen, args.jobs, args.keep.resolve())
    with tempfile.TemporaryDirectory(prefix="same-bits-") as home:
        return run(args.old, args.new, chosen, args.jobs, Path(home))


def run(old_name: str, new_name: str, cases: list[Case], jobs: int, home: Path) -> int:
    """Compare the cases and print one line for each when it ends. Returns the exit code."""
    start = time.monotonic()
    old, new = open_tree("old", old_name, home / "trees" / "old"), open_tree("new", new_name, home / "trees" / "new")
    material = home / "material"
    write_material(material, old.path)
    absent = {case.name: case.missing for case in cases if case.missing}
    num_different = 0
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {
            case.name: pool.submit(compare, case, old, new, material, home / "runs" / case.name)
            for case in cases
            if not case.missing
        }
        for name, result in waiting.items():
            found = result.result()
            num_different += bool(found)
            print(f"{name:34} {'DIFFERS' if found else 'same'}", *found, sep="\n    ", flush=True)
    for name, packages in absent.items():
        print(f"{name:34} not run: {', '.join(packages)} is not installed")
    counts = f"{len(waiting) - num_different} the same, {num_different} different, {len(absent)} not run"
    print(f"{old_name} and {new_name}: {counts} ({time.monotonic() - start:.0f} s)")
    return 1 if num_different or not waiting else 0


if __name__ == "__main__":
    sys.exit(main())
