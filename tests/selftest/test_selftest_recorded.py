"""What is shipped for comparison: it is what the script makes, and a changed one fails."""

import json
import shutil

import pytest

from dualtune.base.errors import FormatError
from dualtune.doctor.selftest.correctness import RECORDED, SERIES, compare_recorded, record
from dualtune.engine.testing import tolerances
from dualtune.train.state import checkpoint
from dualtune.train.state.run_dir import CHECKPOINTS

STEP = "step-00000006"


@pytest.fixture
def copied(tmp_path):
    """A copy of what is shipped, to be changed."""
    return shutil.copytree(RECORDED, tmp_path / "recorded")


def changed(copied, change):
    series = json.loads((copied / SERIES).read_text())
    change(series["series"])
    (copied / SERIES).write_text(json.dumps(series))
    return copied


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_this_machine_computes_what_was_recorded(name, site_of):
    found = compare_recorded("float32", site_of(name))
    assert found.level == "ok"
    assert set(found.limits.values()) == {tolerances.RESUMED_LOSS}
    assert {f"{run}, {other}" for run in ("whole", "continued", "adapter") for other in ("torch", "mlx")} == {
        *found.limits
    }


def test_what_is_shipped_is_what_the_script_makes(site_of, tmp_path):
    record({"torch": site_of("torch")}, made := tmp_path / "made")
    found, shipped = (checkpoint.read(place / CHECKPOINTS / STEP) for place in (made, RECORDED))
    assert (found.step, found.adapter.keys()) == (6, shipped.adapter.keys())
    for name, tensor in shipped.adapter.items():
        assert found.adapter[name] == pytest.approx(tensor, abs=1e-4), name
    losses = [json.loads((place / SERIES).read_text())["series"]["torch"]["losses"] for place in (made, RECORDED)]
    assert losses[0] == pytest.approx(losses[1], abs=tolerances.STEP_LOSS)
    assert {path.relative_to(made) for path in made.rglob("*")} == {
        path.relative_to(RECORDED) for path in RECORDED.rglob("*")
    }


def test_what_is_shipped_is_small_and_names_no_directory():
    files = [path for path in RECORDED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 300_000
    assert not [path.name for path in files if path.suffix == ".json" and '"/' in path.read_text()]


def test_other_losses_fail(site_of, copied):
    def change(series):
        series["mlx"]["adapter_loss"] += 1e-3
        series["torch"]["losses"][-1] += 2e-3

    found = compare_recorded("float32", site_of("torch"), changed(copied, change))
    assert found.level == "fail" and "2.0e-03 nats apart" in found.found
    off = {name for name, most in found.limits.items() if found.figures[name] > most}
    assert off == {"whole, torch", "continued, torch", "adapter, mlx"}


def test_a_changed_checkpoint_is_found(site_of, copied):
    file = copied / CHECKPOINTS / STEP / "optimizer_m.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(FormatError, match="sha256 differs"):
        compare_recorded("float32", site_of("torch"), copied)
