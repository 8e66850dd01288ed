"""`dualtune sweep`: what it trains is what `dualtune train` would have trained, however it is stopped and resumed."""

import json
import math
import shutil

import pytest
import yaml

from dualtune.base.errors import OutOfMemory
from dualtune.config import load_config
from dualtune.engine.backend import SharedBase
from dualtune.show.run import run
from dualtune.train.state import lock
from dualtune.train.sweep.sweep import Attempts, CheckedTrial, SweepTrial, why_not_comparable
from dualtune.train.sweep.values import Choices, Range, sampler

pytestmark = pytest.mark.covering(1)


def weights(run_dir):
    return (run_dir / "adapter" / "adapter_model.safetensors").read_bytes()


def names(home):
    return sorted(path.name for path in home.iterdir() if path.is_dir())


def losses(out):
    """The table of the results: name -> (step, loss, state), best first."""
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.split() == ["run", "step", "loss", "state"])
    rows = (line.split(maxsplit=3) for line in lines[first + 1 :])
    found = {}
    for row in rows:
        if len(row) < 4 or "=" not in row[0]:
            break
        found[row[0]] = (int(row[1]), row[2], row[3])
    return found


@pytest.mark.parametrize("platform", ["numpy", "torch", pytest.param("mlx", marks=pytest.mark.long)])
def test_each_run_is_bitwise_what_train_makes_of_its_config(
    platform, sweep, home, config_file, tiny_llama, tiny_softmax, open_backend, tmp_path
):
    backend, model = open_backend(platform), tiny_softmax if platform == "numpy" else tiny_llama
    path = config_file(model, steps=2)
    values = ("--set", "train.learning_rate=1e-3,1e-2", "--set", "adapter.rank=2,3", "--set", "adapter.dropout=0.1")
    result = sweep(*values, platform=platform, config=path)
    assert result.returncode == 0, result.stderr
    assert len(names(home)) == 4
    for rate, rank in ((1e-3, 3), (1e-2, 2)):
        overrides = [f"train.learning_rate={rate}", f"adapter.rank={rank}", "adapter.dropout=0.1"]
        alone = run(load_config(path, [*overrides, f"run.dir={tmp_path / f'alone-{rank}'}"]), backend)
        assert weights(home / f"learning_rate={rate:g},rank={rank}") == weights(alone.run_dir)


def test_the_base_is_loaded_once_and_again_only_where_it_differs(lab_runs):
    shared = SharedBase()
    lab_runs(shared, {"adapter.rank": 2}, {"adapter.rank": 3}, {"adapter.targets": ["q_proj"]})
    assert shared.num_loaded == 1
    lab_runs(shared, {"model.quantization": "int8"}, {"model.quantization": "int8", "adapter.rank": 3})
    assert shared.num_loaded == 2
    lab_runs(shared, {"memory.resident_layers": 1}, {"memory.resident_layers": 1}, {})
    assert shared.num_loaded == 5  # layers that move are not kept, and nothing else beside them


@pytest.mark.parametrize(
    "quantization",
    [pytest.param("nf4", marks=pytest.mark.long), "int8", pytest.param("affine4", marks=pytest.mark.long)],
)
def test_a_quantized_base_is_shared_bitwise(lab_runs, quantization):
    changes = {"model.quantization": quantization, "adapter.targets": ["q_proj", "down_proj"]}
    _, shared = lab_runs(SharedBase(), changes, changes | {"adapter.rank": 3})
    (alone,) = lab_runs(None, changes | {"adapter.rank": 3})
    assert weights(shared) == weights(alone)


@pytest.fixture
def lab_runs(open_backend, make_config, write_rows, qa_rows, tmp_path):
    """Train short runs on torch with a shared base, and return their directories."""
    data, count = write_rows(qa_rows), iter(range(100))

    def train(shared, *changes):
        configs = [
            make_config(data, {"train.steps": 1, "run.dir": tmp_path / f"r{next(count)}"} | one) for one in changes
        ]
        return [run(config, open_backend("torch"), shared_base=shared).run_dir for config in configs]

    return train


