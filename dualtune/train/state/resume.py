"""Which config values and data must equal those of the checkpoint that a run resumes from, and which may differ."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from dualtune.base.errors import ConfigError, FormatError
from dualtune.base.files import free_name
from dualtune.base.text import in_columns
from dualtune.base.untrusted import open_file
from dualtune.config import Config
from dualtune.config.data_section import with_old_default
from dualtune.config.load import BadYaml, read_yaml
from dualtune.config.schema import sections
from dualtune.data.order import Order
from dualtune.train.guards import Guards
from dualtune.train.state.checkpoint import Checkpoint
from dualtune.train.state.metrics import History, each_row
from dualtune.train.state.run_dir import CONFIG, METRICS, path_of

# ----------------------------------------------------------------------------------------------------------------------
# The config.yaml of a run directory as flat keys, without the schema, which differs between versions.

MAX_CONFIG_CHARACTERS = 1 << 18
_CONDITION = re.compile(r"([\w.]+)\s*(<=|>=|!=|==|=|<|>)\s*(.*)", re.DOTALL)

Flat = dict[str, Any]  # section.key -> value; a list is one value


def read_flat(run_dir: Path) -> Flat:
    """Return the config of a run; empty if it cannot be read."""
    path = run_dir / CONFIG
    try:
        with io.TextIOWrapper(open_file(path, is_own=True), encoding="utf-8") as file:
            values: Any = read_yaml(file.read(MAX_CONFIG_CHARACTERS), str(path)).data
    except (FormatError, OSError, ValueError, BadYaml):
        return {}
    return dict(_flat(values)) if isinstance(values, dict) else {}


def _flat(table: Any, prefix: str = "") -> list[tuple[str, Any]]:
    items = cast("dict[Any, Any]", table).items()
    pairs: list[tuple[str, Any]] = []
    for key, value in items:
        name = f"{prefix}{key}"
        pairs += _flat(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return pairs


def differing(configs: Sequence[Flat]) -> dict[str, list[Any]]:
    """Return the keys that do not have the same value in all configs, with the values; None where a key is absent.

    run.dir is left out: no two runs have the same.
    """
    keys = dict.fromkeys(key for config in configs for key in config if key != "run.dir")
    rows = {key: [config.get(key) for config in configs] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


class Condition:
    """A condition on a config, such as learning_rate<=1e-4: the key may leave out its section.

    Numbers are compared as numbers, anything else as text, which knows only = and !=.
    """

    def __init__(self, text: str) -> None:
        """Raise ConfigError if the text is not a condition."""
        parts = _CONDITION.fullmatch(text.strip())
        if parts is None or not parts[1].strip("."):
            raise ConfigError(f"--where: got {text!r}, allowed: KEY=VALUE, also with !=, <, <=, > or >=")
        self.key, self._operator, self._value = parts[1], parts[2].replace("==", "="), parts[3].strip()
        if self._operator[0] in "<>" and _number(self._value) is None:
            raise ConfigError(f"--where: got {text!r}, but {self._operator} needs a number")

    def holds(self, config: Mapping[str, Any]) -> bool:
        """Return whether the condition holds for the key; of several with this ending, for any. False without one."""
        return any(map(self._compare, self._values(config)))

    def concerns(self, config: Mapping[str, Any]) -> bool:
        """Return whether the config has the key."""
        return bool(self._values(config))

    def _values(self, config: Mapping[str, Any]) -> list[Any]:
        return [value for key, value in config.items() if f".{key}".endswith(f".{self.key}")]

    def _compare(self, value: Any) -> bool:
        a, b = _number(value), _number(self._value)
        if a is None or b is None:
            is_equal = ("null" if value is None else str(value).lower()) == self._value.lower()
            return is_equal if self._operator == "=" else not is_equal if self._operator == "!=" else False
        return {"=": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[self._operator]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


# ----------------------------------------------------------------------------------------------------------------------
# What a resumed run may change, by key of the config.

Rule = Literal["free", "recorded", "forbidden"]

# free        the result does not depend on it
# recorded    the rest of the run differs from what it would have been; shown, and written to metrics.jsonl
# forbidden   the checkpoint means nothing with another value: every key that is not listed, so also a new one
# Names of models and files are recorded, because a run may move to a machine where they lie elsewhere; what they name
# is compared by fingerprint.
RULES: dict[str, Rule] = {
    "model.name": "recorded",
    "model.dtype": "recorded",
    "model.kernels": "free",  # the same mathematics, rounded otherwise
    "adapter.dropout": "recorded",
    "adapter.init_from": "recorded",
    "adapter.init_optimizer": "recorded",
    "data.train": "recorded",
    "data.eval": "recorded",
    "data.format": "recorded",
    "data.columns": "recorded",
    "data.roles": "recorded",  # where these matter, the fingerprints of the data differ
    "data.consecutive": "recorded",
    "data.system": "recorded",
    "data.template": "recorded",
    "data.special_tokens_in_text": "recorded",  # where it matters, the documents' fingerprints differ
    "data.dedup": "recorded",  # where it matters, the documents' fingerprints differ
    "data.packing": "free",  # the rows of a step change, its documents and its mathematics do not
    "data.on_bad_row": "recorded",
    "data.max_bad_rows": "recorded",
    "data.template_variables": "recorded",  # where it matters, the fingerprints of the template differ
    "data.on_lost_text": "recorded",
    "train.epochs": "recorded",
    "train.steps": "recorded",
    "train.micro_batch_tokens": "free",
    "train.activation_cache": "free",  # the same mathematics, in rows of another shape
    "train.learning_rate": "recorded",
    "train.lora_plus_ratio": "recorded",
    "train.label_smoothing": "recorded",
    "train.router_aux_loss_coef": "recorded",
    "train.embedding_learning_rate": "recorded",
    "train.schedule": "recorded",  # but not to or from schedule_free, which has other slots: see `_rule`
    "train.average_over": "recorded",
    "train.warmup": "recorded",
    "train.weight_decay": "recorded",
    "train.max_grad_norm": "recorded",
    "distill.distributions": "recorded",
    "distill.teacher": "recorded",  # where it is another one, the fingerprints differ
    "distill.teacher_adapter": "recorded",
    "distill.teacher_dtype": "recorded",
    "distill.served_as": "recorded",
    "rollouts.rewards": "recorded",
    "rollouts.weights": "recorded",
    "rollouts.samples": "recorded",
    "rollouts.updates": "recorded",
    "rollouts.environment": "recorded",
    "rollouts.environment_args": "recorded",
    "rollouts.turns": "recorded",
    "rollouts.max_tokens": "recorded",
    "rollouts.temperature": "recorded",
    "rollouts.top_p": "recorded",
    "rollouts.stop": "recorded",
    "rollouts.advantage_scale": "recorded",
    "rollouts.clip_low": "recorded",
    "rollouts.clip_high": "recorded",
    "rollouts.kl": "recorded",
    "rollouts.reward_timeout_s": "free",
    "memory.checkpointing": "free",
    "memory.offload": "free",
    "memory.resident_layers": "free",
    "memory.sharding": "free",
    "memory.limit": "free",
    "hybrid.gate": "recorded",
    "hybrid.offload": "free",
    "guards.nonfinite_limit": "recorded",
    "guards.on_spike": "recorded",
    "guards.spike_threshold": "recorded",
    "guards.early_stopping": "recorded",
    "guards.restore_best": "recorded",
    "run.dir": "free",
    "run.deterministic": "free",  # the same mathematics, rounded otherwise
    "run.log_every": "free",
    "run.eval_every": "free",
    "run.save_every": "free",
    "run.keep": "free",
    "run.report": "free",
    "run.sample_prompts": "free",
    "run.track": "free",
}


# Keys newer than some checkpoints, which were all trained with the present default.
DEFAULT_WHERE_ABSENT = {
    "adapter.method", "adapter.scaling", "adapter.init", "adapter.layers", "adapter.merge_for", "adapter.rank_pattern",
    "adapter.master_weights",
    "adapter.alpha_pattern", "adapter.experts", "adapter.train_modules", "adapter.train_rows", "adapter.bias",
    "adapter.init_optimizer",
    "data.new_tokens", "data.new_special_tokens",
    "data.dedup",
    "data.on_lost_text",
    "data.template_variables", "train.optimizer", "train.lora_plus_ratio", "train.average", "train.policy",
    "train.embedding_learning_rate", "train.label_smoothing", "train.router_aux_loss_coef",
    "hybrid.gate",
}  # fmt: skip

TRAIN_DOCUMENTS, EVAL_DOCUMENTS = "train documents", "eval documents"  # their fingerprints
DISTRIBUTIONS, TEACHER = "teacher's distributions", "teacher"  # their fingerprints, of a run that distils
TEACHER_PROBE = "teacher's probe"  # a served teacher's log-probabilities of fixed texts: compared when it has started
TEACHER_PROMPTS = "teacher's prompts"  # that of what the teacher reads, where that is more than the student reads
UNKNOWN = "-"  # for a key that did not exist when the checkpoint was written


class Change(NamedTuple):
    """One line of the table of differences."""

    what: str  # a key of the config, or the name of a fingerprint
    before: str
    now: str
    rule: Rule


def as_recorded(saved: Checkpoint, config: Config) -> Config:
    """Return the config with the recorded value for `auto`.

    `auto` depends on the data and the epochs, but a run that is continued for more epochs keeps its steps. A run of an
    older dualtune evaluated on a valid file in spite of `data.eval: 0.1`, and still does when it is resumed.
    """
    recorded = saved.state["config"].get("train", {}).get("tokens_per_step")
    eval_before = saved.state["config"].get("data", {}).get("eval")
    if config.data.eval == eval_before != with_old_default(saved.state["config"].get("data", {})).get("eval"):
        config = config.model_copy(update={"data": config.data.model_copy(update={"eval": "auto"})})
    is_open = config.train.tokens_per_step == "auto" and isinstance(recorded, int) and recorded > 0
    return with_tokens(config, recorded) if is_open else config


def with_tokens(config: Config, tokens: int) -> Config:
    """Return the config with this number of tokens per step instead of `auto`."""
    return config.model_copy(update={"train": config.train.model_copy(update={"tokens_per_step": tokens})})


def check_config(saved: Checkpoint, config: Config) -> list[Change]:
    """Return the recorded changes since the checkpoint. ConfigError with a table if there is a forbidden one."""
    return _refuse_forbidden(saved, effective_changes(saved, config), "Restore these values")


def effective_changes(saved: Checkpoint, config: Config) -> list[Change]:
    """Return the changes since the checkpoint on which the result depends."""
    # A key that the checkpoint's config lacks is newer than the checkpoint: there is nothing to compare.
    return [c for c in differences(saved, config) if c.rule != "free" and c.before != UNKNOWN]


def differences(saved: Checkpoint, config: Config) -> list[Change]:
    """Return every key with another value than in the checkpoint's config, for any rule."""
    return list(_differences(saved.state["config"], config.model_dump(mode="json")))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    for section, table in new.items():
        before = old.get(section, {})
        before = with_old_default(before) if section == "data" else before
        for name, value in table.items():
            key, default = f"{section}.{name}", sections()[section].model_fields[name].default
            if isinstance(default, tuple):  # as JSON has it
                default = list(cast("tuple[Any, ...]", default))
            rule = _rule(key, before.get(name, default), value)
            if name in before:
                if before[name] != value:
                    yield Change(key, _show(before[name]), _show(value), rule)
            elif value != default:
                yield Change(key, _show(default) if key in DEFAULT_WHERE_ABSENT else UNKNOWN, _show(value), rule)


