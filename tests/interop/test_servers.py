"""mlx_lm.server and vLLM over an adapter, vLLM and llama-server over an exported model, as docs/export.md shows them:
they answer as we do."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from dualtune.engine.testing.tiny_models import write_tiny_llama
from dualtune.train.generation.inference import load_model, stream_text
from dualtune.train.generation.sampling import Sampling

pytestmark = pytest.mark.interop


ASKED = {"prompt": "Lily saw", "max_tokens": 12, "temperature": 0}


def test_mlx_lms_server_answers_as_we_do(stories, open_backend):
    model, adapter, _ = stories
    words = (sys.executable, "-m", "mlx_lm", "server", "--model", model, "--adapter-path", adapter)
    with served(*words) as ask:
        found = ask("/v1/completions", ASKED)
    assert found["choices"][0]["text"].strip() == expected(open_backend("mlx"), stories)


def test_llama_server_answers_as_we_do(llama_cpp, environment, stories, open_backend, dualtune_main, tmp_path):
    if not (environment / "bin" / "llama-server").exists():
        pytest.skip("the environment was made WITHOUT_SERVER=1")
    model, adapter, _ = stories
    words = ("export", adapter, tmp_path / "out", "--base", model, "--llama-cpp", environment, "--platform", "cpu")
    assert dualtune_main(*words, "--to", "gguf", "--quantize", "f32").returncode == 0
    with served(environment / "bin" / "llama-server", "-m", tmp_path / "out" / "out-F32.gguf") as ask:
        found = ask("/v1/completions", ASKED)
        told = ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3})
    assert found["choices"][0]["text"].strip() == expected(open_backend("torch"), stories)
    assert told["choices"][0]["message"]["role"] == "assistant"


@pytest.fixture(scope="module")
def vllm():
    """The program, from the environment that scripts/interop_vllm.sh has made."""
    if not (place := os.environ.get("DUALTUNE_VLLM")):
        pytest.skip("DUALTUNE_VLLM names no environment: scripts/interop_vllm.sh makes one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, instead of half of the memory
        yield Path(place) / "bin" / "vllm"


@pytest.fixture(scope="module")
def wide(tiny_llama, open_backend, train_on_sums, tmp_path_factory):
    """A model with heads of 64, which vLLM needs, and the adapter of a short run on it."""
    place = tmp_path_factory.mktemp("wide")
    vocab = json.loads((tiny_llama / "config.json").read_text())["vocab_size"]
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
    model = write_tiny_llama(place / "model", vocab_size=vocab, num_key_value_heads=2, **sizes)
    for path in tiny_llama.glob("*token*"):
        shutil.copy(path, model)
    return model, train_on_sums(open_backend("torch"), model, place), None


def test_vllm_with_the_adapter_answers_as_we_do(vllm, wide, open_backend):
    model, adapter, _ = wide
    lora = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"tuned={adapter}")
    with served(vllm, "serve", model, *lora, *ON_A_CPU) as ask:
        found, base = (ask("/v1/completions", ASKED | {"model": name}) for name in ("tuned", str(model)))
    assert found["choices"][0]["text"].strip() == expected(open_backend("torch"), wide)
    assert base["choices"][0]["text"] != found["choices"][0]["text"]


def test_vllm_with_the_merged_model_answers_as_we_do(vllm, wide, open_backend, dualtune_main, tmp_path):
    model, adapter, _ = wide
    words = ("export", adapter, tmp_path / "out", "--base", model, "--to", "hf", "--platform", "cpu")
    assert dualtune_main(*words).returncode == 0
    with served(vllm, "serve", tmp_path / "out", *ON_A_CPU) as ask:
        found = ask("/v1/completions", ASKED | {"model": str(tmp_path / "out")})
    assert found["choices"][0]["text"].strip() == expected(open_backend("torch"), wide)


def expected(backend, stories):
    model, adapter, _ = stories
    loaded = load_model(backend, str(model), adapter, dtype="float32")
    text = "".join(stream_text(loaded, loaded.tokenizer.encode(ASKED["prompt"], special=True), Sampling(12))).strip()
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


ON_A_CPU = ("--dtype", "float32", "--max-model-len", "128", "--enforce-eager")


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
