"""Translate the options of transformers' TrainingArguments, under the names that each trainer gives them.

Based on transformers/training_args.py of transformers 5; axolotl, LLaMA-Factory, TRL and Unsloth pass them on.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from dualtune.config.importing.table import (
    ForeignFile,
    Note,
    Rule,
    Settings,
    absent,
    is_off,
    needless,
    renamed,
    shown,
    table_in,
    translated,
)
from dualtune.config.values import RESERVED_VARIABLES
from dualtune.model.targets import is_router

DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-5, "num_train_epochs": 3.0, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "weight_decay": 0.0, "max_grad_norm": 1.0, "lr_scheduler_type": "linear", "warmup_ratio": 0.0,
    "optim": "adamw_torch_fused", "seed": 42, "output_dir": "trainer_output",
}  # fmt: skip

_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}
# Names of other optimizers that are also ours, and what to know of them.
_OWN = {"lion": "", "adafactor": "", "muon": ", whose learning rate is that of AdamW here"}
_ADAMW = {"adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"}
_MOMENTS = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
_PEFT_CHOOSES = "no names are listed, so PEFT chooses by architecture; here the default of adapter.targets is used"
PATTERN = "it is a pattern; list the names of the layers in adapter.targets instead"
TRACKERS = ("wandb", "mlflow", "trackio", "tensorboard")
OTHER_TRACKERS = "run.track knows trackio, wandb, mlflow and tensorboard; every number is in metrics.jsonl"
NAMED_OUTSIDE = "a tracker's own environment variables say it, such as WANDB_PROJECT"
DETECTED = "the format is detected from the columns; allowed are the formats of data.format"
OF_SOURCES = "a source has only path, subset, split, format, columns, roles, consecutive and weight"


def lora(file: ForeignFile, rank: str, alpha: str, dropout: str) -> Settings:
    settings = {
        "adapter.rank": file.note(file.count(rank), rank),
        "adapter.alpha": file.note(file.number(alpha), alpha),
    }
    if file.get(dropout) is not None:  # not every trainer documents a default
        settings["adapter.dropout"] = file.note(file.number(dropout), dropout)
    return settings


def dora(file: ForeignFile, switch: str) -> Settings:
    """Translate the switch of DoRA, for a file with an adapter."""
    return {"adapter.method": file.note("dora", switch)} if file.flag(switch) else {}


def label_smoothing(file: ForeignFile) -> Settings:
    name = "label_smoothing_factor"
    return {"train.label_smoothing": file.number(name)} if name in file else {}


def router_balance(name: str) -> Rule:
    """Make the rule for a trainer's name of the coefficient that balances experts; it has no loss without a value."""

    def convert(file: ForeignFile) -> Settings:
        return {"train.router_aux_loss_coef": file.note(file.number(name), name)} if file.get(name) is not None else {}

    note = "that of each document and layer, not of a micro-batch with all layers together"
    return translated(name, "train.router_aux_loss_coef", convert, note)


def lora_plus(file: ForeignFile, ratio: str, embedding: str) -> Settings:
    """Translate the learning rate of B over that of A. LoRA+ has one for adapters of embeddings, which are not here."""
    if embedding in file:
        file.skip(embedding, "no embedding has an adapter")
    return {"train.lora_plus_ratio": file.note(file.number(ratio), ratio)} if ratio in file else {}


def held_out(file: ForeignFile, share: str) -> Settings:
    """Translate the share of the rows to evaluate on, which other trainers also take as a number of rows."""
    value = file.number(share)
    if value >= 1:
        file.lose(share, "data.eval is a fraction of the rows, below 1, or other data")
        value = 0
    return {"data.eval": file.note(value, share)}


def reported_to(file: ForeignFile, allowed: tuple[str, ...] = TRACKERS) -> Settings:
    """Translate `report_to`: a list, or a text with commas."""
    value = file.get("report_to")
    listed = cast(list[Any], value) if isinstance(value, list) else str(value).split(",")
    names = [] if is_off(value) else [str(name).strip().lower() for name in listed]
    for name in names:
        if name not in allowed and name != "none":
            file.lose("report_to", OTHER_TRACKERS, value=name)
    trackers = [name for name in dict.fromkeys(names) if name in allowed]
    return {"run.track": file.note(trackers, "report_to")} if trackers else {}


