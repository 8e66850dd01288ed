"""Recovery when memory runs out: smaller micro-batches, and then activation checkpointing.

Neither changes the result, because a document sees only itself and its dropout seeds depend on nothing else. The
processes of a run decide alike: between two micro-batches each learns whether memory ran out in any of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, DeviceFault, DualtuneError, OutOfMemory, PeerLost
from dualtune.base.text import in_bytes
from dualtune.config import Config
from dualtune.data.batches import SequenceLayout, trimmed
from dualtune.engine.backend import Backend, Batch, Engine
from dualtune.engine.card import ActivationCheckpointing, card_of
from dualtune.engine.memory.counted import Shape, shape_from
from dualtune.engine.memory.estimate import Ask, ask_of, estimate, tokens_at_once
from dualtune.engine.memory.plan import SAME, savings_alone
from dualtune.engine.memory.shapes import UnknownShape
from dualtune.model.base_model import resolve_model
from dualtune.model.config_file import read_config
from dualtune.train.hooks import Event
from dualtune.train.team import PeerFailed, Team

# ----------------------------------------------------------------------------------------------------------------------
# What to say when memory ran out and nothing else could be tried, or when the device failed.

NUM_WAYS = 3
SAME_RUN, NEW_RUN = "the run resumes with the same result", "another run: choose a new run.dir too"


@contextlib.contextmanager
def explained(backend: Backend, config: Config, where: str) -> Generator[None]:
    """Raise OutOfMemory or DeviceFault in place of the backend's own error. `where`: what was done at that moment."""
    try:
        yield
        return
    except Exception as error:
        reason = first_line(error)
        if backend.is_device_fault(error):
            raise DeviceFault(
                f"the device failed {where} ({reason}), so this process can compute nothing more. Run the same command "
                "again: a run continues after its newest checkpoint. If it fails again, docs/troubleshooting.md has "
                "the causes"
            ) from None
        if not backend.is_out_of_memory(error):
            raise
    # Outside of the block the traceback is gone, and with it what its frames held: the message needs some memory too.
    raise OutOfMemory(explanation(backend, config, f"{where} ({reason})"))


def explanation(backend: Backend, config: Config, where: str) -> str:
    """Return the message: what was done, what takes the memory, and three settings that take less."""
    planned = _planned(backend, config)
    if planned is None:
        memory, ways = backend.memory(), [*_without_plan(backend, config)]
        parts = f"The peak so far is {in_bytes(memory.peak_bytes)} of {in_bytes(memory.total_bytes)}"
    else:
        estimated, ways = estimate(*planned), list[tuple[str, str]]()
        for saving in savings_alone(*planned):
            effect = SAME_RUN if saving.remark == SAME else f"{saving.remark}; {NEW_RUN}"
            ways.append((" ".join(saving.as_json()["set"]), f"saves {in_bytes(saving.saved_bytes)}; {effect}"))
        listed = ", ".join(f"{part.name} {in_bytes(part.bytes)}" for part in estimated.parts)
        parts = f"By estimate it needs {in_bytes(estimated.total_bytes)}: {listed}"
    shown = [*ways, *_last_resorts(backend, config)][:NUM_WAYS]
    width = max(len(setting) for setting, _ in shown)
    lines = [f"  --set {setting:<{width}}   {effect}" for setting, effect in shown]
    return "\n".join([f"out of memory: {where}", parts, "Each of these takes less:", *lines])


def _planned(backend: Backend, config: Config) -> tuple[Shape, Ask] | None:
    """Return what the planner estimates from; None without formulas, or with too little memory to read the config."""
    try:
        decoder = shape_from(read_config(resolve_model(config.model.name, weights=False)), backend.name)
        ask = ask_of(config, decoder, backend.name, backend.devices()[0].kind)
        estimate(decoder, ask)
        return decoder, ask
    except (DualtuneError, UnknownShape, MemoryError):
        return None


def _without_plan(backend: Backend, config: Config) -> Iterator[tuple[str, str]]:
    """Yield the same settings for a model without an estimate."""
    honoured, device = backend.capabilities(), card_of(backend.name).device(backend.devices()[0].kind)
    longest = config.data.max_length
    if "full" in honoured.get("memory.checkpointing", ()) and config.memory.checkpointing != "full":
        yield "memory.checkpointing=full", SAME_RUN
    if tokens_at_once(config.train.micro_batch_tokens, longest) > longest:
        yield f"train.micro_batch_tokens={longest}", SAME_RUN
    if device and device.four_bit and not config.adapter.trains_model and config.model.quantization in ("auto", "none"):
        yield f"model.quantization={device.four_bit}", f"the base is rounded to 4 bits; {NEW_RUN}"
    if longest > 2:
        yield f"data.max_length={longest // 2}", f"longer documents are cut; {NEW_RUN}"


