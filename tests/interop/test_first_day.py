"""The first day with dualtune, by its commands: from two files to a tuned model that answers in other programs."""

import io
import json
import subprocess
import sys

import pytest

from dualtune.train.generation.inference import load_model
from dualtune.train.generation.sampling import Chooser, Sampling

pytestmark = pytest.mark.interop
NAMES, DEEDS = ("Lily", "Tom", "The cat", "A dog", "Mia"), ("went to", "saw", "liked", "had", "found")
PROMPTS = [f"{name} {deed} {what}" for name in NAMES for deed in DEEDS for what in ("the", "a big")]


def test_a_first_day(shared, dualtune_main, llama_cpp, environment, open_backend, tmp_path, monkeypatch):
    openai, model = pytest.importorskip("openai"), str(shared("models/stories260k"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DUALTUNE_DEVICE", "cpu")
    rows = [{"prompt": f"{i} + {i} =", "completion": f" {2 * i}. The dog was happy."} for i in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def dualtune(*words):
        done = dualtune_main(*words)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    train = ("train", "--model", model, "--data", "sums.jsonl", "--steps", 20, "--max-length", 128)
    train = (*train, "--train.documents_per_step", 8, "--adapter.targets", "all-linear", "--data.eval", "0.1")
    train = (*train, "--data.template", "chatml")
    dualtune(*train, "--run-dir", "runs/a", "--learning-rate", "1e-4")
    dualtune(*train, "--run-dir", "runs/b", "--learning-rate", "3e-3")

    assert "20/20" in dualtune("watch", "runs/b", "--once")
    dualtune("report", "runs/a", "runs/b", "--output", "both.html")
    assert "train.learning_rate" in (tmp_path / "both.html").read_text()
    assert "train.learning_rate" in dualtune("runs", "compare", "runs/a", "runs/b")
    monkeypatch.setattr("sys.stdin", io.StringIO("7 + 7 =\n"))
    assert "dog" in dualtune("chat", model, "--adapter", "runs/b/adapter")

    tools = ("--base", model, "--to", "gguf", "--quantize", "f32", "--llama-cpp", environment)
    dualtune("export", "runs/b/adapter", "tuned", *tools)
    ours = load_model(open_backend("torch"), model, tmp_path / "runs/b/adapter", dtype="float32")
    ids = [ours.tokenizer.encode(text, special=True) for text in PROMPTS]
    expected = [list(ours.engine.generate(each, choose=Chooser(Sampling(16), frozenset()))) for each in ids]
    assert llama_cpp.greedy(tmp_path / "tuned/tuned-F32.gguf", [each.tolist() for each in ids], 16) == expected

    served = ("serve", model, "--adapter", "tuned=runs/b/adapter", "--port", "0")
    command = [sys.executable, "-m", "dualtune.cli.main", *served]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = next(line.split()[-1] for line in server.stdout if line.startswith("serving"))
            client = openai.OpenAI(base_url=address, api_key="none")
            asked = {"messages": [{"role": "user", "content": "7 + 7 ="}], "max_tokens": 24, "temperature": 0}
            found = client.chat.completions.create(model="tuned", **asked)
        finally:
            server.terminate()
    said = dualtune("generate", model, "--adapter", "runs/b/adapter", "--prompt", "7 + 7 =", "--max-tokens", 24)
    assert found.choices[0].message.content.strip() in said and "dog" in said
