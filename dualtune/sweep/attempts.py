"""Training the runs of a sweep: what ends one of them, and what ends them all."""

from __future__ import annotations

from collections.abc import Callable

from dualtune.errors import DualtuneError, LockedError, NonFiniteError, OutOfMemory, Paused
from dualtune.sweep.scores import Score, result_of
from dualtune.sweep.trials import SweepTrial

Train = Callable[[SweepTrial, int | None], object]  # up to a step, or to the end


class Attempts:
    """Trains one run after another. A run that diverges or needs too much memory does not end the sweep.

    Every other error does, and so does a stop signal; the same command then resumes where it was.
    """

    def __init__(self, train: Train, tell: Callable[[str], None]) -> None:
        self._train, self._tell = train, tell
        self.failure: DualtuneError | None = None  # of the last run that failed

    def __call__(self, trial: SweepTrial, note: str, pause_after: int | None = None) -> None:
        """Train a run, up to a step or to its end. `note` says which of how many it is."""
        self._tell(f"run         {trial.name} ({note})")
        try:
            self._train(trial, pause_after)
        except Paused:
            pass
        except (NonFiniteError, OutOfMemory) as error:
            self.failure = type(error)(str(error))  # without the frames of the run, which hold its engine
            self._tell(f"failed      {str(error).splitlines()[0]}; the sweep goes on with the other runs")
        self._tell_score(result_of(trial).score)

    def or_leave(self, trial: SweepTrial, note: str) -> None:
        """Train a run, unless another process does: several can share a grid, each with a GPU of its own."""
        try:
            self(trial, note)
        except LockedError as error:
            self._tell(f"left        {str(error).splitlines()[0]}")

    def _tell_score(self, score: Score) -> None:
        if score.loss is not None:
            self._tell(f"loss        {score.loss:.4f} after step {score.step}")