# Optimizers with less state, the nearest first.
SMALLER_STATE: Mapping[str, tuple[str, ...]] = {
    "adamw": ("adamw_8bit", "adafactor"), "adamw_8bit": ("adafactor",), "lion": ("lion_8bit", "adafactor"),
    "lion_8bit": ("adafactor",), "muon": ("adafactor",), "adafactor": ("sgd",),
}  # fmt: skip


def _last_resorts(backend: Backend, config: Config) -> Iterator[tuple[str, str]]:
    """Yield settings that change what is trained or how exactly."""
    honoured, device = backend.capabilities(), card_of(backend.name).device(backend.devices()[0].kind)
    is_full = config.adapter.trains_model
    dtype = config.model.dtype if device is None or config.model.dtype != "auto" else device.auto_dtype
    if dtype == "float32" and "bfloat16" in honoured.get("model.dtype", ()):
        yield "model.dtype=bfloat16", "the run resumes, and rounds more coarsely"
    if config.adapter.rank > 1 and not is_full:
        yield f"adapter.rank={config.adapter.rank // 2}", NEW_RUN
    yield "model.name=<a smaller model>", NEW_RUN
    if config.train.schedule != "schedule_free":  # which is a form of AdamW in float32
        for name in SMALLER_STATE.get(config.train.optimizer, ()):
            if name in honoured.get("train.optimizer", ()):
                yield f"train.optimizer={name}", NEW_RUN
    yield "adapter.method=lora" if is_full else "adapter.targets=[q_proj,v_proj]", NEW_RUN


# ----------------------------------------------------------------------------------------------------------------------
# The recovery itself: a step or an evaluation is attempted again, in smaller parts.
#
# On backends that cannot enforce `memory.limit`, a peak above it counts as a shortage. The peak is read after each
# micro-batch, without synchronizing. Where the device still computes the micro-batch then, as MLX does, an excess is
# seen one micro-batch later, or in the next step. Late, but never missed: the peak grows until it is reset, and
# the smaller cut gives the same result from any step on.

IN_ANOTHER = "in another process"
ALL_LAYERS = ActivationCheckpointing("all", reason="memory ran out")


class Recovery:
    """The sequence layout of a run, which becomes smaller when memory runs out.

    `longest` is the number of tokens of the longest document, which is never cut.
    """

    def __init__(
        self, backend: Backend | None, engine: Engine, layout: SequenceLayout, longest: int = 0, *,
        team: Team | None = None, recomputes: bool = False, limit_bytes: int | None = None,
        tell: Callable[[Event], object] = lambda event: None,
        explain: Callable[[Recovery, str], str] = lambda recovery, reason: reason,
    ) -> None:  # fmt: skip
        """Without a backend, errors are raised as they are. `recomputes`: all layers are recomputed already.

        `limit_bytes`: what arrays may take where the backend cannot enforce it. `explain` makes the message of
        OutOfMemory.
        """
        self.layout = layout
        self.recomputes = recomputes
        self.on_change: Callable[[], object] = lambda: None  # called after each change of the layout
        self._backend, self._engine, self._longest = backend, engine, longest
        self._team, self._limit_bytes = team or Team(), limit_bytes
        self._tell, self._explain = tell, explain
        self._reason = ""  # in the words of the library, if memory ran out in this process

    def attempt(self, step: int, batches: Iterable[Batch], work: Callable[[Batch], object]) -> bool:
        """Do the work on each micro-batch, and return whether all fit in memory, in every process.

        If not, less memory is needed from now on, the engine has discarded its gradient, and the caller repeats the
        whole with new micro-batches. All processes call this with equally many. Raise Preempted if any process has been
        asked to stop, OutOfMemory if nothing is left to try.
        """
        too_many, on_cpu = 0, self._engine.description.device == "cpu"
        for batch in batches:
            if too_many := self._team.poll(interrupt.requested(), too_many):
                break
            # Few widths let an accelerator reuse what it compiled for one. A CPU gains more by computing less padding.
            too_many = 0 if self._fits(work, trimmed(batch) if on_cpu else batch) else batch.tokens_BT.size
        else:
            too_many = self._team.poll(False, too_many)
        if too_many:
            if not self.shrink(step, too_many, self._reason):
                raise self.given_up(self._reason or IN_ANOTHER)
            self._reason = ""
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
            self._reason = self._excess()
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

    def _excess(self) -> str:
        """Return by how much the watched limit was exceeded; empty if it was not."""
        if self._backend is None or self._limit_bytes is None:
            return ""
        peak = self._backend.memory().peak_bytes
        if peak <= self._limit_bytes:
            return ""
        return f"{in_bytes(peak)} were in use, and memory.limit leaves {in_bytes(self._limit_bytes)} for arrays"

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
        if self._backend is not None and self._limit_bytes is not None:
            self._backend.synchronize()  # what was discarded may still be computed, and must not count
            self._backend.reset_peak_memory()
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


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
