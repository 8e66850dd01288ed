"""What the parity tests share: the backends, two models with data, and a tokenization that is not dualtune's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, processors

from dualtune.config import Config
from dualtune.engine.backend import IGNORE_INDEX, Backend, Batch, LoadRequest
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.oracles import llama_oracle
from dualtune.engine.testing.tiny_models import write_tiny_gpt2, write_tiny_llama
from dualtune.model.adapter import AdapterSpec, init_adapter, parse_name
from dualtune.model.optimizer import OptimizerSpec
from dualtune.train.generation.inference import load_model

EOS = 2  # of both models


Change = Callable[[str, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Material:
    """A model and rows with `question` and `answer`."""

    model_dir: Path
    rows: list[dict[str, str]]
    path: Path
    max_length: int
    tolerance: float  # of log-probabilities, see `gap`

    def config(self, run_dir: Path, **sections: dict[str, Any]) -> Config:
        """A config on this material; `sections` replace single keys."""
        defaults: dict[str, dict[str, Any]] = {
            "model": {"name": str(self.model_dir), "dtype": "float32"},
            "adapter": {"rank": 8, "alpha": 16.0, "dropout": 0.0},
            "data": {
                "train": str(self.path), "eval": None, "max_length": self.max_length,
                "columns": {"prompt": "question", "completion": "answer"},
            },
            "train": {
                "documents_per_step": 4, "micro_batch_tokens": 2 * self.max_length, "learning_rate": 1e-3,
            },
            "run": {"dir": str(run_dir), "save_every": None, "eval_every": None},
        }  # fmt: skip
        merged = {name: values | sections.get(name, {}) for name, values in defaults.items()}
        return Config.model_validate(sections | merged)

    def documents(self) -> list[tuple[list[int], list[int]]]:
        """(token ids, labels not shifted) of each row with something to learn, by the `tokenizers` library alone."""
        tokenizer = Tokenizer.from_file(str(self.model_dir / "tokenizer.json"))
        documents = []
        for row in self.rows:
            encoding = tokenizer.encode(row["question"] + row["answer"])
            first = encoding.char_to_token(len(row["question"]))
            ids = [*encoding.ids, EOS]
            labels = [IGNORE_INDEX] * first + ids[first:]
            ids, labels = ids[: self.max_length], labels[: self.max_length]
            if labels[-1] != IGNORE_INDEX:
                documents.append((ids, labels))
        return documents

    def gap(self, found: np.ndarray, expected: np.ndarray) -> float:
        """The largest difference of log-probabilities at the real tokens of `batch()`, relative below −1.

        Those of a trained model go down to −40, where float32 has five digits behind the point.
        """
        real = self.batch().segments_BT > 0
        return float((np.abs(found - expected) / np.maximum(1, np.abs(expected)))[real].max())

    def oracle(self, adapter: Path, change: Change = lambda name, tensor: tensor) -> np.ndarray:
        """Log-probabilities in float64, from PEFT's file as it lies there; `change` is a mistake to make."""
        config = json.loads((adapter / "adapter_config.json").read_text())
        tensors = {n: change(n, w) for n, w in load_file(adapter / "adapter_model.safetensors").items()}

        def of(module: str, pattern: str, default: str) -> float:
            """PEFT's `get_pattern_key`."""
            found = [v for key, v in config.get(pattern, {}).items() if re.match(rf"(.*\.)?({key})$", module)]
            return found[0] if found else config[default]

        for name, tensor in tensors.items():
            module, part = parse_name(name) or ("", "")
            if part == "B":
                r, alpha = of(module, "rank_pattern", "r"), of(module, "alpha_pattern", "lora_alpha")
                tensors[name] = tensor.astype(np.float64) * alpha / (r**0.5 if config["use_rslora"] else r)
        return llama_oracle(self.model_dir)(self.batch(), tensors, 1.0)

    def batch(self, num_rows: int = 4) -> Batch:
        """The first documents as one batch."""
        documents = self.documents()[:num_rows]
        shape = (len(documents), max(len(ids) for ids, _ in documents))
        tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        labels, positions = np.full(shape, IGNORE_INDEX, np.int32), np.zeros(shape, np.int32)
        for b, (ids, targets) in enumerate(documents):
            n = len(ids)
            tokens[b, :n], segments[b, :n], positions[b, :n], labels[b, : n - 1] = ids, 1, np.arange(n), targets[1:]
        seeds = np.random.default_rng(0).integers(0, 1 << 32, shape, np.uint32)
        return Batch(tokens, labels, segments, positions, seeds)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Material:
    """A random Llama with three layers."""
    directory = tmp_path_factory.mktemp("tiny")
    return _sums(directory, write_tiny_llama(directory / "model", num_hidden_layers=3, intermediate_size=192))


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory) -> Material:
    """A random GPT-2, whose linear layers are transformers' Conv1D and whose positions are learned."""
    directory = tmp_path_factory.mktemp("gpt2")
    return _sums(directory, write_tiny_gpt2(directory / "model", n_positions=40))


def _sums(directory: Path, model_dir: Path) -> Material:
    """A tokenizer of characters, one of whose merges joins question and answer, and rows for it."""
    pieces = [*"abcdefghijklmnopqrstuvwxyz0123456789+= .?", "=1", "an", "and"]
    vocab = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", *pieces])}
    merges = [("=", "1"), ("a", "n"), ("an", "d")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(model_dir / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (model_dir / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | special)
    )
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 100, (60, 2)).tolist()
    rows = [{"question": f"what is {a}+{b}=", "answer": f"{a + b} as {a} and {b} are {a + b}."} for a, b in numbers]
    rows.append({"question": "a question longer than what a document may hold" * 2, "answer": "lost"})
    return _material(model_dir, rows, directory, max_length=40, tolerance=tolerances.LOGPROBS)


