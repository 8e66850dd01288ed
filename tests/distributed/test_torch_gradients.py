"""Two torch processes compute together what one computes alone, whether each holds the whole base or half of it."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
from dualtune.engine.testing.tiny_models import write_tiny_llama

WORKER = Path(__file__).with_name("torch_worker.py")
FAMILIES = Path(__file__).with_name("torch_families.py")
CHOICE = Path(__file__).parents[1] / "torch" / "test_torch_choice.py"
CASES = [*((e, layout) for e in ("data", "full") for layout in ("padded", "packed", "single")),
         ("data", "weighted"), ("reference", "padded"), ("affine4", "padded"), ("int8", "padded"),
         ("tied", "padded"),
         *((e, "padded") for e in ("dora", "pissa", "olora", "merge_for", "merged dora"))]  # fmt: skip


@pytest.fixture(scope="module")
def results(start, tmp_path_factory):
    """{number of processes: [what each has]}."""
    home = tmp_path_factory.mktemp("gradients")
    model = write_tiny_llama(home / "model")
    tied = write_tiny_llama(home / "tied", tie_word_embeddings=True)
    running = start(2, model, tied, home, file=WORKER)
    runpy.run_path(str(WORKER))["main"](model, tied, home)
    for process in running.wait():
        assert process.code == 0, process.output
    return {size: [dict(np.load(home / f"{size}-{rank}.npz")) for rank in range(size)] for size in (1, 2)}


@pytest.mark.parametrize(("engine", "layout"), CASES, ids=map("-".join, CASES))
def test_the_gradient_of_two_is_that_of_one(results, engine, layout):
    (alone,), together = results[1], results[2]
    names = [name for name in alone if name.startswith(f"{engine} {layout}") and "lora_" in name]
    assert len(names) == (42 if "dora" in engine else 28)
    for name in [*names, *(f"{engine} {layout} {what}" for what in ("loss", "norm", "loss after"))]:
        assert np.abs(alone[name]).max() > 1e-3
        np.testing.assert_allclose(together[0][name], alone[name], rtol=1e-6, atol=1e-6, err_msg=name)
    before, after = (alone[f"{engine} {layout} {what}"] for what in ("loss", "loss after"))
    assert after < before - 0.01, "a step down the gradient"


def test_in_bfloat16_they_are_as_near_as_its_rounding(results):
    (alone,), together = results[1], results[2]
    names = [name for name in alone if name.startswith("bfloat16 padded") and "lora_" in name]
    norm = np.sqrt(sum(np.square(alone[name]).sum() for name in names))
    gap = np.sqrt(sum(np.square(alone[name] - together[0][name]).sum() for name in names))
    assert gap < 1e-2 * norm
    assert norm > 0.1


def test_the_share_of_a_process_may_be_nothing(results):
    rows = [part["full single rows"] for part in results[2]]
    assert sorted(rows) == [0, 1]
    assert all(part["full padded rows"] >= 3 for part in results[2])


def test_both_have_the_same_bits(results):
    first, second = results[2]
    for name in first:
        if not name.endswith("rows") and not name.endswith("bytes"):
            assert np.array_equal(first[name], second[name]), name


@pytest.mark.parametrize("engine", ["dora", "pissa", "olora"])
def test_a_start_from_the_base_is_the_same_for_two(results, engine):
    (alone,), together = results[1], results[2]
    names = [name for name in alone if name.startswith(f"{engine} start")]
    assert len(names) == (42 if engine == "dora" else 28)
    assert all(np.array_equal(part[name], alone[name]) for part in together for name in names)


@pytest.mark.parametrize("engine", ["data", "full", "reference", "affine4", "int8", "tied", "pissa", "merged dora"])
def test_a_forward_pass_is_the_same_for_two(results, engine):
    (alone,), together = results[1], results[2]
    np.testing.assert_allclose(together[0][f"{engine} logprobs"], alone[f"{engine} logprobs"], atol=1e-6)


@pytest.mark.parametrize("engine", ["full", "bfloat16", "affine4", "int8", "dora", "pissa", "merge_for"])
def test_each_holds_half_of_a_base_that_is_split(results, engine):
    (alone,), together = results[1], results[2]
    whole = alone[f"{'full' if engine == 'merge_for' else engine} bytes"]  # a whole base has the merges beside it
    for part in together:
        assert whole / 2 <= part[f"{engine} bytes"] < 0.55 * whole
        assert part["data bytes"] == alone["data bytes"]


@pytest.mark.cluster
def test_families_are_computed_alike_whole_and_split(start, tmp_path):
    for process in start(2, CHOICE, tmp_path, file=FAMILIES).wait():
        assert process.code == 0, process.output
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert len(found) == 14
        for family, (whole, split) in found.items():
            assert whole["kernels"] == split["kernels"], family
            assert np.linalg.norm(whole["gradient"]) > 0.1
            np.testing.assert_allclose(split["gradient"], whole["gradient"], rtol=1e-6, atol=1e-6, err_msg=family)


@pytest.mark.cluster
def test_processes_that_torchrun_starts_have_the_same_bits(results, tmp_path, python):
    models = write_tiny_llama(tmp_path / "model"), write_tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    ended = python(*torchrun, WORKER, *models, tmp_path)
    assert ended.returncode == 0, ended.stderr
    for rank, forked in enumerate(results[2]):
        found = dict(np.load(tmp_path / f"2-{rank}.npz"))
        assert found.keys() == forked.keys()
        assert all(np.array_equal(found[name], forked[name]) for name in forked)
