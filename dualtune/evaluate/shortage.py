"""What to say when memory ran out and nothing else could be tried: what takes the memory, and what takes less."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator

from dualtune.backend import Backend
from dualtune.base_model import read_config, resolve_model
from dualtune.card import card_of
from dualtune.config import Config
from dualtune.errors import DualtuneError, OutOfMemory
from dualtune.evaluate.recovery import first_line
from dualtune.memory.ask import tokens_at_once
from dualtune.memory.estimate import ask_of, estimate
from dualtune.memory.shapes import UnknownShape, decoder_of
from dualtune.text.show import in_bytes

NUM_WAYS = 3
SAME_RUN, NEW_RUN = "the run resumes with the same result", "another run: choose a new run.dir too"


@contextlib.contextmanager
def explained(backend: Backend, config: Config, what: str) -> Generator[None]:
    """Raise OutOfMemory in place of the backend's own error. `what` was done when memory ran out."""
    try:
        yield
        return
    except Exception as error:
        if not backend.is_out_of_memory(error):
            raise
        reason = first_line(error)
    # Outside of the block the traceback is gone, and with it what its frames held: the message needs some memory too.
    raise OutOfMemory(explanation(backend, config, f"{what} ({reason})"))


def explanation(backend: Backend, config: Config, what: str) -> str:
    """Return the message: what was done, what takes the memory, and three settings that take less."""
    ways = [way for _, way in zip(range(NUM_WAYS), _ways(backend, config), strict=False)]
    width = max(len(setting) for setting, _ in ways)
    lines = [f"  --set {setting:<{width}}   {effect}" for setting, effect in ways]
    return "\n".join([f"out of memory: {what}", _parts(backend, config), "Each of these takes less:", *lines])


def _parts(backend: Backend, config: Config) -> str:
    """Return the parts of the estimate; if there are no formulas or too little memory to read the config, the peak."""
    try:
        decoder = decoder_of(read_config(resolve_model(config.model.name, weights=False)))
        found = estimate(decoder, ask_of(config, decoder, backend.name, _device(backend)))
    except (DualtuneError, UnknownShape, MemoryError):
        memory = backend.memory()
        return f"The peak so far is {in_bytes(memory.peak_bytes)} of {in_bytes(memory.total_bytes)}"
    parts = ", ".join(f"{part.name} {in_bytes(part.bytes)}" for part in found.parts)
    return f"By estimate it needs {in_bytes(found.total_bytes)}: {parts}"


def _device(backend: Backend) -> str:
    return backend.devices()[0].kind


def _ways(backend: Backend, config: Config) -> Iterator[tuple[str, str]]:
    """Yield settings that take less memory than the config, with what they mean for the run; the best first."""
    honoured, device = backend.capabilities(), card_of(backend.name).device(_device(backend))
    longest = config.data.max_length
    if "full" in honoured.get("memory.checkpointing", ()) and config.memory.checkpointing != "full":
        yield "memory.checkpointing=full", SAME_RUN
    if tokens_at_once(config.train.micro_batch_tokens, longest) > longest:
        yield f"train.micro_batch_tokens={longest}", SAME_RUN
    is_full = config.adapter.trains_model
    if device and device.four_bit and not is_full and config.model.quantization in ("auto", "none"):
        yield f"model.quantization={device.four_bit}", NEW_RUN
    dtype = config.model.dtype if device is None or config.model.dtype != "auto" else device.auto_dtype
    if dtype == "float32" and "bfloat16" in honoured.get("model.dtype", ()):
        yield "model.dtype=bfloat16", "the run resumes, and rounds more coarsely"
    if longest > 2:
        yield f"data.max_length={longest // 2}", f"{NEW_RUN}; longer documents are cut"
    if config.adapter.rank > 1 and not is_full:
        yield f"adapter.rank={config.adapter.rank // 2}", NEW_RUN
    yield "model.name=<a smaller model>", NEW_RUN
    if config.train.optimizer == "adamw" and "adamw_8bit" in honoured.get("train.optimizer", ()):
        yield "train.optimizer=adamw_8bit", NEW_RUN
    if config.train.optimizer != "sgd" and "sgd" in honoured.get("train.optimizer", ()):
        yield "train.optimizer=sgd", NEW_RUN
    yield "adapter.method=lora" if is_full else "adapter.targets=[q_proj,v_proj]", NEW_RUN
