"""A model of the hub: downloaded, cached, trained and used offline; and one line for every way in which that fails."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dualtune.base import hub as announced
from dualtune.base.errors import DualtuneError, EnvironmentFault, FormatError
from dualtune.model.base_model import resolve_model
from dualtune.show.run import run

from .fake_hub import COMMIT, NAME, Answer, FakeHub

huggingface_hub = pytest.importorskip("huggingface_hub")
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(monkeypatch, tmp_path, tiny_llama):
    """A hub with the tiny Llama, in place of the real one; no waiting between attempts."""
    without_waiting = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
    for name in ("file_download", "utils._http"):
        monkeypatch.setattr(f"huggingface_hub.{name}.time", without_waiting)
    with FakeHub(tiny_llama) as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", made.url)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", made.url)
        resolve = made.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", resolve)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        for name in ("DOWNLOAD", "ETAG"):
            monkeypatch.setattr(f"huggingface_hub.constants.HF_HUB_{name}_TIMEOUT", 0.2)
        monkeypatch.setenv("DUALTUNE_CACHE", str(tmp_path / "marks"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        monkeypatch.chdir(tmp_path)
        yield made
        made.ended.set()
        made.shutdown()
    huggingface_hub.close_session()


def refused(kind=EnvironmentFault, name=NAME):
    with pytest.raises(DualtuneError) as caught:
        resolve_model(name)
    assert isinstance(caught.value, kind) and "\n" not in str(caught.value)
    return str(caught.value)


def blob(directory, name=WEIGHTS):
    return (directory / name).resolve()


# --- a hub that behaves ----------------------------------------------------------------------------------------------


def test_a_model_is_downloaded_trained_and_used_offline(
    hub, open_backend, make_config, write_rows, qa_rows, monkeypatch
):
    backend = open_backend("torch")
    data = write_rows(qa_rows)
    summary = run(make_config(data, {"train.steps": 1, "run.dir": "first"}, model=NAME), backend)
    directory = resolve_model(NAME)
    assert directory.name == COMMIT and sorted(file.name for file in directory.iterdir()) == sorted(hub.files)
    assert (directory / WEIGHTS).read_bytes() == hub.files[WEIGHTS] and len(hub.fetched(f"store/{WEIGHTS}")) == 1

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    num_asked = len(hub.asked)
    offline = run(make_config(data, {"train.steps": 1, "run.dir": "second"}, model=NAME), backend)
    assert len(hub.asked) == num_asked
    assert len(losses("first")) == 1 and losses("first") == losses("second")
    assert summary.final_loss == offline.final_loss


def losses(run_dir):
    with Path(run_dir, "metrics.jsonl").open() as file:
        return [row["loss"] for row in map(json.loads, file) if "loss" in row]


def test_without_weights_none_are_downloaded(hub):
    directory = resolve_model(NAME, weights=False)
    assert not hub.fetched(WEIGHTS) and (directory / "config.json").is_file()


def test_a_name_that_is_in_no_cache_is_told_offline(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "was not found" in refused()
    assert not hub.asked


# --- bytes that are not those that were announced ------------------------------------------------------------------


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json", "config.json"])
def test_other_bytes_of_the_same_size_are_refused(hub, name):
    hub.change(f"(store|resolve/.*)/{name}$", lambda a: replace(a, body=a.body[:-3] + b"  \n" if a.body else b""))
    message = refused(FormatError)
    assert name in message and "hub announced" in message
    hub.changes.clear()
    removed = message.partition("Remove ")[2].partition(" and run")[0]
    Path(removed).unlink()
    assert (resolve_model(NAME) / name).read_bytes() == hub.files[name]  # the remedy that the message names


def test_a_file_is_hashed_once_and_again_after_a_change(hub, monkeypatch):
    hashed, original = [], announced._digest
    monkeypatch.setattr(announced, "_digest", lambda blob: hashed.append(blob) or original(blob))
    directory = resolve_model(NAME)
    assert {path.name for path in hashed} == {blob(directory, name).name for name in hub.files}
    del hashed[:]
    resolve_model(NAME)
    assert not hashed
    whole = blob(directory).read_bytes()
    blob(directory).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert WEIGHTS in refused(FormatError) and [path.name for path in hashed] == [blob(directory).name]
    assert WEIGHTS in refused(FormatError), "a refused file is hashed again"
    blob(directory).write_bytes(whole)
    resolve_model(NAME)


def test_the_share_that_is_hashed_is_told(hub, monkeypatch):
    resolve_model(NAME, weights=False)
    monkeypatch.setattr(announced, "_PIECE", len(hub.files[WEIGHTS]) // 4)
    shares = []
    resolve_model(NAME, tell=shares.append)
    assert len(shares) in (4, 5) and shares == sorted(shares) and shares[-1] == 1.0
    resolve_model(NAME, tell=shares.append)
    assert len(shares) in (4, 5)


def test_a_cache_that_cannot_be_written_costs_only_time(hub, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DUALTUNE_CACHE", str(tmp_path / "file" / "below"))
    assert resolve_model(NAME) == resolve_model(NAME)


# --- a hub that does not -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (Answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"}), "hf auth login"),
        (Answer(403, {"X-Error-Code": "GatedRepo"}), "accept its terms"),
        (Answer(404, {"X-Error-Code": "RepoNotFound"}), "(404)"),
        (Answer(429, {"Retry-After": "0"}), "(429)"),
        (Answer(500), "(500)"),
        (Answer(302), "in a circle"),
        (Answer(200, {"Content-Type": "text/html"}, b"<html>Log in to this network</html>"), "login page"),
        (Answer(200, {}, b'{"_id": "0", "id": "org/na'), "login page"),
        (Answer(200, {"Content-Length": "4096"}, b"{", sent=1), "the connection broke"),
        (Answer(200, {"Content-Length": "4096"}, b"{", sent=1, stalls=True), "the connection broke"),
    ],
    ids=["private", "gated", "missing", "busy", "fault", "circle", "portal", "truncated", "cut", "stall"],
)
@pytest.mark.parametrize("path", ["/revision/main", "/tree/"])
def test_a_list_of_files_that_is_none_is_told_in_one_line(hub, answer, told, path):
    circle = {"Location": f"/api/models/{NAME}{path}{'' if 'main' in path else COMMIT}"}
    hub.change(path, lambda _: replace(answer, headers=circle) if answer.status == 302 else answer)
    assert told in refused()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (Answer(401), "hf auth login"),
        (Answer(403, {"X-Error-Code": "GatedRepo"}), "accept its terms"),
        (Answer(429, {"Retry-After": "0"}), "(429)"),
        (Answer(500), "(500)"),
        (Answer(302, {"Location": f"/store/{WEIGHTS}"}), "in a circle"),
        (Answer(200, {}, b"x", sent=0), "the connection broke"),
        (Answer(200, {}, b"x", sent=0, stalls=True), "the connection broke"),
    ],
    ids=["private", "gated", "busy", "fault", "circle", "cut", "stall"],
)
def test_weights_that_do_not_come_are_told_in_one_line_and_come_later(hub, answer, told):
    hub.change(f"/store/{WEIGHTS}", lambda a: answer)
    assert told in refused()
    hub.changes.clear()
    before = len(hub.fetched("config.json"))
    assert (resolve_model(NAME) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert len(hub.fetched("config.json")) == before, "what has arrived is kept"


@pytest.mark.parametrize("stalls", [False, True])
def test_a_download_that_breaks_in_the_middle_goes_on_from_there(hub, stalls, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)
    half = len(hub.files[WEIGHTS]) // 2048 * 1024
    hub.change(f"/store/{WEIGHTS}", lambda a: replace(a, sent=half, stalls=stalls), times=1)
    assert (resolve_model(NAME) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert hub.fetched(f"store/{WEIGHTS}") == ["", f"bytes={half}-"]


@pytest.mark.parametrize("change", [lambda body: body + b"more", lambda body: body[:-4]], ids=["longer", "shorter"])
def test_weights_of_another_size_are_refused(hub, change):
    hub.change(f"/store/{WEIGHTS}", lambda a: replace(a, body=change(a.body)))
    refused()
    assert not list(Path("cache").rglob("model.safetensors"))


@pytest.mark.parametrize("path", ["../../../../escaped.json", "/tmp/escaped.json", "a/../../../../../escaped.json"])
def test_a_list_with_a_path_out_of_the_cache_is_refused(hub, tmp_path, path):
    def add(answer):
        rows = json.loads(answer.body)
        return replace(answer, body=json.dumps([*rows, rows[0] | {"path": path}]).encode())

    hub.change("/tree/", add)
    hub.change("escaped", lambda _: hub.honest(f"/{NAME}/resolve/{COMMIT}/config.json"))
    refused(DualtuneError)
    assert not [file for file in tmp_path.rglob("*escaped*") if not file.is_relative_to(tmp_path / "cache")]
    assert not list(tmp_path.parent.glob("*escaped*"))
