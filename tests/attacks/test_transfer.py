"""Attacks on push, pull and unpack in places where others may write: planted links, and files that are exchanged."""

import hashlib
import json
import os
import stat
from pathlib import Path

import pytest

from dualtune.base.errors import DiskError, FormatError
from dualtune.use.transfer import carry
from dualtune.use.transfer.bundles import bundle, signature
from dualtune.use.transfer.bundles.bundle import inspect, unpack
from dualtune.use.transfer.bundles.manifest import ANY
from dualtune.use.transfer.bundles.pack import pack
from dualtune.use.transfer.carry import PushRequest
from dualtune.use.transfer.remotes import store, target
from dualtune.use.transfer.remotes.retries import Patience
from dualtune.use.transfer.remotes.store import chunks_of

HERE = 'for last; do :; done; exec sh -c "$last"'  # an ssh that runs its last argument on this machine


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def pull(text, dest, *, trust=None, wanted=ANY, keep_packed=False):
    return carry.pull(text, dest, keep_packed=keep_packed, trust=trust, required=wanted, patience=Patience(0))


def push(there, file, path, patience=None) -> bool:
    return there.push(file, path, verified=None, force=False, patience=patience or Patience(0))


# --- shared directories ----------------------------------------------------------------------------------------------


def plant(path, kind, victim):
    """Put something under a name that a transfer will use."""
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "dangling link":
        path.symlink_to(victim.with_name("not yet there"))
    elif kind == "second name":
        path.hardlink_to(victim)
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.write_bytes(b"of another user")
        os.chown(path, 12345, 12345)


PLANTED = ["link", "dangling link", "second name", "FIFO", "file of another user"]


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("direction", ["push", "pull"])
def test_what_is_planted_under_the_name_of_a_part_leads_no_write_elsewhere(place, kind, direction):
    if kind == "file of another user" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    victim = place / "precious"
    victim.write_text("precious")
    pack(place / "adapter", place / "a.tar")
    share = place / "share"
    share.mkdir()
    if direction == "push":
        sha256 = inspect(place / "a.tar").sha256
        plant(share / f".a.tar.part-{sha256[:16]}", kind, victim)
        assert target.parse("share/a.tar").push(place / "a.tar", patience=Patience(0)) is True
        assert (share / "a.tar").read_bytes() == (place / "a.tar").read_bytes()
    else:
        plant(share / f".x.part-{chunks_of(place / 'a.tar').identity[:16]}", kind, victim)
        pull("a.tar", share / "x")
        assert (share / "x" / "BUNDLE.json").exists()
    assert victim.read_text() == "precious"
    assert names_in(share) == ["a.tar" if direction == "push" else "x"]
    assert not (place / "not yet there").exists()


def test_a_link_in_place_of_the_directory_is_followed_once_and_for_all(place, monkeypatch):
    """The directory's name is turned to another one in the middle: what was begun is finished where it began."""
    pack(place / "adapter", place / "a.tar")
    (place / "share").mkdir()
    (place / "elsewhere").mkdir()

    def turned(*arguments):
        if not (place / "share").is_symlink():
            (place / "share").rename(place / "moved")
            (place / "share").symlink_to(place / "elsewhere")
        return pieces_of(*arguments)

    from dualtune.use.transfer.remotes import remote_files

    pieces_of = remote_files.pieces_of
    monkeypatch.setattr(remote_files, "pieces_of", turned)
    assert target.parse("share/a.tar").push(place / "a.tar", patience=Patience(0)) is True
    assert (names_in(place / "moved"), names_in(place / "elsewhere")) == (["a.tar"], [])


def test_nobody_else_may_touch_a_part_and_the_whole_file_has_the_usual_rights(place, monkeypatch):
    pack(place / "adapter", place / "a.tar")
    seen = []
    publish = store.Folder.publish

    def watched(self, part, name, final):
        seen.append(stat.S_IMODE((self.path / name).stat().st_mode))
        publish(self, part, name, final)

    monkeypatch.setattr(store.Folder, "publish", watched)
    before = os.umask(0o022)
    try:
        target.parse("share/a.tar").push(place / "a.tar", patience=Patience(0))
        pull("share/a.tar", place / "kept.tar", keep_packed=True)
    finally:
        os.umask(before)
    assert seen == [0o600]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (place / "share" / "a.tar", place / "kept.tar")] == [
        0o644
    ] * 2


