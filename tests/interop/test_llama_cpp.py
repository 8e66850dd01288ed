"""What dualtune exports computes in llama.cpp, PEFT and mlx-lm what it computes here, with a real model in float32.

The oracle is Llama in float64 NumPy, from the tensors in PEFT's file. The numbers are the table in docs/adapters.md.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dualtune.config import Config
from dualtune.engine.backend import IGNORE_INDEX, Batch
from dualtune.engine.testing.oracles import llama_oracle
from dualtune.show.run import run
from dualtune.train.generation.inference import load_model

pytestmark = pytest.mark.interop

TOLERANCE = 5e-5  # of log-probabilities, which go down to -25 in this model: float32 has five digits behind the point
SEEN = 1.0  # what the adapter changes in them, at least
TEXTS = ["Once upon a time, there was a little girl named Lily.", "The cat and the dog", "7 + 8 = 15. Tom was"]
MODULES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def model_dir(shared):
    return shared("models/stories260k")


@pytest.fixture(scope="module")
def prompts(model_dir):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


@pytest.fixture(scope="module")
def batch(prompts):
    """The prompts as the rows of one batch."""
    shape = (len(prompts), max(map(len, prompts)))
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    for b, ids in enumerate(prompts):
        tokens[b, : len(ids)], segments[b, : len(ids)], positions[b, : len(ids)] = ids, 1, np.arange(len(ids))
    labels = np.full(shape, IGNORE_INDEX, np.int32)
    return Batch(tokens, labels, segments, positions, np.zeros(shape, np.uint32))


@pytest.fixture(scope="module", params=["torch", "mlx"])
def trained(request, open_backend, model_dir, tmp_path_factory):
    """(backend, the adapter directory that a short run of it wrote): every kind of module, which llama.cpp permutes."""
    directory = tmp_path_factory.mktemp(request.param)
    data = directory / "train.jsonl"
    rows = [{"prompt": f"{i} + {i} =", "completion": f" {2 * i}. The dog was happy."} for i in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config.model_validate(
        {
            "model": {"name": str(model_dir), "dtype": "float32"},
            "adapter": {"rank": 8, "alpha": 24.0, "dropout": 0.0, "targets": sorted(MODULES)},
            "data": {"train": str(data), "eval": 0, "max_length": 64},
            "train": {"steps": 20, "documents_per_step": 8, "learning_rate": 5e-3, "warmup": 0},
            "run": {"dir": str(directory / "run"), "save_every": None, "eval_every": None},
        }
    )
    return request.param, run(config, open_backend(request.param)).adapter_dir


@pytest.fixture(scope="module")
def oracle(model_dir, batch, prompts):
    """float64 log-probabilities [T, V] of each prompt, with the tensors of an adapter directory or with none."""

    def compute(adapter=None):
        tensors, scale = {}, 0.0
        if adapter is not None:
            config = json.loads((adapter / "adapter_config.json").read_text())
            tensors, scale = load_file(adapter / "adapter_model.safetensors"), config["lora_alpha"] / config["r"]
        return rows(llama_oracle(model_dir)(batch, tensors, scale), prompts)

    return compute


def rows(logprobs_BTV, prompts):
    return [logprobs_BTV[b, : len(ids)] for b, ids in enumerate(prompts)]


def log_softmax(logits):
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def gap(found, expected):
    return max(float(np.abs(f - e).max()) for f, e in zip(found, expected, strict=True))


def by_llama_cpp(llama_cpp, model, prompts, adapter=None):
    return llama_cpp.tools.logprobs(model, prompts, adapter)


def by_peft(model_dir, prompts, adapter=None):
    torch, transformers, peft = map(pytest.importorskip, ("torch", "transformers", "peft"))
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return [log_softmax(model(torch.tensor([ids])).logits[0].numpy()) for ids in prompts]


def by_mlx_lm(model_dir, prompts, adapter=None):
    mx, mlx_lm = map(pytest.importorskip, ("mlx.core", "mlx_lm"))
    model = mlx_lm.load(str(model_dir), adapter_path=adapter and str(adapter))[0]
    return [log_softmax(np.array(model(mx.array([ids]))[0])) for ids in prompts]


@pytest.fixture(scope="module")
def base_gguf(llama_cpp, model_dir):
    return llama_cpp.convert_model(model_dir)


def test_the_base_alone_is_one_function(llama_cpp, base_gguf, model_dir, prompts, oracle, report):
    expected = oracle()
    found = {
        "llama.cpp": by_llama_cpp(llama_cpp, base_gguf, prompts),
        "transformers": by_peft(model_dir, prompts),
        "mlx-lm": by_mlx_lm(model_dir, prompts),
    }
    for program, logprobs in found.items():
        report("the base alone", program, distance := gap(logprobs, expected))
        assert distance < TOLERANCE, program


def test_an_exported_adapter_is_one_function(
    llama_cpp, base_gguf, model_dir, prompts, oracle, trained, batch, open_backend, report
):
    backend, adapter = trained
    names = load_file(adapter / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in names} == MODULES
    expected, gguf = oracle(adapter), llama_cpp.convert_adapter(adapter, model_dir)
    seen = gap(expected, oracle())
    assert seen > SEEN
    report(f"adapter trained on {backend}", "changes them by", seen)
    engine = load_model(open_backend(backend), str(model_dir), adapter, dtype="float32").engine
    found = {
        "llama.cpp": by_llama_cpp(llama_cpp, base_gguf, prompts, gguf),
        "PEFT": by_peft(model_dir, prompts, adapter),
        "mlx-lm": by_mlx_lm(model_dir, prompts, adapter),
        f"dualtune on {backend}": rows(engine.logprobs(batch), prompts),
    }
    for program, logprobs in found.items():
        report(f"adapter trained on {backend}", program, distance := gap(logprobs, expected))
        assert distance < TOLERANCE, program


def test_a_merged_model_is_one_function(
    llama_cpp, model_dir, prompts, oracle, trained, tmp_path, dualtune_main, report
):
    backend, adapter = trained
    platform = {"torch": "cpu", "mlx": "mlx"}[backend]
    done = dualtune_main("adapter", "merge", adapter, tmp_path / "merged", "--base", model_dir, "--platform", platform)
    assert done.returncode == 0, done.stderr
    gguf = llama_cpp.convert_model(tmp_path / "merged")
    found = {
        "llama.cpp": by_llama_cpp(llama_cpp, gguf, prompts),
        "transformers": by_peft(tmp_path / "merged", prompts),
        "mlx-lm": by_mlx_lm(tmp_path / "merged", prompts),
    }
    for program, logprobs in found.items():
        report(f"merged on {backend}", program, distance := gap(logprobs, oracle(adapter)))
        assert distance < TOLERANCE, program


def test_a_wrong_scale_or_orientation_would_be_seen(
    llama_cpp, base_gguf, model_dir, prompts, oracle, trained, tmp_path
):
    """The same comparison, with an adapter whose alpha is a quarter larger, and one with a module's B negated."""
    _, adapter = trained
    for change in ("alpha", "sign"):
        broken = tmp_path / change
        broken.mkdir()
        config = json.loads((adapter / "adapter_config.json").read_text())
        tensors = load_file(adapter / "adapter_model.safetensors")
        if change == "alpha":
            config["lora_alpha"] += 6
        else:
            name = next(name for name in sorted(tensors) if "k_proj.lora_B" in name)
            tensors[name] = -tensors[name]
        (broken / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, broken / "adapter_model.safetensors")
        gguf = llama_cpp.convert_adapter(broken, model_dir)
        found = by_llama_cpp(llama_cpp, base_gguf, prompts, gguf)
        assert gap(found, oracle(adapter)) > 100 * TOLERANCE, change


