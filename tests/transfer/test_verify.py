"""`dualtune verify`: an adapter is the same function on the other backend, and a gap of precision is explained."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dualtune.base.errors import ConfigError, FormatError
from dualtune.engine.libraries import open_library
from dualtune.engine.testing.oracles import llama_oracle
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.formats.directory import read_adapter, write_adapter
from dualtune.use.verify.verdict import recorded_in
from dualtune.use.verify.verify import compute_with, verify


@pytest.mark.parametrize("here", ["torch", "mlx"])
@pytest.mark.parametrize("there", ["torch", "mlx"])
def test_an_adapter_is_the_same_on_the_other_backend(trained, check, there, here):
    result = check(trained(there), here, dtype="float32")
    assert (result.verdict, result.ok, result.function.pair) == ("same", True, "float32")
    assert all(row.level == "ok" for row in result.checks)
    for gap in (result.function.base, result.function.adapter):
        assert gap.num_positions == 40
        assert gap.top1 == 1.0
        assert gap.logprob < 2e-5
    assert result.function.effect.error < 1e-4
    assert not result.function.idle


@pytest.mark.parametrize("there", ["torch", "mlx"])
def test_what_is_recorded_is_what_a_float64_oracle_computes(trained, model, there):
    """At every position, with and without the adapter."""
    record = json.loads((trained(there) / "dualtune.json").read_text())["fingerprints"]
    adapter, oracle = read_adapter(trained(there)), llama_oracle(model)
    for which, tensors in (("base", {}), ("adapter", adapter.tensors)):
        assert len(record[which]) == 5
        for entry in record[which]:
            batch = random_batch([len(entry["tokens"])], 262)
            batch.tokens_BT[0] = entry["tokens"]
            expected_TV = oracle(batch, tensors, adapter.spec.scale)[0]
            tops = [*entry["earlier"], entry["top"]]
            assert len(tops) == 8
            for top, expected_V in zip(tops, expected_TV[-8:], strict=True):
                assert [p for _, p in top] == pytest.approx(np.sort(expected_V)[:-6:-1], abs=2e-5)
                assert [p for _, p in top] == pytest.approx(expected_V[[i for i, _ in top]], abs=2e-5)


@pytest.mark.parametrize(
    ("backend", "options", "pair"),
    [
        ("torch", {"dtype": "bfloat16"}, "bfloat16"),
        ("torch", {"dtype": "float16"}, "float16"),
        ("torch", {"quantization": "nf4"}, "nf4 / none"),
        ("torch", {"quantization": "nf4", "dtype": "bfloat16"}, "nf4 / none"),
        ("mlx", {"dtype": "bfloat16"}, "bfloat16"),
        ("mlx", {"quantization": "affine4"}, "affine4 / none"),
        ("mlx", {"quantization": "affine8"}, "affine8 / none"),
    ],
)
def test_a_gap_of_precision_is_explained(trained, check, backend, options, pair, wording):
    result = check(trained("torch"), backend, **options)
    assert (result.verdict, result.ok, result.function.pair) == ("precision-gap", True, pair), result.sentence
    wording(result.sentence)
    assert result.function.base.kl > 1e-7, "as in float32, so nothing is shown"
    assert ("A gap this wide can hide damage to single modules" in result.sentence) == ("quantization" in options)
    assert ("Verify with --quantization none --dtype float32" in result.sentence) == ("quantization" in options)


def test_what_cannot_be_seen_is_not_claimed(train, check, wording):
    """An adapter that hardly does anything, through 16-bit rounding and on a base in other bits."""
    faint = train(
        "torch", name="faint", train={"steps": 1, "documents_per_step": 4, "learning_rate": 1e-3, "warmup": 0}
    )
    result = check(faint, quantization="nf4", dtype="bfloat16")
    assert (result.ok, result.function.idle) == (True, True)
    wording(result.sentence)
    assert not check(faint, dtype="float32").function.idle


@pytest.mark.parametrize(("backend", "quantization"), [("torch", "nf4"), ("mlx", "affine4")])
def test_an_adapter_of_a_quantized_base_is_the_same_there(train, check, backend, quantization):
    directory = train(backend, name=quantization, model={"quantization": quantization})
    assert check(directory, backend, quantization=quantization, dtype="float32").verdict == "same"
    plain = check(directory, backend, dtype="float32")
    assert (plain.verdict, plain.ok, plain.function.pair) == ("precision-gap", True, f"{quantization} / none")


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("dora", {"method": "dora", "rank_pattern": {"q_proj": 3}}),
        ("pissa", {"init": "pissa", "alpha_pattern": {"q_proj": 3}}),
    ],
)
def test_an_adapter_of_another_method_is_the_same_on_the_other_backend(train, check, name, adapter):
    result = check(train("torch", name=name, adapter=adapter), "mlx", dtype="float32")
    assert (result.verdict, result.function.idle) == ("same", False)


def test_a_base_stored_in_four_bits_is_judged_by_what_it_computes(trained, check, model, tmp_path, wording):
    mlx_lm = pytest.importorskip("mlx_lm")
    mlx_lm.convert(str(model), mlx_path=str(tmp_path / "4bit"), quantize=True)
    result = check(trained("torch"), "mlx", tmp_path / "4bit", dtype="float32")
    assert (result.verdict, result.ok, result.function.pair) == ("precision-gap", True, "affine4 / none")
    rows = {row.name: row for row in result.checks}
    assert rows["weights"].level == rows["config"].level == "skipped"
    wording(rows["quantization"].found)


def test_a_record_of_an_older_dualtune_is_verified(trained, with_record, check):
    """Four prompts, one position each, no dtype: which is then taken for the coarsest."""

    def age(record):
        for which in ("base", "adapter"):
            entries = record["fingerprints"][which]
            record["fingerprints"][which] = [{"tokens": e["tokens"], "top": e["top"]} for e in entries[:4]]

    result = check(with_record(trained("torch"), age))
    assert (result.ok, result.function.pair, result.function.base.num_positions) == (True, "bfloat16", 4)
    assert result.function.adapter.logprob < 1e-5


@pytest.mark.parametrize("library", ["peft", "mlx-lm"])
@pytest.mark.parametrize("there", ["torch", "mlx"])
def test_other_libraries_compute_the_recorded_function(trained, model, there, library):
    pytest.importorskip(library.replace("-", "_"))
    result = verify(trained(there), str(model), no_backend, library=library)
    assert (result.verdict, result.ok, result.function.pair) == ("same", True, "float32"), result.sentence
    assert result.function.adapter.logprob < 2e-5 and not result.function.idle
    (row,) = (row for row in result.checks if row.name == library)
    assert row.level == "ok" and library.split("-")[0] in row.found


@pytest.mark.parametrize(
    ("library", "file"), [("peft", "adapter_model.safetensors"), ("mlx-lm", "adapters.safetensors")]
)
def test_what_another_library_would_compute_from_its_own_file_is_what_is_judged(
    trained, model, tmp_path, library, file
):
    """Each reads its own of the two files: with B of zero in that one alone, only that library has no adapter."""
    damaged = tmp_path / "adapter"
    shutil.copytree(trained("torch"), damaged)
    tensors = load_file(damaged / file)
    save_file(
        {name: np.zeros_like(x) if "lora_b" in name.lower() else x for name, x in tensors.items()}, damaged / file
    )
    recorded = recorded_in(read_adapter(trained("torch")).metadata, Path("dualtune.json"))
    effects = {}
    for name in ("peft", "mlx-lm"):
        pytest.importorskip(name.replace("-", "_"))
        effects[name] = compute_with(open_library(name, model, damaged), recorded).effect.size
    assert effects.pop(library) == 0.0
    assert list(effects.values()) == [pytest.approx(1.0, abs=1e-3)]


def test_a_library_that_is_unknown_or_does_not_load_the_adapter_is_named(trained, model, tmp_path):
    with pytest.raises(ConfigError, match="'vllm', allowed: mlx-lm, peft"):
        verify(trained("torch"), str(model), no_backend, library="vllm")
    write_adapter(tmp_path / "mlx", read_adapter(trained("torch")), layout="mlx")
    with pytest.raises(FormatError, match="peft does not load"):
        verify(tmp_path / "mlx", str(model), no_backend, library="peft")


def no_backend():
    raise AssertionError("a backend was opened")