def test_the_best_run_comes_first_and_the_page_compares_all(sweep, home):
    result = sweep("--set", "train.learning_rate=1e-4,1e-3,1e-2")
    found = losses(result.stdout)
    assert [*found] == ["learning_rate=0.01", "learning_rate=0.001", "learning_rate=0.0001"]
    evals = {name: last_eval(home / name) for name in found}
    assert found == {n: (8, f"{loss:.4f}", "done") for n, loss in evals.items()}
    assert f"best        {home}/learning_rate=0.01/adapter" in result.stdout
    assert "the best train.learning_rate, 0.01, is the highest that was tried: try higher ones" in result.stdout
    page = (home / "report.html").read_text()
    assert "<h1>3 runs</h1>" in page and page.count("<circle") == 4  # three runs, and a ring around the best


def test_the_best_run_is_named_if_its_page_cannot_be_written(sweep, home):
    args = ("--set", "train.learning_rate=1e-3,1e-2", "--set", "train.steps=2")
    assert sweep(*args).returncode == 0
    (home / "report.html").unlink()
    (home / "report.html").mkdir()
    result = sweep(*args)
    assert result.returncode == 0 and "\nno report   " in result.stdout
    assert f"best        {home}/learning_rate=0.01/adapter" in result.stdout
    (home / "learning_rate=0.01" / "environment.json").write_text("[")
    (home / "report.html").rmdir()
    result = sweep(*args)
    assert f"left out    {home}/learning_rate=0.01/environment.json: not valid JSON" in result.stdout
    assert f"best        {home}/learning_rate=0.01/adapter" in result.stdout


def last_eval(run_dir):
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row["eval_loss"] for row in rows if "eval_loss" in row][-1]


def test_one_learning_rate_is_not_replaced_by_the_default_grid(sweep, home):
    result = sweep("--set", "train.learning_rate = 1e-3")
    assert result.returncode == 2 and "--set train.learning_rate: has one value. Give several" in result.stderr
    assert not home.exists()


def test_without_values_three_learning_rates_are_tried(sweep, home):
    assert sweep().returncode == 0
    assert names(home) == ["learning_rate=0.0002", "learning_rate=0.0005", "learning_rate=0.002"]