def test_what_llama_cpp_does_not_know_is_right_after_conversion(
    llama_cpp, base_gguf, model_dir, prompts, tmp_path, dualtune_main, report
):
    """rsLoRA and a rank pattern: llama.cpp's converter takes such a directory of PEFT's, and gets the scale wrong."""
    torch, transformers, peft = map(pytest.importorskip, ("torch", "transformers", "peft"))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, use_rslora=True, rank_pattern={"k_proj": 2}, alpha_pattern={"k_proj": 9},
        target_modules=["q_proj", "k_proj", "down_proj"], task_type="CAUSAL_LM",
    )  # fmt: skip
    adapted = peft.get_peft_model(model, config)
    for name, x in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(x, std=0.05)
    adapted.save_pretrained(tmp_path / "peft")
    expected = by_peft(model_dir, prompts, tmp_path / "peft")
    options = ("--to", "peft", "--scaling", "standard", "--uniform")
    done = dualtune_main("adapter", "convert", tmp_path / "peft", tmp_path / "imported", *options)
    assert done.returncode == 0, done.stderr
    raw, imported = (
        by_llama_cpp(llama_cpp, base_gguf, prompts, llama_cpp.convert_adapter(tmp_path / name, model_dir))
        for name in ("peft", "imported")
    )
    report("rsLoRA and patterns, from PEFT", "llama.cpp, as it is", gap(raw, expected))
    report("rsLoRA and patterns, converted", "llama.cpp", distance := gap(imported, expected))
    assert gap(raw, expected) > 100 * TOLERANCE
    assert distance < 2 * TOLERANCE  # neither side is the float64 oracle
