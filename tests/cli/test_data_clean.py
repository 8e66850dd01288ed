"""`dualtune data clean`: what is kept, as it was; what is left out, and why; and nothing at all after an error."""

import csv
import gzip
import json
import os
import subprocess
import sys
import types

import pytest

from dualtune.data.cleaning import RECOGNIZERS, masked

LONG = "清晨的港口十分安静,海鸥整齐地站在堤墙上,仿佛在等待一列永远不会到来的火车,远处传来低沉的汽笛声。"


def pair(prompt, completion, **more):
    return {"prompt": prompt, "completion": completion, **more}


ROWS = [
    pair("B", " "),  # unusable
    pair("Naïve?", "Ω " + LONG, score=1.0, tags=["a", None], big=2**70),
    pair("A", "first " * 20),
    pair("A", "FIRST " * 20),  # near line 3
    {"completion": "Ω " + LONG, "prompt": "Naïve?"},  # line 2, its other columns apart
    pair("C", "second " * 20, half="\ud800"),
]


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def clean(dualtune_main, tmp_path):
    """Run the command; returns its table, the new directory and the table of what was left out."""

    def run(*args):
        out = tmp_path / "out"
        result = dualtune_main("data", "clean", *args, "--out", out, "--json")
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout), out, read(out / "left_out.jsonl")

    return run


def test_clean_rows_keep_their_values_and_their_order(clean, write_rows):
    path = write_rows(ROWS)
    found, out, left_out = clean(path)
    assert read(out / "train.jsonl") == [ROWS[1], ROWS[2], ROWS[5]]
    assert "Naïve" in (out / "train.jsonl").read_text(encoding="utf-8"), "text stays text"
    same = {"file": str(path), "similarity": 1.0}
    assert left_out == [
        {"file": str(path), "line": 1, "why": "unusable",
         "detail": "completion: is blank, so there is nothing to train on"},
        same | {"line": 4, "why": "near duplicate", "duplicate_of": {"file": str(path), "line": 3}},
        same | {"line": 5, "why": "exact duplicate", "duplicate_of": {"file": str(path), "line": 2}},
    ]  # fmt: skip
    assert found == {
        "sources": [{"path": str(path), "file": "train.jsonl", "rows": 6, "kept": 3}],
        "left_out": {"near duplicate": 1, "exact duplicate": 1, "unusable": 1},
        "personal": None, "personal_rows": 0,
    }  # fmt: skip
    assert names_in(out) == ["left_out.jsonl", "train.jsonl"]


def test_what_is_clean_is_clean(clean, write_rows, dualtune_main, tmp_path, wording):
    _, out, _ = clean(write_rows(ROWS))
    again = dualtune_main("data", "clean", out / "train.jsonl", out / "train.jsonl", "--out", tmp_path / "again")
    counted, first, second, left_out = again.stdout.splitlines()
    wording(counted)
    wording(first)
    wording(second)
    wording(left_out)
    assert (tmp_path / "again/train.jsonl").read_bytes() == (out / "train.jsonl").read_bytes()


