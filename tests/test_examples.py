"""Every example runs and does what it says, on the tiny models that the project makes."""

import csv
import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from dualtune.config import load_config
from dualtune.engine.backend import IGNORE_INDEX
from dualtune.engine.capabilities import check_capabilities
from dualtune.engine.memory.shapes import decoder_of
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.formats.directory import read_adapter

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
CONFIGS = sorted((EXAMPLES / "configs").glob("*.yaml"))
DEMO = ROOT / "dualtune" / "demo"
BACKENDS = ["numpy", "torch", pytest.param("mlx", marks=pytest.mark.slow)]


@pytest.fixture
def example(open_backend, tiny_softmax, write_rows, qa_rows, monkeypatch, tmp_path, capsys):
    """Run an example for three steps as a program in this process, and return what it prints."""

    def run(name: str, backend: str) -> str:
        open_backend(backend)
        monkeypatch.chdir(tmp_path)
        words = ["--platform", "cpu" if backend == "torch" else backend, "--steps", "3"]
        words += ["--out", str(tmp_path / "out")] if name != "custom_objective" else []
        if backend == "numpy":
            words += ["--model", str(tiny_softmax)]
            words += ["--data", str(write_rows(4 * qa_rows))] if name != "custom_data" else []
        monkeypatch.setattr(sys, "argv", [name, *words])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_minimal_loop_learns_and_leaves_an_adapter(example, tmp_path, backend):
    out = example("minimal_loop", backend)
    before, after = (float(re.search(rf"held-out loss {when}: +([\d.]+)", out)[1]) for when in ("before", "after"))
    assert after < before
    adapter = read_adapter(tmp_path / "out")
    assert adapter.spec.rank == 8 and any((array != 0).any() for n, array in adapter.tensors.items() if "lora_B" in n)


