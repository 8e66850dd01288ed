"""The cache of tokenized data: made once, whole or not at all, never stale, never a reason to fail."""

import os
import stat
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import DataError, DiskError
from dualtune.data.documents import Data
from dualtune.data.sources.rows import check_bad_rows
from dualtune.data.tokens import store as cache
from dualtune.data.tokens.store import TOKENS
from dualtune.data.tokens.tokenizer import Tokenizer


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty cache of its own."""
    monkeypatch.setenv("DUALTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """What was tokenized, in order."""
    found: list[str] = []
    real = Tokenizer.encode_batch

    def counted(self, texts, *, special):
        found.extend(texts)
        return real(self, texts, special=special)

    monkeypatch.setattr(Tokenizer, "encode_batch", counted)
    return found


def documents(config, tokenizer):
    return Data(config).train_and_eval(tokenizer)[0]


@pytest.fixture(scope="session")
def tokenizer(tiny_llama) -> Tokenizer:
    return Tokenizer(tiny_llama)


def test_a_second_start_tokenizes_nothing_and_has_the_same(here, reads, make_config, write_rows, qa_rows, tokenizer):
    config = make_config(write_rows(qa_rows))
    first = documents(config, tokenizer)
    assert len(reads) == len(qa_rows)
    reads.clear()
    second = documents(config, tokenizer)
    assert reads == []
    assert [d.tokens.tolist() for d in first] == [d.tokens.tolist() for d in second]
    assert first.fingerprint() == second.fingerprint()
    assert first.summary() == second.summary()


@pytest.mark.parametrize(
    "change",
    [
        {"data.max_length": 63}, {"data.loss_on": "all"}, {"data.columns": {"prompt": "completion"}},
        {"data.format": "prompt_completion"},
    ],
)  # fmt: skip
def test_whatever_decides_the_tokens_makes_another_entry(
    here, reads, make_config, write_rows, qa_rows, tokenizer, change
):
    path = write_rows(qa_rows)
    documents(make_config(path), tokenizer)
    reads.clear()
    documents(make_config(path, change), tokenizer)
    assert len(reads) == len(qa_rows)


def test_other_content_another_template_and_another_tokenizer_make_another_entry(
    here, reads, make_config, write_rows, qa_rows, tiny_llama, tokenizer, monkeypatch
):
    path = write_rows(qa_rows)
    documents(make_config(path), tokenizer)
    for row in (0, -1):  # of the same size, with the same times
        times = path.stat()
        text = path.read_text()
        path.write_text(text.replace("plus", "plum", 1) if row == 0 else text[::-1].replace("sulp", "tulp", 1)[::-1])
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        reads.clear()
        documents(make_config(path), tokenizer)
        assert len(reads) == len(qa_rows)
    bare = Tokenizer(tiny_llama, "none")
    reads.clear()
    documents(make_config(path, {"data.template": "none"}), bare)
    assert len(reads) == len(qa_rows)
    monkeypatch.setattr(cache, "_code", lambda: "a newer dualtune")
    reads.clear()
    documents(make_config(path, {"data.template": "none"}), bare)
    assert len(reads) == len(qa_rows)


def test_a_bad_row_leaves_no_entry(here, make_config, write_rows, qa_rows, tokenizer):
    config = make_config(write_rows([*qa_rows, {"prompt": 1, "completion": ""}]))
    for _ in range(2):
        with pytest.raises(DataError, match="1 of 17 rows cannot be used"):
            documents(config, tokenizer)
    assert list(here.iterdir()) == []


def test_bad_rows_that_are_left_out_are_counted_from_the_cache_too(here, make_config, write_rows, qa_rows, tokenizer):
    path = write_rows([*qa_rows, {"prompt": 1, "completion": ""}])
    allowed = {"data.on_bad_row": "skip", "data.max_bad_rows": 1}
    for _ in range(2):
        found, held_out = Data(make_config(path, allowed)).train_and_eval(tokenizer)
        assert (len(found), found.num_bad, held_out.num_bad) == (16, 1, 0)
        assert found.summary().endswith("; 1 bad row left out")
    # A stricter config is not served from what a more lenient one left there.
    with pytest.raises(DataError, match=r"more than data\.max_bad_rows = 0\.01"):
        documents(make_config(path, {"data.on_bad_row": "skip"}), tokenizer)
    with pytest.raises(DataError, match="1 of 17 rows cannot be used"):
        documents(make_config(path), tokenizer)


def test_a_limit_of_one_is_one_row_and_a_smaller_one_a_share():
    check_bad_rows(1, ["f:1: bad"], 99, skip=True, limit=1)
    check_bad_rows(1, ["f:1: bad"], 99, skip=True, limit=0.01)
    for count, good, limit in ((2, 98, 1), (2, 98, 0.01), (1, 0, 1), (1, 99, 0)):
        reason = rf"That is more than data\.max_bad_rows = {limit}\." if good else r"No usable row is left\."
        with pytest.raises(DataError, match=rf"{count} of {count + good} rows cannot be used\. {reason}"):
            check_bad_rows(count, ["f:1: bad"] * count, good, skip=True, limit=limit)


def test_a_changed_byte_is_noticed_when_the_document_is_used(here, make_config, write_rows, qa_rows, tokenizer):
    config = make_config(write_rows(qa_rows))
    documents(config, tokenizer)
    (tokens,) = here.glob(f"*/{TOKENS}")
    data = np.fromfile(tokens, "<i4")
    data[7] ^= 1
    data.tofile(tokens)
    found = documents(config, tokenizer)
    with pytest.raises(DataError, match=r"the cache of tokenized data is damaged\. Remove this directory"):
        list(found)


@pytest.mark.parametrize("damage", ["cut", "no table", "no JSON"])
def test_a_damaged_entry_is_made_anew(here, reads, make_config, write_rows, qa_rows, tokenizer, damage):
    config = make_config(write_rows(qa_rows))
    expected = documents(config, tokenizer).fingerprint()
    (tokens,), (table,) = here.glob(f"*/{TOKENS}"), here.glob(f"*/{cache.TABLE}")
    if damage == "cut":
        tokens.write_bytes(tokens.read_bytes()[:-4])
    elif damage == "no table":
        table.unlink()
    else:
        table.write_text("{")
    reads.clear()
    assert documents(config, tokenizer).fingerprint() == expected
    assert len(reads) == len(qa_rows)
    assert len(list(here.iterdir())) == 1


def test_where_the_cache_cannot_be_written_the_data_are_kept_for_the_process(
    tmp_path, monkeypatch, make_config, write_rows, qa_rows, tokenizer
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DUALTUNE_CACHE", str(tmp_path / "file"))  # a file: no directory can be made in it
    assert len(documents(make_config(write_rows(qa_rows)), tokenizer)) == 16


def test_a_full_disk_is_a_disk_error_that_says_what_to_do(make_config, write_rows, tokenizer, tmp_path, monkeypatch):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)], check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        monkeypatch.setenv("DUALTUNE_CACHE", str(tmp_path))
        rows = Path(os.environ.get("TMPDIR", "/tmp")) / f"rows-{os.getpid()}.jsonl"
        rows.write_text("".join('{"text": "%s"}\n' % ("a" * 1000) for _ in range(100)))
        with pytest.raises(DiskError, match="Free disk space, or set DUALTUNE_CACHE"):
            documents(make_config(rows), tokenizer)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # nothing half-written is left
    finally:
        rows.unlink(missing_ok=True)
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_what_nobody_used_for_long_is_removed(here, make_config, write_rows, qa_rows, tokenizer):
    documents(make_config(write_rows(qa_rows)), tokenizer)
    (old,) = here.iterdir()
    long_ago = time.time() - (cache.KEPT_DAYS + 1) * 86_400
    os.utime(old, (long_ago, long_ago))
    documents(make_config(write_rows(qa_rows[:8], "other.jsonl")), tokenizer)
    (new,) = here.iterdir()
    assert new != old


def test_use_keeps_an_entry(here, make_config, write_rows, qa_rows, tokenizer):
    config = make_config(write_rows(qa_rows))
    documents(config, tokenizer)
    (entry,) = here.iterdir()
    os.utime(entry, (0, 0))
    documents(config, tokenizer)
    assert time.time() - entry.stat()[stat.ST_MTIME] < 3600