def template_variables(file: ForeignFile, *names: str) -> Settings:
    """Translate keyword arguments of the chat template: each name holds a mapping."""
    variables: dict[str, Any] = {}
    for name in filter(file.__contains__, names):
        variables |= variables_in(file, name, file.get(name))
    return {"data.template_variables": file.note(variables, *names)} if variables else {}


def variables_in(file: ForeignFile, where: str, value: Any) -> dict[str, Any]:
    """Return the variables of a mapping, which may be JSON in a text; those that every template is given are lost."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, dict):
        raise file.wrong(where, "must be a mapping, such as {enable_thinking: false}")
    variables = cast(dict[str, Any], value)
    for name in variables.keys() & RESERVED_VARIABLES:
        file.lose(f"{where}.{name}", "every template is given it", variables[name])
    return {name: inner for name, inner in variables.items() if name not in RESERVED_VARIABLES}


@dataclass(frozen=True)
class Arguments:
    """The names of a trainer for transformers' options: those in `names`, else transformers' own, behind `prefix`."""

    names: Mapping[str, str] = field(default_factory=dict[str, str])
    prefix: str = ""

    def name(self, option: str) -> str:
        return self.prefix + self.names.get(option, option)

    def length(self, file: ForeignFile) -> Settings:
        steps, epochs = self.name("max_steps"), self.name("num_train_epochs")
        if steps in file and file.number(steps) > 0:  # -1 and 0 mean no limit
            return {"train.steps": file.note(file.count(steps), steps)}
        return {"train.epochs": file.note(file.number(epochs), epochs)}

    def batch(
        self, file: ForeignFile, length: str, *, is_packed: bool | None = None, total: str | None = None
    ) -> Settings:
        """Translate the batch: to tokens per step if it is packed (by `packing`), else to documents per step.

        `total`: a key that holds the documents of a step, if the file has it.
        """
        names = [self.name(option) for option in ("per_device_train_batch_size", "gradient_accumulation_steps")]
        per_device, accumulated = map(file.count, names)
        documents, origin = per_device * accumulated, f"{names[0]}: {per_device} × {names[1]}: {accumulated}"
        if total is not None and total in file:
            documents = file.count(total)
            origin = f"{total}: {documents}"
        gpus = "multiply it by the number of GPUs that you used"
        packing = self.name("packing")
        is_packed = file.flag(packing) if is_packed is None else is_packed
        settings: Settings = {"data.packing": file.note(is_packed, packing)}
        if not is_packed:
            return settings | {"train.documents_per_step": Note(documents, f"{origin}; {gpus}")}
        tokens = file.count(length, 2)
        return settings | {"train.tokens_per_step": Note(documents * tokens, f"{origin} × {length}: {tokens}; {gpus}")}

    def schedule(self, file: ForeignFile) -> Settings:
        key, rate = self.name("lr_scheduler_type"), self.name("learning_rate")
        name = file.text(key) or "cosine"
        if name not in _SCHEDULES:
            file.lose(key, "the schedules are constant, linear, cosine and schedule_free; cosine is used")
        settings: Settings = {
            "train.learning_rate": file.note(file.number(rate), rate),
            "train.schedule": file.note(_SCHEDULES.get(name, "cosine"), key),
        }
        if self._is_schedule_free(file):  # theirs multiplies the rate by the schedule all the same
            if name != "constant":
                file.lose(key, "schedule_free keeps the rate after the warm-up")
            optimizer = self.name("optim")
            settings["train.schedule"] = Note("schedule_free", f"{optimizer}: {shown(str(file.get(optimizer)))}")
        return settings | {"train.warmup": self._warmup(file, name)}

    def _is_schedule_free(self, file: ForeignFile) -> bool:
        return str(file.get(self.name("optim"))) in ("schedule_free_adamw", "schedule_free_radamw")

    def _warmup(self, file: ForeignFile, schedule: str) -> Note:
        """Translate the warm-up, which is a share or a number of steps."""
        steps_key, share_key = self.name("warmup_steps"), self.name("warmup_ratio")
        if schedule == "constant":
            return Note(0, f"{self.name('lr_scheduler_type')}: constant has no warm-up")
        has_steps = steps_key in file or (share_key not in file and file.get(steps_key) is not None)
        if not has_steps or (share_key in file and file.number(steps_key) == 0):
            return file.note(file.number(share_key), share_key)
        steps = file.number(steps_key)
        is_share = 0 < steps < 1
        return file.note(steps if is_share else file.count(steps_key, 0), steps_key)

    def optimizer(self, file: ForeignFile) -> Settings:
        for option, constant in _MOMENTS.items():
            key = self.name(option)
            if key in file and file.number(key) == constant:
                file.skip(key, "it is the same here")
            elif key in file:
                file.lose(key, f"it is always {constant:g}")
        decay, norm = self.name("weight_decay"), self.name("max_grad_norm")
        return self._optimizer_name(file) | {
            "train.weight_decay": file.note(file.number(decay), decay),
            "train.max_grad_norm": file.note(file.number(norm) or None, norm),
        }

    def _optimizer_name(self, file: ForeignFile) -> Settings:
        key = self.name("optim")
        name = str(file.get(key))
        if self._is_schedule_free(file):
            if name == "schedule_free_radamw":
                file.lose(key, "here it is schedule-free AdamW, without RAdam's rectification; use a warm-up")
            return {}
        for own, why in _OWN.items():
            if own in name:
                if "paged" in name:
                    file.lose(key, "nothing is paged: the optimizer's state stays on the device")
                if own == "lion" and "8bit" in name:
                    return {"train.optimizer": Note("lion_8bit", f"{key}: {shown(name)}, which has other 8-bit codes")}
                if "8bit" in name:
                    file.lose(key, f"{own} keeps its state in float32")
                return {"train.optimizer": Note(own, f"{key}: {shown(name)}{why}")}
        if "adamw" not in name:
            file.lose(key, "AdamW is used instead; choose a new learning rate and weight decay")
        elif "paged" in name:
            file.lose(key, "nothing is paged: the optimizer's state stays on the device")
        if "adamw" in name and "8bit" in name:
            return {"train.optimizer": Note("adamw_8bit", f"{key}: {shown(name)}, which has other 8-bit codes")}
        if "adamw" in name and "paged" not in name and name not in _ADAMW:
            file.lose(key, "here it is AdamW with moments in float32")
        return {}

    def checkpointing(self, file: ForeignFile) -> Settings:
        names = (self.name("gradient_checkpointing"), "activation_checkpointing")  # its newer name
        key = next((name for name in names if name in file), names[0])
        if is_off(file.get(key)):
            return {}
        value = file.get(key)
        settings: Settings = {"memory.checkpointing": file.note("full", key)}
        if value == "offload":
            settings["memory.offload"] = file.note("activations", key)
        elif value not in (True, "true"):
            file.lose(key, "the kept inputs of layers go to host memory at most: memory.offload")
        return settings

    def intervals(self, file: ForeignFile) -> Settings:
        settings: Settings = {}
        for option, key in (("logging_steps", "run.log_every"), ("eval_steps", "run.eval_every"),
                            ("save_steps", "run.save_every"), ("save_total_limit", "run.keep")):  # fmt: skip
            name = self.name(option)
            if name not in file:
                continue
            if file.number(name) == 0 and option in ("eval_steps", "save_steps"):
                settings[key] = file.note(None, name)
            elif file.number(name) < 1 and option != "save_total_limit":
                file.lose(name, f"it is a fraction of the run; {key} is a number of steps")
            else:
                settings[key] = file.note(file.count(name), name)
        # A strategy comes last: `no` overrides an interval.
        for option, key in (("eval_strategy", "run.eval_every"), ("evaluation_strategy", "run.eval_every"),
                            ("save_strategy", "run.save_every")):  # fmt: skip
            name = self.name(option)
            if file.get(name) in ("no", False):
                settings[key] = file.note(None, name)
            elif name in file and file.get(name) != "steps":
                file.lose(name, f"the interval is set in steps: {key}")
        return settings

    def guards(self, file: ForeignFile, patience: str = "early_stopping_patience") -> Settings:
        settings: Settings = {}
        if patience in file:
            settings["guards.early_stopping"] = file.note(file.count(patience), patience)
        if (best := self.name("load_best_model_at_end")) in file:
            settings["guards.restore_best"] = file.note(file.flag(best), best)
        return settings

    def scaling(self, file: ForeignFile) -> Settings:
        key = self.name("use_rslora")
        return {"adapter.scaling": file.note("rank_stabilized", key)} if file.flag(key) else {}


def module_names(file: ForeignFile, key: str) -> Settings:
    """Translate names of layers: a list, or a text with commas; `all` and `all-linear` are every linear layer."""
    value = file.get(key)
    if value is not None and not isinstance(value, str | list):
        raise file.wrong(key, "must be a list of names")
    listed = value.split(",") if isinstance(value, str) else cast(list[Any], value or [])
    names = [name for entry in listed if (name := str(entry).strip())]
    if names in (["all"], ["all-linear"]):
        return {"adapter.targets": file.note("all-linear", key)}
    if not names:
        file.lose(key, _PEFT_CHOOSES, value=value or "not set")
        return {}
    if any(set("*[]()|\\^$") & set(name) for name in names):
        file.lose(key, PATTERN)
        return {}
    return {"adapter.targets": file.note(names, key)}


def listed(file: ForeignFile, name: str, key: str) -> Settings:
    """Translate a list of names or texts, or one text with commas, to a key that takes a list."""
    value = file.get(name)
    if value is None or value == []:
        return {}
    if not isinstance(value, str | list):
        raise file.wrong(name, "must be a list of names")
    entries = value.split(",") if isinstance(value, str) else cast(list[Any], value)
    texts = [entry.strip() if isinstance(entry, str) else entry for entry in entries]
    if not texts or not all(type(text) in (str, int) and text != "" for text in texts):
        raise file.wrong(name, "must be a list of names")
    return {key: file.note(texts, name)}


def token_rows(file: ForeignFile, name: str) -> Settings:
    """Translate PEFT's trainable_token_indices: a list of token ids, or one for each module, if all are equal."""
    value = file.get(name)
    if not isinstance(value, dict):  # PEFT trains only the rows of the embedding
        return listed(file, name, "adapter.train_rows")
    lists = [*cast(dict[Any, Any], value).values()]
    if not lists or any(ids != lists[0] for ids in lists) or not isinstance(lists[0], list):
        file.lose(name, "a row is trained in embedding and output head alike: adapter.train_rows is one list for both")
        return {}
    return {"adapter.train_rows": file.note(lists[0], name)}