def _rule(key: str, before: Any, now: Any) -> Rule:
    if key == "train.schedule" and "schedule_free" in (before, now):
        return "forbidden"
    return RULES.get(key, "forbidden")


def check_fingerprints(saved: Checkpoint, now: Mapping[str, str]) -> None:
    """Raise ConfigError with a table unless base model, tokenizer and data equal those of the checkpoint."""
    before: dict[str, str] = saved.state.get("fingerprints", {})  # schema version 1 had none
    changes = [Change(k, before[k], now[k], "forbidden") for k in now if k in before and before[k] != now[k]]
    _refuse_forbidden(saved, changes, "Restore the previous files", _with_other_data(saved, changes))


def _with_other_data(saved: Checkpoint, changes: Sequence[Change]) -> str:
    """Return how to continue if only the data are others: a new run, from the adapter of this one."""
    is_full = saved.state["config"].get("adapter", {}).get("method") == "full"
    if is_full or not {change.what for change in changes} <= {TRAIN_DOCUMENTS, EVAL_DOCUMENTS}:
        return ""
    adapter = saved.path.parent.parent / "adapter"
    when = "" if adapter.is_dir() else ", once this one has ended with its previous files"
    return (
        f"\nTo train on with other data, start a new run from the adapter of this one{when}: "
        f"--set adapter.init_from={adapter} --set run.dir=DIR"
    )


