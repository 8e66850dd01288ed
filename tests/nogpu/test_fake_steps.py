"""Whole steps on a stand-in for a GPU: where tensors are, their dtypes, launches, copies, and that nothing waits.

There are no numbers, so nothing here says that results are right; the same code is compared on the CPU elsewhere.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FAKE = Path(__file__).parent / "fake"
LAUNCHES = Path(__file__).parents[2] / "benchmarks" / "results" / "launches.json"
LAYERS = 30  # of SmolLM2-135M
WORKS = ("micro_batch", "step", "evaluation")

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, to build the stand-in for a GPU"),
    pytest.mark.skipif(sys.platform != "linux", reason="the stand-in is built for Linux"),
]
BUDGET, METHODS = (json.loads(LAUNCHES.read_text())[part] for part in ("torch", "methods"))
# The others, and these, in `make test-long`.
ON_A_PUSH = ("dropout", "dropout, 3 layers", "nf4", "mixture", "dora", "dpo, kto, orpo")
EACH, EACH_METHOD = (
    [pytest.param(shape, marks=() if shape in ON_A_PUSH else pytest.mark.long) for shape in part]
    for part in (BUDGET, METHODS)
)
MOST_KERNELS = 1050  # of SmolLM2-135M with dropout, for a micro-batch of 2,048 tokens, besides matrix products


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    """Counts of the shapes that the selected tests are about."""
    of_this_file = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params["shape"] for item in of_this_file}
    shapes = [shape for shape in BUDGET | METHODS if shape in asked] or ON_A_PUSH
    output = tmp_path_factory.mktemp("fake") / "counts.json"
    # Another test of this process may have trained deterministically, and cuBLAS's variable stays.
    env = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    command = [sys.executable, str(FAKE), *shapes, "--output", str(output)]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    counts = json.loads(output.read_text())
    assert counts["shapes"].keys() == set(shapes) and set(counts["known"]) == BUDGET.keys()
    assert set(counts["methods"]) == METHODS.keys()
    return counts


@pytest.mark.parametrize("shape", EACH)
def test_everything_is_on_the_gpu_and_nothing_waits(found, shape):
    counts = found["shapes"][shape]
    assert counts["devices"] == ["cuda:0"]
    for work in WORKS:
        assert counts[work]["waits"] == {}
    assert counts["micro_batch"]["copies"] == counts["evaluation"]["copies"] == {"inputs.py:to_device": 1}
    assert counts["step"]["copies"] == {}


@pytest.mark.parametrize("shape", EACH)
def test_the_dtypes_are_those_of_the_model(found, shape):
    counts = found["shapes"][shape]
    for work in WORKS:
        assert counts[work]["doubles"] == {}
        if shape != "reference":  # transformers' attention multiplies in float32
            assert counts[work]["product_dtypes"].keys() <= {"bfloat16", "bfloat16 float32"}  # float32: a total


@pytest.mark.parametrize("shape", EACH)
def test_launches_are_those_of_the_budget(found, shape):
    """A change needs a new line, with a reason: `python benchmarks/launches.py --reason "…"`."""
    counts, line = found["shapes"][shape], BUDGET[shape][-1]
    for work in WORKS:
        assert {key: counts[work][key] for key in ("kernels", "products")} == line[work]
    assert line["reason"]


@pytest.mark.parametrize("shape", EACH_METHOD)
def test_no_method_waits_or_launches_more_than_its_budget(found, shape):
    """But for the log-probabilities that a comparison needs on the host, before it knows the weights of its targets."""
    counts, line = found["shapes"][shape], METHODS[shape][-1]
    assert counts["devices"] == ["cuda:0"]
    for work in WORKS:
        assert counts[work]["waits"] == {}
        assert counts[work]["copies"] == ({} if work == "step" else {"inputs.py:to_device": 1})
    works = [work for work in (*WORKS, "logprobs") if work in counts]
    assert {work: {key: counts[work][key] for key in ("kernels", "products")} for work in works} == {
        work: line[work] for work in works
    }
    if "logprobs" in counts:
        assert sum(counts["logprobs"]["waits"].values()) == 1


def test_smollm2_launches_few_kernels(found):
    short, long = (found["shapes"][shape]["micro_batch"]["kernels"] for shape in ("dropout", "dropout, 3 layers"))
    assert short + (LAYERS - 2) * (long - short) <= MOST_KERNELS


def test_a_fault_in_the_hot_path_shows(found):
    faults = found["faults"]
    right = faults.pop("change_nothing")
    assert right["waits"] == right["doubles"] == {}
    assert list(faults["read_a_number"]["waits"]) == ["_local_scalar_dense at engine.py:_loss_of"]
    assert list(faults["copy_pageable_memory"]["waits"]) == ["pageable copy at engine.py:_loss_of"]
    assert "float32" in faults["compute_in_float32"]["product_dtypes"]
    assert faults["compute_in_float64"]["doubles"]
    assert faults["launch_more"]["kernels"] == right["kernels"] + 1


# What torch 2.13 refuses on a GPU if it has to be deterministic (`torch.use_deterministic_algorithms`), of what could
# be in a model of text. The experts of a mixture are then computed without `histc`.
REFUSED = {"histc", "bincount", "put_", "median", "nll_loss2d_forward", "_ctc_loss_backward", "_embedding_bag_backward"}


def test_torch_refuses_nothing_in_a_deterministic_step(found):
    for shape, counts in found["shapes"].items():
        operators = {name for work in WORKS for name in counts[work]["by_operator"]}
        assert operators & REFUSED == ({"histc"} if shape == "mixture" else set()), shape


def test_products_are_exact_in_a_call_and_the_settings_of_the_program_are_back_after_it(found):
    settings, exact = (
        found["settings"],
        {"float32": "highest", "tf32_in_convolutions": False, "reduced": [False, False]},
    )
    before = settings["before"]
    assert all(before[name] != value for name, value in exact.items()) and not before["split_k"]
    for kind in ("ordinary", "deterministic"):
        assert len(settings[kind]["in"]) == 2  # layers
        assert all(at.items() >= exact.items() for at in settings[kind]["in"]), kind
        assert settings[kind]["after"] | {"workspace": None} == before, kind


def test_the_backward_pass_of_attention_is_deterministic_if_asked_for(found):
    for kind, is_on in (("ordinary", False), ("deterministic", True)):
        for at in found["settings"][kind]["in"]:
            assert at["deterministic"] == at["inductor_deterministic"] == is_on
            assert at["workspace"] == (":4096:8" if is_on else None)
            assert at["fills_memory"] is not is_on