def test_files_of_several_formats_are_compared_and_stay_apart(clean, write_rows, tmp_path):
    chat = {"messages": [{"role": "user", "content": "Naïve?"}, {"role": "assistant", "content": "Ω " + LONG}]}
    with (tmp_path / "table.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["instruction", "output"], ["Naïve?", "Ω " + LONG], ["D", "third"]])
    with gzip.open(tmp_path / "train.json.gz", "wt", encoding="utf-8") as file:
        json.dump([{"text": "D " * 9}, {"text": "d " * 9}], file)
    _, out, left_out = clean(write_rows([chat], "chat.ndjson"), tmp_path / "table.csv", tmp_path / "train.json.gz")
    assert read(out / "chat.jsonl") == [chat]
    assert read(out / "table.jsonl") == [{"instruction": "D", "output": "third"}]
    assert read(out / "train.jsonl") == [{"text": "D " * 9}]
    assert [(row["why"], row["duplicate_of"]["file"].rpartition("/")[2]) for row in left_out] == [
        ("exact duplicate", "chat.ndjson"), ("near duplicate", "train.json.gz"),
    ]  # fmt: skip


def test_parquet_gives_json_lines(clean, tmp_path, dualtune_main, wording):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [pair("Q", "long " * 30), pair("Q", "long " * 30), pair("R", "other", n=3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows, pyarrow.schema(
        [("prompt", "string"), ("completion", "string"), ("n", "int64")])), tmp_path / "t.parquet")  # fmt: skip
    _, out, _ = clean(tmp_path / "t.parquet")
    assert read(out / "t.jsonl") == [pair("Q", "long " * 30, n=None), rows[2]]
    rows = [{"text": "x", "raw": b"\x00"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    refused = dualtune_main("data", "clean", tmp_path / "b.parquet", "--out", tmp_path / "new")
    assert refused.returncode == 3
    wording(refused.stderr)
    assert not (tmp_path / "new").exists()


def test_of_a_directory_held_out_rows_are_kept_first(clean, write_rows, tmp_path):
    (tmp_path / "data").mkdir()
    write_rows([ROWS[2], pair("E", "own")], "data/train.jsonl")
    write_rows([ROWS[3]], "data/valid.jsonl")
    _, out, _ = clean(tmp_path / "data")
    assert read(out / "valid.jsonl") == [ROWS[3]] and read(out / "train.jsonl") == [pair("E", "own")]


@pytest.mark.parametrize(
    ("options", "kept"),
    [([], [0]), (["--keep", "longest"], [1]), (["--exact"], [0, 1]), (["--near", "0.99"], [0, 1])],
)
def test_options(clean, write_rows, options, kept):
    rows = [{"q": "Q", "a": LONG * 2}, {"q": "Q", "a": LONG * 2 + "全"}, {"q": "Q", "a": LONG * 2}]
    columns = ["--column", "prompt=q", "--column", "completion=a"]
    _, out, _ = clean(write_rows(rows), *columns, *options)
    assert read(out / "train.jsonl") == [rows[i] for i in kept]


def test_an_error_leaves_nothing_and_names_the_place(dualtune_main, write_rows, tmp_path):
    path, out = write_rows(ROWS), tmp_path / "out"
    broken = tmp_path / "b.jsonl.gz"
    broken.write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000)[:-9])
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    cases = [
        ([path, broken, "--out", out], 3, "b.jsonl.gz: broken gzip file"),
        ([tmp_path / "none.jsonl", "--out", out], 3, "none.jsonl: no such file"),
        (
            [write_rows([{"prompt": [1], "completion": 2}], "bad.jsonl"), "--out", out],
            3,
            "bad.jsonl: no row can be used",
        ),
        ([path, "--out", tmp_path / "full"], 2, "exists and is not an empty directory"),
        ([path, "--out", out, "--near", "0.5"], 2, "0.7<=x<=1"),
        ([path, "--out", out, "--exact", "--near", "0.9"], 2, "Give --exact or --near, not both"),
        ([path, "--out", out, "--format", "csv"], 2, "--format: got 'csv', allowed: auto"),
    ]
    for args, code, message in cases:
        result = dualtune_main("data", "clean", *args)
        assert (result.returncode, result.stdout, message in result.stderr) == (code, "", True), result.stderr
        assert not out.exists()
    assert names_in(tmp_path / "full") == ["mine"]
    assert not [name for name in names_in(tmp_path) if ".tmp-" in name]


def test_killed_before_the_end_there_is_no_new_directory(write_rows, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "dualtune", "data", "clean", write_rows(ROWS), "--out", out]
    killed = subprocess.run(command, env=os.environ | {"DUALTUNE_FAULT": "synced:1"}, check=False)
    assert killed.returncode == -9 and not out.exists()
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    assert len(read(out / "train.jsonl")) == 3


# --- personal data ---------------------------------------------------------------------------------------------------


def test_personal_data_without_the_package_is_one_line(dualtune_main, write_rows, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)
    result = dualtune_main("data", "clean", write_rows(ROWS), "--out", tmp_path / "out", "--pii")
    assert result.returncode == 4 and "pip install 'dualtune[pii]'" in result.stderr
    assert result.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def test_personal_data_are_listed_masked_and_not_removed(clean, write_rows, tmp_path):
    pytest.importorskip("presidio_analyzer")  # not in the environment of development: its import takes 8 s
    rows = [
        pair("Write to jane.doe@example.org", "I do."),
        pair("Card?", "4111 1111 1111 1111, or 4111 1111 1111 1112"),  # the second fails its checksum
        pair("写信给", "电话 (415) 555-2671", note={"ip": ["10.1.2.3"]}),
        pair("Nothing", "here"),
    ]
    found, out, _ = clean(write_rows(rows), "--pii")
    listed = read(out / "personal.jsonl")
    assert read(out / "train.jsonl") == rows
    assert [(row["line"], row["kind"], row["masked"]) for row in listed] == [
        (1, "EMAIL_ADDRESS", "j***.***@*******.***"),
        (2, "CREDIT_CARD", "4*** **** **** ****"),
        (3, "PHONE_NUMBER", "(4**) ***-****"),
        (3, "IP_ADDRESS", "1*.*.*.*"),
    ]
    assert (found["personal"]["EMAIL_ADDRESS"], found["personal_rows"]) == (1, 3)
    assert "jane" not in (out / "personal.jsonl").read_text()


def test_what_recognizers_return_is_filtered_counted_and_masked(clean, write_rows, monkeypatch):
    """With a stand-in for the package, whose own recognizers are tested where it is installed."""

    class Digits:
        supported_entities = ("DIGITS",)

        def analyze(self, text, entities, nlp_artifacts):
            at = text.find("42")
            result = {"entity_type": "DIGITS", "start": at, "end": at + 2}
            return [types.SimpleNamespace(**result, score=score) for score in (0.39, 0.4)] if at >= 0 else []

    class Nothing(Digits):
        def analyze(self, text, entities, nlp_artifacts):
            return []

    recognizers = types.SimpleNamespace(**dict.fromkeys(RECOGNIZERS, Nothing) | {RECOGNIZERS[1]: Digits})
    monkeypatch.setitem(sys.modules, "presidio_analyzer", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "presidio_analyzer.predefined_recognizers", recognizers)
    monkeypatch.setitem(sys.modules, "tldextract", types.SimpleNamespace(TLDExtract=lambda **given: None))
    found, out, _ = clean(write_rows([pair("Say 42", "42"), pair("x", "y"), pair("Say 42", "42")]), "--pii")
    assert (found["personal"], found["personal_rows"]) == ({"DIGITS": 2}, 1)
    assert [(row["line"], row["masked"]) for row in read(out / "personal.jsonl")] == [(1, "4*"), (1, "4*")]


def test_a_mask_keeps_the_form():
    assert [masked(value) for value in ("+49 30", "é@ü.de", "…", "")] == ["+4* **", "é@*.**", "…", ""]
