"""The report on an adapter directory. The oracle is NumPy in float64 on matrices that are formed whole."""

import json
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy

from dualtune.cli.adapter import report_text
from dualtune.model.formats.directory import read_adapter, write_adapter
from dualtune.model.inspection import inspect_adapter

Q0 = "model.layers.0.self_attn.q_proj"


def test_the_report_counts_and_measures(dual, make_adapter, deltas):
    report = inspect_adapter(dual)
    assert report.ok and report.hashes_ok is True and report.files_agree is True
    assert (report.layout, report.base_model, report.rank, report.alpha, report.scale) == ("dual", "org/base", 3, 6, 2)
    assert (report.num_modules, report.num_parameters) == (2, 2 * 2 * 3 * 8)
    assert report.file_bytes == {file.name: file.stat().st_size for file in dual.iterdir()}
    norms = [np.linalg.norm(delta) for delta in deltas(make_adapter()).values()]
    [projection] = report.projections
    assert projection.name == "self_attn.q_proj" and projection.num_modules == 2
    assert projection.mean_norm == pytest.approx(np.mean(norms)) and projection.max_norm == pytest.approx(max(norms))


def test_the_report_is_json_and_text(dual):
    report = inspect_adapter(dual)
    table = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert table["ok"] is True and table["targets"] == ["q_proj"] and table["projections"][0]["num_modules"] == 2
    text = report_text(report)
    for expected in ("org/base", "rank        3, alpha 6, scale 2", "hashes ok   yes", "self_attn.q_proj"):
        assert expected in text


def test_the_scaling_is_shown_and_can_be_exchanged(tmp_path, make_adapter, deltas, assert_same_function, dualtune_main):
    """convert --scaling standard is for readers that do not know use_rslora: the same function."""
    adapter = make_adapter(rank=3, alpha=6.0)
    adapter = replace(adapter, spec=replace(adapter.spec, scaling="rank_stabilized"))
    write_adapter(tmp_path / "rs", adapter)
    report = inspect_adapter(tmp_path / "rs")
    assert (report.scaling, report.alpha, report.scale) == ("rank_stabilized", 6.0, 6 / 3**0.5)
    assert "scale 3.4641 (rank-stabilized: alpha / √rank)" in report_text(report)
    done = dualtune_main(
        "adapter", "convert", tmp_path / "rs", tmp_path / "plain", "--to", "dual", "--scaling", "standard"
    )
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "plain" / "adapter_config.json").read_text())
    assert (config["use_rslora"], config["lora_alpha"]) == (False, 10)
    assert_same_function(deltas(read_adapter(tmp_path / "plain")), deltas(adapter))
    said = dualtune_main("adapter", "diff", tmp_path / "rs", tmp_path / "plain")
    assert said.returncode == 0 and "scaling: rank_stabilized in A, standard in B" in said.stdout


def test_the_report_shows_what_reading_refuses(dual):
    file = dual / "adapters.safetensors"
    mlx = safetensors.numpy.load_file(file)
    mlx[f"{Q0}.lora_a"][:] *= 2
    safetensors.numpy.save_file(mlx, file)
    report = inspect_adapter(dual)
    assert not report.ok and report.hashes_ok is False and report.files_agree is False
    assert "hashes ok   NO" in report_text(report) and "PROBLEM: " in report_text(report)


def test_nan_is_reported_and_null_in_json(tmp_path, make_adapter):
    write_adapter(tmp_path / "a", make_adapter(), layout="peft")
    (tmp_path / "a" / "dualtune.json").unlink()
    tensors = make_adapter().tensors
    next(iter(tensors.values()))[0, 0] = np.nan
    safetensors.numpy.save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    report = inspect_adapter(tmp_path / "a")
    assert not report.ok and "NaN" in report.problems[0]
    assert (report.hashes_ok, report.files_agree) == (None, None)
    assert report.to_json()["projections"][0]["mean_norm"] is None


@pytest.mark.parametrize(
    ("layout", "alpha", "flag"),
    [("peft", 20.0, "mlx-lm's default scale"), ("mlx", 48.0, "mlx-lm multiplies by it directly"), ("dual", 6.0, None)],
)
def test_a_suspicious_scale_is_a_hint(tmp_path, layout, alpha, flag, make_adapter):
    write_adapter(tmp_path / "a", make_adapter(alpha=alpha), layout=layout)
    report = inspect_adapter(tmp_path / "a")
    assert report.ok
    assert flag in report.flags[0] if flag else not report.flags
