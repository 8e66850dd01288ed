"""Hidden states below the lowest adapter: the same run with and without a cache of them, and every way it can fail."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, DataError, DiskError
from dualtune.engine.backend import Batch, DeviceInfo
from dualtune.engine.capabilities import check_capabilities
from dualtune.engine.card import Card, Device
from dualtune.engine.testing.tiny_models import write_softmax_model, write_tiny_gpt2
from dualtune.show.run import run, summary
from dualtune.train import activation_cache as store
from dualtune.train.hooks import Hook
from dualtune.train.prepare import prepare
from dualtune.train.run import load_engine

pytestmark = pytest.mark.covering(1)

UPPER = {
    "numpy": ["head"],
    "torch": ["layers.1.self_attn.q_proj", "layers.1.self_attn.v_proj", "layers.1.mlp.down_proj"],
}
UPPER["mlx"] = UPPER["torch"]
CLOSE = {"numpy": 1e-9, "torch": 1e-5, "mlx": 1e-5}
RUN = {"train__steps": 6, "data__eval": 0.25, "run__save_every": 2, "run__eval_every": 3, "adapter__dropout": 0.3,
       "train__documents_per_step": 5, "train__micro_batch_tokens": 128}  # fmt: skip

on_all = pytest.mark.parametrize("lab", ["numpy", "torch", "mlx"], indirect=True)
on_numpy = pytest.mark.parametrize("lab", ["numpy"], indirect=True)


class Crash(BaseException):
    """Ends a run as if it were killed."""


class Stop(Hook):
    def on_step(self, record):
        if record.step == 3:
            raise Crash


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of its own: the directory of the stores."""
    monkeypatch.setenv("DUALTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "activations"


@pytest.fixture
def settings(lab):
    return {**RUN, "train__activation_cache": "disk", "adapter__targets": UPPER[lab.backend.name]}


@pytest.fixture
def calls(lab, monkeypatch) -> list[Batch]:
    """The micro-batches whose hidden states engines have computed."""
    found = []
    load = type(lab.backend).load

    def counting(backend, request):
        engine = load(backend, request)
        compute = engine.hidden_states

        def hidden_states(batch):
            found.append(batch)
            return compute(batch)

        engine.hidden_states = hidden_states
        return engine

    monkeypatch.setattr(type(lab.backend), "load", counting)
    return found


@pytest.fixture
def vocab(tiny_llama) -> int:
    return json.loads((tiny_llama / "config.json").read_text())["vocab_size"]


def with_tokenizer_of(model: Path, path: Path, write, **changes) -> Path:
    """Another model with the tokenizer of this one."""
    shutil.copytree(model, path)
    return write(path, **changes)


def files_of(cache: Path) -> list[bytes]:
    return sorted(path.read_bytes() for path in cache.glob(f"*/{store.STATES}"))


def losses(rows) -> list[float]:
    return [row.get("loss", row.get("eval_loss")) for part in rows for row in part]


def events_of(result, kind) -> list[dict]:
    lines = (result.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row.get("event") == kind]


# --- the same run ----------------------------------------------------------------------------------------------------


@on_all
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_a_run_with_the_cache_is_the_run_without(lab, settings, rows_of, cache, packing):
    settings |= {"data__packing": packing}
    cached, plain = lab.run("cached", **settings), lab.run("plain", **settings | {"train__activation_cache": "none"})
    assert losses(rows_of(cached.run_dir)) == pytest.approx(
        losses(rows_of(plain.run_dir)), abs=CLOSE[lab.backend.name], rel=0
    )
    assert [each["message"].split(",")[0] for each in events_of(cached, "activation_cache")] == [
        "hidden states of 12 documents", "hidden states of 4 documents",
    ]  # fmt: skip
    assert len(files_of(cache)) == 2 and not events_of(plain, "activation_cache")


@on_all
def test_every_batch_of_a_run_has_its_hidden_states(lab, settings):
    """Those of steps, of probes and of documents whose losses are asked for, each from its own document."""
    prepared = prepare(lab.config(**settings), lab.backend)
    assert prepared.batches(0)[0].hidden_BTD is None
    assert "cache       hidden states below the adapter, computed first unless they are on disk" in summary(prepared)
    load_engine(prepared)
    train = prepared.data.train
    asked = prepared.batches_of([3, 1], prepared.data.layout)
    for batch in [*prepared.batches(0), *prepared.batches(5), *asked]:
        for b, t in np.argwhere((batch.positions_BT == 0) & (batch.segments_BT > 0)):
            length = int((batch.segments_BT[b] == batch.segments_BT[b, t]).sum())
            tokens = batch.tokens_BT[b, t : t + length].tolist()
            (document,) = (i for i in range(len(train)) if train[i].tokens.tolist() == tokens)
            assert np.array_equal(batch.hidden_BTD[b, t : t + length], train.hidden[document])
        assert not batch.hidden_BTD[batch.segments_BT == 0].any()


@on_all
def test_a_deleted_cache_is_computed_again_and_the_resumed_run_is_bitwise(
    lab, settings, rows_of, weights_of, cache, calls
):
    """By the same micro-batches, also where those of the run are others, as after memory ran out."""
    straight = lab.run("straight", **settings)
    computed = [batch.tokens_BT.tolist() for batch in calls[1:]]  # the first is the trial
    before = files_of(cache)
    shutil.rmtree(cache)
    with pytest.raises(Crash):
        lab.run("stopped", [Stop()], **settings)
    assert files_of(cache) == before
    shutil.rmtree(cache)
    resumed = lab.run("stopped", **settings)
    assert weights_of(resumed.run_dir) == weights_of(straight.run_dir)
    assert losses(rows_of(resumed.run_dir)) == losses(rows_of(straight.run_dir))
    shutil.rmtree(cache)
    calls.clear()
    lab.run("other rows", **settings | {"train__micro_batch_tokens": 64, "data__packing": False})
    assert files_of(cache) == before and [batch.tokens_BT.tolist() for batch in calls[1:]] == computed


@on_numpy
def test_the_cache_may_come_and_go_in_a_run(lab, settings, rows_of):
    with pytest.raises(Crash):
        lab.run("run", [Stop()], **settings | {"train__activation_cache": "none"})
    resumed, plain = lab.run("run", **settings), lab.run("plain", **settings | {"train__activation_cache": "none"})
    assert losses(rows_of(resumed.run_dir)) == pytest.approx(losses(rows_of(plain.run_dir)), abs=1e-9)


@on_all
def test_a_second_run_computes_only_the_trial(lab, settings, calls):
    lab.run("first", **settings)
    prepared = prepare(lab.config(**settings), lab.backend)
    assert (
        sum(batch.num_tokens for batch in calls[1:]) == prepared.data.train.num_tokens + prepared.data.eval.num_tokens
    )
    calls.clear()
    lab.run("second", **settings | {"run__seed": 1, "train__learning_rate": 1e-3})
    assert len(calls) == 1


@on_numpy
def test_other_documents_or_another_base_have_a_cache_of_their_own(lab, settings, cache, write_rows, qa_rows, vocab):
    lab.run("first", **settings)
    rows = [{**row, "completion": row["completion"][::-1]} for row in qa_rows]
    lab.run("other data", **settings | {"data__train": write_rows(rows, "other.jsonl")})
    assert len(files_of(cache)) == 4
    other = with_tokenizer_of(lab.model, lab.tmp_path / "another", write_softmax_model, seed=1, vocab=vocab)
    lab.run("other base", **settings | {"model__name": other})
    assert len(files_of(cache)) == 6


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_gpt2(open_backend, make_config, write_rows, qa_rows, rows_of, tmp_path, tiny_llama, vocab, backend):
    model = with_tokenizer_of(tiny_llama, tmp_path / "gpt2", write_tiny_gpt2, vocab_size=vocab, n_layer=3)

    def losses_with(value):
        settings = {
            "run.dir": tmp_path / value, "adapter.targets": ["c_attn", "c_fc"], "adapter.layers": "1-2",
            "data.eval": 0.25, "adapter.dropout": 0.2, "train.activation_cache": value,
        }  # fmt: skip
        return losses(rows_of(run(make_config(write_rows(qa_rows), settings, model), open_backend(backend)).run_dir))

    assert losses_with("disk") == pytest.approx(losses_with("none"), abs=1e-5, rel=0)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter.method": "full"}, "adapter.method: full trains the first layer too"),
        ({"adapter.targets": "all-linear"}, "adapter.targets: all-linear adapts the first layer too; choose upper"),
        (
            {"memory.sharding": "full"},
            r"memory.sharding: full needs all processes .* allowed: none, or memory.sharding",
        ),
        ({"memory.resident_layers": 1}, "memory.resident_layers counts on every layer"),
    ],
)
def test_values_that_cannot_go_together(make_config, changes, message):
    base = {"adapter.targets": ["layers.1.mlp.up_proj"], "train.activation_cache": "disk"} | changes
    if "adapter.method" in changes:
        base |= {"adapter.rank": 16, "adapter.alpha": 32, "adapter.dropout": 0.05}
    with pytest.raises(ConfigError, match=rf"train\.activation_cache: got disk, but {message}"):
        make_config("data.jsonl", base)


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
@pytest.mark.parametrize("targets", [["q_proj"], ["layers.0.mlp.up_proj", "layers.1.mlp.up_proj"]])
def test_an_adapter_of_the_first_layer_is_refused_before_anything_is_loaded(lab, settings, targets):
    with pytest.raises(ConfigError, match=r"adapts the first layer, .* adapter\.layers: last 8") as caught:
        prepare(lab.config(**settings | {"adapter__targets": targets}), lab.backend)
    assert ", ".join(targets) in str(caught.value)


