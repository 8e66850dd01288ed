"""Bundles made to harm: each is refused for what it is, by inspect and by unpack, and nothing is written.

They are written by tarfile, with a list whose hashes and digest are right wherever the attack is another one.
"""

import gzip
import hashlib
import io
import json
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from dualtune.base.errors import FormatError
from dualtune.use.transfer.bundles.bundle import inspect, unpack
from dualtune.use.transfer.bundles.pack import pack

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint_v1"
WEIGHTS = "checkpoints/step-{:08d}/adapter.safetensors"


def listed(raw: bytes) -> dict:
    return {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


def sealed(table: dict) -> bytes:
    """BUNDLE.json with the right digest, by the words of the specification."""

    def text(value):
        return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()

    table = {key: value for key, value in table.items() if key != "digest"}
    return text(table | {"digest": hashlib.sha256(text(table)).hexdigest()})


class Forge:
    """The parts of a good bundle, and the way to put them together as one likes."""

    def __init__(self, good: Path) -> None:
        self.good = good.read_bytes()
        with tarfile.open(good) as archive:
            self.files = {member.name: archive.extractfile(member).read() for member in archive}
        self.table = json.loads(self.files.pop("BUNDLE.json"))
        self.folder = next(name for name in self.files if "/" in name).rpartition("/")[0]

    def relist(self, **files) -> dict:
        """The table with other content of some files, hashes of hashes included."""
        contents = self.files | files
        manifest = f"{self.folder}/MANIFEST.json"
        if manifest not in files:
            inner = json.loads(self.files[manifest])
            beside = {
                n: listed(contents[f"{self.folder}/{n}"]) for n in inner["files"] if f"{self.folder}/{n}" in contents
            }
            contents[manifest] = json.dumps(inner | {"files": beside}).encode()
        self.files = dict(sorted(contents.items()))
        return self.table | {"files": {name: listed(raw) for name, raw in self.files.items()}}

    def build(self, table=None, members=None, extra=()) -> bytes:
        """A tar of BUNDLE.json, the members, and TarInfos with their content."""
        out = io.BytesIO()
        raw = table if isinstance(table, bytes) else sealed(self.table if table is None else table)
        with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for name, content in [("BUNDLE.json", raw), *(members or self.files).items()]:
                add(archive, tarfile.TarInfo(name), content)
            for info, content in extra:
                add(archive, info, content)
            end = archive.offset  # tarfile fills up to 10 KiB
        return out.getvalue()[: end + 1024]


def add(archive, info, content):
    info.size = info.size or len(content)
    archive.addfile(info, io.BytesIO(content))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A bundle of the checkpoint that an older version wrote."""
    place = tmp_path_factory.mktemp("good")
    step = json.loads((GOLDEN / "MANIFEST.json").read_text())["step"]
    shutil.copytree(GOLDEN, place / "run" / "checkpoints" / f"step-{step:08d}")
    config = json.loads((GOLDEN / "state.json").read_text())["config"]
    (place / "run" / "config.yaml").write_text("".join(f"{s}: {json.dumps(keys)}\n" for s, keys in config.items()))
    pack(place / "run", place / "good.tar")
    return place / "good.tar"


@pytest.fixture
def forge(good):
    return Forge(good)


@pytest.fixture
def refused(tmp_path):
    """Refused by inspect and unpack for the reason in these words; nothing was written anywhere around."""

    def check(raw: bytes, words: str) -> None:
        (tmp_path / "in").mkdir(exist_ok=True)
        file = tmp_path / "in" / "x.tar"
        file.write_bytes(raw)
        for attempt in (lambda: inspect(file), lambda: unpack(file, tmp_path / "in" / "deep" / "there")):
            with pytest.raises(FormatError) as caught:
                attempt()
            assert words in str(caught.value) and str(caught.value).startswith(f"{file}: ")
            assert str(caught.value).isprintable() and len(str(caught.value)) < 500
            assert [path.name for path in tmp_path.rglob("*")] == ["in", "x.tar"]

    return check


def test_the_forge_makes_good_bundles(forge, good, tmp_path):
    """So that each test below is refused for its own reason."""
    assert forge.build() == forge.good
    file = tmp_path / "relisted.tar"
    file.write_bytes(forge.build(forge.relist(**{"config.yaml": b"model: {}\n"})))
    assert inspect(file).bundle.files["config.yaml"].num_bytes == 10


# --- the container: an entry more, of a kind or a name that may not be -----------------------------------------------

KINDS = {
    tarfile.SYMTYPE: "is a symbolic link", tarfile.LNKTYPE: "is a hard link", tarfile.CHRTYPE: "is a character device",
    tarfile.BLKTYPE: "is a block device", tarfile.DIRTYPE: "is a directory", tarfile.FIFOTYPE: "is a FIFO",
    tarfile.CONTTYPE: "is a contiguous file", b"x": "is a pax header", b"g": "is a global pax header",
    b"L": "is a GNU long name", b"K": "is a GNU long link", b"S": "is a sparse file", b"Z": "is of an unknown type",
}  # fmt: skip


@pytest.mark.parametrize("place", ["in place of a file", "after all files"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files(forge, refused, kind, place):
    info = tarfile.TarInfo("config.yaml")
    info.type, info.linkname = kind, "/etc/passwd"
    raw = forge.build(extra=[(info, b"")]) if place == "after all files" else retyped(forge, kind)
    refused(raw, f" {KINDS[kind]}; only regular files are allowed")


def retyped(forge, kind):
    position = forge.good.index(b"config.yaml\0")
    header = bytearray(forge.good[position : position + 512])
    header[156:157] = kind
    return forge.good[:position] + bytes(fixed(header)) + forge.good[position + 512 :]


def fixed(header):
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return header


NAMES = {
    "../evil.yaml": "leads out of the directory (..)", "a/../../evil": "leads out of the directory (..)",
    "..\\evil": "leads out of the directory (..)", "/etc/cron.d/x": "is an absolute path",
    "C:\\Windows\\x": "is an absolute path with a drive letter", "c:/x": "is an absolute path with a drive letter",
    "\\\\host\\share": "has a backslash in its name", "adapter\\x": "has a backslash in its name",
    "config.yaml:hidden": "has a colon in its name, which on NTFS", "CONFIG.yaml": "only in upper and lower case",
    "bundle.JSON": "only in upper and lower case", "Tokenizer/vocab.json": "only in upper and lower case",
    "checkpoints/": "is a directory", "./config.yaml": "has an empty part or a dot", "adapter//x": "has an empty part",
    "config.yaml.": "ends with a dot or a space", "config.yaml ": "ends with a dot or a space",
    "tokenizer/x.py": "is code, which is not allowed", "adapter/x.so": "is code, which is not allowed",
    "x.pth": "is code, which is not allowed in a bundle",
    "adapter/adapter_model.bin": "can run code when it is loaded (pickle)", "rng.pkl": "(pickle)",
    "inner.tar.gz": "is an archive inside the bundle", "a.zip": "is an archive inside the bundle",
    "config.yaml\x1b[2J": "other characters than printable ASCII", "ｃonfig.yaml": "other characters than printable",
    "config\u202eyaml": "other characters than printable", "NUL": "is not one of the", ".bashrc": "is not one of the",
    "adapter/README.md": "is not one of the names that", "environment.json": "is not one of the",
    "checkpoints/step-4/state.json": "is not one of the", "runs/lock": "is not one of the",
    "checkpoints/step-000000004/state.json": "is not one of the",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_only_names_of_the_list_of_names(forge, refused, name):
    table = forge.table | {"files": dict(sorted((forge.table["files"] | {name: listed(b"x")}).items()))}
    members = dict(sorted((forge.files | {name: b"x"}).items()))
    if not name.endswith("/"):  # tarfile would write a directory
        refused(forge.build(extra=[(tarfile.TarInfo(name), b"x")]), NAMES[name])
    refused(forge.build(table, members), NAMES[name])


# --- the container: the right entries in the wrong way ---------------------------------------------------------------


def test_members_and_list_are_the_same(forge, refused):
    other = {name: raw for name, raw in forge.files.items() if name != "config.yaml"}
    refused(forge.build(members=other), "ends at byte")
    refused(forge.build(extra=[(tarfile.TarInfo("config.yaml"), b"x: 1")]), "config.yaml is in it twice")
    refused(forge.build(extra=[(tarfile.TarInfo("BUNDLE.json"), b"{}")]), "BUNDLE.json is in it twice")
    refused(
        forge.build(extra=[(tarfile.TarInfo("tokenizer/merges.txt"), b"a b")]),
        "merges.txt is not listed in BUNDLE",
    )
    refused(forge.build(members=dict(reversed(forge.files.items()))), "files must be in the order of BUNDLE.json")
    refused(forge.build(members=forge.files | {"config.yaml": b"short"}), "config.yaml has another size in its header")


@pytest.mark.parametrize(
    ("key", "value"),
    [("mode", 0o777), ("mode", 0o4755), ("uid", 1000), ("mtime", 1), ("uname", "root"), ("gname", "wheel")],
)
def test_a_header_says_name_and_size_alone(forge, refused, key, value):
    info = tarfile.TarInfo("config.yaml")
    setattr(info, key, value)
    content = forge.files.pop("config.yaml")
    assert list(forge.table["files"])[-1] == "config.yaml"
    refused(forge.build(extra=[(info, content)]), "holds more than name and size")


def test_every_byte_counts(forge, refused):
    raw, total = forge.good, len(forge.good)
    pad = raw.index(forge.files["config.yaml"]) + len(forge.files["config.yaml"])
    assert raw[pad] == 0
    for damaged, words in {
        b"": "has 0 bytes", raw[:100]: "has 100 bytes, too few for a bundle", raw[:700]: "ends inside BUNDLE.json",
        raw[: total // 2]: "ends inside checkpoints/step-", raw[:-1]: "ends before its end mark",
        raw[:-1024]: "ends before its end mark", raw + b"\0": "has bytes after its end",
        raw + bytes(9216): "has bytes after its end", raw[:-1024] + b"evil".ljust(1024): "has a wrong checksum",
        raw[:-512] + b"evil".ljust(512): "has bytes after its end", raw + raw: "has bytes after its end",
        raw[:pad] + b"!" + raw[pad + 1 :]: "other than zero in the padding after config.yaml",
        b"!" + raw: "has a wrong checksum", raw[512:]: "has a wrong checksum",
    }.items():  # fmt: skip
        refused(damaged, words)


def test_another_format_is_named(forge, refused, tmp_path):
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("BUNDLE.json", "{}")
    for raw, words in {
        zipped.getvalue(): "is a zip archive", gzip.compress(forge.good): "is compressed with gzip",
        b"\x80\x04" + bytes(600): "is a pickle", b"version https://git-lfs.github.com/spec/v1\n": "git lfs pull",
        forge.build(members={}, table=b"").replace(b"BUNDLE.json", b"config.yaml"): "has a wrong checksum",
    }.items():  # fmt: skip
        refused(raw, words)
    other = io.BytesIO()
    with tarfile.open(fileobj=other, mode="w") as archive:
        add(archive, tarfile.TarInfo("config.yaml"), b"x: 1")
    refused(other.getvalue(), "begins with config.yaml, not BUNDLE.json")


# --- the list --------------------------------------------------------------------------------------------------------

BIG = 1 << 40
CHANGES = {
    "kind": ({"kind": "code"}, "kind: got 'code', must be adapter or checkpoint"),
    "version": ({"schema_version": 3}, "schema_version 3, this dualtune reads up to 2: upgrade it"),
    "older version": ({"schema_version": 1}, "'created': unknown; the keys are schema_version, kind, dualtune"),
    "no name": ({"name": None}, "name: got 'None', must be 1 to 200 printable characters"),
    "name that moves a cursor": ({"name": "a\x1b[2J"}, "must be 1 to 200 printable characters"),
    "long name": ({"name": "a" * 201}, "must be 1 to 200 printable characters"),
    "no date": ({"created": 0}, "created: got '0', must be a date and time such as 2026-01-31T23:59:59+00:00"),
    "impossible date": ({"created": "2026-02-31T00:00:00+00:00"}, "must be a date and time such as"),
    "date without a zone": ({"created": "2026-02-01T00:00:00"}, "must be a date and time such as"),
    "no version": ({"schema_version": "1"}, "schema_version: got '1', must be an integer >= 1"),
    "unknown key": ({"run_after": "x"}, "'run_after': unknown; the keys are"),
    "step of another": ({"step": 5}, "but step is 5"),
    "step negative": ({"step": -1}, "step: got '-1', must be an integer >= 0"),
    "step true": ({"step": True}, "step: got 'True', must be an integer >= 0"),
    "kind of another": ({"kind": "adapter", "step": None}, "kind is adapter, but it lists a checkpoint"),
    "relocate": ({"relocate": ["model.name; rm -rf ~"]}, "must be keys of a config"),
    "terminal": ({"dualtune": "\x1b[2J"}, "must be a printable string"),
    "base": ({"base": {"name": "\x1b[2J"}}, "must be a printable string"),
    "base a list": ({"base": []}, "base: got '[]', must be an object"),
    "no files": ({"files": {}}, "lists 0 files, allowed are 1 to 32"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_the_list_is_checked_key_by_key(forge, refused, change):
    change, words = CHANGES[change]
    refused(forge.build(forge.table | change), words)


ENTRIES = {
    "too large": ({"bytes": BIG, "sha256": "0" * 64}, f"lists {BIG} bytes, at most 1048576 are allowed"),
    "negative": ({"bytes": -1, "sha256": "0" * 64}, "lists -1 bytes"),
    "true": ({"bytes": True, "sha256": "0" * 64}, "needs bytes and sha256, and nothing else"),
    "one more": ({"bytes": 1, "sha256": "0" * 64, "mode": 493}, "needs bytes and sha256, and nothing else"),
    "short hash": ({"bytes": 1, "sha256": "0" * 63}, "is not 64 hexadecimal digits"),
    "no entry": (None, "needs bytes and sha256, and nothing else"),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_list_is_checked_file_by_file(forge, refused, entry):
    entry, words = ENTRIES[entry]
    refused(forge.build(forge.table | {"files": forge.table["files"] | {"config.yaml": entry}}), words)


def test_the_list_is_complete_and_small(forge, refused):
    files = forge.table["files"]
    for name in files:
        left = {n: entry for n, entry in files.items() if n != name}
        # Lion keeps m alone, so a list without v is complete; but then the bundle has a file that it does not list.
        fault = "not listed in" if "optimizer_v" in name else "missing, which a bundle of kind"
        refused(forge.build(forge.table | {"files": left}), f"{name} is {fault}")
    weights = {WEIGHTS.format(i): {"bytes": 1 << 32, "sha256": "0" * 64} for i in range(40)}
    refused(forge.build(forge.table | {"files": weights}), "lists 40 files, allowed are 1 to 32")
    refused(forge.build(forge.table | {"files": dict([*weights.items()][:9])}), "lists 38654705664 bytes in all")
    refused(forge.build(forge.table | {"files": files | dict([*weights.items()][7:9])}), "not sorted by name")
    three = dict(sorted((files | dict([*weights.items()][7:9])).items()))
    refused(forge.build(forge.table | {"files": three}), "lists the checkpoints of steps [")
    refused(forge.build(forge.table | {"files": files | {"BUNDLE.json": files["config.yaml"]}}), "lists itself")


def test_the_list_is_json_of_one_reading(forge, refused):
    good = sealed(forge.table)
    for raw, words in {
        good.replace(b'"kind"', b'"kind": "adapter", "kind"'): "a key appears twice",
        good.replace(b'"step": ', b'"step": NaN, "x": '): "NaN is not JSON", b"[]\n": "must be an object",
        good[:-3]: "not valid JSON", b"": "not valid JSON", b'{"a":' * 20_000: "nested too deeply",
        good.replace(b"  ", b" ", 1): "its digest is not that of its content",
        json.dumps(json.loads(good)).encode(): "its digest is not that of its content",
        b" " * (1 << 18): "at most 131072 are allowed", "{}".encode("utf-16"): "not valid JSON",
    }.items():  # fmt: skip
        refused(forge.build(raw), words)
    changed = json.loads(good) | {"dualtune": "9.9.9"}
    raw = (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()
    refused(forge.build(raw), "its digest is not that of its content")


# --- what is inside --------------------------------------------------------------------------------------------------


def test_a_changed_file_is_named(forge, refused):
    for name, content in forge.files.items():
        middle = len(content) // 2
        changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        refused(forge.build(members=forge.files | {name: changed}), f"{name}")


def test_a_list_that_was_edited_with_its_file_disagrees_with_the_checkpoint(forge, refused):
    name = f"{forge.folder}/optimizer_m.safetensors"
    content = bytearray(forge.files[name])
    content[-1] ^= 1
    files = forge.files | {name: bytes(content)}
    table = forge.table | {"files": {n: listed(raw) for n, raw in files.items()}}
    words = "MANIFEST.json: its entry of optimizer_m.safetensors differs from that in BUNDLE.json"
    refused(forge.build(table, files), words)
    inner = json.loads(forge.files[f"{forge.folder}/MANIFEST.json"])
    inner["files"]["../../../etc/passwd"] = {"bytes": 0, "sha256": "0" * 64}
    table = forge.relist(**{f"{forge.folder}/MANIFEST.json": json.dumps(inner).encode()})
    refused(forge.build(table), "MANIFEST.json: lists '../../../etc/passwd', which is not in the bundle")


KEYS = ("auto_map", "trust_remote_code", "_attn_implementation_internal", "\\u0061uto_map", "auto\\u005Fm\\u0061p")


@pytest.mark.parametrize("place", ["state.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"])
@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_makes_a_reader_run_code_is_refused_wherever_it_hides(forge, refused, key, place):
    place = place if "/" in place else f"{forge.folder}/{place}"
    for before in (0, 262_100, 262_144):  # in the first piece that is read, and across the border to the next
        raw = '{"a": "' + "x" * before + f'", "b": [{{"{key}": {{"AutoModel": "evil.Model"}}}}]}}'
        refused(forge.build(forge.relist(**{place: raw.encode()})), f"{place}: has a key that can make a reader")


def test_a_text_about_such_a_key_is_no_key(forge, tmp_path):
    raw = rb'{"help": "set \"auto_map\" and trust_remote_code", "auto_maps": 1, "my_auto_map": 2}'
    file = tmp_path / "x.tar"
    file.write_bytes(forge.build(forge.relist(**{f"{forge.folder}/state.json": raw})))
    assert inspect(file).bundle.kind == "checkpoint"


DISGUISES = {
    "adapter.safetensors": (b"\x80\x04\x95" + b"x" * 600, "is not a safetensors file, but a pickle"),
    "optimizer_m.safetensors": (b"PK\x03\x04" + b"x" * 600, "is not a safetensors file, but an archive"),
    "optimizer_v.safetensors": (b"\x08" + bytes(7) + b"[]", "is not a safetensors file"),
    "state.json": (b"#!/bin/sh\nrm -rf ~\n", "is a program"),
    "../tokenizer/tokenizer.model": (b"\x7fELF" + b"x" * 600, "is a program"),
    "../tokenizer/vocab.json": (b"[1]", "is not a JSON object"),
    "../tokenizer/merges.txt": (b"a b\n\xff\xfe", "is not UTF-8 text"),
    "../tokenizer/chat_template.jinja": (b"a\0b", "is not UTF-8 text"),
    "../tokenizer/special_tokens_map.json": (b'{"a": "\xf0\x9f', "is not UTF-8 text"),
    "../tokenizer/tokenizer_config.json": ("{}".encode("utf-16"), "is not UTF-8 text"),
    "../tokenizer/added_tokens.json": (b"version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer"),
}  # fmt: skip


@pytest.mark.parametrize("name", DISGUISES)
def test_a_file_is_what_its_name_says(forge, refused, name):
    raw, words = DISGUISES[name]
    name = name.removeprefix("../") if ".." in name else f"{forge.folder}/{name}"
    refused(forge.build(forge.relist(**{name: raw})), f"{name}: {words}")


def test_an_archive_in_disguise_is_refused(forge, refused):
    name = "tokenizer/tokenizer.model"
    refused(forge.build(forge.relist(**{name: forge.good})), f"{name}: is an archive")
