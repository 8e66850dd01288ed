"""mlx_lm.server over an adapter of dualtune, as docs/export.md shows it: its answer is ours."""

import json
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from dualtune.evaluate.inference import load_model, stream_text

pytestmark = pytest.mark.interop


def test_mlx_lms_server_answers_as_we_do(stories, open_backend):
    backend, (model, adapter, _) = open_backend("mlx"), stories
    loaded = load_model(backend, str(model), adapter, dtype="float32")
    expected = "".join(stream_text(loaded, loaded.tokenizer.encode("Lily saw", special=True), max_tokens=12))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", model, "--adapter-path", adapter, "--port", port]
    with subprocess.Popen([*map(str, command)], stderr=subprocess.DEVNULL) as server:
        try:
            body = {"prompt": "Lily saw", "max_tokens": 12, "temperature": 0}
            found = _answer(f"http://127.0.0.1:{port}/v1/completions", body, server)
        finally:
            server.terminate()
    assert found["choices"][0]["text"].strip() == expected.strip() and len(expected) > 10


def _answer(url, body, server):
    """Ask until the server is there."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    while server.poll() is None:
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except OSError:
            time.sleep(0.3)
    pytest.fail("the server has ended")
