"""`memory.limit` and `memory.checkpointing: auto` in a run: refused or decided by the plan, enforced, and recorded."""

import json

import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.machine import Budget
from dualtune.engine.memory.estimate import padded
from dualtune.engine.memory.shapes import UnknownShape
from dualtune.show.run import run
from dualtune.train import memory
from dualtune.train.prepare import prepare

LIMITED = """if True:
    import sys
    import torch
    from dualtune_torch.kernels.allocator import limit_memory

    def allocate():
        try:
            torch.ones(300_000_000, dtype=torch.uint8)
        except RuntimeError as error:
            return "can't allocate memory" in str(error)
        return False

    with open("/proc/self/status") as status:
        (used,) = (int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    cpu = torch.device("cpu")
    limit_memory(used + 200_000_000, cpu)
    refused = allocate()
    limit_memory(None, cpu)
    print(refused, allocate())
"""


@pytest.fixture
def prepare_with(open_backend, make_config, write_rows, qa_rows):
    def prepare_(backend, **settings):
        overrides = {key.replace("__", "."): value for key, value in settings.items()}
        return prepare(make_config(write_rows(qa_rows), overrides), open_backend(backend))

    return prepare_


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_run_that_exceeds_its_limit_by_plan_is_refused(prepare_with, backend):
    with pytest.raises(ConfigError, match=r"memory.limit: got 150MB, but the run needs an estimated \d+\.\d MiB\. Not"):
        prepare_with(backend, memory__limit="150MB")
    assert prepare_with(backend, memory__limit="900MB").memory.budget.reason == "memory.limit"


def test_a_limit_that_can_only_be_planned_needs_a_plan(prepare_with, monkeypatch):
    """Torch enforces it without one."""

    def shape_from(*args):
        raise UnknownShape("it is a mixture of experts")

    monkeypatch.setattr(memory, "shape_from", shape_from)
    with pytest.raises(ConfigError, match="which mlx can only keep by plan, and there is none: it is a mixture"):
        prepare_with("mlx", memory__limit="900MB")
    found = prepare_with("torch", memory__limit="900MB").memory
    assert found.plan is None and found.lines() == ["memory      not estimated: it is a mixture of experts"]


@pytest.mark.skipif(not memory.Path("/proc/self/status").exists(), reason="RLIMIT_DATA limits memory on Linux only")
def test_an_allocation_beyond_the_limit_fails_and_the_limit_can_be_lifted(python):
    pytest.importorskip("torch")
    done = python("-c", LIMITED)
    assert done.stdout.split() == ["True", "False"], done.stderr


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_auto_recomputes_as_little_as_fits_and_the_run_records_why(
    backend, open_backend, make_config, write_rows, qa_rows, monkeypatch
):
    """The adapter is the same to the bit, and environment.json has the plan."""
    model = open_backend(backend)
    whole = run(make_config(write_rows(qa_rows), {"train.steps": 2}), model)
    has = json.loads((whole.run_dir / "environment.json").read_text())["memory"]["planned_bytes"]
    monkeypatch.setattr(memory, "budget", lambda *args: Budget(has, "a test"))
    tight = run(make_config(write_rows(qa_rows), {"train.steps": 2, "run.dir": whole.run_dir.parent / "tight"}), model)
    files = [result.adapter_dir / "adapter_model.safetensors" for result in (whole, tight)]
    assert files[0].read_bytes() == files[1].read_bytes()
    before, after = (json.loads((result.run_dir / "environment.json").read_text()) for result in (whole, tight))
    assert before["engine"]["checkpointing"] == "none"
    assert before["engine"]["checkpointing_reason"].startswith("auto: everything fits")
    assert after["engine"]["checkpointing"] == "1 of 2 layers are recomputed"
    assert after["engine"]["checkpointing_reason"].startswith("auto: to keep everything takes ")
    assert after["memory"]["available_bytes"] == has
    assert after["memory"]["planned_bytes"] == sum(part["bytes"] for part in after["memory"]["parts"])


EXACT = {"data__eval": 0, "train__steps": 6, "train__tokens_per_step": 4096, "train__documents_per_step": None}


@pytest.mark.parametrize(
    ("settings", "cells"),
    [
        ({"train__micro_batch_tokens": 128}, 128),  # a step has many
        ({"train__documents_per_step": 1}, None),
        ({"train__documents_per_step": 4}, None),
        ({"train__documents_per_step": 4, "data__packing": False}, None),
        ({"train__tokens_per_step": 100}, None),
        ({}, None),  # all documents fit into a step, and are fewer than a micro-batch may have
    ],
)
def test_the_plan_is_made_for_the_tokens_that_the_data_have(prepare_with, settings, cells):
    found = prepare_with("torch", **EXACT | settings)
    largest = max(batch.tokens_BT.size for step in range(6) for batch in found.batches(step))
    planned = found.memory.plan.ask.micro_batch_tokens
    assert largest <= planned <= (cells or padded(largest + found.data.longest))
    assert found.memory.plan.ask.max_length == found.data.longest
    assert found.config.train.micro_batch_tokens == settings.get("train__micro_batch_tokens", "auto")


def test_large_evaluations_need_memory_too_but_not_for_a_backward_pass(prepare_with):
    """All 16 documents are evaluated at once, and trained on one by one."""
    small = {"train__documents_per_step": 1, "train__steps": 2}
    without, beside = (prepare_with("torch", data__eval=eval_, **small).memory.plan for eval_ in (0, 0.5))
    assert without.estimate.total_bytes <= beside.estimate.total_bytes
