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

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.config.schema import DistillConfig
from dualtune.data.batches import make_batch
from dualtune.data.documents import in_memory
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.testing.tiny_models import write_tiny_llama
from dualtune.show.run import run
from dualtune.train.generation.inference import load_model, stream_text
from dualtune.train.generation.sampling import Sampling
from dualtune.train.objectives import served_teacher
from dualtune.train.objectives.served_teacher import ServedTeacher, TeacherLost
from dualtune.train.objectives.teachers import top_logprobs_of

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


def test_mlx_lms_server_cannot_be_a_teacher(stories, monkeypatch, tmp_path):
    """It scores no prompt, and a run that asks it to is told so at its start."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))  # whose models it lists, and which it misses where there is none
    model, _, _ = stories
    port = free_port()
    with served(sys.executable, "-m", "mlx_lm", "server", "--model", model, port=port) as ask:
        ask("/v1/completions", ASKED)
        teacher = ServedTeacher(DistillConfig(teacher=f"http://127.0.0.1:{port}/v1"), Tokenizer(model, "none"))
        with pytest.raises(ConfigError, match=r"400 .*max_tokens.* as dualtune serve and vLLM do; mlx_lm\.server"):
            teacher.start(None, None)  # pyright: ignore[reportArgumentType]


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


def test_a_teacher_on_vllm_says_what_its_model_says_and_teaches_it(vllm, wide, open_backend, make_config, write_rows):
    """All in one test, because the server takes minutes to start. A run on answers that are drawn is the one that the
    teacher's directory gives; once the server is gone, it is saved, and named."""
    model, _, _ = wide
    backend, port = open_backend("torch"), free_port()
    engine = load_model(backend, str(model), None, dtype="float32").engine
    rng = np.random.default_rng(0)
    documents = in_memory((rng.integers(5, 200, n).astype(np.int32), np.arange(n) >= n // 2) for n in (40, 9, 23))
    batch, address = make_batch(documents, [[0], [1], [2]], seed=0, step=0), f"http://127.0.0.1:{port}/v1"
    with served(vllm, "serve", model, *ON_A_CPU, port=port) as ask:
        ask("/v1/completions", ASKED | {"model": str(model)})
        none, eight, greedy = (
            ServedTeacher(DistillConfig(teacher=address, top_k=top_k), Tokenizer(model, "none")) for top_k in (0, 8, 21)
        )
        for k, teacher in ((0, none), (8, eight)):
            teacher.start(engine, None)
            tokens, logprobs = teacher(batch, k)
            expected_tokens, expected_logprobs = top_logprobs_of(engine)(batch, k)
            np.testing.assert_array_equal(tokens, expected_tokens)
            np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-4)
        with pytest.raises(ConfigError, match=r"400 .*lower distill\.top_k; vLLM allows 20"):
            greedy.start(engine, None)
        data = write_rows([{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(8)])
        options = {
            "train.objective": "on_policy_distill", "train.steps": 3, "train.documents_per_step": 2, "distill.top_k": 4,
            "rollouts.max_tokens": 4, "rollouts.samples": 2, "run.report": False,
            "adapter.init_from": str(wide[1]), "adapter.rank": 8, "adapter.alpha": 16,
        }  # fmt: skip

        def losses(name, teacher):
            values = {**options, "run.dir": data.with_name(name), "distill.teacher": teacher}
            result = run(make_config(data, values, model), backend)
            rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
            return [row["loss"] for row in rows if "loss" in row]

        taught = losses("served", address)
        assert len(taught) == 3 and min(taught) > 0
        assert taught == pytest.approx(losses("loaded", str(model)), abs=1e-4)
    options["train.steps"] = 4
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TeacherLost, match=r"does not answer: .*refused"):
        patch.setattr(served_teacher, "PAUSES_S", ())
        losses("served", address)


def expected(backend, stories):
    model, adapter, _ = stories
    loaded = load_model(backend, str(model), adapter, dtype="float32")
    text = "".join(stream_text(loaded, loaded.tokenizer.encode(ASKED["prompt"], special=True), Sampling(12))).strip()
    assert len(text) > 10
    return text


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def served(*command, port=None):
    """Start a server, on a free port. Yields what asks it, and waits until it is there."""
    port = port or free_port()
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
