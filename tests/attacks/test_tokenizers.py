"""A tokenizer.json that nobody vouches for costs little time and memory, and is refused in one line."""

import base64
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dualtune.base import limits
from dualtune.base.errors import DualtuneError, EnvironmentFault, FormatError
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.data.tokens.tokenizer_files import load

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
import mutations

GREEDY = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
SPACE = {"type": "Replace", "pattern": {"Regex": r" {2,}"}, "content": " "}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def row(key, part, count):
    return {"type": "Sequence", key: [part] * count}


def template(single, special=None):
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special or {}}


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


MANY_IDS = {"<s>": {"id": "<s>", "ids": [1] * 1000, "tokens": ["<s>"] * 1000}}
CHARSMAP = base64.b64encode((4).to_bytes(4, "little") + b"\xff" * 4 + b"x" * 5000 + b"\0").decode()
BROKEN_TRIE = base64.b64encode((8).to_bytes(4, "little") + b"\xff" * 8 + b"x\0").decode()

HOSTILE = {  # what is changed in a good file -> what is said
    "normalizers that double": ({"normalizer": row("normalizers", GREEDY, 20)}, "normalizer can make a text 1.05e+06"),
    "a normalizer that puts in much": ({"normalizer": GREEDY | {"content": "e" * 1000}}, "1e+03 times as long"),
    "it matches nothing": ({"normalizer": GREEDY | {"pattern": {"Regex": ""}, "content": "e" * 99}}, "100 times as"),
    "decoders that double": ({"decoder": row("decoders", GREEDY, 20)}, "its decoder can make a text"),
    "bytes of bytes": ({"pre_tokenizer": row("pretokenizers", {"type": "ByteLevel", "add_prefix_space": False,
                        "trim_offsets": True, "use_regex": False}, 20)}, "its pre_tokenizer can make a text"),
    "a type that is a list": ({"normalizer": {"type": ["NFC"]}}, "normalizer: got type "),
    "a model's type that is an object": ({"model": {"type": {"BPE": 1}}}, "model: got type "),
    "many parts": ({"normalizer": row("normalizers", {"type": "NFC"}, 33)}, "more than 32 parts"),
    "parts in parts": ({"normalizer": row("normalizers", row("normalizers", {"type": "NFC"}, 20), 20)}, "more than 32"),
    "a template that repeats": ({"post_processor": template([TEXT] * 60)}, "repeats its text"),
    "a template of many pieces": ({"post_processor": template([{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 65)},
                                  "more than 64 pieces"),
    "a special token of many ids": ({"post_processor": template([TEXT], MANY_IDS)}, "of 1000 ids, at most 64"),
    "an unknown part": ({"normalizer": {"type": "Evil"}}, "normalizer: got type 'Evil', allowed: Sequence, Bert"),
    "an unknown model": ({"model": {"type": "LSTM"}}, "model: got type 'LSTM', allowed: BPE"),
    "a long pattern": ({"pre_tokenizer": split("a" * 5000)}, "pattern must be a String or Regex"),
    "a table of replacements that puts in much": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}}, "5e+03 times as long"),
    "a broken table of replacements": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": BROKEN_TRIE}}, "the tokenizer is damaged"),
    "a regular expression without end": ({"pre_tokenizer": split(r"((a+)+)+!")}, "retry-limit-in-match over. Use the"),
    "a slow regular expression": ({"pre_tokenizer": split(r"a*a*b|.")}, "a trial on texts of 3,000 characters"),
    "a regular expression that is none": ({"pre_tokenizer": split("(")}, "the tokenizer is damaged: "),
    "an id beyond everything": ({"model": {"type": "BPE", "vocab": {"a": 2**40}, "merges": []}}, "got id 1099511627"),
    "an id below zero": ({"added_tokens": [{"id": -1, "content": "x"}]}, "added_tokens: got id -1"),
    "a merge of unknown tokens": ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}}, "is damaged: "),
    "no unknown token": ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}}, "is damaged: "),
    "no model": ({"model": None}, "model: must be an object"),
}  # fmt: skip


@pytest.fixture
def model(tiny_llama, tmp_path):
    return shutil.copytree(tiny_llama, tmp_path / "model")


def change(model, changes):
    path = model / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_tokenizer_is_refused_in_one_line(model, monkeypatch, case):
    monkeypatch.setattr("dualtune.data.tokens.tokenizer_vetting.CPU_S", 1)  # of the five
    changes, said = HOSTILE[case]
    change(model, changes)
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(FormatError) as caught:
        Tokenizer(model).encode("Hi there", special=True)
    after = resource.getrusage(resource.RUSAGE_SELF)
    message = str(caught.value)
    assert said in message and "\n" not in message and message.startswith(str(model))
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3
    assert after.ru_maxrss - before.ru_maxrss < 64 << 10


def test_an_unusual_tokenizer_is_tried_once(model, monkeypatch):
    change(model, {"normalizer": row("normalizers", SPACE, 2)})
    asked = []
    run = limits.run
    monkeypatch.setattr("dualtune.data.tokens.tokenizer_vetting.run", lambda *args: asked.append(args[0]) or run(*args))
    first, second = Tokenizer(model), Tokenizer(model)
    assert first.encode("a     b", special=False).tolist() == second.encode("a b", special=False).tolist()
    assert asked == ["dualtune.data.tokens.tokenizer_vetting"]


