"""Translate distillation as TRL has it: DistillationTrainer, and GKDTrainer, whose student draws some of the answers.

Based on trl/trainer/distillation_config.py and trl/experimental/gkd/gkd_config.py of TRL 1.16.
"""

from __future__ import annotations

from typing import Any

from dualtune.config.importing.preferences import without_dropout
from dualtune.config.importing.samples import lost_in
from dualtune.config.importing.table import ForeignFile, Note, Settings
from dualtune.config.values import DEFAULT_TOP_K, ON_POLICY

TEACHER = "teacher_model_name_or_path"
_OF_GKD = ("lmbda", "seq_kd", "max_new_tokens")
KEYS = " ".join((TEACHER, *_OF_GKD))
LOST = "teacher_model_revision teacher_model_init_kwargs"
OURS = (
    "train.objective, distill.teacher, distill.divergence, distill.beta, distill.temperature, rollouts.samples, "
    "rollouts.max_tokens, rollouts.temperature, rollouts.top_p"
)
_DEFAULTS: dict[str, Any] = {"temperature": 1.0, "beta": 1.0, "max_completion_length": 512, "learning_rate": 1e-6}
_GKD: dict[str, Any] = {"temperature": 0.9, "beta": 0.5, "max_new_tokens": 128, "lmbda": 0.5}
_VOCABULARY = f"of the teacher's {DEFAULT_TOP_K} most probable tokens and all others as one, there of all tokens"


def is_distilled(file: ForeignFile) -> bool:
    """Return whether the file is one of a distillation trainer."""
    return any(name in file for name in KEYS.split())


def is_on_policy(file: ForeignFile) -> bool:
    """Return whether the student draws the answers; with a share between none and all, which is not here, an error."""
    if not _is_gkd(file):
        return True
    if file.flag("seq_kd"):
        raise file.wrong("seq_kd", "the answers of a teacher are data: let it write them, and train on them by sft")
    if (share := file.number("lmbda")) not in (0, 1):
        rule = (
            f"with an lmbda of {share:g} GKDTrainer takes some answers of the data and some of the student; set it to "
        )
        raise file.wrong(next(name for name in _OF_GKD if name in file), f"{rule}0 or 1")
    return share == 1


def assume_defaults(file: ForeignFile) -> None:
    """Take the defaults of the file's trainer."""
    file.assume(top_p=1.0, **(_GKD if _is_gkd(file) else _DEFAULTS))


def distilled(file: ForeignFile) -> Settings:
    """Return the objective, the teacher and the divergence. {} for a file of another trainer."""
    if not is_distilled(file):
        return {}
    on_policy, beta = is_on_policy(file), file.number("beta")
    objective = ON_POLICY if on_policy else "distill"
    comment = f"{file.note(beta, 'beta').comment}; {_VOCABULARY}"
    settings: Settings = {
        "train.objective": file.note(objective, TEACHER, "lmbda"),
        "distill.teacher": file.note(file.model(TEACHER), TEACHER),
        "distill.divergence": Note("reverse_kl" if beta == 1 else "jsd", comment),
    }
    if beta != 1:
        settings["distill.beta"] = file.note(beta, "beta")
    if not on_policy:
        last = Note("last", "GKDTrainer learns the last answer")
        dropout = {} if file.get("disable_dropout") is False else without_dropout(file, "lora_dropout")
        return settings | {"data.loss_on": last} | dropout
    for name, reason in lost_in(file):
        file.lose(name, reason)
    length = "max_new_tokens" if _is_gkd(file) else "max_completion_length"
    temperature = file.number("temperature")
    if not _is_gkd(file):
        settings["distill.temperature"] = file.note(temperature, "temperature")
        settings["data.format"] = Note("prompt", "the student answers; what else is in a row is not read")
    return settings | {
        "rollouts.samples": Note(1, "one answer to each prompt"),
        "rollouts.max_tokens": file.note(file.count(length), length),
        "rollouts.temperature": file.note(temperature, "temperature"),
        "rollouts.top_p": file.note(file.number("top_p"), "top_p"),
        "adapter.dropout": Note(0.0, "samples are drawn without dropout"),
    }


def _is_gkd(file: ForeignFile) -> bool:
    return any(name in file for name in _OF_GKD)