def test_options_of_a_key_and_no_file_at_all(dualtune_main, config_file, tmp_path, monkeypatch):
    settings = yaml.safe_load(config_file().read_text())
    monkeypatch.chdir(tmp_path)
    result = dualtune_main(
        "sweep", "--platform", "numpy", "--model", settings["model"]["name"], "--data", settings["data"]["train"],
        "--steps", "2", "--learning-rate", "1e-3,1e-2", "--adapter.rank", "2", "--adapter.targets", "all-linear",
        "--data.max_length", "64", "--train.documents_per_step", "4",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert names(tmp_path / "runs" / "softmax-train-sweep") == ["learning_rate=0.001", "learning_rate=0.01"]


def test_the_same_command_again_trains_nothing(sweep, home):
    first = sweep("--set", "train.learning_rate=1e-3,1e-2")
    before = {path: path.stat().st_mtime_ns for path in home.rglob("metrics.jsonl")}
    again = sweep("--set", "train.learning_rate=1e-3,1e-2")
    assert losses(again.stdout) == losses(first.stdout)
    assert {path: path.stat().st_mtime_ns for path in home.rglob("metrics.jsonl")} == before
    more = sweep("--set", "train.learning_rate=1e-3,1e-2,3e-2")
    assert len(losses(more.stdout)) == 3
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_run_that_began_with_other_values_is_no_run_of_the_sweep(sweep, home):
    """It would be trained with one schedule first and with another one after, and be compared with whole runs."""
    rates = ("--set", "train.learning_rate=1e-3,3e-3,1e-2,3e-2")
    assert sweep(*rates, "--halving").returncode == 0
    before = {path: path.read_bytes() for path in home.rglob("metrics.jsonl")}
    longer = sweep(*rates, "--set", "train.steps=16")
    assert longer.returncode == 2 and "was trained with other values" in longer.stderr
    assert "train.steps  8           16   recorded" in longer.stderr and "another directory: --dir DIR" in longer.stderr
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_run_that_diverges_does_not_end_the_sweep(sweep):
    result = sweep("--set", "train.learning_rate=1e-2,1e30", "--set", "guards.nonfinite_limit=1")
    assert result.returncode == 0
    assert "the sweep continues with the other runs" in result.stdout
    found = losses(result.stdout)
    assert found["learning_rate=0.01"][2] == "done" and found["learning_rate=1e+30"][2] == "failed"
    nothing = sweep("--set", "train.learning_rate=1e30,1e31", "--set", "guards.nonfinite_limit=1")
    assert nothing.returncode == 7 and "no run of this sweep was trained to its end" in nothing.stderr


def test_what_failed_is_not_kept_in_memory(tmp_path, make_config):
    """An exception holds the frames that it has passed, and so the engine."""
    trial = SweepTrial("x", {}, make_config("d", {"run.dir": tmp_path / "x"}))

    def train(trial, pause_after):
        raise OutOfMemory("too large") from RuntimeError("CUDA out of memory")

    attempt = Attempts(train, lambda text: None)
    attempt(trial, "1 of 1")
    assert isinstance(attempt.failure, OutOfMemory) and str(attempt.failure) == "too large"
    assert attempt.failure.__traceback__ is attempt.failure.__cause__ is attempt.failure.__context__ is None


def test_a_wrong_value_is_found_before_anything_is_trained(sweep, home):
    for args, code, words in (
        ("train.warmup=0.1,20", 2, "--set train.warmup: got 20 steps"),
        ("data.max_length=64,2", 3, "Error: max_length=2: "),
    ):
        result = sweep("--set", args)
        assert (result.returncode, words in result.stderr) == (code, True), result.stderr
        assert not home.exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--set", "adapter.rnak=1,2"], "rnak"),
        (["--set", "adapter.rank=4..8"], "a range needs --trials N"),
        (["--set", "adapter.rank=4,8", "--halving", "--trials", "3"], "Leave one out"),
        (["--set", "train.steps=4,8", "--halving"], "have 4 to 8 steps"),
        (["--set", "run.eval_every=2,4", "--halving"], "run.eval_every must be the same"),
        (["--set", "data.eval=0.25,0.5", "--halving"], "they have different held-out rows or tokens"),
        (["--set", "data.eval=0.25,0.5", "--trials", "2"], "they have different held-out rows or tokens"),
        (["--trials", "3"], None),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(sweep, home, args, words):
    result = sweep(*args)
    if words is None:  # three rates are chosen from the default grid
        assert result.returncode == 0
        return
    assert result.returncode == 2 and words in result.stderr and "Traceback" not in result.stderr
    assert not home.exists()


def test_a_directory_that_holds_a_run_is_not_used(sweep, home):
    sweep("--set", "train.learning_rate=1e-3,1e-2")
    result = sweep("--set", "adapter.rank=1,2", "--dir", home / "learning_rate=0.01")
    assert result.returncode == 2 and "is a run directory" in result.stderr


def test_a_dry_run_writes_nothing(sweep, home):
    result = sweep("--set", "train.learning_rate=1e-3,1e-2", "--dry-run")
    assert result.returncode == 0 and "run         learning_rate=0.001, 8 steps" in result.stdout
    assert not home.exists()


def test_runs_that_other_processes_train_are_left_to_them(sweep, home):
    sweep("--set", "train.learning_rate=1e-3,1e-2")
    shutil.rmtree(home / "learning_rate=0.01")
    (home / "learning_rate=0.01").mkdir()
    held = lock.Lock(home / "learning_rate=0.01")
    try:
        result = sweep("--set", "train.learning_rate=1e-3,1e-2")
    finally:
        held.release("failed", "the test is over")
    assert result.returncode == 0 and "left        " in result.stdout
    assert losses(result.stdout)["learning_rate=0.01"][2] == "running"


def test_without_held_out_rows_the_training_loss_counts(sweep):
    result = sweep("--set", "train.learning_rate=1e-4,1e-2", "--set", "data.eval=0")
    assert "compared    by the training loss" in result.stdout
    assert [*losses(result.stdout)] == ["learning_rate=0.01", "learning_rate=0.0001"]


def test_losses_of_different_held_out_rows_are_not_compared(sweep):
    result = sweep("--set", "data.eval=0.25,0.5")
    assert "no run is called best" in result.stdout and "best        " not in result.stdout


def test_losses_of_different_objectives_are_not_compared(make_config, tmp_path):
    """Each β of DPO has a scale of its own. What is trained otherwise to the same evaluation is compared."""

    def reason(*changes):
        trials = [SweepTrial(str(n), {}, make_config("x.jsonl", own)) for n, own in enumerate(changes)]
        return why_not_comparable([CheckedTrial(trial, 8, True, "the same", []) for trial in trials])

    dpo, taught = {"train.objective": "dpo"}, {"train.objective": "distill", "distill.distributions": "x"}
    for changes in (dpo | {"preference.beta": 0.5}, dpo | {"preference.loss": "ipo"}, {"train.objective": "orpo"}, {}):
        assert "their losses are different" in reason(dpo, changes)
    assert reason(dpo, dpo | {"train.learning_rate": 1e-5}) is None
    assert reason({}, {"train.label_smoothing": 0.1}, taught) is None


def test_halving_trains_the_best_to_the_end_bitwise_as_if_alone(sweep, home, config_file, open_backend, tmp_path):
    result = sweep("--set", "train.learning_rate=1e-5,1e-4,1e-3,1e-2", "--halving")
    assert result.returncode == 0, result.stderr
    found = losses(result.stdout)
    assert [(step, state) for step, _, state in found.values()] == [
        (8, "done"), (4, "given up"), (2, "given up"), (2, "given up"),
    ]  # fmt: skip
    assert next(iter(found)) == "learning_rate=0.01"
    alone = run(load_config(config_file(), [f"run.dir={tmp_path / 'alone'}"]), open_backend("numpy"))
    assert weights(home / "learning_rate=0.01") == weights(alone.run_dir)


def test_halving_again_trains_nothing(sweep, home):
    args = ("--set", "train.learning_rate=1e-5,1e-4,1e-3,1e-2", "--halving")
    first = sweep(*args)
    before = {path: path.stat().st_mtime_ns for path in home.rglob("lock")}
    again = sweep(*args)
    assert losses(again.stdout) == losses(first.stdout)
    changed = [path.parent.name for path in before if path.stat().st_mtime_ns != before[path]]
    assert changed == ["learning_rate=0.01"]  # it is asked for its end, and has it


def test_halving_that_is_stopped_resumes_with_the_same_decisions(sweep, home, monkeypatch):
    args = ("--set", "train.learning_rate=1e-5,1e-4,1e-3,1e-2", "--halving")
    whole = losses(sweep(*args).stdout)
    for path in home.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert stopped_after(5, sweep, args, monkeypatch).returncode == 75
    assert losses(sweep(*args).stdout) == whole


def test_a_sweep_that_is_killed_loses_nothing(config_file, home, forked, sweep, tmp_path):
    args = ("--set", "train.learning_rate=1e-3,1e-2", "--set", "run.save_every=3")
    command = ("dualtune", "sweep", config_file(), "--platform", "numpy", *args)
    assert forked(*command, env={"DUALTUNE_FAULT": "step:13"}).returncode == -9  # in the second run
    again = sweep(*args)
    assert again.returncode == 0
    rows = map(json.loads, (home / "learning_rate=0.01" / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if row.get("event") == "resumed"] == [4]  # saved at an evaluation
    whole = sweep(*args, "--dir", tmp_path / "whole")
    assert losses(again.stdout) == losses(whole.stdout)
    for name in names(home):
        assert weights(home / name) == weights(tmp_path / "whole" / name)


def stopped_after(num_starts, sweep, args, monkeypatch):
    """Run a sweep that a signal stops when it begins a run for the sixth time."""
    import dualtune.train.run as module
    from dualtune.base.errors import Preempted

    count, fit = iter(range(100)), module.fit

    def stopping(*given):
        if next(count) == num_starts:
            raise Preempted("Stopped by SIGTERM")
        return fit(*given)

    with monkeypatch.context() as patch:
        patch.setattr(module, "fit", stopping)
        return sweep(*args)


def test_a_sampler_chooses_the_same_again_and_reuses_its_runs(sweep, home):
    pytest.importorskip("optuna")
    args = ("--set", "train.learning_rate=1e-4..1e-1", "--set", "adapter.rank=2,4", "--trials")
    three = losses(sweep(*args, "3").stdout)
    before = {path: path.stat().st_mtime_ns for path in home.rglob("metrics.jsonl")}
    five = losses(sweep(*args, "5").stdout)
    assert three.items() <= five.items() and len(five) == 5
    assert {path: path.stat().st_mtime_ns for path in before} == before
    rates = [yaml.safe_load((home / name / "config.yaml").read_text())["train"]["learning_rate"] for name in five]
    assert all(1e-4 <= rate <= 1e-1 for rate in rates) and len(set(rates)) == 5


def test_a_sampler_may_choose_a_key_that_every_config_needs(dualtune_main, tiny_softmax, write_rows, qa_rows, home):
    pytest.importorskip("optuna")
    options = ("--data", write_rows(qa_rows), "--set", f"model.name={tiny_softmax},{tiny_softmax}/", "--steps", "1")
    options += ("--adapter.targets", "all-linear")
    result = dualtune_main("sweep", *options, "--trials", "2", "--dir", home, "--platform", "numpy")
    assert result.returncode == 0, result.stderr
    assert len(list(home.rglob("metrics.jsonl"))) >= 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_sampler_learns_what_the_runs_have_shown(sweep, monkeypatch):
    """Only of runs that were trained to their end."""
    asked = []

    def sampler(varied, seed):
        def choose(known):
            asked.append([*known])
            return {"train.learning_rate": [1e-3, 1e30, 1e-2][len(known)]}

        return choose

    monkeypatch.setattr("dualtune.train.sweep.sweep.sampler", sampler)
    result = sweep("--set", "train.learning_rate=1e-4..1e31", "--trials", "3", "--set", "guards.nonfinite_limit=1")
    assert result.returncode == 0, result.stderr
    loss = float(losses(result.stdout)["learning_rate=0.001"][1])
    assert [len(known) for known in asked] == [0, 1, 2]
    ((values, first), (_, failed)) = asked[-1]
    assert values == {"train.learning_rate": 1e-3} and failed is None
    assert first == pytest.approx(loss, abs=1e-4)


def test_the_sampler_prefers_values_near_the_best_so_far():
    pytest.importorskip("optuna")
    choose = sampler([Range("a.rate", 1e-5, 1e-1), Choices("a.kind", ("x", ["y"]))], seed=0)
    rates = [10 ** (-5 + 4 * i / 30) for i in range(31)]

    def suggested(best):
        known = [
            ({"a.rate": rate, "a.kind": "x" if i % 2 else ["y"]}, abs(math.log10(rate / best)))
            for i, rate in enumerate(rates)
        ]
        known.append(({"a.rate": best, "a.kind": "x"}, None))  # a run that failed counts for nothing
        found = []
        for _ in range(8):
            found.append(choose(known))
            known.append((found[-1], abs(math.log10(found[-1]["a.rate"] / best))))
        assert {json.dumps(each["a.kind"]) for each in found} <= {'"x"', '["y"]'}
        return [each["a.rate"] for each in found]

    assert sorted(suggested(1e-4))[4] < 1e-3 < sorted(suggested(1e-2))[4]
    assert suggested(1e-4) == suggested(1e-4)