def check_position(saved: Checkpoint, place: Mapping[str, Any]) -> None:
    """Raise ConfigError if the next step would use other documents: in another order, or a document twice."""
    before = saved.state.get("place", {}).get("next_documents")
    if before is not None and before != place["next_documents"]:
        raise ConfigError(
            f"{saved.path}: the next step would use other documents ({place['next_documents']}) than the checkpoint "
            f"says ({before}): the weight of a source has changed, or this NumPy shuffles differently. Restore the "
            "weights, or use the NumPy version in environment.json"
        )


def table(changes: Sequence[Change]) -> str:
    return in_columns([("", "checkpoint", "now", ""), *changes])


def _refuse_forbidden(saved: Checkpoint, changes: list[Change], advice: str, more: str = "") -> list[Change]:
    if any(change.rule == "forbidden" for change in changes):
        raise ConfigError(
            f"{saved.path}: cannot resume: the values marked as forbidden have changed.\n{table(changes)}\n"
            f"{advice}, or start a new run in another directory: --run-dir DIR or --set run.dir=DIR{more}"
        )
    return changes


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ----------------------------------------------------------------------------------------------------------------------
# A finished run, started again with another config: which changed keys have no effect, and which are errors.

# All other keys affected the adapter, if only its rounding or the choice of the state that was kept.
WITHOUT_EFFECT = frozenset(
    {
        # when to log, evaluate or save: nothing of this is left to do
        "run.log_every", "run.eval_every", "run.save_every", "run.keep", "run.report",
        "run.sample_prompts", "run.track",
        # names of models and files, and how rows are read: the results were compared by fingerprint
        "model.name", "data.train", "data.eval", "data.format", "data.columns", "data.template", "data.on_bad_row",
        "data.max_bad_rows", "data.dedup", "data.roles", "data.consecutive", "data.system",
        # the present path of the run
        "run.dir",
    }
)  # fmt: skip
LENGTH = ("train.steps", "train.epochs")