@on_numpy
def test_an_adapter_of_the_first_layer_is_refused_when_the_model_is_loaded(lab, settings):
    with pytest.raises(ConfigError, match=r"adapter\.targets \(mixer, head\) adapts the first layer"):
        lab.run(**settings | {"adapter__targets": ["mixer", "head"]})


def test_a_backend_that_does_not_honour_it_is_refused(make_config):
    config = make_config("data.jsonl", {"train.activation_cache": "disk", "adapter.targets": ["layers.1.x"]})
    card = Card("plain", devices=(Device("cpu", "float32", ("float32",)),))
    with pytest.raises(ConfigError, match=r"train\.activation_cache: got disk, the backend 'plain' honours: none"):
        check_capabilities(card, config)


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
def test_a_split_base_is_refused(lab, settings, monkeypatch):
    from dataclasses import replace

    load = type(lab.backend).load

    def split(backend, request):
        engine = load(backend, request)
        engine.description = replace(engine.description, sharding="full", sharding_reason="too large")
        return engine

    monkeypatch.setattr(type(lab.backend), "load", split)
    with pytest.raises(ConfigError, match=r"base is sharded among the processes \(too large\); set memory\.sharding"):
        lab.run(**settings)


@on_all
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda states: states[..., ::-1].copy(), r"it computes another loss with them \("),
        (lambda states: states * np.float32("nan"), r"it computes another loss with them \(nan"),
    ],
)
def test_a_model_whose_layers_get_more_is_refused(lab, settings, monkeypatch, change, message):
    load = type(lab.backend).load

    def other(backend, request):
        engine = load(backend, request)
        compute = engine.hidden_states
        engine.hidden_states = lambda batch: change(compute(batch))
        return engine

    monkeypatch.setattr(type(lab.backend), "load", other)
    with pytest.raises(ConfigError, match=message):
        lab.run(**settings)


