"""Every reader of files that come from somebody else: the good files to begin with, and how they are read.

A reader takes a directory with the files and a place that is free for what it writes. It raises DualtuneError, or
returns; what it accepts is compared with what another program reads in the same bytes.
"""

from __future__ import annotations

import atexit
import hashlib
import io
import json
import random
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import readers_template
import readers_tokenizer
import safetensors
import safetensors.numpy
from readers_data import DATA_SEEDS, read_data

from dualtune.base.files import json_bytes, listing
from dualtune.base.untrusted import read_safetensors
from dualtune.cli.adapter import report_text
from dualtune.config import load_config, parse_config, to_yaml
from dualtune.engine.testing.tiny_models import write_tiny_llama
from dualtune.model.adapter import AdapterSpec, init_adapter
from dualtune.model.base_model import find_weights, resolve_model
from dualtune.model.copies import staged
from dualtune.model.fingerprint import fingerprint
from dualtune.model.formats.directory import Adapter, read_adapter, read_manifest, write_adapter
from dualtune.model.importing.repair import import_adapter
from dualtune.model.inspection import diff_adapters, inspect_adapter
from dualtune.train.state import checkpoint
from dualtune.train.state.metrics import History, main_rows, read_rows
from dualtune.use.transfer.bundles import manifest
from dualtune.use.verify.verdict import recorded_in

Files = dict[str, bytes]
GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint_v1"
CONFIGS = Path(__file__).parents[2] / "configs"
SHAPES = {
    f"model.layers.{i}.{n}": s for i in range(2) for n, s in (("self_attn.q_proj", (6, 4)), ("mlp.up_proj", (8, 4)))
}
BASE = Path(tempfile.mkdtemp(prefix="dualtune-fuzz-")) / "base"  # given as --base; the first use writes it
atexit.register(shutil.rmtree, BASE.parent)


class Reader(NamedTuple):
    seeds: Callable[[], list[Files]]
    read: Callable[[Path, Path, random.Random], None]
    rehash: Callable[[Files], None]  # makes the hashes of a changed directory right
    max_growth_bytes: int = 72 << 20


# --- adapters --------------------------------------------------------------------------------------------------------


def adapter_seeds() -> list[Files]:
    """dualtune's three layouts, and the same numbers as PEFT, mlx-lm and others have them."""
    rng = np.random.default_rng(0)
    tensors = {n: x + rng.normal(0, 1, x.shape).astype(np.float32) for n, x in init_adapter(SHAPES, 2, 0).items()}
    adapter = Adapter(AdapterSpec(2, 4.0, 0.1, ("q_proj", "up_proj")), tensors, "org/base")
    top = [{"tokens": [1, 2], "top": [[3, -0.5], [4, -1.5]], "dtype": "float32", "prompt": "x"}]
    record = {
        "base": {"name": "b", "loaded_as": "none"},
        "training": {"steps": 3},
        "fingerprints": {"base": top, "adapter": top},
    }
    found: list[Files] = []
    with tempfile.TemporaryDirectory() as name:
        for layout in ("dual", "peft", "mlx"):
            write_adapter(Path(name) / layout, adapter, layout=layout, metadata=record)
            found.append({file.name: file.read_bytes() for file in (Path(name) / layout).iterdir()})
    dual, peft, mlx = found
    foreign = [{name: data for name, data in files.items() if name != "dualtune.json"} for files in found]
    patterns = json.loads(peft["adapter_config.json"]) | {
        "rank_pattern": {"q_proj": 2}, "alpha_pattern": {".*up_proj": 8}, "target_modules": r".*\.(q|up)_proj",
        "use_rslora": True,
    }  # fmt: skip
    old = json.loads(mlx["adapter_config.json"]) | {"num_layers": 2}
    old["lora_parameters"] |= {"alpha": 16}
    index = {"weight_map": dict.fromkeys(tensors, "adapter_model-00001-of-00001.safetensors")}
    np.savez(npz := io.BytesIO(), **safetensors.numpy.load(mlx["adapters.safetensors"]))
    weights = peft["adapter_model.safetensors"]
    return [
        dual, peft, mlx, *foreign,
        {"adapter_config.json": json_bytes(patterns), "adapter_model.safetensors": weights},
        {"adapter_config.json": json_bytes(old), "adapters.safetensors": mlx["adapters.safetensors"]},
        {"adapter_config.json": peft["adapter_config.json"], "adapter_model.safetensors.index.json": json_bytes(index),
         "adapter_model-00001-of-00001.safetensors": weights},
        {"adapter_config.json": mlx["adapter_config.json"], "adapters.npz": npz.getvalue()},
        {"adapter_config.json": mlx["adapter_config.json"],
         "0000100_adapters.safetensors": mlx["adapters.safetensors"]},
    ]  # fmt: skip


