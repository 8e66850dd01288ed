"""`dualtune plan`: what it prints for a machine, and its exit code."""

import json
import re

import pytest

from dualtune.config.render import example_path

CONFIGS = {name: example_path(name) for name in ("training_config_h100", "training_config_m4", "rtx_16gb")}


def test_a_plan_has_the_parts_what_is_recomputed_the_time_and_a_verdict(dualtune_main, wording):
    result = dualtune_main("plan", CONFIGS["training_config_h100"], "--machine", "h100-80")
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines() if line]
    names = ["weights", "adapter", "optimizer", "activations", "workspace", "reserve"]
    assert [line[2] for line in lines[1:7]] == names
    assert lines[7][:4] == ["47.0", "GiB", "in", "all"]
    wording(result.stdout)
    (time,) = [line for line in result.stdout.splitlines() if line.startswith("time ")]
    assert re.search(r"GFLOP for each token; about 1\d,\d{3} tokens/s, .*, bound by compute; computed from", time)
    assert "(NVIDIA's data sheet; documents: data.max_length, 4096 tokens for every document" in time
    assert "verdict     it fits" in result.stdout


def test_a_run_that_does_not_fit_gets_the_changes_with_what_each_saves_and_costs(dualtune_main, wording):
    changes = ("memory.checkpointing=none", "data.max_length=2048")
    options = [option for change in changes for option in ("--set", change)]
    result = dualtune_main("plan", CONFIGS["training_config_h100"], "--machine", "rtx-3060-12", *options)
    assert result.returncode == 4
    wording(result.stdout)
    _, rows = result.stdout.split("With all of these it fits:\n")
    first, second = rows.splitlines()
    words = "--set train.micro_batch_tokens=2048 34.8 GiB less 1.00 times the time same result"
    assert " ".join(first.split()) == words
    wording(second)


def test_the_json_of_a_plan_adds_up(dualtune_main):
    result = dualtune_main("plan", CONFIGS["training_config_m4"], "--machine", "m4-16", "--json")
    plan = json.loads(result.stdout)
    assert (result.returncode, plan["fits"]) == (0, True)
    assert plan["total_bytes"] == sum(part["bytes"] for part in plan["parts"]) <= 0.9 * plan["available_bytes"]
    assert plan["checkpointing"].endswith(" of 32 layers are recomputed") and plan["recompute_time"] > 1
    assert {part["phase"] for part in plan["parts"]} == {"always", "forward to backward", "at the peak"}
    assert (plan["flops_per_s"], plan["rate"], plan["changes"]) == (4.3e12, "Apple's figures", [])
    assert plan["prediction"]["what"] == "computed from published limits and stated efficiencies, not measured"
    assert plan["prediction"]["tokens_per_s"] < plan["flops_per_s"] / plan["flops_per_token"]


def test_a_machine_without_published_limits_has_no_predicted_time(dualtune_main):
    result = dualtune_main("plan", CONFIGS["training_config_h100"], "--machine", "rtx-4000-ada-20", "--json")
    plan = json.loads(result.stdout)
    assert (plan["flops_per_s"], plan["rate"]) == (None, "no rate is known for this machine")
    assert plan["prediction"] is None and plan["flops_per_token"] > 1e10


def test_what_a_segment_takes_while_it_is_recomputed_is_at_the_peak(dualtune_main):
    every_four = ("--machine", "h100-80", "--set", "memory.checkpointing={layers: 32, every: 4}")
    result = dualtune_main("plan", CONFIGS["training_config_h100"], *every_four, "--json")
    assert {part["name"]: part["phase"] for part in json.loads(result.stdout)["parts"]} == {
        "weights": "always", "adapter": "always", "optimizer": "always", "activations": "forward to backward",
        "recomputation": "at the peak", "reserve": "always",
    }  # fmt: skip


def test_this_machine_is_measured(dualtune_main, config_file, tiny_llama):
    result = dualtune_main("plan", config_file({"model.name": tiny_llama}), "--platform", "cpu", "--json")
    plan = json.loads(result.stdout)
    assert plan["rate"] == "measured just now" and plan["flops_per_s"] > 1e6 and plan["flops_per_token"] > 1e4


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--machine", "h100-81"), 2, "h100-80"),
        (("--machine", "cpu-16", "--platform", "cuda"), 4, "Plan for another machine with --machine"),
        (("--machine", "h100-80", "--set", "model.name=nobody/knows"), 4, "its shape is not known"),
        (("--machine", "h100-80", "--set", "memory.checkpointing={layers: 99}"), 2, "allowed: 1 to 32, or full"),
        (("--machine", "h100-80", "--set", "memory.limit=10GB", "--set", "memory.checkpointing=none"), 4, "--set"),
    ],
)
def test_what_cannot_be_planned_says_why(dualtune_main, arguments, code, words):
    result = dualtune_main("plan", CONFIGS["training_config_h100"], *arguments)
    assert (result.returncode, words in result.stdout + result.stderr) == (code, True)


def test_a_plan_says_how_long_the_run_takes(dualtune_main):
    """By the steps that the config sets, and by the time of one."""
    options = ("--machine", "h100-80", "--set", "train.steps=2000")
    plan = json.loads(dualtune_main("plan", CONFIGS["training_config_h100"], *options, "--json").stdout)
    assert (plan["num_steps"], plan["load_average"], plan["busy"]) == (2000, None, None)
    assert plan["run_s"] == 2000 * plan["prediction"]["step_s"] > 3600
    text = dualtune_main("plan", CONFIGS["training_config_h100"], *options).stdout
    hours = re.search(r"^run +2,000 steps take about (\d+) h \d\d min$", text, re.M)
    assert int(hours[1]) == int((plan["run_s"] + 30) / 3600)


@pytest.mark.parametrize(("average", "is_busy"), [(0.4, False), (1.1, True)])
def test_a_plan_says_how_busy_this_machine_is(dualtune_main, config_file, tiny_llama, monkeypatch, average, is_busy):
    from dualtune.engine import detect

    monkeypatch.setattr(detect.os, "getloadavg", lambda: (average, 9.0, 9.0))
    monkeypatch.setattr(detect.os, "cpu_count", lambda: 4)
    config = config_file({"model.name": tiny_llama})
    plan = json.loads(dualtune_main("plan", config, "--platform", "cpu", "--json").stdout)
    assert (plan["load_average"], plan["busy"]) == (average, is_busy)
    assert ("the load is 1.1 on 4 CPUs" in dualtune_main("plan", config, "--platform", "cpu").stdout) == is_busy


def test_a_plan_takes_the_lengths_that_the_data_have(dualtune_main, config_file, tiny_llama, write_rows):
    """200 short rows, and one in the middle that may be long: behind the first ones that are looked at."""
    rows = [{"prompt": f"{i}?", "completion": "Yes."} for i in range(200)]
    tokens = {}
    for name, length in (("short", 4), ("long", 300)):
        rows[150] = {"prompt": "150?", "completion": "x" * length}
        data = write_rows(rows, f"{name}.jsonl")
        config = config_file({"model.name": tiny_llama, "data.train": data, "data.max_length": 512, "data.eval": 0})
        parts = json.loads(dualtune_main("plan", config, "--platform", "cpu", "--json").stdout)["parts"]
        (kept,) = [part["formula"] for part in parts if part["name"] == "activations"]
        tokens[name] = int(re.match(r"([\d,]+) tokens", kept)[1].replace(",", ""))
    assert tokens["short"] < 200 < 300 < tokens["long"] < 512