# --- the files -------------------------------------------------------------------------------------------------------


@on_numpy
@pytest.mark.parametrize("name", [store.STATES, store.CHECKSUMS, store.TABLE])
def test_a_file_of_another_size_is_made_again(lab, settings, cache, rows_of, name):
    first = lab.run("first", **settings)
    before = files_of(cache)
    for path in cache.glob(f"*/{name}"):
        path.write_bytes(path.read_bytes()[:-5])
    again = lab.run("again", **settings)
    assert files_of(cache) == before and losses(rows_of(again.run_dir)) == losses(rows_of(first.run_dir))


@on_numpy
def test_a_changed_byte_is_an_error_with_the_way_out(lab, settings, cache):
    lab.run("first", **settings)
    for path in cache.glob(f"*/{store.STATES}"):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    with pytest.raises(DataError, match=r"the cache of hidden states is damaged\. Remove this directory and run again"):
        lab.run("again", **settings | {"run__eval_every": 1})
    shutil.rmtree(cache)
    lab.run("again", **settings)


@on_numpy
def test_a_full_disk_is_an_error_before_anything_is_written(lab, settings, cache, monkeypatch):
    usage = shutil.disk_usage(lab.tmp_path)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(DiskError, match=r"activations needs .* tokens of 64 bytes each, but the disk has 100 B free"):
        lab.run(**settings)
    assert not cache.exists()


@on_numpy
def test_a_killed_fill_leaves_nothing_that_counts(lab, settings, cache, monkeypatch):
    from dualtune.train import activation_cache as fill

    make = fill.make_batch

    def dies(documents, rows, **options):
        if len(list(cache.glob("[!.]*"))) == 1:  # the store of the training documents is done
            raise Crash
        return make(documents, rows, **options)

    monkeypatch.setattr(fill, "make_batch", dies)
    with pytest.raises(Crash):
        lab.run("first", **settings)
    assert len(files_of(cache)) == 1
    monkeypatch.undo()
    monkeypatch.setenv("DUALTUNE_CACHE", str(cache.parent))
    lab.run("second", **settings)
    assert len(files_of(cache)) == 2 and not list(cache.glob(".*"))


def test_the_key_has_the_device(lab, settings, cache, monkeypatch):
    prepared = prepare(lab.config(**settings), lab.backend)
    load_engine(prepared)
    monkeypatch.setattr(type(lab.backend), "devices", lambda backend: [DeviceInfo("another", "cpu", 1 << 34)])
    load_engine(prepare(lab.config(**settings), lab.backend))
    assert len(files_of(cache)) == 4
