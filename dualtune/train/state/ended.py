"""A finished run, started again with another config: which changed keys have no effect, and which are errors."""

from __future__ import annotations

import shlex

from dualtune.config import Config
from dualtune.data.batching.order import Order
from dualtune.errors import ConfigError
from dualtune.io.disk import free_name
from dualtune.text.show import in_columns
from dualtune.train.health.guards import Guards
from dualtune.train.state.checkpoint import Checkpoint
from dualtune.train.state.metrics import History, each_row
from dualtune.train.state.resume import Change, differences
from dualtune.train.state.run_dir import METRICS, path_of

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