_IN_TEXT = "in the text of rows it is plain text, unless data.special_tokens_in_text is allow"


def special_tokens(file: ForeignFile, name: str) -> Settings:
    """Translate a list of control tokens that the other trainer adds, and reads in any text."""
    return {
        key: Note(note.value, f"{note.comment}; {_IN_TEXT}")
        for key, note in listed(file, name, "data.new_special_tokens").items()
    }


# The parameters in which transformers stacks experts, and the projections that they hold.
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}


def with_experts(file: ForeignFile, key: str, settings: Settings) -> Settings:
    """Add PEFT's target_parameters to the translated targets: the projections of stacked experts, and routers."""
    if not (names := file.get(key)):
        return settings
    if not isinstance(names, list):
        raise file.wrong(key, "must be a list of names")
    projections: list[str] = []
    routers: list[str] = []
    for name in map(str, cast(list[Any], names)):
        container, _, parameter = name.rpartition(".")
        if parameter == "weight" and is_router(container):
            routers.append(container)
        elif container.endswith("experts") and parameter in _STACKS:
            projections += [f"{container}.{projection}" for projection in _STACKS[parameter]]
        else:
            rule = (
                "only stacks of experts are adapted as parameters, gate_up_proj and down_proj, and weights of routers"
            )
            file.lose(key, rule, value=name)
    targets = settings.get("adapter.targets")
    if (value := targets.value if isinstance(targets, Note) else targets) == "all-linear":
        value, projections, has_experts = ["all-linear"] if routers else [], [], bool(projections)
        settings = settings | ({"adapter.experts": file.note(True, key)} if has_experts else {})
    added = [*projections, *routers]
    return settings | {"adapter.targets": file.note([*(value or []), *added], key)} if added else settings


