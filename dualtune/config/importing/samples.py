"""Translate training on the model's own samples as TRL has it: axolotl passes its options on, mlx-lm-lora copies them.

Based on trl/trainer/grpo_config.py and rloo_config.py of TRL 1.16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from dualtune.config.importing.table import ForeignFile, Note, Settings

DEFAULTS: dict[str, Any] = {
    "num_generations": 8, "max_completion_length": 256, "temperature": 1.0, "top_p": 1.0, "beta": 0.0, "epsilon": 0.2,
    "num_iterations": 1, "scale_rewards": "group", "loss_type": "dapo", "importance_sampling_level": "token",
    "use_bias_correction_kl": True,
}  # fmt: skip
OF_RLOO: dict[str, Any] = {"num_generations": 2, "max_completion_length": 512, "beta": 0.05}  # where it differs
KEYS = (
    "reward_funcs reward_weights num_generations max_completion_length temperature top_p beta num_iterations epsilon "
    "epsilon_high scale_rewards loss_type importance_sampling_level use_bias_correction_kl"
)
_NUMBERS = {  # ours -> theirs
    "rollouts.samples": "num_generations", "rollouts.max_tokens": "max_completion_length",
    "rollouts.updates": "num_iterations", "rollouts.temperature": "temperature", "rollouts.top_p": "top_p",
    "rollouts.kl": "beta", "rollouts.clip_low": "epsilon",
}  # fmt: skip
OURS = ", ".join(("rollouts.rewards", "rollouts.weights", "rollouts.clip_high", "rollouts.advantage_scale", *_NUMBERS))
_COUNTS = ("num_generations", "max_completion_length", "num_iterations")
_OBJECTIVES = {"grpo": "grpo", "dr_grpo": "dr_grpo", "dapo": "dapo", "bnpo": "dapo", "cispo": "cispo"}
_SCALES = {"group": "group", "true": "group", "batch": "step", "none": "none", "false": "none"}
_REWARDS = {"accuracy_reward": "number", "think_format_reward": "regex:^<think>.*?</think>"}  # of TRL, and the nearest
# Other options of TRL's trainers, and what holds here.
LOST = {
    "delta": "a ratio is clipped on one side, by the sign of the advantage",
    "mask_truncated_completions": "answers that a limit ended are rewarded as they are; the metric `cut` counts them",
    "top_k": "answers are drawn from all tokens, or by rollouts.top_p",
    "min_p": "answers are drawn from all tokens, or by rollouts.top_p",
    "repetition_penalty": "answers are drawn without penalties",
    "generation_kwargs": "answers are drawn by rollouts.temperature and rollouts.top_p",
    "steps_per_generation": "a step learns from the answers that it has drawn; rollouts.updates learns from them again",
    "generation_batch_size": "a step learns from the answers that it has drawn",
    "multi_objective_aggregation": "rewards are added with their weights, and then compared",
    "top_entropy_quantile": "all tokens of an answer count",
    "entropy_coef": "the loss has no bonus for entropy",
    "use_adaptive_entropy": "the loss has no bonus for entropy",
    "max_tool_calling_iterations": "rollouts.turns limits the answers to an environment: rollouts.environment",
    "off_policy_mask_threshold": "no answer is left out for its ratio",
    "reward_model_name_or_path": "a reward is a function: FILE.py:FUNCTION in rollouts.rewards may ask a model",
    "vllm_structured_outputs_regex": "answers are drawn from all tokens; rollouts.rewards may judge their form: regex:",
}
_AS_HERE: dict[str, tuple[Any, ...]] = {  # values of these that ask for what holds here
    "mask_truncated_completions": (False,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,),
    "multi_objective_aggregation": ("sum_then_normalize",), "top_entropy_quantile": (1,), "entropy_coef": (0,),
    "use_adaptive_entropy": (False,),
}  # fmt: skip
NEEDLESS = (
    "use_vllm vllm_* use_transformers_paged cache_implementation num_generations_eval log_completions "
    "num_completions_to_print log_unique_prompts ds3_gather_for_generation log_multimodal log_completions_hub_repo "
    "use_transformers_continuous_batching transformers_continuous_batching_config entropy_coef_* entropy_target "
    "sapo_temperature_* vespo_*"
)
# Options of TRL's RLOO alone, with what holds here, and of its GRPO alone.
RLOO = {
    "normalize_advantages": "an advantage is the difference from the others, divided by nothing",
    "reward_clip_range": "rewards count as they are; clip them in the function",
}
GRPO = (
    "scale_rewards importance_sampling_level delta multi_objective_aggregation top_entropy_quantile "
    "off_policy_mask_threshold use_bias_correction_kl"
)


def sampled(
    file: ForeignFile, *origin: str, names: Mapping[str, str] | None = None, defaults: Mapping[str, Any] | None = None,
    source: str = "rewards.py", is_rloo: bool = False,
) -> Settings:  # fmt: skip
    """Return train.objective, which follows from the keys `origin`, and `rollouts`.

    `names` and `defaults`: of TRL's options in the file, where they are not TRL's. `source`: the Python file of a
    function that is named without one. All settings are written out: the defaults of others are not ours.
    """
    name = {**{key: key for key in (*KEYS.split(), *LOST)}, **(names or {})}
    file.assume(**{name[key]: value for key, value in {**DEFAULTS, **(defaults or {})}.items()})
    objective = "rloo" if is_rloo else _objective(file, name)
    settings: Settings = {"train.objective": Note(objective, file.note(0, *origin, name["loss_type"])[1])}
    settings["rollouts.rewards"] = _rewards(file, name["reward_funcs"], source)
    if name["reward_weights"] in file:
        settings["rollouts.weights"] = file.note(file.get(name["reward_weights"]), name["reward_weights"])
    is_cispo = file.get(name["loss_type"]) == "cispo"  # limits a ratio from above alone, in TRL by the ratio itself
    for ours, theirs in _NUMBERS.items():
        if is_cispo and theirs == "epsilon":
            continue
        value = (file.count if theirs in _COUNTS else file.number)(name[theirs])
        settings[ours] = file.note(value, name[theirs])
    high = name["epsilon_high"] if name["epsilon_high"] in file else name["epsilon"]
    settings["rollouts.clip_high"] = file.note(file.number(high) - is_cispo, high)
    if not is_rloo:
        scale = str(file.get(name["scale_rewards"])).lower()
        if scale not in _SCALES:
            file.lose(name["scale_rewards"], "an advantage is divided by a deviation or by nothing")
        settings["rollouts.advantage_scale"] = file.note(_SCALES.get(scale, "group"), name["scale_rewards"])
    for key, reason in lost_in(file, name):
        file.lose(key, reason)
    if not is_rloo and file.number(name["beta"]) and file.flag(name["use_bias_correction_kl"]):
        reason = "the gradient of a token's divergence has no part from its ratio; TRL 1.16 adds it unless told not to"
        file.lose(name["use_bias_correction_kl"], reason)
    return settings | {"adapter.dropout": Note(0.0, "samples are drawn without dropout")}


def lost_in(file: ForeignFile, names: Mapping[str, str] | None = None) -> Iterator[tuple[str, str]]:
    """Yield the options of a file that are not so here, with the reasons. `names`: where they are not TRL's."""
    for key, reason in LOST.items():
        theirs = (names or {}).get(key, key)
        if theirs in file and file.get(theirs) not in _AS_HERE.get(key, ()):
            yield theirs, reason


