"""Adapters in PEFT's shards and in mlx-lm's old NumPy archive. What is read is compared with what was written."""

import io
import json
import tracemalloc
import zipfile

import numpy as np
import pytest
import safetensors.numpy

from dualtune.base.errors import FormatError
from dualtune.model.formats.directory import read_adapter, write_adapter
from dualtune.model.importing.repair import import_adapter

INDEX, NPZ = "adapter_model.safetensors.index.json", "adapters.npz"


@pytest.fixture
def sharded(tmp_path, make_adapter):
    """PEFT's layout, its tensors cut into two files by hand."""
    path = tmp_path / "sharded"
    write_adapter(path, make_adapter(base_model="org/base"), layout="peft")
    tensors = safetensors.numpy.load_file(path / "adapter_model.safetensors")
    (path / "adapter_model.safetensors").unlink()
    (path / "dualtune.json").unlink()
    names, shards = (
        sorted(tensors),
        ("adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors"),
    )
    weight_map = {name: shards[i % 2] for i, name in enumerate(names)}
    for shard in shards:
        safetensors.numpy.save_file({n: tensors[n] for n in names if weight_map[n] == shard}, path / shard)
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


@pytest.fixture
def archived(tmp_path, make_adapter):
    """A function that writes mlx-lm's layout with its arrays in an archive, saved by `save(path, **arrays)`."""

    def make(save=np.savez):
        path = tmp_path / "archived"
        write_adapter(path, make_adapter(), layout="mlx")
        tensors = safetensors.numpy.load_file(path / "adapters.safetensors")
        (path / "adapters.safetensors").unlink()
        (path / "dualtune.json").unlink()
        save(str(path / NPZ), **tensors)
        return path

    return make


def assert_imported(path, expected, out):
    found = import_adapter(path)
    assert found.repaired == ()
    write_adapter(out, found.adapter, metadata=found.metadata)
    read = read_adapter(out)
    assert read.spec.scale == expected.spec.scale and read.tensors.keys() == expected.tensors.keys()
    for name, x in expected.tensors.items():
        np.testing.assert_array_equal(read.tensors[name], x)
    return read


def test_shards_are_read_as_the_one_file_they_were(sharded, make_adapter, tmp_path):
    read = assert_imported(sharded, make_adapter(), tmp_path / "out")
    assert [*read.metadata["import"]["files"]] == [f"adapter_model-0000{i}-of-00002.safetensors" for i in (1, 2)]


@pytest.mark.parametrize("writer", ["numpy", "numpy, by columns", "mlx"])
def test_an_archive_of_arrays_is_read_exactly(archived, make_adapter, tmp_path, writer):
    def by_mlx(path, **arrays):
        mx = pytest.importorskip("mlx.core")
        mx.savez(path, **{name: mx.array(x) for name, x in arrays.items()})

    def by_columns(path, **arrays):
        np.savez(path, **{name: np.asfortranarray(x) for name, x in arrays.items()})

    save = {"numpy": np.savez, "numpy, by columns": by_columns, "mlx": by_mlx}[writer]
    assert_imported(archived(save), make_adapter(), tmp_path / "out")


def test_the_strict_reader_says_how_such_a_directory_is_read(sharded, archived):
    for path in (sharded, archived()):
        with pytest.raises(FormatError, match=f"dualtune adapter import {path} OUT"):
            read_adapter(path)


def edit(path, change):
    table = json.loads((path / INDEX).read_text())
    change(table["weight_map"])
    (path / INDEX).write_text(json.dumps(table))


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", ".safetensors", 7, None]
)
def test_a_shard_lies_beside_its_index(sharded, name):
    edit(sharded, lambda weight_map: weight_map.update({next(iter(weight_map)): name}))
    with pytest.raises(FormatError, match="the name of a safetensors file in this directory"):
        import_adapter(sharded, repair=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop(next(iter(m))), "in 1 tensor: .* is in the file, but not listed there"),
        (lambda m: m.update({"x": next(iter(m.values()))}), "is listed there, but not in the file"),
        (lambda m: m.update({"x": "adapter_model-00003.safetensors"}), "00003.safetensors: cannot be read"),
        (lambda m: m.clear(), "lists 0 files"),
    ],
)
def test_an_index_that_is_not_of_its_shards_is_refused(sharded, change, message):
    edit(sharded, change)
    with pytest.raises(FormatError, match=message):
        import_adapter(sharded, repair=True)