def peft_init(value: Any) -> str | None:
    """Return the adapter.init of PEFT's init_lora_weights, None if there is none."""
    if value is True:
        return "kaiming"
    name = str(value).lower()
    return "pissa" if re.fullmatch(r"pissa(_niter_\d+)?", name) else name if name in ("gaussian", "olora") else None


def module_numbers(file: ForeignFile, key: str) -> Settings:
    """Translate PEFT's rank_pattern or alpha_pattern, a mapping from names of modules to numbers."""
    if key not in file:
        return {}
    numbers = table_in(file.get(key))
    if not numbers or not all(type(number) in (int, float) and number > 0 for number in numbers.values()):
        raise file.wrong(key, "must be a mapping from names of modules to positive numbers")
    if any(set("*[]()|\\^$+?") & set(name) for name in numbers):
        file.lose(key, PATTERN)
        return {}
    return {f"adapter.{key.removeprefix('lora_')}": file.note(numbers, key)}


def nf4_only(file: ForeignFile, kind: str, double: str) -> None:
    """Report values of bitsandbytes' 4 bits that are not those of nf4 here."""
    if (name := file.get(kind)) not in (None, "nf4"):
        file.lose(kind, "of the 4-bit codes of bitsandbytes, there is nf4", value=name)
    if not file.flag(double):
        file.lose(double, "the scales of nf4 are always quantized too, which saves 0.4 bits a weight",
                   value=file.get(double))  # fmt: skip


