"""Translate preference training as TRL has it: axolotl, LLaMA-Factory and others build on TRL's trainers and losses.

Based on trl/trainer/dpo_trainer.py, kto_trainer.py and trl/experimental/ of TRL 1.16.
"""

from __future__ import annotations

from typing import Any, cast

from dualtune.config.importing.table import ForeignFile, Note, Settings, shown

LOSSES = ("sigmoid", "hinge", "ipo", "robust", "apo_zero")  # of dpo, under TRL's names


def compared(file: ForeignFile, objective: str, *origin: str, **keys: str) -> Settings:
    """Return train.objective, which follows from the keys `origin`, and keys of `preference`: ours=the name of theirs.

    All are written out, for the defaults of others are not ours.
    """
    values = {f"preference.{ours}": file.note(file.number(theirs), theirs) for ours, theirs in keys.items()}
    answers = Note("assistant", f"{objective} compares answers")
    return {"train.objective": file.note(objective, *origin), "data.loss_on": answers, **values}


def losses_of(file: ForeignFile, key: str) -> list[str]:
    """Return TRL's `loss_type`, which may be a name or a list of names, not an empty one."""
    value = file.get(key)
    listed = cast(list[Any], value) if isinstance(value, list) else [value]
    if not listed:
        raise file.wrong(key, "must be the name of a loss, or a list of names")
    return [str(name) for name in listed]


def dpo_losses(file: ForeignFile, losses: str, weights: str, label_smoothing: str) -> Settings:
    """Translate the losses of TRL's DPO under these keys: one of ours, or one and that of SFT, which is RPO."""
    names = losses_of(file, losses)
    if names[0] not in LOSSES or names[1:] not in ([], ["sft"]):
        raise file.wrong(losses, f"allowed are {', '.join(LOSSES)}, each alone or in a list with sft after it")
    settings: Settings = {"preference.loss": file.note(names[0], losses)}
    first, *rest = _weights(file, weights, names)
    if first != 1:
        file.lose(weights, "the loss that compares has the weight 1; the ratio of the two weights is kept")
    if rest:
        settings["preference.sft_weight"] = file.note(rest[0] / first, losses, weights)
    if label_smoothing in file and names[0] == "robust":
        settings["preference.label_smoothing"] = file.note(file.number(label_smoothing), label_smoothing)
    elif label_smoothing in file:
        file.skip(label_smoothing, f"the loss {names[0]} of TRL's DPO does not read it")
    return settings


def _weights(file: ForeignFile, key: str, losses: list[str]) -> list[float]:
    value = file.get(key)
    if value is None:
        return [1.0] * len(losses)
    weights = cast(list[Any], value) if isinstance(value, list) else []
    are_numbers = all(isinstance(weight, int | float) and not isinstance(weight, bool) for weight in weights)
    if not are_numbers or len(weights) != len(losses) or min(weights) < 0 or weights[0] == 0:
        raise file.wrong(
            key, f"must be a list of weights >= 0, one for each loss of {shown(losses)}, the first above 0"
        )
    return weights


def without_dropout(file: ForeignFile, key: str) -> Settings:
    """Return the dropout of an adapter in TRL's preference trainers, which turn it off whatever the adapter says."""
    beginning = f"{key}: {shown(file.get(key))}, but " if key in file else ""
    return {"adapter.dropout": Note(0.0, f"{beginning}dropout is turned off in preference training")}
