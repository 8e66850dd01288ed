"""The adapter directory: what is written, round trips in every layout, and writes that are interrupted."""

import hashlib
import json
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from dualtune.base.errors import ConfigError, DiskError, FormatError, NonFiniteError
from dualtune.model.adapter import tensor_name
from dualtune.model.formats.canonical import to_pairs
from dualtune.model.formats.directory import read_adapter, write_adapter
from dualtune.model.inspection import inspect_adapter

FILES = {
    "dual": {"adapter_config.json", "adapter_model.safetensors", "adapters.safetensors", "dualtune.json"},
    "peft": {"adapter_config.json", "adapter_model.safetensors", "dualtune.json"},
    "mlx": {"adapter_config.json", "adapters.safetensors", "dualtune.json"},
}
Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"


def config_of(path):
    return json.loads((path / "adapter_config.json").read_text())


names = st.sampled_from(["self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"])
modules = st.one_of(st.just("lm_head"), st.builds("model.layers.{}.{}".format, st.integers(0, 3), names))
sizes = st.integers(1, 9)


@settings(deadline=None)
@given(
    shapes=st.dictionaries(modules, st.one_of(st.tuples(sizes, sizes), st.just((5, 5))), min_size=1, max_size=6),
    rank=st.integers(1, 7),
    alpha=st.one_of(st.integers(1, 64).map(float), st.floats(0.01, 100)),
    by_path=st.booleans(),
    layout=st.sampled_from(list(FILES)),
)
def test_round_trip_keeps_the_function(tmp_path_factory, shapes, rank, alpha, by_path, layout, make_adapter, deltas):
    targets = tuple(shapes) if by_path else tuple({module.split(".")[-1] for module in shapes})
    adapter = make_adapter(shapes, rank, alpha, targets)
    path = tmp_path_factory.mktemp("round") / "a"
    write_adapter(path, adapter, layout=layout)
    assert {file.name for file in path.iterdir()} == FILES[layout]
    again = read_adapter(path)
    assert (again.layout, again.spec.rank, again.spec.dropout) == (layout, rank, 0.1)
    expected = deltas(adapter)
    assert deltas(again).keys() == expected.keys()
    for module, delta in deltas(again).items():
        A, B = (np.abs(adapter.tensors[tensor_name(module, part)]) for part in "AB")
        most = adapter.spec.scale_of(module) * (B @ A).max()  # of the terms: their sum may cancel
        np.testing.assert_allclose(delta, expected[module], rtol=0, atol=3e-7 * most)
    if alpha.is_integer():
        assert again.spec.alpha == alpha
        for name, x in adapter.tensors.items():
            np.testing.assert_array_equal(again.tensors[name], x)


