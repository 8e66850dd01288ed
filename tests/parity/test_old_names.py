"""Adapters and checkpoints with other names inside the wrapper around a text model, as older versions wrote them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, FormatError
from dualtune.config import Config
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing.conformance_case import assert_equal, random_adapter
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.adapter import AdapterSpec, modules_of
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.model.formats.naming import rename_modules
from dualtune.model.optimizer import OptimizerSpec
from dualtune.show.run import run
from dualtune.train.generation.inference import load_model
from dualtune.train.prepare import start_of
from dualtune.train.state.checkpoint import Checkpoint, restore
from dualtune.use.chat import load_adapter_set
from dualtune.use.export.merge import load_to_merge

pytestmark = pytest.mark.covering(1)

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

ROOT = Path(__file__).parents[2]
SPEC = AdapterSpec(rank=2, alpha=4.0, dropout=0.0, targets=("all-linear",))
OLD = {"torch": "model.language_model.", "mlx": "language_model.model."}  # what the text model of a wrapper was called
# The files of the first have the names that MLX had, those of the second have neither's.
BASES = {"gemma3": "language_model.model.", "qwen2_vl": "model."}


@pytest.fixture(params=BASES)
def family(request):
    return request.param


@pytest.fixture
def base(family, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from family.make import make

    make(family, tmp_path / "base")
    return tmp_path / "base"


def engine_for(backend, base):
    return backend.load(LoadRequest(base, "float32", "none", "pretrained", SPEC, OptimizerSpec(), seed=0))


def in_old_names(tensors, family, backend):
    names = {module: OLD[backend] + module.removeprefix(BASES[family]) for module in modules_of(tensors)}
    assert all(old.startswith(f"{OLD[backend]}layers.") for old in names.values())
    return rename_modules(tensors, names)


@pytest.fixture
def written(open_backend, base, family, tmp_path):
    """backend -> an adapter directory with the names that it had, and the numbers of the adapter in today's."""

    def write(backend):
        state = random_adapter(engine_for(open_backend("torch"), base).adapter_state())
        old = in_old_names(state, family, backend)
        # Whole paths, as an adapter has them that is not on every layer of a name.
        adapter = Adapter(replace(SPEC, targets=tuple(modules_of(old))), old, str(base))
        write_adapter(tmp_path / f"of-{backend}", adapter)
        return tmp_path / f"of-{backend}", state, adapter

    return write


@pytest.mark.parametrize("here", ["torch", "mlx"])
@pytest.mark.parametrize("there", ["torch", "mlx"])
def test_an_adapter_with_old_names_is_loaded_merged_and_continued(open_backend, base, written, here, there):
    directory, expected, adapter = written(there)
    backend = open_backend(here)
    loaded = load_model(backend, str(base), directory, dtype="float32").engine
    assert_equal(loaded.adapter_state(), expected)
    several = load_adapter_set(backend, str(base), {"old": directory}, dtype="float32")
    several.use("old")
    assert_equal(several.engine.adapter_state(), expected)
    assert_equal(load_to_merge(adapter, base, backend).adapter_state(), expected)
    continued = start_of(Config.model_validate({
        "model": {"name": str(base)}, "adapter": {"init_from": str(directory)}, "data": {"train": "rows.jsonl"},
    }))  # fmt: skip
    assert continued is not None
    assert_equal(continued.tensors, expected)
    assert {*continued.spec.targets} == {*modules_of(expected)}


@pytest.mark.parametrize("here", ["torch", "mlx"])
@pytest.mark.parametrize("there", ["torch", "mlx"])
def test_a_checkpoint_with_old_names_is_restored(open_backend, base, family, tmp_path, here, there):
    engine = engine_for(open_backend(here), base)
    batch = random_batch((9, 12), 64)
    engine.forward_backward(batch, divisor=batch.num_targets)
    engine.optim_step(lr=1e-2, max_grad_norm=1.0)
    adapter, optimizer = engine.adapter_state(), engine.optimizer_state()
    slots = {slot: in_old_names(each, family, there) for slot, each in optimizer.slots.items()}
    old = in_old_names(adapter, family, there)
    other = engine_for(open_backend(here), base)
    restore(other, Checkpoint(tmp_path, 1, old, replace(optimizer, slots=slots), {}))
    assert_equal(other.adapter_state(), adapter)
    for slot, tensors in optimizer.slots.items():
        assert_equal(other.optimizer_state().slots[slot], tensors)
        assert any(np.abs(each).max() > 0 for each in tensors.values())


def test_training_continues_from_an_adapter_with_old_names(open_backend, base, written, tmp_path):
    """The run begins with the adapter's numbers: at a learning rate of nothing it ends with them."""
    directory, expected, _ = written("mlx")
    from family.make import write_data

    write_data(tmp_path / "rows.jsonl")
    config = Config.model_validate({
        "model": {"name": str(base), "dtype": "float32"}, "adapter": {"init_from": str(directory), "dropout": 0.0},
        "data": {"train": str(tmp_path / "rows.jsonl"), "eval": None, "max_length": 64},
        "train": {"documents_per_step": 4, "learning_rate": 1e-30, "weight_decay": 0.0},
        "run": {"dir": str(tmp_path / "run"), "save_every": None, "eval_every": None},
    })  # fmt: skip
    result = run(config, open_backend("torch"))
    found = read_adapter(result.adapter_dir)
    assert found.tensors.keys() == expected.keys()
    assert all(np.allclose(found.tensors[name], x, atol=1e-7) for name, x in expected.items())


def test_names_that_fit_nothing_are_refused(open_backend, base, family, written, tmp_path):
    _, _, adapter = written("torch")
    foreign = rename_modules(adapter.tensors, {m: f"decoder.{m}" for m in modules_of(adapter.tensors)})
    strange = replace(adapter, tensors=foreign, spec=replace(SPEC, targets=("q_proj",)))
    write_adapter(tmp_path / "strange", strange)
    with pytest.raises(ConfigError, match=r"decoder\.model\.language_model\.layers"):
        load_model(open_backend("torch"), str(base), tmp_path / "strange", dtype="float32")


def test_two_names_of_one_layer_are_refused(open_backend, base, family, written, tmp_path):
    _, state, _ = written("torch")
    mixed = state | in_old_names(state, family, "torch")
    write_adapter(tmp_path / "mixed", Adapter(SPEC, mixed, str(base)))
    with pytest.raises(FormatError, match="it mixes the names of several programs"):
        load_model(open_backend("torch"), str(base), tmp_path / "mixed", dtype="float32")
