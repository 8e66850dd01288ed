"""`dualtune bench lora-backward`: the documented shapes, timed where it runs; nothing is said of an absent GPU."""

import json
import statistics

import pytest

pytest.importorskip("torch")

SHAPES = {"b4 s512 h768 r16": (45, 15), "b8 s256 h1024 r32": (85, 22), "b2 s1024 h2048 r16": (120, 28)}


def test_the_documented_shapes_in_json(dualtune_main):
    process = dualtune_main("bench", "lora-backward", "--platform", "cpu", "--rounds", 3, "--json")
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert found["device"] == "cpu"
    shapes = {}
    for result in found["results"]:
        shape = result["shape"]
        name = f"b{shape['batch']} s{shape['tokens']} h{shape['features']} r{shape['rank']}"
        shapes[name] = (shape["promised_cpu_ms"], shape["promised_gpu_ms"])
        assert {name: len(seconds) for name, seconds in result["seconds"].items()} == {"ours": 3, "autograd": 3}
        assert result["ours_ms"] == pytest.approx(1000 * statistics.median(result["seconds"]["ours"]))
        assert result["ratio_to_autograd"] == pytest.approx(result["autograd_ms"] / result["ours_ms"])
        assert result["cpu_ms"] is result["ratio_to_cpu"] is None
    assert shapes == SHAPES


def test_the_table_says_whose_times_these_are(dualtune_main):
    process = dualtune_main("bench", "lora-backward", "--platform", "cpu", "--rounds", 1)
    assert process.returncode == 0, process.stderr
    assert all(name in process.stdout for name in SHAPES)
    assert "These are times of a CPU: there is no NVIDIA GPU here" in process.stdout


def test_a_backend_without_the_function_is_an_error(dualtune_main):
    process = dualtune_main("bench", "lora-backward", "--platform", "numpy")
    assert process.returncode == 2
    assert "the backend 'numpy' has no lora_backward. Use --platform cpu" in process.stderr
