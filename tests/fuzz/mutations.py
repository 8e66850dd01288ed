"""How a good file becomes a bad one: damaged in its bytes, forged in its JSON, or in the header of its tensors."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

KEYS = (
    "r", "rank", "scale", "alpha", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "keys", "files",
    "schema_version", "peft_type", "fine_tune_type", "lora_parameters", "num_layers", "use_dora", "bias", "notes",
    "base", "quantization", "group_size", "step", "config", "guards", "losses", "weight_map", "chat_template", "",
    "\x1b[2J", "a\x00b", "\ud800", "x" * 5000, "../../etc/passwd",
)  # fmt: skip
# Values that are wrong in most places. The texts stand for what JSON's writer does not write: see `written`.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 8, 2**31, 2**62, 2**63, 2**64, -(2**63), 10**400, 0.5, 1e308, -0.0, 1e-320, "",
    "0", "1", "8", "1.5", "x", "none", "lora", "LORA", "all-linear", ".*", "(a+)+$", "(", "[z-a]", "\ud800", "\x1b[31m",
    "a\x00", "\ufeff", "../x", "/etc/passwd", "x" * 10_000, [], {}, [[]], [None], [{}], {"a": {}}, {"": []}, [1, "a"],
    ["q_proj"], "@NaN", "@Infinity", "@-Infinity", "@1e999", "@digits", "@deep", "@object", "@twice",
)  # fmt: skip
_RAW = {
    '"@NaN"': "NaN", '"@Infinity"': "Infinity", '"@-Infinity"': "-Infinity", '"@1e999"': "1e999",
    '"@digits"': "9" * 5000, '"@deep"': "[" * 3000 + "]" * 3000, '"@object"': '{"a":' * 90 + "1" + "}" * 90,
    '"@twice"': '{"a": 1, "a": 2}',
}  # fmt: skip
_ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
DTYPES = ("F32", "F64", "F16", "BF16", "U16", "I8", "F8_E4M3", "", "x" * 500)


def written(value: Any, draw: random.Random) -> bytes:
    """The value as JSON, with what JSON's writer does not write; sometimes as no JSON."""
    text = json.dumps(value, ensure_ascii=draw.random() < 0.8)
    for mark, raw in _RAW.items():
        text = text.replace(mark, raw)
    data = text.encode("utf-8", "surrogatepass")
    if draw.random() < 0.05:
        data = draw.choice(
            (b"\xef\xbb\xbf" + data, data + b"\0", data.decode("utf-8", "replace").encode("utf-16"), data * 2)
        )
    return data


def forged_json(data: bytes, draw: random.Random) -> bytes:
    """The file with one to four values replaced, removed, added, renamed or exchanged, wherever they are."""
    value = json.loads(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        places = [*_places(value)]
        if not places:
            break
        container, key = draw.choice(places)
        match draw.randrange(6):
            case 0 | 1:
                container[key] = copy.deepcopy(draw.choice(VALUES))
            case 2:
                del container[key]
            case 3 if isinstance(container, dict):
                container[draw.choice(KEYS)] = copy.deepcopy(draw.choice(VALUES))
            case 4 if isinstance(container, dict):
                container[draw.choice(KEYS)] = container.pop(key)
            case _:
                other, its_key = draw.choice(places)
                container[key] = copy.deepcopy(other.get(its_key) if isinstance(other, dict) else other)
    return written(value, draw)


def _places(value: Any) -> Any:
    """(container, key or index) of everything inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in [*items]:
        yield value, key
        yield from _places(inner)


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Some bytes flipped, cut out, repeated, put in, zeroed or left off."""
    raw = bytearray(data or b"x")
    for _ in range(draw.choice((1, 1, 2, 5))):
        at, size = draw.randrange(len(raw) or 1), draw.choice((1, 2, 8, draw.randrange(1, 200)))
        match draw.randrange(6):
            case 0:
                raw[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del raw[at : at + size]
            case 2:
                raw[at:at] = raw[at : at + size]
            case 3:
                raw[at:at] = draw.choice(
                    (b"\0", b"\xff", b"{", b"[", b'"', b"\\", b",", b"\xed\xa0\x80", b"- ", b"\n", b"9")
                )
            case 4:
                raw[at : at + size] = bytes(len(raw[at : at + size]))
            case _:
                raw = raw[:at]
    return bytes(raw)


def forged_tensors(data: bytes, draw: random.Random) -> bytes:
    """A safetensors file with another header, whose length is mostly right, or with other numbers."""
    size = int.from_bytes(data[:8], "little")
    header, content = json.loads(data[8 : 8 + size]), bytearray(data[8 + size :])
    for _ in range(draw.choice((1, 1, 2))):
        name = draw.choice([*header])
        if name == "__metadata__" or not isinstance(entry := header[name], dict) or entry.keys() != _ENTRY.keys():
            entry = header[name] = copy.deepcopy(_ENTRY)
        match draw.randrange(9):
            case 0:
                entry["shape"] = draw.choice(
                    ([2**62, 4], [0], [], [-1], [True], [1] * 40, [2**63], [0, 2**62], ["1"], "x")
                )
            case 1:
                entry["shape"] = entry["shape"][::-1] if isinstance(entry["shape"], list) else [1]
            case 2:
                entry["data_offsets"] = draw.choice(
                    ([0, 4], [4, 0], [-4, 0], [0, 2**63], [0], [0.0, 4.0], [False, 4], {})
                )
            case 3:
                entry["dtype"] = draw.choice(DTYPES)
            case 4:
                header[_other_name(name, draw)] = header.pop(name)
            case 5:
                del header[name]
            case 6:
                header[_other_name(name, draw)] = copy.deepcopy(entry)
            case 7:
                at = draw.randrange(len(content) // 4) * 4
                content[at : at + 4] = draw.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f", bytes(4)))
            case _:
                header[draw.choice((name, "__metadata__", "x"))] = copy.deepcopy(draw.choice(VALUES))
        if not header:
            break
    text = written(header, draw)
    length = len(text) if draw.random() < 0.95 else draw.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(text) + 1, 8 << 20))
    return length.to_bytes(8, "little") + text + content


def _other_name(name: str, draw: random.Random) -> str:
    return draw.choice(
        (
            name.replace("lora_A", "lora_B"), name.replace(".weight", ".default.weight"), "module." + name,
            name.replace("layers.0", "layers.9999"), name.replace("layers.0", "layers.999999"), name + "\x1b[2J",
            "\ud800",
            name.replace("base_model.model.", ""), name.replace("model", "model.model", 1), "", "x" * 3000, "a\x00b",
            name.replace("lora_A", "lora_embedding_A"), f"{name[:20]}\n{name[20:]}", name + ".m", "q" * 600 + name,
        )
    )  # fmt: skip


def forged_lines(data: bytes, draw: random.Random) -> bytes:
    """A file of JSON lines, one of which is forged."""
    lines = data.splitlines()
    at = draw.randrange(len(lines))
    lines[at] = forged_json(lines[at], draw)
    return b"\n".join(lines) + b"\n"