def has_ended(saved: Checkpoint, config: Config, order: Order) -> bool:
    """Return whether a run that resumes from this checkpoint has no step left."""
    return saved.step >= order.num_steps or _stops_early(saved, config)


def check_end(saved: Checkpoint, config: Config, order: Order) -> list[Change]:
    """Return the changes without effect on a finished run. ConfigError with a table if another key has changed."""
    # The same number of steps may come from epochs; a run that stopped early may have been planned longer.
    is_as_long = order.num_steps in (saved.step, saved.state.get("schedule", {}).get("num_steps"))
    harmless = WITHOUT_EFFECT.union(LENGTH if is_as_long else ())
    changes = [change for change in differences(saved, config) if change.what != "run.dir"]
    refused = [change for change in changes if change.what not in harmless]
    if refused or saved.step > order.num_steps:
        rows = [(c.what, c.before, c.now, "" if c in refused else "no effect") for c in changes]
        table = in_columns([("", "finished", "now", ""), *rows])
        raise ConfigError(
            f"{saved.path}: the run is finished, so these values would have no effect: {saved.step} steps are done, "
            f"{order.num_steps} are configured.\n{table}\nNothing was changed. Options:\n"
            + in_columns([(f"  {aim}", option) for aim, option in _options(saved, config, order)])
        )
    return changes


def _options(saved: Checkpoint, config: Config, order: Order) -> list[tuple[str, str]]:
    """Return what the user may want, each with what to change for it."""
    stops_early = _stops_early(saved, config)
    more = ["guards.early_stopping=null"] if stops_early else []
    if not stops_early or order.num_steps <= saved.step:
        more.append(f"train.steps={2 * saved.step}")
    new = shlex.quote(f"run.dir={free_name(path_of(config))}")
    return [
        ("start a new run with these values:", f"--resume never --set {new}"),
        ("continue with these values:", f"{' '.join(f'--set {setting}' for setting in more)}  (or more)"),
        ("keep the run as it is:", "remove these changes"),
    ]


def _stops_early(saved: Checkpoint, config: Config) -> bool:
    if config.guards.early_stopping is None:
        return False
    guards = Guards(config, lambda step: [], saved.state.get("guards"))
    # A step is saved before it is evaluated, so the evaluation that ended the run is only in its rows.
    evaluated = History(each_row(saved.path.parents[1] / METRICS)).evals.get(saved.step)
    if evaluated is not None:
        guards.on_eval(evaluated)
    return guards.stops_early
