"""`dualtune bench`: real steps on every backend, a result that adds up, traces that can be read, no run directory."""

import json
from importlib.util import find_spec
from statistics import fmean

import pytest

from dualtune.base.text import in_short_time
from dualtune.config.render import example_path

PLATFORMS = {"cpu": "torch", "mlx": "mlx", "numpy": "numpy"}


@pytest.fixture(params=PLATFORMS)
def bench(request, dualtune_main, config_file, tiny_llama, tiny_softmax, tmp_path):
    """Run `dualtune bench` on a platform: the process, and its result where it went well."""
    if find_spec(PLATFORMS[request.param]) is None:
        pytest.skip(f"{request.param} is not installed")
    model = tiny_softmax if request.param == "numpy" else tiny_llama

    def run(*args, **changes):
        config = config_file({"model.name": model, "run.dir": tmp_path / "runs" / "a"} | changes)
        args = (
            "bench",
            config,
            "--platform",
            request.param,
            "--steps",
            2,
            "--warmup",
            1,
            "--out",
            tmp_path / "o",
            *args,
        )
        process = dualtune_main(*args)
        assert process.returncode == 0, process.stderr
        return process, json.loads((tmp_path / "o" / "result.json").read_text())

    run.platform = request.param
    return run


@pytest.fixture(scope="module")
def measurements():
    """By platform: what `bench` gave, and where."""
    return {}


@pytest.fixture
def measured(bench, measurements, tmp_path):
    """One run with the settings above, for all tests that only look at it: process, result, home."""
    if bench.platform not in measurements:
        measurements[bench.platform] = (*bench(), tmp_path)
    return measurements[bench.platform]


def test_the_numbers_add_up(bench, tmp_path):
    process, result = bench("--json")
    assert json.loads(process.stdout) == result
    mean_s = sum(result["step_s"]) / 2
    assert len(result["step_s"]) == 2 and min(result["step_s"]) > 0
    assert 0 < sum(result["phases_s"].values()) <= mean_s * (1 + 1e-9)
    assert result["phases_s"].keys() == {"data", "forward", "backward", "optimizer"}
    assert result["tokens_per_s"] == pytest.approx(result["num_tokens"] / sum(result["step_s"]))
    assert 0 < result["num_targets"] < result["num_tokens"]
    assert 0 < result["fill"] <= 1
    assert 0 < result["peak_bytes"] < result["total_bytes"]
    assert not (tmp_path / "runs").exists()


def test_the_tokens_are_those_of_the_steps_that_training_takes(bench, measured, dualtune_main):
    """After one step of warm-up, the second and the third."""
    _, result, home = measured
    (config,) = home.glob("*.yaml")
    assert dualtune_main("train", config, "--platform", bench.platform).returncode == 0
    rows = [json.loads(line) for line in (home / "runs/a/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "num_tokens" in row][1:3]
    assert result["num_tokens"] == sum(row["num_tokens"] for row in steps)
    assert result["num_targets"] == sum(row["num_targets"] for row in steps)


def test_the_model_flops_are_per_second_what_they_are_per_token(bench, measured):
    _, result, _ = measured
    use, reason = result["utilisation"], result["no_utilisation"]
    if bench.platform == "numpy":
        assert (use, reason) == (None, "its config.json has no num_hidden_layers, or one for each layer")
        return
    assert reason is None
    assert use["flops_per_s"] == pytest.approx(use["flops_per_token"] * result["tokens_per_s"])
    assert use["utilisation"] == pytest.approx(use["flops_per_s"] / use["peak_flops_per_s"])
    engine = result["environment"]["engine"]
    # 4 N for the frozen base and 6 P for the adapter; the rest is attention.
    without_attention = 4 * (engine["num_parameters"] - 262 * 32) + 6 * engine["trainable_parameters"]
    assert 0.98 * without_attention < use["flops_per_token"] < 1.3 * without_attention


def test_the_traces_can_be_read(bench, measured):
    process, result, home = measured
    events = json.loads((home / "o" / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["step"] for event in events if event["name"] == "optimizer"] == [0, 1, 2]
    assert {"load", "step", "data", "micro-batch", "making data", "forward alone"} < {e["name"] for e in events}
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in events)
    shares = result["profile"]["shares"]
    if bench.platform != "cpu":
        assert (result["profile"]["trace"], shares) == (None, {})
        assert f"profile     none: {result['profile']['note']}" in process.stdout
        return
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["matrix products"] > 0
    names = {event.get("name") for event in json.loads((home / "o" / "torch-trace.json").read_text())["traceEvents"]}
    assert "aten::mm" in names


def test_a_person_reads_one_screen(measured):
    process, result, _ = measured
    lines = process.stdout.splitlines()
    assert len(lines) < 40
    heads = {line[:12].rstrip() for line in lines}
    assert {"engine", "start", "steps", "speed", "model FLOPs", "memory", "profile", "written"} <= heads
    assert f"{result['tokens_per_s']:,.0f} tokens/s" in process.stdout
    steps = next(line for line in lines if line.startswith("steps") and "measured after" in line)
    mean, least, most = (in_short_time(s) for s in (fmean(result["step_s"]), *sorted(result["step_s"])))
    assert steps == f"steps       {mean} each ({least} to {most}), 2 measured after 1 warm-up steps"


def test_the_measurement_goes_on_where_the_run_would_end(bench):
    results = [bench(**{"train.steps": steps})[1] for steps in (1, 4)]
    assert len({(result["num_tokens"], result["num_targets"]) for result in results}) == 1


def test_no_weights_are_needed(dualtune_main, config_file, tmp_path, tiny_llama):
    pytest.importorskip("torch")
    model = tmp_path / "shape"
    model.mkdir()
    for file in tiny_llama.iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    config = config_file({"model.name": model, "model.init": "random"})
    options = ("--platform", "cpu", "--steps", 1, "--warmup", 0, "--out", tmp_path / "o")
    assert dualtune_main("bench", config, *options).returncode == 0


def test_a_mixture_of_experts_gets_no_utilisation(dualtune_main, config_file, tmp_path, tiny_llama):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    model = tmp_path / "moe"
    transformers.MixtralConfig(
        vocab_size=262, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4,
    ).save_pretrained(model)  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((tiny_llama / name).read_bytes())
    config = config_file({"model.name": model, "model.init": "random", "adapter.targets": ["q_proj"]})
    options = ("--platform", "cpu", "--steps", 1, "--warmup", 0, "--out", tmp_path / "o")
    process = dualtune_main("bench", config, *options)
    assert process.returncode == 0, process.stderr
    assert "model FLOPs no formula for this model: it is a mixture of experts" in process.stdout
    assert "utilisation" not in process.stdout


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--steps", 0), 2, "0 is not in the range x>=1"),
        (("--set", "model.quantization=nf4"), 2, "model.quantization: got nf4"),
        (("--out", "{file}"), 2, "is a file"),
        (("--out", "{file}/below"), 5, "cannot be created"),
    ],
)
def test_what_cannot_be_done_is_said(dualtune_main, config_file, tmp_path, options, code, message):
    file = tmp_path / "file"
    file.touch()
    options = [str(option).format(file=file) for option in options]
    result = dualtune_main("bench", config_file(), "--platform", "numpy", *options)
    assert (result.returncode, "Error: " in result.stderr) == (code, True)
    assert message in result.stderr


