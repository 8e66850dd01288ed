"""Files that somebody else wrote, or that were cut, flipped and forged on the way. The oracle is safetensors."""

import contextlib
import json
import os
import tracemalloc

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from dualtune.base.errors import FormatError
from dualtune.base.files import listing, write_directory
from dualtune.base.tensors import StoredForm, bytes_of, safetensors_pieces, write_safetensors
from dualtune.base.untrusted import MAX_HEADER_BYTES, parse_object, read_json, read_safetensors

RNG = np.random.default_rng(0)
TENSORS = {
    "a.lora_A.weight": RNG.normal(size=(3, 40)).astype(np.float32),
    "a.lora_B.weight": RNG.normal(size=(50, 3)).astype(np.float32),
    "b.half": RNG.normal(size=(5, 7)).astype(np.float16),
    "c.double": RNG.normal(size=(2, 2)),
}


def encode(header, data=b""):
    """A file with any header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(begin, end, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "adapter_model.safetensors"


def test_reads_what_the_library_wrote(file):
    safetensors.numpy.save_file(TENSORS, file, metadata={"format": "pt"})
    read = read_safetensors(file)
    assert read.keys() == TENSORS.keys()
    for name, x in TENSORS.items():
        assert read[name].dtype == np.float32
        np.testing.assert_array_equal(read[name], x.astype(np.float32))


def test_bfloat16_is_the_upper_half_of_float32(file):
    x = RNG.normal(size=(4, 6)).astype(np.float32)
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    file.write_bytes(encode({"x": tensor(0, bits.nbytes, x.shape, "BF16")}, bits.tobytes()))
    read = read_safetensors(file)["x"]
    np.testing.assert_array_equal(read, (x.view(np.uint32) & 0xFFFF0000).view(np.float32))


def test_bfloat16_reads_as_torch_reads_it(file):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, :3] = torch.tensor([float("inf"), -0.0, 1e-40])
    save_file({"x": x}, file)
    np.testing.assert_array_equal(read_safetensors(file)["x"], x.float().numpy())


def test_every_truncation_is_an_error_with_both_sizes(file):
    safetensors.numpy.save_file({"x": np.ones((64, 64), np.float32)}, file)
    whole = file.read_bytes()
    for size in [*range(0, len(whole), 1024), 1, 7, 8, 9, len(whole) - 1]:
        file.write_bytes(whole[:size])
        with pytest.raises(FormatError, match=rf"adapter_model\.safetensors: {size} bytes") as error:
            read_safetensors(file)
        assert size < 8 or "expected" in str(error.value)


def test_bytes_after_the_last_tensor_are_an_error(file):
    file.write_bytes(encode({"x": tensor(0, 4)}, b"\0" * 5))
    with pytest.raises(FormatError, match="after the last tensor"):
        read_safetensors(file)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_a_huge_header_is_refused_before_it_is_read(file, length):
    file.write_bytes(length.to_bytes(8, "little") + b"{}")
    os.truncate(file, 1 << 30)  # sparse; large enough for the first of the lengths
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=f"header of {length} bytes, at most"):
            read_safetensors(file)
        assert tracemalloc.get_traced_memory()[1] < MAX_HEADER_BYTES / 8  # the peak
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"x": tensor(0, 8, (2,)), "y": tensor(4, 8)}, 8, "'y' overlaps"),
        ({"x": tensor(0, 4), "y": tensor(8, 12)}, 12, "'y' leaves a hole"),
        ({"x": tensor(4, 8)}, 8, "'x' leaves a hole"),
        ({"x": tensor(0, 4, (2,))}, 4, "hold 4 bytes, shape .* needs 8"),
        ({"x": tensor(4, 0)}, 4, "hold -4 bytes"),
        ({"x": tensor(-4, 0)}, 4, "offsets"),
        ({"x": tensor(0, 4, (2**62, 2**62))}, 4, "needs"),
        ({"x": tensor(0, 4, (-1,))}, 4, "shape"),
        ({"x": tensor(0, 4, (1.0,))}, 4, "shape"),
        ({"x": tensor(0, 4, [1] * 1000)}, 4, "shape"),
        ({"x": tensor(0, 4, dtype="I32")}, 4, "dtype 'I32'"),
        ({"x": {"dtype": "F32"}}, 4, "data_offsets"),
        ({"x": [1]}, 4, "data_offsets"),
        ({"__metadata__": "x"}, 0, "must be an object of strings"),
        ({"__metadata__": {"x": 1}}, 0, "must be an object of strings"),
        ([], 0, "must be an object"),
        (b"{", 0, "not valid JSON"),
        (b'{"x": NaN}', 0, "not valid JSON"),
        (b'{"x": 1, "x": 1}', 0, "appears twice"),
        (b'{"\xff": 1}', 0, "not valid JSON"),
        (b"[" * 100_000, 0, "nested too deeply"),
    ],
)
def test_forged_headers_are_refused(file, header, data, message):
    file.write_bytes(encode(header, b"\0" * data))
    with pytest.raises(FormatError, match=message) as error:
        read_safetensors(file)
    assert str(file) in str(error.value)


def test_notes_may_be_null(file):
    """As MLX writes them."""
    file.write_bytes(encode({"__metadata__": None, "x": tensor(0, 4)}, b"\0" * 4))
    assert list(read_safetensors(file)) == ["x"]


def test_a_git_lfs_pointer_is_recognised(file):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    file.write_bytes(pointer)
    with pytest.raises(FormatError, match="git lfs pull"):
        read_safetensors(file)
    with pytest.raises(FormatError, match="git lfs pull"):
        read_json(file, max_bytes=1 << 20)


def test_json_has_a_size_limit(tmp_path):
    path = tmp_path / "adapter_config.json"
    path.write_bytes(b'{"a": "' + b"x" * 100 + b'"}')
    assert read_json(path, max_bytes=109)["a"] == "x" * 100
    with pytest.raises(FormatError, match="at most 108"):
        read_json(path, max_bytes=108)


def test_a_missing_file_is_an_error_with_its_path(tmp_path):
    with pytest.raises(FormatError, match=r"absent.*No such file"):
        read_safetensors(tmp_path / "absent")


@settings(deadline=None)
@given(st.data())
def test_a_changed_byte_raises_only_format_errors(tmp_path_factory, data):
    """Whatever the header says: a clean error, or tensors that the library reads from the same bytes."""
    file = tmp_path_factory.mktemp("flip") / "x.safetensors"
    whole = bytearray(safetensors.numpy.save({"x": np.ones((2, 3), np.float32), "y": np.ones(2, np.float16)}))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(whole)
    try:
        read = read_safetensors(file)
    except FormatError:
        return
    for name, info in safetensors.deserialize(bytes(whole)):
        dtype = {"F32": np.float32, "F16": np.float16, "F64": np.float64}.get(info["dtype"])
        if dtype is not None:
            expected = np.frombuffer(info["data"], dtype).astype(np.float32).reshape(info["shape"])
            np.testing.assert_array_equal(read[name], expected)


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_format_errors(data):
    with contextlib.suppress(FormatError):
        parse_object(data, "file")


@pytest.mark.parametrize(
    "tensors",
    [
        TENSORS,
        {"one": np.ones((), np.float32), "none": np.ones((0, 3), np.float32), "Zürich": np.ones(3, np.float32)},
        {"turned": np.arange(6, dtype=np.float32).reshape(2, 3).T},
        {},
    ],
    ids=["dtypes", "corners", "transposed", "empty"],
)
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_pieces_of_a_file_are_the_bytes_that_the_library_writes(tensors, metadata):
    contiguous = {name: np.ascontiguousarray(x).reshape(x.shape) for name, x in tensors.items()}
    assert b"".join(safetensors_pieces(tensors, metadata)) == safetensors.numpy.save(contiguous, metadata)


def test_a_file_written_tensor_by_tensor_is_the_same_and_a_wrong_tensor_is_refused(tmp_path):
    forms = {name: StoredForm(f"F{8 * x.itemsize}", x.shape) for name, x in TENSORS.items()}
    write_safetensors(tmp_path / "one", forms, lambda name: bytes_of(TENSORS[name]), {"format": "pt"})
    assert (tmp_path / "one").read_bytes() == safetensors.numpy.save(TENSORS, {"format": "pt"})
    with pytest.raises(ValueError, match=r"c\.double: got 4 bytes, the header says 32"):
        write_safetensors(tmp_path / "two", forms, lambda name: memoryview(b"four"))


def test_a_file_is_written_without_a_copy_of_its_tensors(tmp_path):
    tensors = {name: np.ones((1024, 1024), np.float32) for name in "abcd"}
    tracemalloc.start()
    try:
        pieces = {"adapter.safetensors": safetensors_pieces(tensors)}
        listing(pieces)
        write_directory(tmp_path / "step", pieces)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < tensors["a"].nbytes / 4
    assert read_safetensors(tmp_path / "step" / "adapter.safetensors").keys() == tensors.keys()