EIGHT_BITS = (
    "bitsandbytes' LLM.int8() also rounds the inputs of a layer to 8 bits; the base keeps its stored format, "
    "which takes more memory. model.quantization: int8 rounds the weights alone"
)
NEAREST = "For another kind of adapter, the nearest here is lora"
NO_REWARDS = "reward models and PPO are not supported; the nearest is train.objective: grpo with rollouts.rewards"
LAUNCHED = "`dualtune launch` starts several processes, and memory.sharding splits the base among them"
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
    translated("gradient_checkpointing activation_checkpointing", "memory.checkpointing", _HF.checkpointing,
               "`full`; `auto`: as little as fits"),
    translated("logging_steps eval_steps save_steps eval_strategy evaluation_strategy save_strategy save_total_limit",
               "run.log_every, run.eval_every, run.save_every, run.keep", _HF.intervals, "always in optimizer steps"),
    renamed("output_dir", "run.dir", ForeignFile.text),
    renamed("seed", "run.seed", ForeignFile.count, "the random numbers differ", least=0),
    translated("report_to", "run.track", reported_to, "W&B is offline by default"),
    absent("project trackio_* run_name", NAMED_OUTSIDE),
    absent("neftune_noise_alpha", "NEFTune is not supported yet"),
    translated("label_smoothing_factor", "train.label_smoothing", label_smoothing, "evaluations have none"),
    absent("lr_scheduler_kwargs", "the learning rate has a peak, a warm-up and a schedule that falls to 0",
           "train.schedule"),
    absent("optim_args optim_target_modules", "AdamW has one learning rate, betas of 0.9 and 0.999 and an eps of 1e-8"),
    absent("group_by_length length_column_name train_sampling_strategy", "documents are shuffled anew in each epoch"),
    absent("dataloader_drop_last", "every document is used"),
    absent("deepspeed fsdp fsdp_* parallelism_config accelerator_config tp_size ray_* master_addr master_port",
           LAUNCHED,
           "memory.sharding"),
    absent("push_to_hub hub_* push_to_hub_*", "`dualtune push hf://…` publishes an adapter"),
    absent("trust_remote_code", "code from a model's repository is never run; use a model that needs none"),
    absent("metric_for_best_model greater_is_better", "the best evaluation is that of the lowest loss"),
    absent("num_train_tokens average_tokens_across_devices include_num_input_tokens_seen",
           "the loss of a step is always divided by its target tokens on all devices"),
    absent("do_eval do_predict predict_with_generate compute_accuracy", "`dualtune eval` answers and scores"),
    absent("include_for_metrics label_names", "an evaluation has the loss; `dualtune eval` has other metrics"),
    needless("dataloader_* remove_unused_columns preprocessing_* overwrite_cache tokenized_path cache_dir "
             "dataset_num_proc data_shared_file_system buffer_size eval_accumulation_steps per_device_eval_batch_size "
             "eval_batch_size auto_find_batch_size torch_empty_cache_steps gradient_checkpointing_kwargs "
             "activation_checkpointing_kwargs eval_do_concat_batches eval_use_gather_object "
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
             "profile_modules print_param_status debug enable_jit_checkpoint",
             "it does not change the result"),
)  # fmt: skip