def read_an_adapter(place: Path, out: Path, draw: random.Random) -> None:
    """By the strict reader, by inspect, or by import; what is accepted is written, read again and the same."""
    check_tensors(place)
    match draw.randrange(4):
        case 0:
            adapter, metadata = read_adapter(place), None
        case 1:
            report_text(report := inspect_adapter(place))
            json.dumps(report.to_json(), allow_nan=False)
            return
        case 2:
            recorded_in(read_manifest(place) or {}, place)
            return
        case _:
            imported = import_adapter(place, base=base() if draw.random() < 0.3 else None, repair=draw.random() < 0.7)
            adapter, metadata = imported.adapter, imported.metadata
    write_adapter(out, adapter, layout=draw.choice(("dual", "peft", "mlx")), metadata=metadata)
    again = read_adapter(out)
    assert all(np.isfinite(x).all() and x.dtype == np.float32 for x in again.tensors.values())
    if draw.random() < 0.1 and not metadata:
        assert diff_adapters(place, out).is_same_function


def check_tensors(place: Path) -> None:
    """Where our reader and the safetensors library both read a file, they read the same numbers."""
    for file in place.glob("*.safetensors"):
        try:
            theirs = safetensors.numpy.load(file.read_bytes())
        except (safetensors.SafetensorError, KeyError, ValueError, AttributeError):  # NumPy has no bfloat16
            continue
        ours = read_safetensors(file)
        assert ours.keys() == theirs.keys(), "other tensors than the library reads"
        with np.errstate(over="ignore"):
            assert all(np.array_equal(ours[n], x.astype(np.float32), equal_nan=True) for n, x in theirs.items())


def base() -> Path:
    if not BASE.exists():
        write_tiny_llama(BASE, vocab_size=16, hidden_size=4, intermediate_size=8, head_dim=3, num_attention_heads=2)
    return BASE


def rehash_adapter(files: Files) -> None:
    rehash_listing(files, "dualtune.json")


