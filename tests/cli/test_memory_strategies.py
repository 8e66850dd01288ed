"""`dualtune memory strategies`: what each strategy of the source documents saves and costs, by formula."""

import json
import re
from pathlib import Path

import pytest

from dualtune.config.render import example_path
from dualtune.engine.strategies import LINKS, moving_s

H100 = example_path("training_config_h100")
# Requirement G05: the strategies for the optimizer's state; G06: those for activations, and the presets.
NAMES = [
    "none", "cpu_offload", "pinned_cpu_offload", "compress_in_place", "drop_and_reinitialize",
    "async_restore, lookahead", "discard_activations", "activations on the host", "streamed layers",
    "preset disabled", "preset conservative, aggressive", "preset maximum",
]  # fmt: skip


@pytest.fixture
def found(dualtune_main):
    def run(*options, config=H100, machine="rtx-4090-24"):
        result = dualtune_main("memory", "strategies", config, "--machine", machine, "--json", *options)
        assert result.returncode == 0, result.stderr
        record = json.loads(result.stdout)
        assert record["links_bytes_per_s"] == list(LINKS) == [12e9, 24e9]
        return {row["name"]: row for row in record["strategies"]}

    return run


def planned(dualtune_main, *settings):
    options = [word for setting in settings for word in ("--set", setting)]
    return json.loads(dualtune_main("plan", H100, "--machine", "rtx-4090-24", "--json", *options).stdout)


def test_each_name_of_the_documents_is_offered_or_refused_with_a_reason(found):
    rows = found()
    assert [*rows] == NAMES
    refused = {name for name, row in rows.items() if row["saved_bytes"] is None}
    assert refused == {NAMES[1], NAMES[4], NAMES[5], NAMES[10]}
    assert all(not rows[name]["settings"] and len(rows[name]["remark"]) > 40 for name in refused)
    assert "convergence suffers" in rows["drop_and_reinitialize"]["remark"]


def test_the_moments_are_moved_out_and_back_over_the_link(found):
    """Two slots of 41.9 million weights in float32. The way back overlaps with a step, which is longer."""
    row = found()["pinned_cpu_offload"]
    num_bytes = 2 * 4 * 41_943_040
    assert row["saved_bytes"] == num_bytes and row["during"] == "a search for a prediction"
    assert row["added_s"] == pytest.approx([num_bytes / 12e9, num_bytes / 24e9])
    assert moving_s(24, 12.0, step_s=0.5) == 2 + 1.5 and moving_s(24, 24.0, step_s=9.0) == 1


def test_what_a_step_saves_and_costs_is_the_difference_of_two_plans(found, dualtune_main):
    none, full = (planned(dualtune_main, f"memory.checkpointing={value}") for value in ("none", "full"))
    row = found()["discard_activations"]
    assert row["saved_bytes"] == none["total_bytes"] - full["total_bytes"] > 1 << 30
    longer = full["prediction"]["step_s"] - none["prediction"]["step_s"]
    assert row["added_s"] == pytest.approx([longer, longer]) and longer > 0


def test_the_maximum_is_all_of_them_and_saves_most(found):
    rows = found()
    steps = [row for name, row in rows.items() if row["during"] == "a step" and not name.startswith("preset")]
    maximum = rows["preset maximum"]
    assert maximum["settings"] == {key: value for row in steps for key, value in row["settings"].items()}
    assert maximum["saved_bytes"] > max(row["saved_bytes"] for row in steps)


def test_a_slow_link_costs_time_where_copies_take_longer_than_the_computation(found):
    """Few tokens, so that a layer is computed before the next one has come."""
    few = [f"--set={key}={value}" for key, value in {
        "train.micro_batch_tokens": 256, "data.max_length": 256, "model.quantization": "none",
        "train.documents_per_step": 1}.items()]  # fmt: skip
    slow, fast = found(*few)["streamed layers"]["added_s"]
    assert slow > 1.9 * fast > 0


@pytest.mark.parametrize(
    ("machine", "config", "options", "refused"),
    [
        ("m4-16", "training_config_m4", [], {"pinned_cpu_offload", "activations on the host"}),
        ("h100-80", "training_config_h100", ["--set", "adapter.method=full", "--set", "model.quantization=none"],
         {"streamed layers"}),
    ],
)  # fmt: skip
def test_what_a_machine_or_a_method_cannot_do_is_said(found, machine, config, options, refused):
    rows = found(*options, config=example_path(config), machine=machine)
    always = {NAMES[1], NAMES[4], NAMES[5], NAMES[10]}
    assert {name for name, row in rows.items() if row["saved_bytes"] is None} == always | refused


@pytest.mark.parametrize(("length", "tokens"), [(4096, 16384), (512, 512)])
def test_the_page_has_the_share_of_memory_that_a_search_takes(dualtune_main, length, tokens):
    """Requirement L04: at most 0.30 with long documents; with one short one the weights dominate."""
    settings = {"data.max_length": length, "train.micro_batch_tokens": tokens, "memory.checkpointing": "none"}
    options = [f"--set={key}={value}" for key, value in settings.items()]
    result = dualtune_main("memory", "strategies", H100, "--machine", "h100-80", "--json", *options)
    shown = f"{json.loads(result.stdout)['search_share']:.2f}"
    page = (Path(__file__).parents[2] / "docs" / "hybrid.md").read_text(encoding="utf-8")
    by_plan = re.search(
        r"takes ([\d.]+) of the peak of a step with 4 documents of 4,096 .* ([\d.]+) with one of 512", page
    )
    assert shown == by_plan[1 if length == 4096 else 2]


def test_the_text_has_a_line_for_each(dualtune_main, wording):
    result = dualtune_main("memory", "strategies", H100, "--machine", "rtx-4090-24")
    assert result.returncode == 0, result.stderr
    offered, _, refused = result.stdout.partition("\n\nnot offered\n")
    refused, _, share = refused.partition("\n\n")
    assert re.fullmatch(r"a search takes 0\.\d\d of the peak of a step with this config\n", share)
    assert len(offered.splitlines()) - 1 + len(refused.splitlines()) == len(NAMES)
    wording(result.stdout)
