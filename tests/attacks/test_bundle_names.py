"""Attacks with good signatures: an old bundle under a new name, one of another run, one that is out of date."""

import json
import os
import shutil
import time
from datetime import UTC, datetime, timedelta

import pytest

from dualtune.base.errors import ConfigError, FormatError
from dualtune.use.transfer import carry
from dualtune.use.transfer.bundles import bundle, manifest, signature
from dualtune.use.transfer.bundles.bundle import inspect, unpack
from dualtune.use.transfer.bundles.manifest import ANY, RequiredBinding, check, parse_age
from dualtune.use.transfer.bundles.pack import pack
from dualtune.use.transfer.remotes.retries import Patience


def pull(text, dest, *, trust=None, wanted=ANY, keep_packed=False):
    return carry.pull(text, dest, keep_packed=keep_packed, trust=trust, required=wanted, patience=Patience(0))


# --- names and dates -------------------------------------------------------------------------------------------------


def dated(directory, age_days: float):
    for path in directory.iterdir():
        os.utime(path, (time.time() - age_days * 86400,) * 2)


def test_an_old_signed_bundle_under_a_new_name_is_refused(place, keys, trust):
    pack(place / "adapter", place / "old.tar", key=keys / "key")
    for ending in ("", ".sig"):
        shutil.copyfile(place / f"old.tar{ending}", place / f"new.tar{ending}")
    with pytest.raises(
        FormatError, match="is the bundle 'old', found under the name 'new': it was renamed or replaced"
    ):
        pull("new.tar", place / "there", trust=trust)
    with pytest.raises(FormatError, match=r"is the bundle 'old', --name requires 'new'"):
        unpack(place / "new.tar", place / "there", trust, RequiredBinding(name="new"))
    assert not (place / "there").exists()
    assert pull("new.tar", place / "there", trust=trust, wanted=RequiredBinding(name="old")).report.notes == []


def test_without_a_signature_another_name_is_told(place, wording):
    pack(place / "adapter", place / "old.tar")
    (place / "old.tar").rename(place / "new.tar")
    (note,) = pull("new.tar", place / "there").report.notes
    wording(note)


def test_a_bundle_is_bound_to_where_it_is_pushed(place, dualtune_main):
    assert dualtune_main("push", "share/first", "adapter").returncode == 0
    assert inspect(place / "share" / "first" / "bundle.tar").bundle.name == "first"
    done = dualtune_main("push", "share/second", "share/first/bundle.tar")
    assert "note        the bundle is bound to the name 'first': to pull it from here" in done.stdout
    assert (
        "note        is the bundle 'first', found under the name 'second'"
        in dualtune_main("pull", "share/second").stdout
    )


def test_an_old_bundle_is_refused_where_an_age_is_set(place, dualtune_main):
    dated(place / "adapter", 8)
    pack(place / "adapter", place / "a.tar")
    for words in (("pull", "a.tar"), ("bundle", "inspect", "a.tar"), ("bundle", "unpack", "a.tar", "there")):
        done = dualtune_main(*words, "--max-age", "7d")
        assert (done.returncode, "8.0 days ago; --max-age allows 7.0 days" in done.stderr) == (6, True), words
        assert dualtune_main(*words, "--max-age", "9d").returncode == 0, words
    done = dualtune_main("pull", "a.tar", "x", "--max-age", "soon")
    assert (done.returncode, "--max-age: got 'soon'; allowed: a number and one of m, h, d and w" in done.stderr) == (
        2, True,
    )  # fmt: skip


def test_the_date_is_that_of_the_content_so_packing_again_does_not_renew_it(place):
    dated(place / "adapter", 8)
    pack(place / "adapter", place / "a.tar", name="x")
    pack(place / "adapter", place / "b.tar", name="x")
    assert (place / "a.tar").read_bytes() == (place / "b.tar").read_bytes()
    created = datetime.fromisoformat(inspect(place / "a.tar").bundle.created)
    assert abs(datetime.now(UTC) - created - timedelta(days=8)) < timedelta(minutes=5)


def test_a_date_that_is_to_come_is_refused_and_a_clock_that_is_a_little_fast_is_not(place):
    pack(place / "adapter", place / "a.tar")
    found = inspect(place / "a.tar").bundle
    written = datetime.fromisoformat(found.created)
    wanted = RequiredBinding(max_age=parse_age("7d"))
    assert check(found, wanted, "a", "x", is_signed=True, now=written - timedelta(minutes=50)) == []
    with pytest.raises(FormatError, match=r"which is in the future\. Check both clocks"):
        check(found, wanted, "a", "x", is_signed=True, now=written - timedelta(hours=2))
    with pytest.raises(ConfigError, match="--max-age"):
        parse_age("7 years")


def test_a_bundle_of_the_first_version_is_read_and_said_to_bind_nothing(place, keys, trust):
    """As an older dualtune wrote it, signed."""
    pack(place / "adapter", place / "new.tar")
    raw, report = (place / "new.tar").read_bytes(), inspect(place / "new.tar")
    before = manifest.to_bytes(report.bundle)
    after = manifest.to_bytes(manifest.Bundle(
        report.bundle.kind, report.bundle.version, None, report.bundle.base, {}, (), report.bundle.files, "",
    ))  # fmt: skip
    assert (json.loads(after)["schema_version"], "created" in json.loads(after)) == (1, False)
    body = raw[512 + len(before) + bundle.archive.padding(len(before)) :]
    first = bundle.archive.header("BUNDLE.json", len(after)) + after + bytes(bundle.archive.padding(len(after)))
    (place / "old.tar").write_bytes(first + body)
    with (place / "old.tar").open("rb") as file:
        (place / "old.tar.sig").write_text(signature.sign(file, keys / "key")[0])
    done = unpack(place / "old.tar", place / "there", trust)
    assert done.notes == ["BUNDLE.json has neither a name nor a date: an older dualtune packed it"]
    for wanted in (RequiredBinding(name="old"), RequiredBinding(max_age=timedelta(days=1))):
        with pytest.raises(FormatError, match=r"an older dualtune packed it\. --name and --max-age need them"):
            inspect(place / "old.tar", trust, wanted)


def test_verify_shows_what_an_unpacked_bundle_was_bound_to(place, dualtune_main, tiny_llama):
    dated(place / "adapter", 8)
    pack(place / "adapter", place / "a.tar")
    unpack(place / "a.tar", place / "there")
    words = ("verify", "there", "--base", tiny_llama, "--platform", "numpy")
    shown = dualtune_main(*words).stdout
    assert "bundle" in shown and "'a', written 20" in shown and "on the base model org/base" in shown
    done = dualtune_main(*words, "--max-age", "7d")
    assert (done.returncode, "8.0 days ago; --max-age allows 7.0 days" in done.stderr) == (6, True)
    assert dualtune_main(*words, "--name", "b").returncode == 6
    (place / "there" / "adapter" / "dualtune.json").unlink()
    assert "adapter/dualtune.json differs from BUNDLE.json" in dualtune_main(*words).stdout
    done = dualtune_main("verify", "adapter", "--base", tiny_llama, "--max-age", "7d")
    assert (done.returncode, "has no BUNDLE.json next to it" in done.stderr) == (6, True)
