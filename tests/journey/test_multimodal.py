"""Multimodal models as users have them: begun on MLX, continued on torch, verified, merged, and answered elsewhere.

Tiny Gemma 3 and Qwen3.5 with vision towers and random weights, by the commands that a user would type.
"""

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import yaml

import dualtune
from dualtune.engine.testing.tolerances import LOGPROBS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file
peft = pytest.importorskip("peft")
mlx_lm = pytest.importorskip("mlx_lm.utils")
mx = pytest.importorskip("mlx.core")

DEMO = Path(dualtune.__file__).parent / "demo/model"
TEXT = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MODELS = {
    "gemma 3": lambda ids: transformers.Gemma3Config(
        text_config=TEXT | ids | {"sliding_window": 32, "sliding_window_pattern": 2}, mm_tokens_per_image=4,
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                       "image_size": 28, "patch_size": 14},
    ),
    "qwen 3.5": lambda ids: transformers.Qwen3_5Config(
        text_config=TEXT | ids | {
            "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
            "full_attention_interval": 2, "rope_parameters": ROPE, "tie_word_embeddings": False,
        },
        vision_config={"hidden_size": 32, "depth": 2, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64},
        tie_word_embeddings=False,
    ),
}  # fmt: skip
PROMPT = np.array([[5, 9, 40, 17, 60, 33, 21, 8]])


@pytest.fixture(params=MODELS)
def model_dir(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    demo = json.loads((DEMO / "config.json").read_text())
    ids = {key: demo[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(MODELS[request.param](ids | {"pad_token_id": 0}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained("model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, "model")
    config = {
        "model": {"name": "model", "dtype": "float32"},
        "adapter": {"rank": 4, "dropout": 0.1},
        "data": {"train": "rows.jsonl", "eval": 0, "max_length": 64},
        "train": {"steps": 4, "documents_per_step": 4, "learning_rate": 1e-2, "schedule": "constant", "warmup": 0},
        "run": {"dir": "run", "save_every": 2},
    }
    Path("config.yaml").write_text(yaml.safe_dump(config))
    rows = [{"prompt": f"{i} + {i} =", "completion": f" {2 * i}"} for i in range(16)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Path("model")


def whole_model(directory):
    """What AutoModelForImageTextToText makes of a directory, with no tensor missing or new."""
    auto = transformers.AutoModelForImageTextToText
    model, told = auto.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    return model.eval()


def logprobs(model):
    with torch.no_grad():
        return model(torch.from_numpy(PROMPT), use_cache=False).logits.float().log_softmax(-1).numpy()


def tensors(directory):
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_wrapper_from_the_laptop_to_the_cluster_and_out(model_dir, dualtune_main):
    def run(*args):
        done = dualtune_main(*args)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = run("train", "config.yaml", "--platform", "mlx", "--set", "train.steps=2")
    inspected = run("adapter", "inspect", "run/adapter")
    run("train", "config.yaml", "--platform", "cpu", "--resume", "auto")
    for platform in ("cpu", "mlx"):
        assert "verdict: same: " in run("verify", "run/adapter", "--platform", platform)
        run("adapter", "merge", "run/adapter", f"merged-{platform}", "--base", model_dir, "--platform", platform)

    # The text of the adapter in other tools: PEFT on the class of the whole model and of the text, the merges in both.
    text_model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = logprobs(peft.PeftModel.from_pretrained(whole_model(model_dir), "run/adapter"))
        gap = np.abs(logprobs(peft.PeftModel.from_pretrained(text_model, "run/adapter")) - expected).max()
    for text in (said, inspected, run("verify", "run/adapter", "--platform", "cpu")):
        assert ("not of AutoModelForCausalLM" in " ".join(text.split())) is bool(gap > LOGPROBS), (gap, text)
    assert np.abs(expected - logprobs(whole_model(model_dir))).max() > 0.1  # it has learned something
    for platform in ("cpu", "mlx"):
        merged = Path(f"merged-{platform}")
        assert np.abs(logprobs(whole_model(merged)) - expected).max() <= LOGPROBS
        model, _ = mlx_lm.load_model(merged)
        logits = model(mx.array(PROMPT)).astype(mx.float32)
        assert np.abs(np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)) - expected).max() <= LOGPROBS

        # The vision tower, to the bit, and no tensor more or less.
        before, after = tensors(model_dir), tensors(merged)
        assert before.keys() == after.keys()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed and not any("vis" in name or "projector" in name for name in changed)