@pytest.mark.parametrize("planted", ["link to a file", "link to a directory", "file", "directory of another user"])
def test_what_is_planted_at_the_other_end_of_ssh_leads_no_write_elsewhere(place, peer, planted):
    if planted == "directory of another user" and os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    away = place / "away"
    away.mkdir()
    (away / "data").write_text("precious")
    pack(place / "adapter", place / "a.tar")
    there = peer(HERE)
    part = place / "share" / f".a.tar.part-{inspect(place / 'a.tar').sha256[:16]}"
    part.parent.mkdir()
    if planted == "link to a file":
        part.symlink_to(away / "data")
    elif planted == "link to a directory":
        part.symlink_to(away)
    elif planted == "file":
        part.write_text("an old one")
    else:
        part.mkdir()
        os.chown(part, 12345, 12345)

    if planted == "directory of another user":
        with pytest.raises(DiskError, match="is not your directory; remove it"):
            push(there, place / "a.tar", "./share/a.tar")
    else:
        assert push(there, place / "a.tar", "./share/a.tar") is True
        assert names_in(place / "share") == ["a.tar"]
        assert (place / "share" / "a.tar").read_bytes() == (place / "a.tar").read_bytes()
    assert (away / "data").read_text() == "precious"


# --- what is verified is what is used --------------------------------------------------------------------------------


def test_a_file_that_is_exchanged_after_its_signature_was_checked_is_not_unpacked(place, keys, trust, monkeypatch):
    file = place / "a.tar"
    pack(place / "adapter", file, key=keys / "key")
    pack(place / "other", place / "evil.tar", name="a")
    verify = signature.verify

    def exchanged(*arguments):
        found = verify(*arguments)
        file.write_bytes((place / "evil.tar").read_bytes())  # in place: the open file is the same
        return found

    monkeypatch.setattr(signature, "verify", exchanged)
    good = file.read_bytes()
    with pytest.raises(FormatError, match=r"has another size|was changed|is not listed in"):
        unpack(file, place / "there", trust)
    assert not (place / "there").exists()
    file.write_bytes(good)
    done = pull("a.tar", place / "there", trust=trust)  # of a copy that is nobody else's
    assert done.report.sha256 == hashlib.sha256(good).hexdigest()
    assert (place / "there" / "adapter" / "adapter_model.safetensors").read_bytes() == (
        place / "adapter" / "adapter_model.safetensors"
    ).read_bytes()


def test_a_bundle_that_is_exchanged_after_it_was_verified_is_not_pushed(place, monkeypatch):
    pack(place / "adapter", place / "a.tar")

    def exchanged(file, **options):
        report = inspect(file, **options)
        pack(place / "other", place / "evil.tar", name="a")
        file.write_bytes((place / "evil.tar").read_bytes())
        return report

    monkeypatch.setattr(bundle, "inspect", exchanged)
    with pytest.raises(FormatError, match=r"was changed after it was verified\. Nothing was sent"):
        carry.push("share/a.tar", PushRequest(place / "a.tar"), force=False, public=False, patience=Patience(0))
    assert not (place / "share").exists()


def test_what_is_signed_is_what_was_packed(place, keys, monkeypatch):
    sign = signature.sign

    def exchanged(file, key):
        with Path(file.name).open("r+b") as other:
            other.seek(-600, os.SEEK_END)
            other.write(b"\1")
        return sign(file, key)

    monkeypatch.setattr(signature, "sign", exchanged)
    with pytest.raises(FormatError, match="was changed while it was signed"):
        pack(place / "adapter", place / "a.tar", key=keys / "key")
    assert not (place / "a.tar").exists()


def test_a_secret_that_shows_itself_at_a_second_look_is_not_packed(place, monkeypatch):
    """A file that has other bytes each time it is read is packed with those that were searched, or not at all."""
    (place / "adapter" / "dualtune.json").unlink()  # it would list the first bytes
    config = place / "adapter" / "adapter_config.json"
    table = json.loads(config.read_text())
    clean, leaking = (json.dumps(table | {"note": text}) for text in ("hf-" + "A1" * 17, "hf_" + "A1" * 17))
    config.write_text(clean)
    from dualtune.use.transfer.bundles import pack as packing

    pieces, looks = packing._pieces, []

    def changing(content):
        if content == config:
            looks.append(1)
            config.write_text(leaking if len(looks) > 1 else clean)
        return pieces(content)

    monkeypatch.setattr(packing, "_pieces", changing)
    with pytest.raises(FormatError, match=r"changed while it was packed|a Hugging Face token"):
        pack(place / "adapter", place / "a.tar")
    assert not (place / "a.tar").exists()
