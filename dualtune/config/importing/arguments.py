"""Translate the options of transformers' TrainingArguments, under the names that each trainer gives them.

Based on transformers/training_args.py of transformers 5; axolotl, LLaMA-Factory, TRL and Unsloth pass them on.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from dualtune.config.importing.table import (
    NAMED_OUTSIDE,
    Given,
    Note,
    Rule,
    Settings,
    absent,
    is_off,
    needless,
    shown,
    trackers_of_transformers,
    translated,
)
from dualtune.config.values import RESERVED_VARIABLES

DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-5, "num_train_epochs": 3.0, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "weight_decay": 0.0, "max_grad_norm": 1.0, "lr_scheduler_type": "linear", "warmup_ratio": 0.0,
    "optim": "adamw_torch_fused", "seed": 42, "output_dir": "trainer_output",
}  # fmt: skip

_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}
_ADAMW = {"adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"}
_MOMENTS = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
_PEFT_CHOOSES = "no names are listed, so PEFT chooses by architecture; here the default of adapter.targets is used"
GPUS = "multiply it by the number of GPUs that you used"


def template_variables(given: Given, *names: str) -> Settings:
    """Translate keyword arguments of the chat template: each name holds a mapping."""
    variables: dict[str, Any] = {}
    for name in filter(given.__contains__, names):
        variables |= variables_in(given, name, given.get(name))
    return {"data.template_variables": given.note(variables, *names)} if variables else {}


def variables_in(given: Given, where: str, value: Any) -> dict[str, Any]:
    """Return the variables of a mapping, which may be JSON in a text; those that every template is given are lost."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, dict):
        raise given.wrong(where, "must be a mapping, such as {enable_thinking: false}")
    variables = cast(dict[str, Any], value)
    for name in variables.keys() & RESERVED_VARIABLES:
        given.lose(f"{where}.{name}", "every template is given it", variables[name])
    return {name: each for name, each in variables.items() if name not in RESERVED_VARIABLES}


