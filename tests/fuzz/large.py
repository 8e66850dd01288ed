"""The largest that each file can be, in the shapes that take most memory to read."""

from __future__ import annotations

from collections.abc import Iterator

from readers import ADAPTER, READERS, Files, rehash_adapter, rehash_listing

from dualtune.base.untrusted import MAX_HEADER_BYTES, MAX_STRUCTURE
from dualtune.model.config_file import MAX_CONFIG_BYTES as MAX_MODEL_CONFIG_BYTES
from dualtune.model.formats.directory import MAX_BYTES as MAX_RECORD_BYTES
from dualtune.model.formats.directory import MAX_CONFIG_BYTES
from dualtune.train.state.checkpoint import MAX_MANIFEST_BYTES, MAX_STATE_BYTES

ITEMS = {  # one value each, with what it needs of the structure that is allowed
    "numbers": (b"%d", 1), "lists": (b"[%d]", 2), "objects": (b'{"%x":[]}', 6), "texts": (b'"%07x"', 3),
    "tensors": (b'{"dtype":"F32","shape":[%d],"data_offsets":[0,4]}', 19),
}  # fmt: skip


def jsons(max_bytes: int) -> Iterator[bytes]:
    """Objects of at most `max_bytes`, with as much in them as is allowed."""
    for item, cost in ITEMS.values():
        count = min(MAX_STRUCTURE // cost, max_bytes // (len(item) + 8)) - 9
        yield b'{"files":[' + b",".join(item % i for i in range(1000, 1000 + count)) + b"]}"
    pairs = min(MAX_STRUCTURE // 6, max_bytes // 22) - 9
    yield b"{" + b",".join(b'"%07x":"%07x"' % (i, i) for i in range(pairs)) + b"}"
    yield b'{"' + b"x" * (max_bytes - 20) + b'":1}'
    yield b'{"a":"' + b"y" * (max_bytes - 20) + "\U0001f999".encode() + b'"}'
    yield b'{"a":' + b"[" * (max_bytes // 2) + b"}"


def tensors(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def large_inputs(*, few: bool) -> Iterator[tuple[str, Files]]:
    """(reader, files); a few of them are the headers of an adapter's tensors alone."""
    good = {name: reader.seeds()[-1] for name, reader in READERS.items()} | {"adapter": ADAPTER}
    for reader, file, max_bytes in (
        ("adapter", "adapter_config.json", MAX_CONFIG_BYTES), ("adapter", "dualtune.json", MAX_RECORD_BYTES),
        ("adapter", "adapter_model.safetensors", MAX_HEADER_BYTES), ("checkpoint", "MANIFEST.json", MAX_MANIFEST_BYTES),
        ("checkpoint", "state.json", MAX_STATE_BYTES), ("base model", "config.json", MAX_MODEL_CONFIG_BYTES),
        ("base model", "model.safetensors", MAX_HEADER_BYTES), ("bundle list", "BUNDLE.json", 1 << 17),
        ("base model", "model.safetensors.index.json", MAX_HEADER_BYTES),
        ("tokenizer", "tokenizer.json", 4 << 20), ("tokenizer", "tokenizer_config.json", 4 << 20),
    ):  # fmt: skip
        if few and file != "adapter_model.safetensors":
            continue
        for content in jsons(max_bytes):
            files = good[reader] | {file: tensors(content) if file.endswith(".safetensors") else content}
            rehash_adapter(files) if reader == "adapter" else rehash_listing(files, "MANIFEST.json")
            yield reader, files
