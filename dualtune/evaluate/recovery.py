"""Recovery when memory runs out: smaller micro-batches, and then activation checkpointing.

Neither changes the result, because a document sees only itself and its dropout seeds depend on nothing else. The
processes of a run decide alike: between two micro-batches each learns whether memory ran out in any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dualtune import interrupt
from dualtune.activation_checkpointing import ActivationCheckpointing
from dualtune.backend import Backend, Batch, Engine
from dualtune.data.batching.batches import SequenceLayout
from dualtune.distributed.team import PeerFailed, Team
from dualtune.errors import ConfigError, OutOfMemory, PeerLost
from dualtune.evaluate.limit import WatchedLimit
from dualtune.hooks import Event

IN_ANOTHER = "in another process"
ALL_LAYERS = ActivationCheckpointing("all", reason="memory ran out")


class Recovery:
    """The sequence layout of a run, which becomes smaller when memory runs out.

    `longest` is the number of tokens of the longest document, which is never cut.
    """

    def __init__(
        self, backend: Backend | None, engine: Engine, layout: SequenceLayout, longest: int = 0, *,
        team: Team | None = None, recomputes: bool = False, limit: WatchedLimit | None = None,
        tell: Callable[[Event], object] = lambda event: None,
        explain: Callable[[Recovery, str], str] = lambda recovery, reason: reason,
    ) -> None:  # fmt: skip
        """Without a backend, errors are raised as they are. `recomputes`: all layers are recomputed already.

        An excess of `limit` counts as a shortage. `explain` makes the message of OutOfMemory.
        """
        self.layout = layout
        self.recomputes = recomputes
        self.on_change: Callable[[], object] = lambda: None  # called after each change of the layout
        self._backend, self._engine, self._longest = backend, engine, longest
        self._team, self._limit = team or Team(), limit or WatchedLimit()
        self._tell, self._explain = tell, explain
        self._reason = ""  # in the words of the library, if memory ran out in this process

    def attempt(self, step: int, batches: Iterable[Batch], work: Callable[[Batch], object]) -> bool:
        """Do the work on each micro-batch, and return whether all fit in memory, in every process.

        If not, less memory is needed from now on, the engine has discarded its gradient, and the caller repeats the
        whole with new micro-batches. All processes call this with equally many. Raise Preempted if any process has been
        asked to stop, OutOfMemory if nothing is left to try.
        """
        too_many = 0
        for batch in batches:
            if too_many := self._team.poll(interrupt.requested(), too_many):
                break
            too_many = 0 if self._fits(work, batch) else batch.tokens_BT.size
        else:
            too_many = self._team.poll(False, too_many)
        if too_many:
            self._need_less(step, too_many)
        return not too_many

    def recompute_all(self) -> bool:
        """Recompute the activations of all layers in the backward pass. Return whether the engine can do that."""
        honoured = self._backend.capabilities().get("memory.checkpointing", ()) if self._backend else ()
        if self.recomputes or "full" not in honoured:
            return False
        try:
            self._engine.set_checkpointing(ALL_LAYERS)
        except ConfigError:
            return False
        self.recomputes = True
        return True

    def _fits(self, work: Callable[[Batch], object], batch: Batch) -> bool:
        try:
            work(batch)
            self._reason = self._limit.excess()
            if not self._reason:
                return True
        except PeerLost:  # with a split base, the others see only that this process does not send its part
            self._learn_cause()
            raise
        except Exception as error:
            if self._backend is None or not self._backend.is_out_of_memory(error):
                raise
            self._reason = first_line(error)
        # Only here, outside of the block, nothing refers to the traceback, whose frames hold the activations.
        if self._team.size > 1 and self._engine.description.sharding == "full":
            self._engine.discard()
            self.halve(self.layout.max_tokens)
            why = "the other processes wait for a part of the base, so the step is not repeated here"
            resume = f"The same command resumes with micro-batches of up to {self.layout.max_tokens} tokens"
            raise OutOfMemory(self._explain(self, f"{self._reason or IN_ANOTHER}; {why}. {resume}"))
        return False

    def _learn_cause(self) -> None:
        """Raise PeerFailed if the process that is gone has reported why; if its memory ran out, remember that."""
        try:
            self._team.check()
        except PeerFailed as cause:
            if cause.exit_code == OutOfMemory.exit_code:
                self._engine.discard()
                self.halve(self.layout.max_tokens)
            raise

    def shrink(self, step: int, tokens: int, why: str = "") -> bool:
        """Halve micro-batches of so many tokens from now on, or else recompute all layers; say so, and `why`.

        Return whether any of it is possible.
        """
        self._engine.discard()
        before = self.layout.max_tokens
        if self.halve(tokens):
            after = self.layout.max_tokens
            text = f"micro-batches had up to {before} tokens, from now on up to {after}, with the same result"
            details = {"tokens_before": before, "tokens_after": after}
        elif self.recompute_all():
            text = f"micro-batches of up to {before} tokens are the smallest; from now on activations are recomputed"
            details = {"checkpointing": "full"}
        else:
            return False
        self._limit.restart()
        self._tell(Event(step, "out_of_memory", f"{why}; {text}" if why else text, details))
        return True

    def given_up(self, reason: str) -> OutOfMemory:
        """Return the error for a run in which nothing is left to try."""
        smallest = f"micro-batches of up to {self.layout.max_tokens} tokens are the smallest"
        return OutOfMemory(self._explain(self, f"{reason}; {smallest}"))

    def halve(self, tokens: int) -> bool:
        """Cut micro-batches of so many tokens in halves from now on. Return whether that is possible."""
        smaller = self.layout.halved(tokens, self._longest)
        if smaller is not None:
            self.layout = smaller
            self.on_change()
        return smaller is not None

    def _need_less(self, step: int, tokens: int) -> None:
        if not self.shrink(step, tokens, self._reason):
            raise self.given_up(self._reason or IN_ANOTHER)
        self._reason = ""


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