@pytest.fixture(scope="session")
def stories(shared, tmp_path_factory) -> Material:
    """A real pretrained Llama and GSM8K."""
    model_dir, data = shared("models/stories260k"), shared("data/gsm8k/train.jsonl")
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    short = [row for row in rows if len(row["question"]) < 130][:300]
    directory = tmp_path_factory.mktemp("stories")
    # Hugging Face's own float32 model is 8e-6 away from float64.
    # Log-probabilities down to -25: each engine is within 2.2e-5 of the float64 oracle, and so two within twice that.
    return _material(model_dir, [*short, *rows[:20]], directory, max_length=96, tolerance=4.5e-5)


def _material(model_dir: Path, rows: list[dict[str, str]], directory: Path, **limits: Any) -> Material:
    path = directory / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Material(model_dir, rows, path, **limits)


# The pretrained model of every push is that of test_parity.py, beside the other tests of each machine's kernels.
@pytest.fixture(scope="session", params=["tiny", pytest.param("stories", marks=pytest.mark.long)])
def material(request) -> Material:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def backends(open_backend) -> dict[str, Backend]:
    return {name: open_backend(name) for name in ("torch", "mlx")}


@pytest.fixture(scope="session", params=["torch", "mlx"])
def backend(request, open_backend) -> Backend:
    return open_backend(request.param)


@pytest.fixture
def load(backends):
    """Load a model on a backend, in float32, for an adapter."""

    def load_(name, model_dir, spec, **options):
        request = LoadRequest(model_dir, "float32", "auto", "pretrained", spec, OptimizerSpec(), seed=5, **options)
        return backends[name].load(request)

    return load_


# --- what other tools compute -----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def peft_logprobs() -> Callable[[Any, Batch], np.ndarray]:
    """Of a model of transformers or PEFT."""
    torch = pytest.importorskip("torch")

    def logprobs(model: Any, batch: Batch) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(batch.tokens_BT).long()).logits.log_softmax(-1).numpy()

    return logprobs


@pytest.fixture(scope="session")
def train_in_peft() -> Callable[..., tuple[Any, list[float]]]:
    """Steps written out with PEFT's layers and torch's AdamW, from the core's start: the model, and their losses."""
    torch, peft, transformers = (pytest.importorskip(name) for name in ("torch", "peft", "transformers"))

    def train(
        model_dir: Path, spec: AdapterSpec, batches: list[Batch], steps: int, **options: Any
    ) -> tuple[Any, list[float]]:
        base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        weights = {
            path: (module.weight.T if options.get("fan_in_fan_out") else module.weight).detach().numpy()
            for path, module in base.named_modules()
            if path.split(".")[-1] in spec.targets
        }
        config = peft.LoraConfig(
            r=spec.rank, lora_alpha=spec.alpha, target_modules=[*spec.targets], use_dora=spec.method == "dora",
            bias=spec.beside.bias, **options,
        )  # fmt: skip
        model = peft.get_peft_model(base, config).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        shapes = {path: weight.shape for path, weight in weights.items()}
        start = init_adapter(shapes, spec.rank, 5, method=spec.method, weight=weights.__getitem__)
        loaded = peft.set_peft_model_state_dict(model, {n: torch.from_numpy(w) for n, w in start.items()})
        assert not loaded.unexpected_keys
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer, losses = torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01), []
        for step in range(steps):
            batch = batches[step % len(batches)]
            tokens, labels = (torch.from_numpy(x).long() for x in (batch.tokens_BT, batch.labels_BT))
            logits = model(input_ids=tokens, attention_mask=torch.from_numpy(batch.segments_BT)).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(params, 0.3)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return model, losses

    return train


@pytest.fixture(scope="session")
def mlx_lm_logprobs() -> Callable[[Any, Batch], np.ndarray]:
    """Of a model of mlx-lm."""
    mx = pytest.importorskip("mlx.core")

    def logprobs(model: Any, batch: Batch) -> np.ndarray:
        logits = model(mx.array(batch.tokens_BT))
        return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

    return logprobs


@pytest.fixture(scope="session")
def assert_one_function(backends, peft_logprobs, mlx_lm_logprobs) -> Callable[[Material, Path], None]:
    """PEFT, mlx-lm and both engines read an adapter directory and compute what the float64 oracle does."""
    transformers, peft, mlx_lm = map(pytest.importorskip, ("transformers", "peft", "mlx_lm"))

    def check(material: Material, adapter: Path) -> None:
        name, batch = str(material.model_dir), material.batch()
        base = transformers.AutoModelForCausalLM.from_pretrained(name, dtype="float32")
        models = peft.PeftModel.from_pretrained(base, adapter), mlx_lm.load(name, adapter_path=str(adapter))[0]
        num_modules = sum("lora_A" in name for name in load_file(adapter / "adapter_model.safetensors"))
        for model in models:  # nothing else is wrapped, not even with zeros
            assert sum(hasattr(m, "lora_A") or hasattr(m, "lora_a") for m in model.modules()) == num_modules
        found = {"peft": peft_logprobs(models[0], batch), "mlx-lm": mlx_lm_logprobs(models[1], batch)}
        found |= {b: load_model(backend, name, adapter).engine.logprobs(batch) for b, backend in backends.items()}
        gaps = {tool: material.gap(logprobs, material.oracle(adapter)) for tool, logprobs in found.items()}
        print({tool: f"{gap:.1e}" for tool, gap in gaps.items()})
        assert max(gaps.values()) <= material.tolerance, gaps

    return check