def batch(
    file: ForeignFile, per_device: str, accumulated: str, generations: str, default: int = DEFAULTS["num_generations"]
) -> Settings:
    """Translate a batch of answers to prompts of a step. `default`: the answers to a prompt."""
    size, times = file.count(per_device), file.count(accumulated)
    each = file.count(generations) if generations in file else default
    origin = f"{per_device}: {size} × {accumulated}: {times} answers // {generations}: {each}"
    origin += "; multiply it by the number of GPUs that you used"
    return {"train.documents_per_step": Note(max(1, size * times // each), origin)}


def _objective(file: ForeignFile, name: Mapping[str, str]) -> str:
    loss, level = str(file.get(name["loss_type"])), file.get(name["importance_sampling_level"])
    if loss not in _OBJECTIVES:
        raise file.wrong(name["loss_type"], f"it cannot be translated, allowed are {', '.join(_OBJECTIVES)}")
    if loss == "bnpo":
        file.lose(name["loss_type"], "the nearest is dapo, which divides by the tokens of the whole step")
    if level == "sequence" and loss == "grpo":
        return "gspo"
    if level != "token":
        file.lose(name["importance_sampling_level"], "ratios of whole answers are those of gspo, of TRL's loss grpo")
    return _OBJECTIVES[loss]


def _rewards(file: ForeignFile, key: str, source: str) -> Note:
    """Translate names of Python functions to files: those of TRL itself have a nearest one here."""
    value = file.get(key)
    listed = cast("list[Any]", value) if isinstance(value, list) else str(value or "").split(",")
    if not listed or not all(isinstance(each, str) and each for each in listed):
        raise file.wrong(key, "must be the name of a Python function, or a list of names")
    rewards = [_REWARDS.get(each) or _in_file(each.strip(), source) for each in cast("list[str]", listed)]
    return Note(rewards, f"{file.note(0, key)[1]}; put functions into these files")


def _in_file(name: str, source: str) -> str:
    module, _, function = name.rpartition(".")
    return f"{module.replace('.', '/')}.py:{function}" if module else f"{source}:{function}"
