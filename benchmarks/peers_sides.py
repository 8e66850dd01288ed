"""The peers that peers.py measures: each trains in a fresh interpreter of its own environment, by JOB.json.

    python peers_sides.py hf_peft|trl|trl_dpo|llamafactory|axolotl|unsloth|mlx_lm JOB.json

JOB.json names the base model, the initial adapter and the documents (peers_inputs.py), the optimizer, which is the same
for all, and the settings of this run, in the peer's own names. The result goes to job["result"]: the loss of each step,
when it ended, and the arguments that the peer got. This file imports only what all environments have.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


class Clock:
    """Notes the loss of each step, and when it ended (seconds since the epoch, as the driver notes the start)."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.ended_at: list[float] = []
        self.targets: list[int] = []  # the target tokens that the peer counts, where it says so

    def for_trainer(self) -> Any:
        import transformers

        class Callback(transformers.TrainerCallback):
            def on_step_end(_, *args: Any, **kwargs: Any) -> None:
                self.ended_at.append(time.time())

            def on_log(_, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
                if "loss" in logs:
                    self.losses.append(float(logs["loss"]))

        return Callback()


# --- Hugging Face + PEFT: the loop that everybody writes ---


def hf_peft(job: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Settings: micro_batch, documents; dtype; attn_implementation; autocast to bfloat16, or adapters in float32."""
    import torch

    settings, optimizer = job["settings"], job["optimizer"]
    device = job["device"]
    model = peft_model(job, {key: settings[key] for key in ("dtype", "attn_implementation")})
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    adamw = {"lr": optimizer["lr"], "betas": optimizer["betas"], "eps": optimizer["eps"]}
    adamw |= {"weight_decay": optimizer["weight_decay"], "fused": True}
    update = torch.optim.AdamW(parameters, **adamw)
    for documents in steps_of(job):
        num_targets = sum(label != -100 for document in documents for label in document["labels"])
        total = 0.0
        for start in range(0, len(documents), settings["micro_batch"]):
            batch = {k: v.to(device) for k, v in padded(documents[start : start + settings["micro_batch"]]).items()}
            with torch.autocast(device, torch.bfloat16, enabled=settings["autocast"]):
                loss = model(**batch, num_items_in_batch=num_targets).loss
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(parameters, optimizer["max_grad_norm"])
        update.step()
        update.zero_grad()
        clock.losses.append(float(total))
        clock.ended_at.append(time.time())
    save(job, model)
    return {"settings": settings, "AdamW": adamw}


def padded(documents: list[dict[str, list[int]]]) -> dict[str, Any]:
    """input_ids, attention_mask and labels [B, longest]."""
    import torch

    def stack(rows: list[list[int]], fill: int) -> torch.Tensor:
        longest = max(map(len, rows))
        return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])

    ids = [document["input_ids"] for document in documents]
    labels = [document["labels"] for document in documents]
    return {"input_ids": stack(ids, 0), "attention_mask": stack([[1] * len(row) for row in ids], 0),
            "labels": stack(labels, -100)}  # fmt: skip


# --- TRL ---


def trl(job: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Settings: model, of from_pretrained; arguments, of SFTConfig."""
    import datasets
    import transformers
    import trl as peer

    settings = job["settings"]
    arguments = trainer_arguments(job) | {"train_sampling_strategy": "sequential"} | settings["arguments"]
    trainer = peer.SFTTrainer(
        peft_model(job, settings["model"]),
        peer.SFTConfig(**arguments),
        train_dataset=datasets.Dataset.from_list(documents_of(job)),
        processing_class=transformers.AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[clock.for_trainer()],
    )
    trainer.train()
    save(job, trainer.model)
    return {"model": settings["model"], "SFTConfig": arguments}


def trl_dpo(job: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """The job's documents are pairs: prompt, chosen, rejected. Settings: model, and arguments, of DPOConfig."""
    import datasets
    import transformers
    import trl as peer

    settings = job["settings"]
    arguments = trainer_arguments(job) | {"precompute_ref_log_probs": True} | settings["arguments"]

    class InOrder(peer.DPOTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return transformers.trainer.SequentialSampler(self.train_dataset)

    trainer = InOrder(
        peft_model(job, settings["model"]),
        args=peer.DPOConfig(**arguments),
        train_dataset=datasets.Dataset.from_list(documents_of(job)),
        processing_class=transformers.AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[clock.for_trainer()],
    )
    trainer.train()
    return {"model": settings["model"], "DPOConfig": arguments}


def trainer_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """What TRL and LLaMA-Factory hand to Hugging Face's Trainer."""
    optimizer = job["optimizer"]
    return {
        "output_dir": f"{job['scratch']}/output", "max_steps": job["steps"], "seed": job["seed"], "report_to": "none",
        "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "use_cpu": job["device"] == "cpu",
        "learning_rate": optimizer["lr"], "lr_scheduler_type": "constant",
        "adam_beta1": optimizer["betas"][0], "adam_beta2": optimizer["betas"][1], "adam_epsilon": optimizer["eps"],
        "weight_decay": optimizer["weight_decay"], "max_grad_norm": optimizer["max_grad_norm"],
        "per_device_train_batch_size": job["documents_per_step"],
    }  # fmt: skip


# --- LLaMA-Factory ---


def llamafactory(job: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Settings: its own arguments. With neat_packing, a row holds the documents of a step, in its packed form."""
    import datasets
    from llamafactory.train.tuner import run_exp

    settings = job["settings"]
    rows: list[dict[str, list[int]]] = [
        document | {"attention_mask": [1] * len(document["input_ids"])} for document in documents_of(job)
    ]
    arguments = trainer_arguments(job) | {
        "stage": "sft", "do_train": True, "template": "empty", "finetuning_type": "lora", "disable_shuffling": True,
        "model_name_or_path": job["model"], "adapter_name_or_path": job["adapter"],
        "dataset": "none", "tokenized_path": f"{job['scratch']}/tokenized",  # the second wins; the first must be given
    }  # fmt: skip
    if job["quantization"] == "nf4":
        arguments |= {"quantization_bit": 4, "double_quantization": False}
    if settings.get("neat_packing"):
        rows = [packed(documents) for documents in steps_of(job)]
        arguments["per_device_train_batch_size"] = 1
    arguments |= settings
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(arguments["tokenized_path"])
    run_exp(arguments, [clock.for_trainer()])
    return arguments


def packed(documents: list[dict[str, list[int]]]) -> dict[str, list[int]]:
    """The documents in one row; attention_mask numbers them from 1, as PackedSupervisedDatasetProcessor does.

    It fills a row up to cutoff_len, we up to a multiple of 8, as the collator does with all but the positions.
    """
    lengths = [len(document["input_ids"]) for document in documents]
    filling = -sum(lengths) % 8
    row = {key: [x for document in documents for x in document[key]] for key in ("input_ids", "labels")}
    row["attention_mask"] = [number for number, length in enumerate(lengths, start=1) for _ in range(length)]
    row["position_ids"] = [position for length in lengths for position in range(length)]
    return {key: values + [-100 if key == "labels" else 0] * filling for key, values in row.items()}


# --- axolotl ---


def axolotl(job: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Settings: keys of its config. The rows are tokenized already, and come in their order."""
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.cli.train import do_train
    from axolotl.integrations.base import BasePlugin, PluginManager
    from axolotl.utils.dict import DictDefault

    class Reports(BasePlugin):
        def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
            return [clock.for_trainer()]

        def get_training_args(self, cfg: Any) -> dict[str, Any]:
            return {"use_cpu": job["device"] == "cpu"}  # no key says so, and without it bf16 is refused there

    rows, optimizer = Path(job["scratch"], "rows.jsonl"), job["optimizer"]
    documents = [document | {"attention_mask": [1] * len(document["input_ids"])} for document in documents_of(job)]
    rows.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    adapter = json.loads(Path(job["adapter"], "adapter_config.json").read_text())
    arguments = {
        "base_model": job["model"], "adapter": "lora", "lora_model_dir": job["adapter"], "lora_r": adapter["r"],
        "lora_alpha": adapter["lora_alpha"], "lora_dropout": 0.0, "lora_target_modules": adapter["target_modules"],
        "datasets": [{"path": str(rows), "ds_type": "json"}], "dataset_prepared_path": f"{job['scratch']}/prepared",
        "curriculum_sampling": True, "sequence_len": max(len(document["input_ids"]) for document in documents),
        "micro_batch_size": job["documents_per_step"], "gradient_accumulation_steps": 1, "max_steps": job["steps"],
        "seed": job["seed"], "optimizer": "adamw_torch_fused", "learning_rate": optimizer["lr"],
        "adam_beta1": optimizer["betas"][0], "adam_beta2": optimizer["betas"][1], "adam_epsilon": optimizer["eps"],
        "weight_decay": optimizer["weight_decay"], "max_grad_norm": optimizer["max_grad_norm"],
        "lr_scheduler": "constant", "logging_steps": 1, "save_strategy": "no", "output_dir": f"{job['scratch']}/output",
    } | job["settings"]  # fmt: skip
    if job["device"] == "cpu":
        arguments["lora_mlp_kernel"] = False  # Triton, which it switches on by itself, also where it cannot run
    if job["quantization"] == "nf4":
        arguments |= {"adapter": "qlora", "load_in_4bit": True}
    config = load_cfg(DictDefault(arguments))
    PluginManager.get_instance().plugins["clock"] = Reports()
    config.plugins = ["clock"]
    do_train(config, TrainerCliArgs())
    return arguments


# --- Unsloth ---


def unsloth(job: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Settings: model, of from_pretrained; adapter, of get_peft_model; arguments, of SFTConfig."""
    import unsloth as peer  # before trl and peft, which it patches

    # isort: split
    import datasets
    import safetensors.torch
    import torch
    import trl
    from peft import set_peft_model_state_dict

    settings = job["settings"]
    adapter = json.loads(Path(job["adapter"], "adapter_config.json").read_text())
    spec = {key: adapter[key] for key in ("r", "lora_alpha", "lora_dropout", "target_modules")} | settings["adapter"]
    loading = {"max_seq_length": 2048, "load_in_4bit": job["quantization"] == "nf4"} | settings["model"]
    dtype = getattr(torch, loading["dtype"]) if "dtype" in loading else None  # None: it chooses
    model, tokenizer = peer.FastLanguageModel.from_pretrained(job["model"], **loading | {"dtype": dtype})
    model = peer.FastLanguageModel.get_peft_model(model, random_state=job["seed"], **spec)
    set_peft_model_state_dict(model, safetensors.torch.load_file(Path(job["adapter"], "adapter_model.safetensors")))
    arguments = trainer_arguments(job) | {"train_sampling_strategy": "sequential"} | settings["arguments"]
    dataset = datasets.Dataset.from_list(documents_of(job))
    trainer = trl.SFTTrainer(
        model, trl.SFTConfig(**arguments), train_dataset=dataset, processing_class=tokenizer,
        callbacks=[clock.for_trainer()],
    )  # fmt: skip
    trainer.train()
    return {"from_pretrained": loading, "get_peft_model": spec, "SFTConfig": arguments}


# --- mlx-lm ---


class Tokenized:
    """Documents that are tokenized already: (token ids, number of tokens before the first target)."""

    def __init__(self, documents: list[dict[str, list[int]]]) -> None:
        self._pairs = [(d["input_ids"], next(i for i, t in enumerate(d["labels"]) if t != -100)) for d in documents]

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        return self._pairs[index]

    def process(self, pair: tuple[list[int], int]) -> tuple[list[int], int]:
        return pair


def mlx_lm_model(directory: str, dtype: str | None) -> Any:
    """The model in a directory as mlx-lm computes it, in the dtype of its files unless another is named."""
    import mlx.core as mx
    from mlx_lm.utils import load

    config = json.loads(Path(directory, "config.json").read_text())
    rope = config.get("rope_parameters") or {}  # of transformers 5; mlx-lm takes its default where it is not above
    model, _ = load(directory, model_config={"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})
    if dtype:
        model.set_dtype(getattr(mx, dtype))
    return model


def mlx_lm(job: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Settings: of mlx_lm.lora's config, and dtype, to which the base is cast. mlx-lm shuffles the batches itself."""
    import types

    import mlx.core as mx
    import numpy as np
    from mlx_lm import lora
    from mlx_lm.tuner.callbacks import TrainingCallback

    class Reports(TrainingCallback):
        def on_train_loss_report(_, report: dict[str, Any]) -> None:
            clock.ended_at.append(time.time())
            clock.losses.append(report["train_loss"])
            clock.targets.append(report["trained_tokens"] - sum(clock.targets))

    optimizer = job["optimizer"]
    adamw = {key: optimizer[key] for key in ("betas", "eps", "weight_decay")} | {"bias_correction": True}
    adapter = json.loads(Path(job["adapter"], "adapter_config.json").read_text())
    arguments = lora.CONFIG_DEFAULTS | {
        "model": job["model"], "train": True, "seed": job["seed"], "num_layers": -1, "iters": job["steps"],
        "lora_parameters": adapter["lora_parameters"], "batch_size": job["documents_per_step"],
        "resume_adapter_file": str(Path(job["adapter"], "adapters.safetensors")), "adapter_path": job["scratch"],
        "learning_rate": optimizer["lr"], "optimizer": "adamw", "optimizer_config": {"adamw": adamw},
        "steps_per_report": 1, "steps_per_eval": job["steps"] + 1, "save_every": job["steps"] + 1,
    } | {key: value for key, value in job["settings"].items() if key != "dtype"}  # fmt: skip
    if "save" in job:
        arguments["adapter_path"] = job["save"]
    model = mlx_lm_model(job["model"], job["settings"].get("dtype"))
    documents = list(map(json.loads, Path(job["documents"]).read_text(encoding="utf-8").splitlines()))
    np.random.seed(job["seed"])  # the order of the batches
    lora.train_model(types.SimpleNamespace(**arguments), model, Tokenized(documents), [], Reports())
    return arguments | {"device": str(mx.default_device())}


# --- what they share ---


def documents_of(job: dict[str, Any]) -> list[dict[str, list[int]]]:
    """In the order of training."""
    documents = list(map(json.loads, Path(job["documents"]).read_text(encoding="utf-8").splitlines()))
    return [documents[i] for i in job["order"][: job["steps"] * job["documents_per_step"]]]


def steps_of(job: dict[str, Any]) -> list[list[dict[str, list[int]]]]:
    documents, size = documents_of(job), job["documents_per_step"]
    return [documents[start : start + size] for start in range(0, len(documents), size)]


def peft_model(job: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """The base model with the initial adapter, ready to be trained."""
    import peft
    import transformers

    if job["device"] == "cuda":
        arguments = arguments | {"device_map": "cuda"}
    if job["quantization"] == "nf4":
        arguments = arguments | {"quantization_config": nf4()}
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], **arguments)
    if job["quantization"] == "nf4":
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return peft.PeftModel.from_pretrained(model, job["adapter"], is_trainable=True)


def save(job: dict[str, Any], model: Any) -> None:
    """Write the adapter where the job asks for it, with the peer's own words."""
    if "save" in job:
        model.save_pretrained(job["save"])


def nf4() -> Any:
    import torch
    import transformers

    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )


def versions() -> dict[str, str]:
    """Of the packages that are at work."""
    return {name: version(name) for name in PACKAGES if name.replace("-", "_") in sys.modules}


def peak_device_bytes() -> int:
    """0 if there is no device with separate memory."""
    torch = sys.modules.get("torch")
    return torch.cuda.max_memory_allocated() if torch and torch.cuda.is_available() else 0


PACKAGES = ("torch", "transformers", "peft", "accelerate", "trl", "llamafactory", "axolotl", "unsloth", "mlx", "mlx-lm")
SIDES = {"hf_peft": hf_peft, "trl": trl, "trl_dpo": trl_dpo, "llamafactory": llamafactory, "axolotl": axolotl,
         "unsloth": unsloth, "mlx_lm": mlx_lm}  # fmt: skip

if __name__ == "__main__":
    name, path = sys.argv[1:]
    job = json.loads(Path(path).read_text())
    clock = Clock()
    arguments = SIDES[name](job, clock)
    result = {
        "losses": clock.losses, "ended_at": clock.ended_at, "targets": clock.targets, "arguments": arguments,
        "versions": versions(), "peak_device_bytes": peak_device_bytes(),
    }  # fmt: skip
    Path(job["result"]).write_text(json.dumps(result))
