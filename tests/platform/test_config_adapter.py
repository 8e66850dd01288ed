"""What check-config says of the adapter: its targets against the model, and the adapter that a run starts from."""

import json
from pathlib import Path

import pytest

from dualtune.doctor.check_config import check_config
from dualtune.engine.testing.tiny_models import write_tiny_gpt2
from dualtune.model.adapter import AdapterSpec, init_adapter
from dualtune.model.formats.directory import Adapter, write_adapter

DATA = Path(__file__).parents[2] / "dualtune" / "demo" / "data" / "train.jsonl"


@pytest.fixture
def check(tmp_path):
    """The rows of check-config by their name, of a config that says nothing but the model."""

    def run(model, *overrides):
        path = tmp_path / "config.yaml"
        path.write_text(f"model: {{name: {model}}}\n")
        overrides = [f"data.train={DATA}", f"run.dir={tmp_path / 'run'}", *overrides]
        report = check_config(path, overrides, machine_name="h100-80")
        return {row.name: row for row in report.checks}, report.memory

    return run


@pytest.mark.parametrize(
    ("kind", "name"), [("gpt2", "memory"), ("unheard_of", "targets")], ids=["of a known shape", "by its files"]
)
def test_a_target_that_a_gpt2_lacks_is_answered_with_its_layers_and_the_line_that_works(
    check, tmp_path, kind, name, wording
):
    """As `train` answers them, whether or not there is an estimate for the model."""
    model = write_tiny_gpt2(tmp_path / "gpt2")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    row = check(model, "data.max_length=128", "adapter.targets=[q_proj]")[0][name]
    assert (row.level, row.exit_code) == ("fail", 2)
    wording(row.found)
    assert check(model, "data.max_length=128")[0][name].level == "ok"  # the default, which all-linear replaces
    for targets in ("all-linear", "[c_attn, c_fc]"):
        assert check(model, "data.max_length=128", f"adapter.targets={targets}")[0][name].level == "ok"


def test_a_rank_stabilized_scale_is_shown(check, tmp_path, wording):
    """Its usual alpha is not twice the rank, so nothing is advised."""
    model, targets = write_tiny_gpt2(tmp_path / "gpt2"), "adapter.targets=all-linear"
    settings = ("data.max_length=128", targets, "adapter.rank=16", "adapter.alpha=16")
    row = check(model, *settings, "adapter.scaling=rank_stabilized")[0]["adapter"]
    assert row.level == "ok"
    wording(row.found)
    wording(check(model, *settings)[0]["adapter"].found)


def test_a_run_from_an_adapter_of_another_scaling_is_refused(check, tmp_path, wording):
    model = write_tiny_gpt2(tmp_path / "gpt2")
    tensors = {name: x + 0.01 for name, x in init_adapter({"transformer.h.0.attn.c_attn": (96, 32)}, 4, seed=0).items()}
    spec = AdapterSpec(4, 8.0, 0.0, ("c_attn",), "rank_stabilized")
    write_adapter(tmp_path / "a", Adapter(spec, tensors))
    settings = ("data.max_length=128", f"adapter.init_from={tmp_path / 'a'}")
    assert check(model, *settings)[0]["start"].level == "ok"
    row = check(model, *settings, "adapter.scaling=standard")[0]["start"]
    assert row.level == "fail"
    wording(row.found)


def test_a_run_from_an_adapter_is_reported_and_estimated_with_that_adapter_s_rank(check, tmp_path, wording):
    """Not with the schema's, which the run does not take either."""
    shapes = {
        f"model.layers.{i}.self_attn.{name}": (rows, 4096)
        for i in range(32)
        for name, rows in {"q_proj": 4096, "v_proj": 1024}.items()
    }
    tensors = {name: x + 0.01 for name, x in init_adapter(shapes, 48, seed=0).items()}
    write_adapter(tmp_path / "a", Adapter(AdapterSpec(48, 96.0, 0.0, ("q_proj", "v_proj")), tensors))
    settings = ("mistralai/Mistral-7B-Instruct-v0.3", "model.quantization=nf4", f"adapter.init_from={tmp_path / 'a'}")
    rows, memory = check(*settings)
    wording(rows["start"].found)
    num_weights = 48 * 32 * (4096 + 4096 + 1024 + 4096)
    assert memory.estimate["optimizer"] == 12 * num_weights
    assert rows["disk"].found.endswith(f"{num_weights:,} trainable weights")
    contradicted, _ = check(*settings, "adapter.rank=8")
    assert (contradicted["start"].level, contradicted["start"].exit_code) == ("fail", 2)
    wording(contradicted["start"].found)


def test_what_the_activation_cache_keeps_is_shown_or_why_it_cannot(check, tmp_path, wording):
    model = write_tiny_gpt2(tmp_path / "gpt2", n_layer=4)
    settings = ("data.max_length=128", "train.activation_cache=disk")
    row = check(model, *settings, "adapter.targets=[h.3.attn.c_attn, h.2.mlp.c_fc]")[0]["activation cache"]
    assert row.level == "ok"
    wording(row.found)
    row = check(model, *settings, "adapter.targets=[c_attn]")[0]["activation cache"]
    assert (row.level, row.exit_code) == ("fail", 2)
    wording(row.found)
    assert "activation cache" not in check(model, "data.max_length=128", "adapter.targets=[c_attn]")[0]