def npy(descr="<f4", shape="(2, 2)", content=bytes(16)):
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


def test_the_forged_arrays_below_differ_from_a_good_one_in_one_thing(archived):
    rewrite(archived(), lambda name, data: npy())
    np.testing.assert_array_equal(np.load(io.BytesIO(npy())), np.zeros((2, 2), np.float32))


def rewrite(path, change, **options):
    with zipfile.ZipFile(path / NPZ) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path / NPZ, "w", **options) as archive:
        for name, data in members.items():
            archive.writestr(name, change(name, data))
    return path


HOSTILE = {
    "a pickle": (lambda n, d: npy("|O", "(1,)", b"\x80\x04."), "got dtype b'|O'".replace("|", r"\|")),
    "a pickle alone": (lambda n, d: b"\x80\x04N.", "is not an array of numbers"),
    "a huge shape": (lambda n, d: npy(shape="(99999999999, 99999999999)"), "has 39999999999200000000004"),
    "a cut array": (lambda n, d: d[:-3], r"got 93 bytes, but shape \(8, 3\) of <f4 has 96"),
    "an expression": (lambda n, d: npy(shape="(__import__('os').getpid(),)"), "is not an array of numbers"),
    "bfloat16": (lambda n, d: npy("<V2", "(2, 4)"), "got dtype b'<V2'"),
    "nothing": (lambda n, d: b"", "is not an array of numbers"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_an_array_is_numbers_of_the_size_of_its_bytes(archived, case):
    change, message = HOSTILE[case]
    path = rewrite(archived(), change)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=message):
            import_adapter(path, repair=True)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_compressed_archive_is_refused_unread(archived):
    bomb = npy(shape=f"({16 << 20},)", content=bytes(64 << 20))
    path = rewrite(archived(), lambda name, data: bomb if name.startswith("model.layers.0") else data,
                   compression=zipfile.ZIP_DEFLATED)  # fmt: skip
    assert (path / NPZ).stat().st_size < 2 << 20
    with pytest.raises(FormatError, match="got a compressed"):
        import_adapter(path, repair=True)


@pytest.mark.parametrize("at", [0, 40, -30, -10])
def test_a_damaged_archive_is_refused(archived, at):
    path = archived()
    raw = bytearray((path / NPZ).read_bytes())
    raw[at] ^= 0xFF
    (path / NPZ).write_bytes(raw)
    with pytest.raises(FormatError):
        import_adapter(path, repair=True)


# --- what is damaged inside is found and repaired as in one file -----------------------------------------------------


def test_damage_in_shards_is_repaired_on_repair_and_not_before(sharded, make_adapter):
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    for shard in {*weight_map.values()}:
        tensors = safetensors.numpy.load_file(sharded / shard)
        renamed = {name.replace(".weight", ".default.weight"): x for name, x in tensors.items()}
        safetensors.numpy.save_file(renamed, sharded / shard)
    edit(sharded, lambda m: [m.update({name.replace(".weight", ".default.weight"): m.pop(name)}) for name in [*m]])
    with pytest.raises(FormatError, match=r"4 names contain the adapter's name \(default\)"):
        import_adapter(sharded)
    found = import_adapter(sharded, repair=True)
    assert len(found.repaired) == 1
    for name, x in make_adapter().tensors.items():
        np.testing.assert_array_equal(found.adapter.tensors[name], x)


def test_the_config_of_an_old_mlx_lm_is_repaired_on_repair(archived, make_adapter):
    """`lora_layers` is what `num_layers` was called then, and alpha stood beside scale, which counts."""
    path = archived()
    config = json.loads((path / "adapter_config.json").read_text())
    config["lora_layers"] = config.pop("num_layers")
    config["lora_parameters"]["alpha"] = 16.0
    (path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="num_layers: missing"):
        import_adapter(path)
    found = import_adapter(path, repair=True)
    assert found.adapter.spec.scale == make_adapter().spec.scale
    assert found.adapter.notes == ("lora_parameters.alpha is ignored, as in mlx-lm: only scale is used",)
