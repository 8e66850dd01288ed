"""`dualtune adapter merge`. The oracles are plain transformers on the result, and PEFT on base and adapter."""

import json

import numpy as np
import pytest
import safetensors.numpy

from dualtune.engine.testing.tiny_models import random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec, init_adapter
from dualtune.model.formats.directory import Adapter, write_adapter

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

TOLERANCE = 1e-4  # of logits in float32
SEEN = 1e-2
SHAPES = {
    f"model.layers.{i}.{name}": shape
    for i in range(2)
    for name, shape in {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (32, 64), "mlp.down_proj": (64, 128)}.items()
}
TOKENS = random_batch([12, 12], 96).tokens_BT


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="module")
def adapter_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapter") / "a"
    tensors, noise = init_adapter(SHAPES, 4, seed=0), np.random.default_rng(0)
    tensors = {n: x if x.any() else noise.normal(0, 0.1, x.shape).astype(np.float32) for n, x in tensors.items()}
    metadata = {"base": {"loaded_as": "nf4"}}
    write_adapter(
        path, Adapter(AdapterSpec(4, 6.0, 0.0, ("q_proj", "v_proj", "down_proj")), tensors), metadata=metadata
    )
    return path


def logits_of(model):
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS, dtype=torch.long)).logits.float().numpy()


@pytest.mark.parametrize("platform", ["cpu", "mlx"])
def test_a_large_model_is_written_in_shards(
    platform, base, adapter_dir, tmp_path, dualtune_main, open_backend, monkeypatch
):
    open_backend({"cpu": "torch"}.get(platform, platform))

    def merge(out):
        done = dualtune_main("adapter", "merge", adapter_dir, tmp_path / out, "--base", base, "--platform", platform)
        assert done.returncode == 0, done.stderr
        return tmp_path / out

    whole = merge("whole")
    monkeypatch.setattr("dualtune.base.tensors.SHARD_BYTES", 100_000)
    parts = merge("parts")
    files = sorted(parts.glob("*.safetensors"))
    count = len(files)
    assert count > 3 and not (parts / "model.safetensors").exists()
    assert [file.name for file in files] == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert all(file.stat().st_size < 100_000 + 4000 for file in files)
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    tensors = safetensors.numpy.load_file(whole / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for file in files:
        names = safetensors.numpy.load_file(file).keys()
        assert {name for name, place in index["weight_map"].items() if place == file.name} == {*names}
    read = transformers.AutoModelForCausalLM.from_pretrained(parts, dtype=torch.float32)
    np.testing.assert_array_equal(logits_of(read), logits_of(transformers.AutoModelForCausalLM.from_pretrained(whole)))


@pytest.mark.parametrize("platform", ["cpu", "mlx"])
def test_the_merged_model_is_base_and_adapter_in_plain_transformers(
    platform, base, adapter_dir, tmp_path, dualtune_main, open_backend
):
    open_backend({"cpu": "torch"}.get(platform, platform))
    out = tmp_path / "merged"
    result = dualtune_main("adapter", "merge", adapter_dir, out, "--base", base, "--platform", platform)
    assert result.returncode == 0, result.stderr
    assert "trained on a base in nf4" in result.stdout and "6 modules merged, in float32" in result.stdout
    assert result.stdout.splitlines()[-1].endswith(f" chat {tmp_path / 'merged'}")
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    without = logits_of(plain)
    expected = logits_of(peft.PeftModel.from_pretrained(plain, adapter_dir))
    merged = logits_of(transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32))
    assert np.abs(merged - expected).max() <= TOLERANCE
    assert np.abs(without - expected).max() > SEEN


def test_the_result_has_the_precision_in_which_the_base_is_stored(base, adapter_dir, tmp_path, dualtune_main):
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    out = tmp_path / "merged"
    result = dualtune_main("adapter", "merge", adapter_dir, out, "--base", tmp_path / "base", "--platform", "cpu")
    assert result.returncode == 0, result.stderr
    header = (out / "model.safetensors").read_bytes()
    entries = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    assert {info["dtype"] for name, info in entries.items() if name != "__metadata__"} == {"BF16"}


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_a_quantized_base_is_refused(key, base, adapter_dir, tmp_path, dualtune_main, wording):
    packed = tmp_path / "packed"
    packed.mkdir()
    config = json.loads((base / "config.json").read_text()) | {key: {"bits": 4, "group_size": 64}}
    (packed / "config.json").write_text(json.dumps(config))
    tensors = safetensors.numpy.load_file(base / "model.safetensors") | {"x.scales": np.zeros(1, np.float32)}
    safetensors.numpy.save_file(tensors, packed / "model.safetensors")
    result = dualtune_main("adapter", "merge", adapter_dir, tmp_path / "out", "--base", packed, "--platform", "cpu")
    assert result.returncode == 2
    wording(result.stderr)
    assert not (tmp_path / "out").exists()


def test_nothing_is_replaced_and_a_wrong_base_leaves_nothing(base, adapter_dir, tmp_path, dualtune_main):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    result = dualtune_main("adapter", "merge", adapter_dir, out, "--base", base, "--platform", "cpu")
    assert result.returncode == 2 and "already exists" in result.stderr and (out / "mine").read_text() == "x"
    other = write_tiny_llama(tmp_path / "other", hidden_size=32)
    result = dualtune_main("adapter", "merge", adapter_dir, tmp_path / "new", "--base", other, "--platform", "cpu")
    assert result.returncode == 2 and "does not fit the model" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"out", "other"}