@dataclass(frozen=True)
class Arguments:
    """The names of a trainer for transformers' options: those in `names`, else transformers' own, behind `prefix`."""

    names: Mapping[str, str] = field(default_factory=dict[str, str])
    prefix: str = ""

    def name(self, option: str) -> str:
        return self.prefix + self.names.get(option, option)

    def length(self, given: Given) -> Settings:
        steps, epochs = self.name("max_steps"), self.name("num_train_epochs")
        if steps in given and given.number(steps) > 0:  # -1 and 0 mean no limit
            return {"train.steps": given.note(given.count(steps), steps)}
        return {"train.epochs": given.note(given.number(epochs), epochs)}

    def batch(self, given: Given, length: str) -> Settings:
        """Translate the batch: to tokens per step if `packing` is on, else to documents per step."""
        names = [self.name(option) for option in ("per_device_train_batch_size", "gradient_accumulation_steps")]
        each, accumulated = map(given.count, names)
        origin = f"{names[0]}: {each} × {names[1]}: {accumulated}"
        packing = self.name("packing")
        if not given.flag(packing):
            return {
                "data.packing": given.note(False, packing),
                "train.documents_per_step": Note(each * accumulated, f"{origin}; {GPUS}"),
            }
        tokens = given.count(length, 2)
        note = Note(each * accumulated * tokens, f"{origin} × {length}: {tokens}; {GPUS}")
        return {"data.packing": given.note(True, packing), "train.tokens_per_step": note}

    def schedule(self, given: Given) -> Settings:
        key, rate = self.name("lr_scheduler_type"), self.name("learning_rate")
        name = given.text(key) or "cosine"
        if name not in _SCHEDULES:
            given.lose(key, "the schedules are constant, linear, cosine and schedule_free; cosine is used")
        settings: Settings = {
            "train.learning_rate": given.note(given.number(rate), rate),
            "train.schedule": given.note(_SCHEDULES.get(name, "cosine"), key),
        }
        if self._is_schedule_free(given):  # theirs multiplies the rate by the schedule all the same
            if name != "constant":
                given.lose(key, "schedule_free keeps the rate after the warm-up")
            optimizer = self.name("optim")
            settings["train.schedule"] = Note("schedule_free", f"{optimizer}: {shown(str(given.get(optimizer)))}")
        return settings | {"train.warmup": self._warmup(given, name)}

    def _is_schedule_free(self, given: Given) -> bool:
        return str(given.get(self.name("optim"))) in ("schedule_free_adamw", "schedule_free_radamw")

    def _warmup(self, given: Given, schedule: str) -> Note:
        """Translate the warm-up, which is a share or a number of steps."""
        steps_key, share_key = self.name("warmup_steps"), self.name("warmup_ratio")
        if schedule == "constant":
            return Note(0, f"{self.name('lr_scheduler_type')}: constant has no warm-up")
        has_steps = steps_key in given or (share_key not in given and given.get(steps_key) is not None)
        if not has_steps or (share_key in given and given.number(steps_key) == 0):
            return given.note(given.number(share_key), share_key)
        steps = given.number(steps_key)
        is_share = 0 < steps < 1
        return given.note(steps if is_share else given.count(steps_key, 0), steps_key)

    def optimizer(self, given: Given) -> Settings:
        for option, ours in _MOMENTS.items():
            key = self.name(option)
            if key in given:
                if given.number(key) == ours:
                    given.skip(key, "it is the same here")
                else:
                    given.lose(key, f"it is always {ours:g}")
        decay, norm = self.name("weight_decay"), self.name("max_grad_norm")
        return self._optimizer_name(given) | {
            "train.weight_decay": given.note(given.number(decay), decay),
            "train.max_grad_norm": given.note(given.number(norm) or None, norm),
        }

    def _optimizer_name(self, given: Given) -> Settings:
        key = self.name("optim")
        name = str(given.get(key))
        if self._is_schedule_free(given):
            if name == "schedule_free_radamw":
                given.lose(key, "here it is schedule-free AdamW, without RAdam's rectification; use a warm-up")
            return {}
        if "adamw" not in name:
            given.lose(key, "AdamW is used instead; choose a new learning rate and weight decay")
        elif "paged" in name:
            given.lose(key, "nothing is paged: the optimizer's state stays on the device")
        if "adamw" in name and "8bit" in name:
            return {"train.optimizer": Note("adamw_8bit", f"{key}: {shown(name)}, which has other 8-bit codes")}
        if "adamw" in name and "paged" not in name and name not in _ADAMW:
            given.lose(key, "here it is AdamW with moments in float32")
        return {}

    def checkpointing(self, given: Given) -> Settings:
        key = self.name("gradient_checkpointing")
        if key not in given or is_off(given.get(key)):
            return {}
        value = given.get(key)
        settings: Settings = {"memory.checkpointing": given.note("full", key)}
        if value == "offload":
            settings["memory.offload"] = given.note("activations", key)
        elif value not in (True, "true"):
            given.lose(key, "the kept inputs of layers go to host memory at most: memory.offload")
        return settings

    def intervals(self, given: Given) -> Settings:
        logging, keep = self.name("logging_steps"), self.name("save_total_limit")
        settings: Settings = {}
        if logging in given and given.number(logging) < 1:
            given.lose(logging, "it is a fraction of the run; run.log_every is a number of steps")
        elif logging in given:
            settings["run.log_every"] = given.note(given.count(logging), logging)
        for option, ours in (("eval_steps", "eval_every"), ("save_steps", "save_every")):
            key = self.name(option)
            if key not in given:
                continue
            if given.number(key) == 0:
                settings[f"run.{ours}"] = given.note(None, key)
            elif given.number(key) < 1:
                given.lose(key, f"it is a fraction of the run; run.{ours} is a number of steps")
            else:
                settings[f"run.{ours}"] = given.note(given.count(key), key)
        return settings | self._strategies(given) | (
            {"run.keep": given.note(given.count(keep), keep)} if keep in given else {})  # fmt: skip

    def _strategies(self, given: Given) -> Settings:
        settings: Settings = {}
        for option, ours in (("eval_strategy", "eval_every"), ("evaluation_strategy", "eval_every"),
                             ("save_strategy", "save_every")):  # fmt: skip
            key = self.name(option)
            if given.get(key) in ("no", False):
                settings[f"run.{ours}"] = given.note(None, key)
            elif key in given and given.get(key) != "steps":
                given.lose(key, f"the interval is set in steps: run.{ours}")
        return settings

    def guards(self, given: Given, patience: str = "early_stopping_patience") -> Settings:
        settings: Settings = {}
        if patience in given:
            settings["guards.early_stopping"] = given.note(given.count(patience), patience)
        if (best := self.name("load_best_model_at_end")) in given:
            settings["guards.restore_best"] = given.note(given.flag(best), best)
        return settings

    def seed(self, given: Given) -> Settings:
        return {"run.seed": given.note(given.count(self.name("seed"), 0), self.name("seed"))}

    def directory(self, given: Given) -> Settings:
        return {"run.dir": given.note(given.text(self.name("output_dir")), self.name("output_dir"))}

    def scaling(self, given: Given) -> Settings:
        key = self.name("use_rslora")
        return {"adapter.scaling": given.note("rank_stabilized", key)} if given.flag(key) else {}


def module_names(given: Given, key: str) -> Settings:
    """Translate names of layers: a list, or a text with commas; `all` and `all-linear` are every linear layer."""
    value = given.get(key)
    if value is not None and not isinstance(value, str | list):
        raise given.wrong(key, "must be a list of names")
    listed = value.split(",") if isinstance(value, str) else cast(list[Any], value or [])
    names = [name for name in (str(each).strip() for each in listed) if name]
    if names in (["all"], ["all-linear"]):
        return {"adapter.targets": given.note("all-linear", key)}
    if not names:
        given.lose(key, _PEFT_CHOOSES, value=value or "not set")
        return {}
    if any(set("*[]()|\\^$") & set(name) for name in names):
        given.lose(key, "it is a pattern; list the names of the layers in adapter.targets instead")
        return {}
    return {"adapter.targets": given.note(names, key)}