def test_dual_directory_is_laid_out_as_documented(dual, make_adapter):
    config = config_of(dual)
    assert config == {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "org/base",
        "r": 3, "lora_alpha": 6, "lora_dropout": 0.1, "target_modules": ["q_proj"], "bias": "none",
        "fan_in_fan_out": False, "use_rslora": False, "use_dora": False, "init_lora_weights": True,
        "inference_mode": True, "fine_tune_type": "lora", "num_layers": -1,
        "lora_parameters": {"rank": 3, "scale": 2.0, "dropout": 0.1, "keys": ["self_attn.q_proj"]},
    }  # fmt: skip
    assert '"lora_alpha": 6,' in (dual / "adapter_config.json").read_text()  # an integer: some readers refuse 6.0
    manifest = json.loads((dual / "dualtune.json").read_text())
    assert manifest["schema_version"] == 1
    assert manifest["files"] == {
        name: {
            "bytes": (dual / name).stat().st_size,
            "sha256": hashlib.sha256((dual / name).read_bytes()).hexdigest(),
        }
        for name in FILES["dual"] - {"dualtune.json"}
    }
    with safetensors.safe_open(dual / "adapter_model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    mlx = safetensors.numpy.load_file(dual / "adapters.safetensors")
    for module, pair in to_pairs(make_adapter().tensors, "test").items():
        np.testing.assert_array_equal(mlx[f"{module}.lora_a"], pair.A_rI.T)
        np.testing.assert_array_equal(mlx[f"{module}.lora_b"], pair.B_Or.T)


def test_written_files_are_the_same_each_time(tmp_path, make_adapter):
    for name in "ab":
        write_adapter(tmp_path / name, make_adapter())
    for name in FILES["dual"]:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_metadata_is_kept_through_a_conversion(tmp_path, make_adapter):
    write_adapter(tmp_path / "a", make_adapter(), metadata={"training": {"steps": 7}})
    adapter = read_adapter(tmp_path / "a")
    assert adapter.metadata["training"] == {"steps": 7}
    write_adapter(tmp_path / "b", adapter, layout="peft")
    again = read_adapter(tmp_path / "b")
    assert again.metadata["training"] == {"steps": 7}
    assert again.metadata["files"].keys() == FILES["peft"] - {"dualtune.json"}
    write_adapter(tmp_path / "c", adapter, metadata={})
    assert "training" not in read_adapter(tmp_path / "c").metadata


def test_a_taken_path_is_refused_and_left_alone(tmp_path, make_adapter):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("a", "file"):
        with pytest.raises(ConfigError, match="already exists"):
            write_adapter(tmp_path / name, make_adapter())
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["precious"]
    (tmp_path / "empty").mkdir()
    write_adapter(tmp_path / "empty", make_adapter())
    read_adapter(tmp_path / "empty")


def test_an_unknown_layout_is_refused(tmp_path, make_adapter):
    with pytest.raises(ConfigError, match="must be one of dual, peft, mlx"):
        write_adapter(tmp_path / "a", make_adapter(), layout="gguf")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_written(tmp_path, value, make_adapter):
    adapter = make_adapter()
    next(iter(adapter.tensors.values()))[0, 0] = value
    with pytest.raises(NonFiniteError, match="NaN or Inf"):
        write_adapter(tmp_path / "a", adapter)
    assert not list(tmp_path.iterdir())


def test_a_module_of_zeros_is_not_written_but_a_fresh_adapter_is(tmp_path, make_adapter):
    adapter = make_adapter()
    for name, x in adapter.tensors.items():
        x[:] = x if "lora_A" in name else 0
    write_adapter(tmp_path / "fresh", adapter)
    assert "B is all zeros (the adapter does nothing)" in inspect_adapter(tmp_path / "fresh").flags
    for name, x in adapter.tensors.items():
        x[:] = 0 if Q1 in name else x
    with pytest.raises(FormatError, match=f"{Q1}: A and B are all zeros"):
        write_adapter(tmp_path / "zeros", adapter)


WRITER = """
    import os, resource, signal, sys
    import numpy as np
    from dualtune.model.formats.directory import Adapter, write_adapter
    from dualtune.model.adapter import AdapterSpec, tensor_name
    from dualtune.base.errors import DualtuneError
    x = np.arange(1, 20001, dtype=np.float32)
    tensors = {tensor_name("lm_head", "A"): x.reshape(2, -1), tensor_name("lm_head", "B"): x.reshape(-1, 2)}
    adapter = Adapter(AdapterSpec(2, 4.0, 0.0, ("lm_head",)), tensors)
"""


def run_python(*lines, args):
    code = textwrap.dedent(WRITER) + "\n".join(lines)
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=1800)


def test_a_kill_at_any_sync_leaves_all_or_nothing(tmp_path):
    killed = 0
    for count in range(1, 20):
        target = tmp_path / str(count) / "a"
        result = run_python(
            "calls, fsync = [], os.fsync",
            "def killing(fd):",
            "    calls.append(fd)",
            "    os.kill(os.getpid(), signal.SIGKILL) if len(calls) == int(sys.argv[2]) else fsync(fd)",
            "os.fsync = killing",
            "write_adapter(sys.argv[1], adapter)",
            args=(target, count),
        )
        if result.returncode == 0:
            break
        assert result.returncode == -signal.SIGKILL, result.stderr
        killed += 1
        if target.exists():
            read_adapter(target)
    assert killed == 7  # the parent, which is new; four files, their directory, and the parent again
    assert read_adapter(target).spec.rank == 2


def test_a_full_disk_is_a_disk_error_and_leaves_nothing(tmp_path):
    result = run_python(
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)",
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))",
        "try: write_adapter(sys.argv[1], adapter)",
        "except DualtuneError as error: print(type(error).__name__, error)",
        args=(tmp_path / "a",),
    )
    assert result.stdout.startswith("DiskError") and "File too large" in result.stdout, result
    assert not list(tmp_path.iterdir())


def test_a_path_below_a_file_is_a_disk_error(tmp_path, make_adapter):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DiskError, match="cannot be written"):
        write_adapter(tmp_path / "file" / "a", make_adapter())