# --- predicted --------------------------------------------------------------------------------------------------------


def test_a_prediction_names_every_part_and_what_bounds_it(dualtune_main):
    result = dualtune_main("bench", example_path("training_config_h100"), "--predict", "h100-80")
    assert result.returncode == 0, result.stderr
    assert "computed from published limits and stated efficiencies, not measured" in result.stdout.splitlines()[0]
    rows = {line[:20].strip(): line.split() for line in result.stdout.splitlines()[3:14]}
    assert rows["base products"][-1] == "compute" and rows["norms and residuals"][-1] == "memory"
    assert {"LoRA products", "attention", "dropout", "unpacking", "head and loss", "optimizer"} <= rows.keys()
    assert "47.0 GiB at the peak, has 79.1 GiB" in result.stdout


def test_a_prediction_as_json_adds_up(dualtune_main, config_file):
    changes = {"model.name": "HuggingFaceTB/SmolLM2-135M", "model.init": "random", "data.packing": True}
    result = dualtune_main("bench", config_file(changes), "--predict", "rtx-4090-24", "--json")
    found = json.loads(result.stdout)
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["step_s"])
    slowest = max(found["device_s"], found["host_s"], found["transfer_s"])
    assert found["step_s"] == pytest.approx(slowest + found["waits_s"])
    assert (found["machine"], found["limits"], found["bound"]) == ("rtx-4090-24", "NVIDIA's data sheet", "launch")
    assert 0 < found["peak_bytes"] < found["available_bytes"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [(("--predict", "h100-81"), 2, "Did you mean 'h100-80'?"),
     (("--predict", "cpu-16"), 2, "allowed: this, h200"),
     (("--predict", "h100-80", "--set", "model.kernels=reference"), 4, "set it to auto"),
     (("--predict", "h100-80", "--set", "model.name=nobody/knows"), 4, "shape is not known")],
)  # fmt: skip
def test_what_cannot_be_predicted_says_why(dualtune_main, arguments, code, words):
    result = dualtune_main("bench", example_path("training_config_h100"), *arguments)
    assert (result.returncode, words in result.stderr) == (code, True), result.stderr


def test_a_measurement_says_why_nothing_is_predicted_beside_it(bench, measured):
    """The model of these tests is so small that nothing is compiled."""
    process, _, _ = measured
    expected = "predicted   nothing: " + {
        "cpu": "no time is predicted for a model of", "mlx": "the backend 'mlx' does not say",
        "numpy": "there is no memory estimate",
    }[bench.platform]  # fmt: skip
    assert expected in process.stdout