def rehash_listing(files: Files, name: str) -> None:
    """The sizes and hashes in a list made those of the files; what was forged around them stays as it is."""
    for file, data in files.items() if name in files else ():
        entry = json.dumps({"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}).encode()
        listed = rb'("%s":\s*)\{[^{}]*"sha256"[^{}]*\}' % re.escape(file).encode()
        files[name] = re.sub(listed, lambda found, entry=entry: found[1] + entry, files[name])


# --- the rest --------------------------------------------------------------------------------------------------------


def checkpoint_seeds() -> list[Files]:
    """The golden one, and one as it is written today."""
    golden = {file.name: file.read_bytes() for file in GOLDEN.iterdir()}
    state = json.loads(golden["state.json"]) | {
        "schedule": {"num_steps": 6, "next_learning_rate": 0.01}, "place": {"next_documents": [1, 2]},
        "guards": {"losses": [1.0, 2], "in_spike": False, "best_step": None, "eval_step": 2, "best_loss": 1.5},
        "fingerprints": dict.fromkeys(checkpoint.FINGERPRINTS, "sha256 0123"),
    }  # fmt: skip
    newer = golden | {"state.json": json_bytes(state)}
    table = json.loads(golden["MANIFEST.json"]) | {"schema_version": 2}
    table["files"] = listing({name: data for name, data in newer.items() if name != "MANIFEST.json"})
    return [golden, newer | {"MANIFEST.json": json_bytes(table)}]


def read_a_checkpoint(place: Path, out: Path, draw: random.Random) -> None:
    del out, draw
    problem = checkpoint.problem_of(place)
    assert problem is None or (problem.isprintable() and len(problem) < 2000), repr(problem)
    found = checkpoint.read(place)
    check_tensors(place)
    assert found.state == json.loads((place / "state.json").read_bytes()) and found.step == found.state["step"]
    assert {*found.optimizer.slots} == {"m", "v"}
    assert all(tensors.keys() == found.adapter.keys() for tensors in found.optimizer.slots.values())


def base_model_seeds() -> list[Files]:
    """Two shards with their index, and one file with a template."""
    files = {file.name: file.read_bytes() for file in base().iterdir()}
    template = json_bytes({"chat_template": [{"name": "default", "template": "{{ messages }}"}], "eos_token": "</s>"})
    tensors = safetensors.numpy.load(files["model.safetensors"])
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    index = {"metadata": {}, "weight_map": {name: file for file, mine in parts.items() for name in mine}}
    shards = {file: safetensors.numpy.save({name: tensors[name] for name in mine}) for file, mine in parts.items()}
    return [
        {"config.json": files["config.json"], "model.safetensors.index.json": json_bytes(index), **shards},
        files | {"tokenizer_config.json": template},
    ]


def read_a_base_model(place: Path, out: Path, draw: random.Random) -> None:
    resolve_model(str(place))
    json.dumps(fingerprint(place), allow_nan=True)
    with staged(place, find_weights(place)) as directory:
        theirs = {n for file in directory.glob("*.safetensors") for n in safetensors.numpy.load_file(file)}
    assert theirs == set(find_weights(place).tensors), "the loaders see other tensors"
    if draw.random() < 0.5:
        source = out.parent / "adapter"
        source.mkdir()
        for name, data in ADAPTER.items():
            (source / name).write_bytes(data)
        try:
            import_adapter(source, base=place, repair=True)
        finally:
            shutil.rmtree(source)


ADAPTER = adapter_seeds()[4]


def bundle_list_seeds() -> list[Files]:
    files = {f"adapter/{n}": manifest.File(len(d), hashlib.sha256(d).hexdigest()) for n, d in sorted(ADAPTER.items())}
    unbound = manifest.Bundle("adapter", "1", None, {"name": "b"}, {"data": "x"}, ("data.train",), files, "")
    bound = replace(unbound, name="first", created="2026-01-31T23:59:59+00:00")
    return [{"BUNDLE.json": manifest.to_bytes(listed)} for listed in (unbound, bound)]


def read_a_bundle_list(place: Path, out: Path, draw: random.Random) -> None:
    del out, draw
    raw = (place / "BUNDLE.json").read_bytes()
    assert manifest.to_bytes(manifest.parse(raw, place / "BUNDLE.json")) == raw


def rehash_bundle_list(files: Files) -> None:
    """The digest of what is there now."""
    try:
        table = json.loads(files["BUNDLE.json"])
        del table["digest"]
        digest = hashlib.sha256(json_bytes(table)).hexdigest()
        files["BUNDLE.json"] = json_bytes(table | {"digest": digest})
    except (KeyError, ValueError, TypeError, RecursionError):
        return


def config_seeds() -> list[Files]:
    return [{"config.yaml": file.read_bytes()} for file in sorted(CONFIGS.glob("*.yaml"))[:4]]


def read_a_config(place: Path, out: Path, draw: random.Random) -> None:
    del out
    overrides = draw.choice(((), (), ("train.steps=3",), ("data.columns={a: b}",)))
    config = load_config(place / "config.yaml", overrides)
    assert parse_config(to_yaml(config)) == config


def metrics_seeds() -> list[Files]:
    rows = [
        {"step": 0, "eval_loss": 2.0, "eval_targets": 9}, {"step": 1, "loss": 1.5, "grad_norm": float("nan")},
        {"step": 1, "event": "spike", "message": "x"}, {"step": 2, "eval_loss": 1.0, "eval_targets": 9},
    ]  # fmt: skip
    return [{"metrics.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()}]


def read_metrics(place: Path, out: Path, draw: random.Random) -> None:
    del out, draw
    for rows in (read_rows(place / "metrics.jsonl"), main_rows(place / "metrics.jsonl")):
        history = History(rows)
        assert all(isinstance(row["step"], int) for row in rows)
        f"{history.final_loss:.4f} {history.eval_loss or 0:.4f} {history.eval_loss_before or 0:.4f}"


def nothing(files: Files) -> None:
    del files


READERS = {
    "adapter": Reader(adapter_seeds, read_an_adapter, rehash_adapter),
    "checkpoint": Reader(checkpoint_seeds, read_a_checkpoint, lambda files: rehash_listing(files, "MANIFEST.json")),
    "base model": Reader(base_model_seeds, read_a_base_model, nothing),
    "bundle list": Reader(bundle_list_seeds, read_a_bundle_list, rehash_bundle_list),
    "config": Reader(config_seeds, read_a_config, nothing),
    "metrics": Reader(metrics_seeds, read_metrics, nothing),
    "tokenizer": Reader(readers_tokenizer.tokenizer_seeds, readers_tokenizer.read_a_tokenizer, nothing, 256 << 20),
    "template": Reader(readers_template.template_seeds, readers_template.read_a_template, nothing),
    "data": Reader(DATA_SEEDS["data"], read_data, nothing),
    "parquet": Reader(DATA_SEEDS["parquet"], read_data, nothing, 256 << 20),
}
SHARES = {
    "adapter": 6, "checkpoint": 3, "base model": 2, "bundle list": 2, "config": 1, "metrics": 1, "tokenizer": 1,
    "template": 1, "data": 4, "parquet": 0.02,
}  # fmt: skip