def test_usual_tokenizers_are_not_tried(tiny_llama, shared, monkeypatch, tmp_path):
    monkeypatch.setenv("DUALTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr("dualtune.data.tokens.tokenizer_vetting.run", lambda *args: pytest.fail("tried"))
    for path in (tiny_llama, shared("tokenizers/smollm2"), shared("models/stories260k")):
        Tokenizer(path)


@pytest.mark.parametrize("name", ["tokenizer.json", "merges.txt", "tokenizer.model", "special_tokens_map.json"])
def test_a_file_that_pretends_to_be_huge_is_not_read(model, name):
    with (model / name).open("ab") as file:
        file.truncate(60 << 30)
    with pytest.raises(FormatError, match=rf"{name}: 64424509440 bytes, at most 67108864 are allowed. Copy the whole"):
        Tokenizer(model)


def test_a_missing_tokenizer_is_a_whole_sentence(model):
    (model / "tokenizer.json").unlink()
    with pytest.raises(EnvironmentFault, match=r"there is no tokenizer.json. Copy the whole model directory, or down"):
        Tokenizer(model)
    (model / "merges.txt").write_text("#version\n")
    with pytest.raises(EnvironmentFault, match=r"there is no tokenizer.json, and .* cannot be converted .*. Copy the"):
        Tokenizer(model)


def test_forged_files_end_in_a_sentence_or_in_a_tokenizer(model):
    """What is not refused encodes and decodes."""
    good = {name: (model / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    refused = 0
    for seed in range(150):
        draw = random.Random(seed)
        name = draw.choice(sorted(good))
        (model / name).write_bytes(mutations.forged_json(good[name], draw))
        try:
            tokenizer = Tokenizer(model, "none")
            tokenizer.decode(tokenizer.encode("Hi <s> there", special=True).tolist())
        except DualtuneError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 2000
        (model / name).write_bytes(good[name])
    assert 20 < refused < 140


# --- a process with limits -------------------------------------------------------------------------------------------

ANSWERS = {
    "answers": "def answer(data):\n    return data.decode()[::-1]",
    "grows": "def answer(data):\n    found = []\n    while True:\n        found.append(bytearray(1 << 20))",
    "never_ends": "def answer(data):\n    while True:\n        pass",
    "fails": "def answer(data):\n    raise KeyError",
}


@pytest.fixture
def module(tmp_path, monkeypatch):
    for name, text in ANSWERS.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_limited_process_answers_or_is_ended(module):
    small = limits.Limits(64 << 20, 1)
    assert limits.run("answers", b"abc", small) == "cba"
    for name in ("grows", "never_ends"):
        with pytest.raises(limits.Exceeded, match="1 s of CPU time or 64 MiB"):
            limits.run(name, b"", small)
    with pytest.raises(EnvironmentFault, match="it ended with exit code 1"):
        limits.run("fails", b"", small)


def test_a_limited_process_ends_with_its_parent(module, tmp_path):
    code = "from dualtune.base import interrupt; from dualtune.base import limits\nwith interrupt.handled():\n" \
           "    print('ready', flush=True)\n    limits.run('never_ends', b'', limits.Limits(1 << 28, 100))"  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=environment)  # fmt: skip
    process.stdout.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert "Preempted" in process.communicate(timeout=1800)[1]


@pytest.mark.parametrize("by_transformers", [False, True])
def test_named_templates_are_found_and_anything_else_is_a_sentence(model, by_transformers):
    """Also where transformers loads the tokenizer, which keeps a list of templates as a dictionary."""
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | ({"init_inputs": []} if by_transformers else {})
    (model / "chat_template.jinja").unlink(missing_ok=True)
    named = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    listed = [{"name": name, "template": text} for name, text in named.items()]
    path.write_text(json.dumps(config | {"chat_template": listed}), encoding="utf-8")
    assert load(model).templates == named
    for wrong in ({"default": {"content": "x"}}, [{"name": "default"}], [3]):
        path.write_text(json.dumps(config | {"chat_template": wrong}), encoding="utf-8")
        with pytest.raises((FormatError, EnvironmentFault), match=r"chat_template|cannot be loaded"):
            load(model)


@pytest.mark.parametrize(
    "part",
    [
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "none", "type_id": 0}}],
                            "pair": [], "special_tokens": {}}},
    ],
    ids=["fixed-length", "template"],
)  # fmt: skip
def test_a_panic_is_one_line_and_its_backtrace_stays_away_from_the_terminal(tiny_llama, tmp_path, capfd, part):
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    file = model / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | part))
    with pytest.raises(FormatError) as refusal:
        load(model)
    assert "\n" not in str(refusal.value) and str(model) in str(refusal.value)
    assert capfd.readouterr() == ("", "")


def test_settings_of_a_training_are_no_fault(tiny_llama, tmp_path):
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    file = model / "tokenizer.json"
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5}  # panics where it is used
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation": cut}))
    ids = load(model).encode_batch(["abcdef"], special=False)[0].ids
    assert ids == load(tiny_llama).encode_batch(["abcdef"], special=False)[0].ids and len(ids) == 6
