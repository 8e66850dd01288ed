"""Which trackers the configs of other trainers turn on."""

from __future__ import annotations

from typing import Any, cast

from dualtune.config.importing.table import Given, Note, Settings, is_off

OTHERS = "run.track knows trackio, wandb, mlflow and tensorboard; every number is in metrics.jsonl"
NAMED_OUTSIDE = "a tracker's own environment variables say it, such as WANDB_PROJECT"
AXOLOTL = {  # ours -> the keys that turn it on: a switch, and the name of a project
    "wandb": ("use_wandb", "wandb_project"),
    "mlflow": ("use_mlflow", "mlflow_experiment_name"),
    "trackio": ("use_trackio", "trackio_project_name"),
    "tensorboard": ("use_tensorboard", ""),
}
TRACKER_KEYS = " ".join(key for keys in AXOLOTL.values() for key in keys if key)


def trackers_of_axolotl(given: Given) -> Settings:
    found: dict[str, str] = {}
    for name, (switch, project) in AXOLOTL.items():
        if project in given and not is_off(given.get(project)):
            found[name] = project
            given.lose(project, NAMED_OUTSIDE)
        if given.flag(switch):
            found[name] = switch
    return {"run.track": Note([*found], ", ".join(found.values()))} if found else {}


def trackers_of_mlx_lm(given: Given) -> Settings:
    return _reported(given, ("wandb",))


def trackers_of_transformers(given: Given) -> Settings:
    return _reported(given, tuple(AXOLOTL))


def _reported(given: Given, allowed: tuple[str, ...]) -> Settings:
    """Translate `report_to`: a list, or a text with commas."""
    value = given.get("report_to")
    listed = cast(list[Any], value) if isinstance(value, list) else str(value).split(",")
    names = [] if is_off(value) else [str(name).strip().lower() for name in listed]
    for name in names:
        if name not in allowed and name != "none":
            given.lose("report_to", OTHERS, value=name)
    known = [name for name in dict.fromkeys(names) if name in allowed]
    return {"run.track": given.note(known, "report_to")} if known else {}
