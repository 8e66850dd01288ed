"""The bundle reader among random inputs, and its memory with the largest that it can meet."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualtune.base.errors import FormatError
from dualtune.use.transfer.bundles import archive, manifest, names
from dualtune.use.transfer.bundles.archive import FORBIDDEN_KEYS, Content

FUZZ = Path(__file__).with_name("fuzz_bundle.py")
MAX_MEMORY_KIB = 64 << 10


def test_no_damaged_or_forged_file_gets_through(python):
    """A few thousand; the long form is in the file's first lines."""
    done = python(FUZZ, "--inputs", 3000, "--seed", 7)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["damaged refused"] > 500 and counts["headers_forged refused"] > 500
    assert (
        counts["lists_forged refused"] > 300 and counts["lists_forged accepted"] > 10
    )  # harmless changes, all hashes right


@given(st.binary(max_size=3000))
def test_random_bytes_are_no_list(raw):
    with pytest.raises(FormatError):
        manifest.parse(raw, "test")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner)
                    | st.dictionaries(st.text(), inner), max_leaves=20))  # fmt: skip
def test_random_json_is_no_list(value):
    with pytest.raises(FormatError):
        manifest.parse(json.dumps(value).encode(), "test")


@given(st.text(max_size=130))
def test_a_name_is_in_the_list_of_names_or_has_a_problem(name):
    """Whatever passes is a plain relative path: the oracle is pathlib's."""
    if names.problem_of(name) is None:
        path = Path("/dest") / name
        assert path.resolve() == path and path.is_relative_to("/dest/") and len(path.parts) in (3, 4, 5)


@given(st.sampled_from(FORBIDDEN_KEYS), st.data())
def test_a_forbidden_key_is_found_however_it_is_spelled_and_cut(key, data):
    """The oracle is the JSON reader: what it takes for the key is refused, in any pieces."""
    spelled = "".join(data.draw(st.sampled_from((c, f"\\u{ord(c):04x}", f"\\u{ord(c):04X}"))) for c in key)
    raw = f'{{"x": [{{"{spelled}": 1}}]}}'.encode()
    assert key in json.loads(raw)["x"][0]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    content = Content("a.json", len(raw), "test")
    with pytest.raises(FormatError, match="has a key that can make a reader run code"):
        for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
            content.feed(raw[begin:end])


# --- memory ----------------------------------------------------------------------------------------------------------


def write_bundle(path, files):
    """A bundle of an adapter: of contents, and of one beginning that is followed by a hole up to (beginning, size)."""
    sizes = {name: content[1] if isinstance(content, tuple) else len(content) for name, content in files.items()}
    contents = {name: content[0] if isinstance(content, tuple) else content for name, content in files.items()}
    listed = {n: manifest.File(sizes[n], hashlib.sha256(raw).hexdigest()) for n, raw in sorted(contents.items())}
    first = manifest.to_bytes(manifest.Bundle("adapter", "1", None, {}, {}, (), listed, ""))
    with path.open("wb") as file:
        for name, content in {"BUNDLE.json": first, **dict(sorted(contents.items()))}.items():
            size = sizes.get(name, len(content))
            file.write(archive.header(name, size) + content)
            file.seek(size - len(content) + archive.padding(size), 1)
        file.write(archive.END)


HEAD = b"\x02" + bytes(7) + b"{}"  # of a safetensors file without tensors
ADAPTER = {"adapter/adapter_config.json": b"{}", "adapter/adapter_model.safetensors": HEAD}
LARGE = {
    "weights of 128 MiB": ADAPTER | {"adapter/adapter_model.safetensors": (HEAD, 128 << 20)},
    "a vocabulary of 64 MiB": ADAPTER | {"tokenizer/tokenizer.model": (b"", 64 << 20)},
}


@pytest.fixture
def peak_of(python, tmp_path):
    """(exit code, what was said, VmHWM in KiB) of `dualtune bundle …` in a process of its own."""
    if sys.platform != "linux":
        pytest.skip("needs /proc")
    program = (
        "import sys\nfrom pathlib import Path\nfrom dualtune.cli import main\n"
        "try:\n    main.main()\n"
        "finally:\n    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    print(next(line for line in lines if 'VmHWM' in line).split()[1])\n"
    )

    def run(verb, file, before=""):
        target = [tmp_path / "there"] if verb == "unpack" else []
        done = python("-c", before + program, "bundle", verb, file, *target)
        return done.returncode, done.stderr, int(done.stdout.split()[-1])

    return run


@pytest.mark.parametrize("case", LARGE)
@pytest.mark.parametrize("verb", ["inspect", "unpack"])
def test_memory_is_small_however_large_a_file_is(peak_of, tmp_path, case, verb):
    write_bundle(tmp_path / "x.tar", LARGE[case])
    code, said, peak_kib = peak_of(verb, tmp_path / "x.tar")
    assert code == 6 and "its sha256 is not that in BUNDLE.json" in said  # which is known at its end
    assert peak_kib < MAX_MEMORY_KIB, peak_kib
    assert not (tmp_path / "there").exists()


def padded(text, size, fill=b" "):
    return text + fill * (size - len(text))


CONTENTS = {
    "JSON of 64 MiB": {"tokenizer/tokenizer.json": padded(b'{"a": "', 64 << 20, b"x")},
    "four bytes to a character": {"tokenizer/merges.txt": "\U0001f999".encode() * (16 << 20)},
    "a listing of empty lists": {"adapter/dualtune.json": b'{"files":[' + b"[]," * 174_000 + b"0]}"},
    "a listing of deep lists": {"adapter/dualtune.json": b'{"files":' + b"[" * 250_000},
    "a listing of many keys": {
        "adapter/dualtune.json": b'{"files":{%s}}' % b",".join(b'"%x":0' % i for i in range(47_000))
    },
}


@pytest.mark.parametrize("case", CONTENTS)
def test_memory_is_small_whatever_a_file_holds(peak_of, tmp_path, case):
    write_bundle(tmp_path / "x.tar", ADAPTER | CONTENTS[case])
    code, said, peak_kib = peak_of("unpack", tmp_path / "x.tar")
    is_harmless = case in ("JSON of 64 MiB", "four bytes to a character")  # not for a reader of the JSON, but here
    assert code == (0 if is_harmless else 6), said
    assert peak_kib < MAX_MEMORY_KIB, (said, peak_kib)


def test_a_list_of_empty_lists_is_small_too(peak_of, tmp_path):
    raw = padded(b'{"base":[' + b"[]," * 43_000 + b"0]}", names.MAX_BUNDLE_FILE_BYTES)
    content = archive.header("BUNDLE.json", len(raw)) + raw + bytes(archive.padding(len(raw))) + archive.END
    (tmp_path / "x.tar").write_bytes(content)
    code, said, peak_kib = peak_of("unpack", tmp_path / "x.tar")
    assert code == 6 and "BUNDLE.json: schema_version: missing" in said and peak_kib < MAX_MEMORY_KIB, (said, peak_kib)


def test_the_measure_of_memory_can_tell(peak_of, tmp_path):
    """With pieces of 64 MiB the limit is passed."""
    write_bundle(tmp_path / "x.tar", LARGE["weights of 128 MiB"])
    before = "from dualtune.use.transfer.bundles import archive\narchive.CHUNK = 64 << 20\n"
    code, _, peak_kib = peak_of("inspect", tmp_path / "x.tar", before)
    assert code == 6 and peak_kib > MAX_MEMORY_KIB
