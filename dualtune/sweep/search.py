"""Values that optuna's TPE sampler chooses from what earlier runs have shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from dualtune.extras import import_extra
from dualtune.sweep.values import Choices, Range, Values

DIGITS = 3  # of a chosen number, so that a run's name says it exactly

Known = Sequence[tuple[Values, float | None]]  # the values of each run so far, and its loss; None: it failed


def sampler(varied: Sequence[Choices | Range], seed: int) -> Callable[[Known], Values]:
    """Return what chooses the values of the next run: a function of the runs so far. EnvironmentFault without optuna.

    Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011.
    """
    optuna = import_extra("optuna", "optuna", "--trials")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space: dict[str, Any] = {each.key: _distribution(optuna, each) for each in varied}
    texts = {each.key for each in varied if isinstance(each, Choices)}

    def choose(known: Known) -> Values:
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed + len(known)))
        for tried, loss in known:
            params = {key: json.dumps(value) if key in texts else value for key, value in tried.items()}
            state = optuna.trial.TrialState.FAIL if loss is None else optuna.trial.TrialState.COMPLETE
            study.add_trial(optuna.create_trial(params=params, distributions=space, value=loss, state=state))
        chosen = study.ask(space).params
        return {each.key: _value(each, chosen[each.key]) for each in varied}

    return choose


def _distribution(optuna: Any, each: Choices | Range) -> Any:
    if isinstance(each, Choices):  # as texts, because optuna wants values without a list among them
        return optuna.distributions.CategoricalDistribution([json.dumps(value) for value in each.values])
    kind = (
        optuna.distributions.FloatDistribution if isinstance(each.low, float) else optuna.distributions.IntDistribution
    )
    return kind(each.low, each.high, log=each.is_log)


def _value(each: Choices | Range, chosen: Any) -> Any:
    if isinstance(each, Choices):
        return json.loads(chosen)
    return min(max(float(f"{chosen:.{DIGITS}g}"), each.low), each.high) if isinstance(each.low, float) else chosen