def nf4_only(given: Given, kind: str, double: str) -> None:
    """Report values of bitsandbytes' 4 bits that are not those of nf4 here."""
    if (name := given.get(kind)) not in (None, "nf4"):
        given.lose(kind, "of the 4-bit codes of bitsandbytes, there is nf4", value=name)
    if not given.flag(double):
        given.lose(double, "the scales of nf4 are always quantized too, which saves 0.4 bits a weight",
                   value=given.get(double))  # fmt: skip


EIGHT_BITS = (
    "bitsandbytes' LLM.int8() also rounds the inputs of a layer to 8 bits; the base keeps its stored format, "
    "which takes more memory. model.quantization: int8 rounds the weights alone"
)
NO_PREFERENCES = "preference and reward training are not supported yet"
_HF = Arguments()

# What LLaMA-Factory and TRL pass on to transformers, under its names.
RULES: tuple[Rule, ...] = (
    translated("num_train_epochs max_steps", "train.epochs, train.steps", _HF.length),
    translated("learning_rate lr_scheduler_type warmup_steps warmup_ratio",
               "train.learning_rate, train.schedule, train.warmup", _HF.schedule,
               "a warm-up below 1 is a fraction of the steps, from 1 on a number of steps"),
    translated("optim weight_decay max_grad_norm adam_beta1 adam_beta2 adam_epsilon",
               "train.optimizer, train.weight_decay, train.max_grad_norm", _HF.optimizer,
               "AdamW; names with 8bit become adamw_8bit, whose codes are its own, and nothing is paged"),
    translated("gradient_checkpointing", "memory.checkpointing", _HF.checkpointing,
               "`full`; `auto`: as little as fits"),
    translated("logging_steps eval_steps save_steps eval_strategy evaluation_strategy save_strategy save_total_limit",
               "run.log_every, run.eval_every, run.save_every, run.keep", _HF.intervals, "always in optimizer steps"),
    translated("output_dir", "run.dir", _HF.directory),
    translated("seed", "run.seed", _HF.seed, "the random numbers differ"),
    translated("report_to", "run.track", trackers_of_transformers, "W&B is offline by default"),
    absent("project trackio_* run_name", NAMED_OUTSIDE),
    absent("neftune_noise_alpha", "NEFTune is not supported yet"),
    absent("label_smoothing_factor", "the loss is the cross-entropy of the targets"),
    absent("lr_scheduler_kwargs", "the learning rate has a peak, a warm-up and a schedule that falls to 0",
           "train.schedule"),
    absent("optim_args optim_target_modules", "AdamW has one learning rate, betas of 0.9 and 0.999 and an eps of 1e-8"),
    absent("group_by_length length_column_name train_sampling_strategy", "documents are shuffled anew in each epoch"),
    absent("dataloader_drop_last", "every document is used"),
    absent("deepspeed fsdp fsdp_* parallelism_config accelerator_config tp_size ray_* master_addr master_port",
           "`dualtune launch` starts several processes, and memory.sharding splits the base among them",
           "memory.sharding"),
    absent("push_to_hub hub_* push_to_hub_*", "`dualtune push hf://…` publishes an adapter"),
    absent("trust_remote_code", "code from a model's repository is never run; use a model that needs none"),
    absent("metric_for_best_model greater_is_better", "the best evaluation is that of the lowest loss"),
    absent("num_train_tokens average_tokens_across_devices include_num_input_tokens_seen",
           "the loss of a step is always divided by its target tokens on all devices"),
    absent("do_eval do_predict predict_with_generate compute_accuracy", "`dualtune eval` answers and scores"),
    needless("dataloader_* remove_unused_columns preprocessing_* overwrite_cache tokenized_path cache_dir "
             "dataset_num_proc data_shared_file_system buffer_size eval_accumulation_steps per_device_eval_batch_size "
             "eval_batch_size auto_find_batch_size torch_empty_cache_steps gradient_checkpointing_kwargs "
             "low_cpu_mem_usage pad_to_multiple_of batch_eval_metrics prediction_loss_only use_cache "
             "skip_memory_metrics",
             "the layout in memory does not change the result, and is chosen automatically"),
    needless("attn_implementation flash_attn use_liger_kernel enable_liger_kernel liger_kernel_config torch_compile "
             "torch_compile_* tf32 use_unsloth use_unsloth_gc use_v1_kernels use_kernels",
             "the fastest code that keeps the numbers is chosen automatically; see model.kernels"),
    needless("resume_from_checkpoint overwrite_output_dir ignore_data_skip restore_callback_states_from_checkpoint",
             "the same command resumes a run"),
    needless("ddp_* local_rank device_map use_cpu no_cuda", "it is set by --platform and the launcher"),
    needless("logging_first_step logging_strategy logging_dir logging_nan_inf_filter log_level log_level_replica "
             "log_on_each_node disable_tqdm include_tokens_per_second include_effective_tokens_per_second "
             "save_safetensors save_only_model save_on_each_node plot_loss eval_on_start eval_delay full_determinism "
             "data_seed fp16_full_eval bf16_full_eval use_fast_tokenizer enable_torch_profiler profiler_* "
             "profile_modules print_param_status debug",
             "it does not change the result"),
)  # fmt: skip
