"""mlx_lm.server over an adapter, and llama-server over an exported model, as docs/export.md shows them: they answer as
we do."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import pytest

from dualtune.evaluate.inference import load_model, stream_text

pytestmark = pytest.mark.interop


ASKED = {"prompt": "Lily saw", "max_tokens": 12, "temperature": 0}


def test_mlx_lms_server_answers_as_we_do(stories, open_backend):
    model, adapter, _ = stories
    words = (sys.executable, "-m", "mlx_lm", "server", "--model", model, "--adapter-path", adapter)
    with served(*words) as ask:
        found = ask("/v1/completions", ASKED)
    assert found["choices"][0]["text"].strip() == expected(open_backend("mlx"), stories)


def test_llama_server_answers_as_we_do(llama_cpp, environment, stories, open_backend, dualtune_main, tmp_path):
    model, adapter, _ = stories
    words = ("export", adapter, tmp_path / "out", "--base", model, "--llama-cpp", environment, "--platform", "cpu")
    assert dualtune_main(*words, "--to", "gguf", "--quantize", "f32").returncode == 0
    with served(environment / "bin" / "llama-server", "-m", tmp_path / "out" / "out-F32.gguf") as ask:
        found = ask("/v1/completions", ASKED)
        told = ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3})
    assert found["choices"][0]["text"].strip() == expected(open_backend("torch"), stories)
    assert told["choices"][0]["message"]["role"] == "assistant"


def expected(backend, stories):
    model, adapter, _ = stories
    loaded = load_model(backend, str(model), adapter, dtype="float32")
    text = "".join(stream_text(loaded, loaded.tokenizer.encode(ASKED["prompt"], special=True), max_tokens=12)).strip()
    assert len(text) > 10
    return text


@contextmanager
def served(*command):
    """Start a server on a free port. Yields what asks it, and waits until it is there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [*map(str, command), "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            yield lambda path, body: _answer(f"http://127.0.0.1:{port}{path}", body, server)
        finally:
            server.terminate()


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
