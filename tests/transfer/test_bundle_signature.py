"""Signatures of bundles, made and checked by the real ssh-keygen with throw-away keys."""

import shutil
import subprocess

import numpy as np
import pytest

from dualtune.model.adapter import AdapterSpec, init_adapter
from dualtune.model.formats.directory import Adapter, write_adapter

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen (OpenSSH's client)")


@pytest.fixture
def place(tmp_path):
    """An adapter, keys of alice and mallory, and a file that allows alice's."""
    tensors = init_adapter({"model.layers.0.self_attn.q_proj": (8, 8)}, 2, seed=0)
    tensors = {name: x + np.float32(1) for name, x in tensors.items()}
    write_adapter(tmp_path / "adapter", Adapter(AdapterSpec(2, 4, 0.0, ("q_proj",)), tensors, "org/base"))
    for name in ("alice", "mallory"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", tmp_path / name]
        subprocess.run(command, check=True)
    public = (tmp_path / "alice.pub").read_text().rpartition(" ")[0]
    (tmp_path / "allowed").write_text(f'alice@example.org namespaces="dualtune-bundle" {public}\n')
    return tmp_path


def options(place, identity="alice@example.org"):
    return ("--verify-signature", place / "allowed", "--identity", identity)


def signed_by(place, dualtune_main, key="alice"):
    file = place / f"{key}.tar"
    done = dualtune_main("bundle", "pack", place / "adapter", file, "--sign", place / key)
    assert (done.returncode, done.stderr) == (0, "")
    return file


def test_a_signed_bundle_is_accepted_and_says_whose_it_is(place, dualtune_main):
    file = signed_by(place, dualtune_main)
    done = dualtune_main("bundle", "inspect", file, *options(place))
    assert done.returncode == 0 and "by alice@example.org" in done.stdout
    assert dualtune_main("bundle", "unpack", file, place / "there", *options(place)).returncode == 0
    # The oracle is ssh-keygen itself, called by hand.
    command = ["ssh-keygen", "-Y", "verify", "-n", "dualtune-bundle", "-f", place / "allowed",
               "-I", "alice@example.org", "-s", place / "alice.tar.sig"]  # fmt: skip
    with file.open("rb") as stream:
        assert subprocess.run(command, stdin=stream, check=False).returncode == 0


def test_any_other_signature_is_refused_and_nothing_unpacked(place, dualtune_main):
    good, other = signed_by(place, dualtune_main), signed_by(place, dualtune_main, "mallory")
    raw, signature = good.read_bytes(), (place / "alice.tar.sig").read_bytes()
    elsewhere = ["ssh-keygen", "-q", "-Y", "sign", "-n", "file", "-f", place / "alice", place / "for another use.tar"]
    (place / "for another use.tar").write_bytes(raw)
    subprocess.run(elsewhere, check=True, capture_output=True)
    for name, content, sig in (
        ("changed", raw[:-1] + b"\1", signature),  # refused before the file is looked at
        ("cut", raw[:-1], signature),
        ("without", raw, None),
        ("empty", raw, b""),
        ("nonsense", raw, b"-----BEGIN SSH SIGNATURE-----\n" + b"A" * 400),
        ("of mallory", raw, (place / "mallory.tar.sig").read_bytes()),
        ("for another use", raw, (place / "for another use.tar.sig").read_bytes()),
    ):
        file = place / f"{name}.tar"
        file.write_bytes(content)
        place.joinpath(f"{name}.tar.sig").write_bytes(sig) if sig is not None else None
        done = dualtune_main("bundle", "unpack", file, place / "there", *options(place))
        words = "has no signature" if sig is None else "has no valid signature of 'alice@example.org' by "
        assert done.returncode == 6 and words in done.stderr, name
    for file, identity in ((good, "mallory@example.org"), (good, "*"), (other, "alice@example.org")):
        assert dualtune_main("bundle", "unpack", file, place / "there", *options(place, identity)).returncode == 6
    assert not (place / "there").exists()


def test_what_cannot_be_signed_or_checked_says_why(place, dualtune_main, monkeypatch):
    pack = ("bundle", "pack", place / "adapter", place / "x.tar", "--sign")
    inspect = ("bundle", "inspect", signed_by(place, dualtune_main))
    done = dualtune_main(*pack, place / "nobody")
    assert done.returncode == 2 and "--sign: " in done.stderr and "no such file; give a private SSH key" in done.stderr
    done = dualtune_main(*pack, place / "allowed")
    assert done.returncode == 2 and "ssh-keygen could not sign with it" in done.stderr
    done = dualtune_main(*inspect, "--verify-signature", place / "nowhere", "--identity", "x")
    assert done.returncode == 2 and "no such file; it needs a line such as: x ssh-ed25519" in done.stderr
    for alone in (("--identity", "x"), ("--verify-signature", place / "allowed")):
        assert dualtune_main(*inspect, *alone).returncode == 2
    (place / "x.tar.sig").write_text("somebody's")
    assert "x.tar.sig: already exists" in dualtune_main(*pack, place / "alice").stderr
    (place / "x.tar.sig").unlink()
    monkeypatch.setenv("PATH", str(place))
    for args in ((*pack, place / "alice"), (*inspect, *options(place))):
        done = dualtune_main(*args)
        assert done.returncode == 4 and "verifies signatures, is not installed" in done.stderr
    assert not [path for path in place.iterdir() if "x.tar" in path.name]
