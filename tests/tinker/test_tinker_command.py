"""The command `dualtune serve --train`: what it refuses before anything is loaded, and how it ends."""

import contextlib
import http.client
import importlib.util
import json
import re
import signal
import subprocess
import sys
import threading

import pytest

from dualtune.use.tinker.requests import protobufs


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["MODEL", "--train", "--adapter", "a", "--template", "none"], "--adapter, --template"),
        (["MODEL", "--train", "--time-limit", "5"], "--time-limit"), (["MODEL", "--runs", "r"], "--runs"),
        (["MODEL", "--seed", "1"], "--seed"), (["--train"], "MODEL"),
        (["MODEL", "--train", "--host", "0.0.0.0"], "DUALTUNE_API_KEY"),
    ],
)  # fmt: skip
def test_options_that_would_have_no_effect_are_refused(dualtune_main, tiny_softmax, monkeypatch, options, names):
    monkeypatch.delenv("DUALTUNE_API_KEY", raising=False)
    result = dualtune_main("serve", *(tiny_softmax if word == "MODEL" else word for word in options))
    assert result.returncode == 2 and names in result.stderr


def test_a_key_that_the_client_would_not_send_is_refused(dualtune_main, tiny_softmax, monkeypatch, wording):
    monkeypatch.setenv("DUALTUNE_API_KEY", "secret")
    result = dualtune_main("serve", tiny_softmax, "--train", "--host", "0.0.0.0")
    assert result.returncode == 2
    wording(result.stderr)


def test_without_the_package_it_says_what_to_install(dualtune_main, tiny_softmax, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "tinker" else find(name, *rest)
    )
    protobufs.cache_clear()
    result = dualtune_main("serve", tiny_softmax, "--train", "--platform", "numpy")
    assert result.returncode == 4 and "pip install 'dualtune[tinker]'" in result.stderr


@contextlib.contextmanager
def serving(model, runs):
    """Run the command. Yields its process and what posts to it; both need no client, but the command its package."""
    pytest.importorskip("tinker")
    command = [sys.executable, "-m", "dualtune", "serve", str(model), "--train", "--port", "0", "--platform", "numpy",
               "--runs", str(runs)]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found, line + process.stderr.read()

        def post(path, /, **body):
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
            connection.request("POST", f"/api/v1/{path}", json.dumps(body), {"Content-Type": "application/json"})
            return json.loads(connection.getresponse().read())

        try:
            yield process, post
        except BaseException:
            process.kill()  # or its end would be waited for
            raise


def trained_run(post, model):
    """Make a run and update it."""
    session = post("create_session", tags=[])["session_id"]
    made = post("create_model", session_id=session, model_seq_id=0, base_model=str(model), lora_config={"rank": 1})
    run = post("retrieve_future", **made)["model_id"]
    post("optim_step", model_id=run, seq_id=1, adam_params={"learning_rate": 0.1})
    assert "metrics" in post("retrieve_future", request_id=f"{run}:1")
    return run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_when_what_it_computes_has_ended(tiny_softmax, tmp_path, number):
    """What waits is refused, and a run with an update that no checkpoint has is saved."""
    with serving(tiny_softmax, tmp_path) as (process, post):
        run = trained_run(post, tiny_softmax)
        waiting = post("optim_step", model_id=run, seq_id=9, adam_params={})
        results = []
        asking = threading.Thread(target=lambda: results.append(post("retrieve_future", **waiting)))
        asking.start()
        process.send_signal(number)
        assert process.wait(60) == 0
        told = process.stderr.read()
        asking.join()
    assert f"tinker://{run}/weights/interrupted" in told and told.rstrip().endswith("stopped")
    assert (tmp_path / run / "weights" / "interrupted").is_dir()
    assert results == [{"error": "the server is stopping", "category": "server"}]


def test_a_server_that_was_killed_goes_on_from_its_checkpoints(tiny_softmax, tmp_path):
    with serving(tiny_softmax, tmp_path) as (process, post):
        run = trained_run(post, tiny_softmax)
        path = post("retrieve_future", **post("save_weights", model_id=run, seq_id=2, path="kept"))["path"]
        process.kill()
    with serving(tiny_softmax, tmp_path) as (process, post):
        session = post("create_session", tags=[])["session_id"]
        made = post("load_weights", session_id=session, model_seq_id=0, path=path, optimizer=True)
        other = post("retrieve_future", **made)["model_id"]
        post("optim_step", model_id=other, seq_id=1, adam_params={})
        assert "metrics" in post("retrieve_future", request_id=f"{other}:1")
        process.terminate()
