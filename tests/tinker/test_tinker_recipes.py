"""Recipes of Tinker's cookbook, unmodified, train a tiny model here, on torch and on MLX (`make test-tinker`).

The recipes get the server's address, a model's name that their tables know, and small numbers. The model and the data
are directories of the working directory that have the names of those on the hub, so that nothing is downloaded. The
model knows one thing, to answer `\\boxed{N}`, so that some answers earn a reward.
"""

import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.tinker
BASE = "Qwen/Qwen3-8B-Base"  # its renderer in the cookbook is plain text, so that any tokenizer does
ENV = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0",
       "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
PLATFORMS = {"torch": "cpu", "mlx": "mlx"}
METRICS = {}  # by backend, what its recipes have said


def question(i):
    return f"What is {i} + 1?"


def write_data(place):
    chats = [
        [{"role": "user", "content": f"Count to {i % 5 + 1}."},
         {"role": "assistant", "content": " ".join(map(str, range(1, i % 5 + 2)))}]
        for i in range(256)
    ]  # fmt: skip
    pairs = [
        {side: f"\n\nHuman: Say {i}.\n\nAssistant: {text}" for side, text in (("chosen", str(i)), ("rejected", "no"))}
        for i in range(32)
    ]
    sets = {
        "HuggingFaceH4/no_robots": ("default", {"train": chats, "test": chats[:8]}),
        "openai/gsm8k": ("main", {"train": range(4), "test": range(2)}),
        "Anthropic/hh-rlhf": ("default", {"train": pairs, "test": pairs[:8]}),
        "zwhe99/DeepMath-103K": ("default", {"train": range(32)}),
    }

    def row(name, entry):
        if name.endswith("no_robots"):
            return {"prompt": entry[0]["content"], "messages": entry, "category": "Chat"}
        if name.endswith("gsm8k"):
            return {"question": question(entry), "answer": f"One more.\n#### {entry % 3}"}
        return entry if isinstance(entry, dict) else {"question": question(entry), "final_answer": str(entry + 1)}

    for name, (config, splits) in sets.items():
        directory = place / name
        directory.mkdir(parents=True)
        for split, entries in splits.items():
            lines = (json.dumps(row(name, entry)) + "\n" for entry in entries)
            (directory / f"{split}.jsonl").write_text("".join(lines))
        files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
        (directory / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")


def write_base(directory, tiny_llama):
    """Write a tiny Llama whose answers are mostly `\\boxed{N}` with an N from 0 to 2."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shutil.copytree(tiny_llama, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer, draw = torch.optim.Adam(model.parameters(), lr=1e-2), random.Random(0)
    for _ in range(400):
        # As long as the recipes' prompts, which show an example before the question.
        before = "".join(draw.choices("abcdefghij .:\n\\{}123", k=draw.randrange(20, 400)))
        texts = [f"{before}Assistant: \\boxed{{{draw.randrange(3)}}}\n\n" for _ in range(4)]
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False) for text in texts])
        labels = torch.where(torch.arange(ids.shape[1]) < ids.shape[1] - 13, -100, ids)
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_llama):
    """The working directory of the server and of the recipes."""
    place = tmp_path_factory.mktemp("recipes")
    write_data(place)
    write_base(place / BASE, tiny_llama)
    return place


@contextlib.contextmanager
def served(place, platform):
    """Serve the model; yields its address. It ends as Ctrl-C ends it."""
    command = [sys.executable, "-m", "dualtune", "serve", BASE, "--train", "--runs", f"runs-{platform}", "--port", "0",
               "--platform", platform, "--seed", "7"]  # fmt: skip
    log = (place / f"serve-{platform}.log").open("w")
    with log, subprocess.Popen(
        command, cwd=place, env=os.environ | ENV, stdout=subprocess.PIPE, stderr=log, text=True
    ) as server:  # fmt: skip
        try:
            address = next(found for line in server.stdout if (found := re.search(r"http://[\d.:]+", line)))
            yield address[0]
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(120) == 0, (place / f"serve-{platform}.log").read_text()[-3000:]


def run_recipe(place, address, name, log, **options):
    """Run a recipe. Return its metrics, a table for each step."""
    shutil.rmtree(place / log, ignore_errors=True)
    words = {"base_url": address, "model_name": BASE, "log_path": str(place / log), **options}
    command = [
        sys.executable,
        "-m",
        f"tinker_cookbook.recipes.{name}",
        *(f"{key}={value}" for key, value in words.items()),
    ]
    done = subprocess.run(command, cwd=place, env=os.environ | ENV, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return [json.loads(line) for line in (place / log / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=PLATFORMS)
def recipes(request, place, open_backend):
    """What each recipe says of each step, on a backend that is here."""
    pytest.importorskip("tinker_cookbook")
    open_backend(request.param)
    METRICS[request.param] = all_recipes(place, PLATFORMS[request.param])
    return METRICS[request.param]


def all_recipes(place, platform):
    with served(place, platform) as address:

        def run(name, **options):
            return run_recipe(place, address, name, f"{platform}-{name}", **options)

        found = {
            "sl_loop": run("sl_loop", batch_size=4, max_steps=3, save_every=2, max_length=256, learning_rate=0.01,
                           lora_rank=4),
            "rl_loop": run("rl_loop", batch_size=2, group_size=6, max_steps=2, max_tokens=12, lora_rank=4,
                           loss_fn="importance_sampling"),
            "sl_basic": run("sl_basic", max_steps=1, lora_rank=4, eval_every=0),
            "rl_basic": run("rl_basic", max_steps=1, lora_rank=4, max_tokens=12),
            "dpo": run("preference.dpo.train", max_steps=2, batch_size=2, max_length=256, renderer_name="role_colon",
                       learning_rate=1e-3),
        }  # fmt: skip
        # The teacher is what the first recipe has made: another model than the student.
        lines = (place / f"{platform}-sl_loop" / "checkpoints.jsonl").read_text().splitlines()
        teacher = json.loads(lines[-1])["sampler_path"]
        found["distillation"] = run(
            "distillation.on_policy_distillation", teacher_model=BASE, teacher_checkpoint=teacher, max_steps=2,
            groups_per_batch=2, group_size=2, max_tokens=8, lora_rank=4, eval_every=0, renderer_name="role_colon",
        )  # fmt: skip
    return found


def column(rows, name):
    return [row[name] for row in rows if name in row]


def test_every_recipe_ends(recipes):
    for name, rows in recipes.items():
        values = [value for row in rows for value in row.values() if isinstance(value, float)]
        assert rows and all(map(math.isfinite, values)), (name, rows)


def test_losses_fall_and_some_answers_earn_a_reward(recipes):
    losses = column(recipes["sl_loop"], "train_mean_nll")
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert 0 < column(recipes["rl_loop"], "reward/total")[0] < 1
    assert column(recipes["rl_loop"], "grad_norm:mean")[0] > 0


def test_samples_have_the_log_probabilities_that_training_finds_for_them(recipes):
    """The cookbook compares them itself, before the first update."""
    for name in ("rl_basic", "distillation"):
        assert abs(column(recipes[name], "optim/kl_sample_train_v1")[0]) < 1e-3


def test_the_backends_agree(recipes):
    if len(METRICS) < 2:
        pytest.skip("the first backend has nothing to agree with")
    torch, mlx = METRICS["torch"], METRICS["mlx"]
    for name, key in (
        ("sl_loop", "train_mean_nll"),
        ("sl_basic", "train_mean_nll"),
        ("dpo", "dpo_loss"),
        ("distillation", "teacher_kl"),
        ("rl_loop", "reward/total"),
        ("rl_basic", "env/all/reward/total"),
    ):
        values = column(torch[name], key)
        assert values and values == pytest.approx(column(mlx[name], key), rel=1e-4), name