def test_the_minimal_loop_is_short_and_uses_each_verb():
    text = (EXAMPLES / "minimal_loop.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    verbs = ["backend.load(", "engine.forward_backward(", "engine.optim_step(", "engine.adapter_state("]
    places = [text.index(verb) for verb in verbs]
    assert places == sorted(places) and "engine.evaluate(" in text


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_custom_objective_falls(example, backend):
    out = example("custom_objective", backend)
    before, after = (float(re.search(rf"focal loss {when}: +([\d.]+)", out)[1]) for when in ("before", "after"))
    assert after < before


def test_the_weights_of_the_custom_objective_are_its_derivative():
    focal = runpy.run_path(str(EXAMPLES / "custom_objective.py"))["focal"]
    batch = random_batch([8, 5], 32)
    rng = np.random.default_rng(0)
    logprobs = np.where(batch.labels_BT == IGNORE_INDEX, 0, -rng.uniform(0.1, 3, batch.labels_BT.shape))
    for at in zip(*np.nonzero(batch.labels_BT != IGNORE_INDEX), strict=True):
        up, down = (logprobs.copy() for _ in range(2))
        up[at] += 1e-6
        down[at] -= 1e-6
        slope = (focal(up, batch)[0] - focal(down, batch)[0]) / 2e-6
        assert focal(logprobs, batch)[1][at] == pytest.approx(-slope, rel=1e-6)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_custom_data_shows_what_is_trained_and_trains_on_it(example, tmp_path, backend):
    out = example("custom_data", backend)
    rows = (tmp_path / "out" / "orders.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(row)["messages"][1]["content"] for row in rows]
    trained = re.search(r"^trained   (.*)$", out, re.M)[1]
    assert any(answer in trained for answer in answers) and "lamps" not in trained
    before, after = map(float, re.search(r"held-out rows: ([\d.]+) before, ([\d.]+) after", out).groups())
    assert after < before


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_the_hook_sees_every_step_and_both_evaluations(example, tmp_path, backend):
    out = example("watch_a_run", backend)
    with (tmp_path / "out" / "losses.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["loss"]] == [1, 2, 3]
    assert [int(row["step"]) for row in rows if row["eval_loss"]] == [0, 3]
    metrics = (tmp_path / "out" / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [row["loss"] for row in map(json.loads, metrics) if "loss" in row]
    assert [float(row["loss"]) for row in rows if row["loss"]] == losses
    assert "verdict: " in out


@pytest.mark.parametrize("backend", ["torch", pytest.param("mlx", marks=pytest.mark.slow)])
def test_the_memory_profile_of_a_tiny_model_holds_its_checks(open_backend, monkeypatch, tmp_path, capsys, backend):
    open_backend(backend)
    monkeypatch.chdir(tmp_path)
    platform = "cpu" if backend == "torch" else backend
    monkeypatch.setattr(sys, "argv", ["profile", "--smoke", "--platform", platform, "--steps", "17"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "memory_profile_validation.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert ended.value.code == 0 and len(re.findall(r"^ok    \w+: ", out, re.M)) == 5 and "FAIL" not in out
    assert re.findall(r"^ +(\d+)  (\w+) +[\d.]+ +[\d.]+ +[-+][\d.]+ +[\d.]+$", out, re.M) == [
        (str(step), "Warmup" if step < 5 else "Full" if step < 15 else "Forward") for step in range(17)
    ]
    assert re.search(r"^Forward +2 ", out, re.M) and "peak " in out
    assert len((tmp_path / "memory_profile.csv").read_text(encoding="utf-8").splitlines()) == 18


def test_the_denoiser_learns_new_figures_and_is_loaded_again(open_backend, monkeypatch, tmp_path, capsys):
    open_backend("torch")
    monkeypatch.setattr(sys, "argv", ["diffusion_block", "--steps", "60", "--out", str(tmp_path / "adapter")])
    runpy.run_path(str(EXAMPLES / "diffusion_block.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "LoRA on 6 layers: 9,216 of 59,842 parameters" in out
    before, after = map(float, re.search(r"triangles: ([\d.]+) before, ([\d.]+) after", out).groups())
    assert after < 0.9 * before and float(re.search(r"loaded from .*: ([\d.]+)", out)[1]) == after


GPT2 = {  # of each example: compute dtype, and whether all layers but the last are recomputed
    "gpt2_small_baseline": ("float32", False), "gpt2_small_memory_optimized": ("bfloat16", True),
    "gpt2_small_hybrid": ("float32", False),
    "gpt2_medium_validation": ("bfloat16", False), "gpt2_1b_validation": ("bfloat16", True),
}  # fmt: skip


ONE = "gpt2_small_memory_optimized"  # for every push: it recomputes, in bfloat16


@pytest.mark.parametrize("name", [ONE, *(pytest.param(each, marks=pytest.mark.long) for each in GPT2 if each != ONE)])
def test_a_tiny_gpt2_is_trained_whole_beside_its_plan(open_backend, forked, tmp_path, name):
    """In a process of its own, because a limit of the memory stays."""
    open_backend("torch")
    done = forked(EXAMPLES / f"{name}.py", "--smoke", "--platform", "cpu", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    dtype, recomputes = GPT2[name]
    (planned,) = re.findall(r"^plan of ([\d,]+) parameters, (\w+), \w+, recomputed: (.*)$", done.stdout, re.M)
    assert planned == ("221,184", dtype, "1 of 2 layers are recomputed" if recomputes else "none")
    assert re.search(r"^step     1  loss  6\.\d+  perplexity +\d+\.\d  grad norm .* ms  peak ", done.stdout, re.M)
    assert re.search(r"^measured peak .* \(the process\), \d+ ms for a step", done.stdout, re.M)
    before, after = map(float, re.search(r"held-out loss ([\d.]+) before, ([\d.]+) after", done.stdout).groups())
    assert after < before and (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.long
def test_each_technique_is_planned_and_measured_alone(open_backend, python, tmp_path):
    open_backend("torch")
    done = python(EXAMPLES / "gpt2_small_memory_optimized.py", "--each", "--smoke", "--platform", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [re.split(r"  +", line.strip()) for line in done.stdout.splitlines()]
    names = ["baseline", "bfloat16", "micro-batches", "8-bit optimizer", "recomputed layers", "all"]
    assert rows[0] == ["technique", "planned", "measured"] and [name for name, *_ in rows[1:]] == names
    assert len({planned for _, planned, _ in rows[1:]}) == len(names)  # each setting reaches the plan


def test_the_sizes_of_gpt2_are_the_published_ones():
    """Of which AdamW in float32 takes 16 bytes a parameter."""
    shared = runpy.run_path(str(EXAMPLES / "gpt2_whole.py"))
    count = {name: decoder_of(shared["model_config"](*size)).num_parameters for name, size in shared["SIZES"].items()}
    millions = {"124M": 124.4, "355M": 354.8, "774M": 774.0, "1.02B": 1024.5, "1.56B": 1557.6}
    assert {name: round(number / 1e6, 1) for name, number in count.items()} == millions


# --- the notebook ---


NOTEBOOK = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))


def test_the_notebook_is_one_without_outputs():
    """The keys that nbformat 4.5 asks for, and nothing left over from somebody's machine."""
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert NOTEBOOK.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", name) for name in ids)
    for cell in NOTEBOOK["cells"]:
        assert {"cell_type", "id", "metadata", "source"} <= cell.keys() and cell["cell_type"] in ("code", "markdown")
        assert all(isinstance(line, str) for line in cell["source"])
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.long
def test_the_notebook_runs_from_top_to_bottom(open_backend, python, tmp_path):
    """Its code cells one after another in one process, as a kernel runs them."""
    open_backend("torch")
    cells = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    (tmp_path / "notebook.py").write_text("\n\n".join(cells), encoding="utf-8")
    result = python("notebook.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "learning" in result.stdout
    before, after = re.findall(r"^answered: (.*)$", result.stdout, re.M)
    assert not before.startswith("{") and json.loads(after)["customer"]


# --- the configs ---


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_passes_check_config(dualtune_main, open_backend, path, tmp_path):
    """With the demo's model and data in place of a download; on the backend that its comments name."""
    backend = "mlx" if path.stem == "mlx_lm_lora" else "torch"
    check_capabilities(open_backend(backend), load_config(path))
    places = {"model.name": DEMO / "model", "data.train": DEMO / "data" / "train.jsonl", "run.dir": tmp_path / "run"}
    overrides = [word for key, place in places.items() for word in ("--set", f"{key}={place}")]
    overrides += ["--set", "data.max_length=256"]
    platform = "mlx" if backend == "mlx" else "cpu"
    result = dualtune_main("check-config", path, "--platform", platform, *overrides)
    assert result.returncode == 0, result.stdout + result.stderr


def test_there_is_a_config_for_users_of_each_tool():
    assert {path.stem.partition("_")[0] for path in CONFIGS} == {"axolotl", "trl", "unsloth", "mlx"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_key_of_a_config_names_the_other_tool_s(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    bare = [line for line in lines if re.match(r"  \w+:", line) and "  # " not in line]
    assert not bare and max(map(len, lines)) <= 120


def test_the_page_lists_every_example():
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = [path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.*")]
    listed = [name for name in files if name.endswith((".py", ".ipynb", ".yaml"))]
    assert listed and all(f"]({name})" in page for name in listed)
