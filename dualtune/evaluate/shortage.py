"""What to say when memory ran out and nothing else could be tried: what takes the memory, and what takes less.

And when the device failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator

from dualtune.backend import Backend
from dualtune.base_model import read_config, resolve_model
from dualtune.card import card_of
from dualtune.config import Config
from dualtune.errors import DeviceFault, DualtuneError, OutOfMemory
from dualtune.evaluate.recovery import first_line
from dualtune.memory.ask import Ask, tokens_at_once
from dualtune.memory.counted import Shape, shape_from
from dualtune.memory.estimate import ask_of, estimate
from dualtune.memory.plan import SAME, savings_alone
from dualtune.memory.shapes import UnknownShape
from dualtune.text.show import in_bytes

NUM_WAYS = 3
SAME_RUN, NEW_RUN = "the run resumes with the same result", "another run: choose a new run.dir too"


@contextlib.contextmanager
def explained(backend: Backend, config: Config, what: str) -> Generator[None]:
    """Raise OutOfMemory or DeviceFault in place of the backend's own error. `what` was done at that moment."""
    try:
        yield
        return
    except Exception as error:
        reason = first_line(error)
        if backend.is_device_fault(error):
            raise _device_fault(what, reason) from None
        if not backend.is_out_of_memory(error):
            raise
    # Outside of the block the traceback is gone, and with it what its frames held: the message needs some memory too.
    raise OutOfMemory(explanation(backend, config, f"{what} ({reason})"))


def _device_fault(what: str, reason: str) -> DeviceFault:
    return DeviceFault(
        f"the device failed {what} ({reason}), so this process can compute nothing more. Run the same command again: a "
        "run continues after its newest checkpoint. If it fails again, docs/troubleshooting.md has the causes"
    )


def explanation(backend: Backend, config: Config, what: str) -> str:
    """Return the message: what was done, what takes the memory, and three settings that take less."""
    planned = _planned(backend, config)
    firsts = _from_plan(*planned) if planned else _without_plan(backend, config)
    ways = [*firsts, *_last_resorts(backend, config)][:NUM_WAYS]
    width = max(len(setting) for setting, _ in ways)
    lines = [f"  --set {setting:<{width}}   {effect}" for setting, effect in ways]
    parts = _parts(*planned) if planned else _peak(backend)
    return "\n".join([f"out of memory: {what}", parts, "Each of these takes less:", *lines])


def _planned(backend: Backend, config: Config) -> tuple[Shape, Ask] | None:
    """Return what the planner estimates from; None without formulas, or with too little memory to read the config."""
    try:
        decoder = shape_from(read_config(resolve_model(config.model.name, weights=False)), backend.name)
        ask = ask_of(config, decoder, backend.name, _device(backend))
        estimate(decoder, ask)
        return decoder, ask
    except (DualtuneError, UnknownShape, MemoryError):
        return None


def _parts(decoder: Shape, ask: Ask) -> str:
    found = estimate(decoder, ask)
    parts = ", ".join(f"{part.name} {in_bytes(part.bytes)}" for part in found.parts)
    return f"By estimate it needs {in_bytes(found.total_bytes)}: {parts}"


def _peak(backend: Backend) -> str:
    memory = backend.memory()
    return f"The peak so far is {in_bytes(memory.peak_bytes)} of {in_bytes(memory.total_bytes)}"


def _device(backend: Backend) -> str:
    return backend.devices()[0].kind


def _from_plan(decoder: Shape, ask: Ask) -> Iterator[tuple[str, str]]:
    """Yield the planner's settings, with the bytes that each saves and what it means for the run."""
    for saving in savings_alone(decoder, ask):
        effect = SAME_RUN if saving.remark == SAME else f"{saving.remark}; {NEW_RUN}"
        yield " ".join(saving.as_json()["set"]), f"saves {in_bytes(saving.saved_bytes)}; {effect}"


def _without_plan(backend: Backend, config: Config) -> Iterator[tuple[str, str]]:
    """Yield the same settings for a model without an estimate."""
    honoured, device = backend.capabilities(), card_of(backend.name).device(_device(backend))
    longest = config.data.max_length
    if "full" in honoured.get("memory.checkpointing", ()) and config.memory.checkpointing != "full":
        yield "memory.checkpointing=full", SAME_RUN
    if tokens_at_once(config.train.micro_batch_tokens, longest) > longest:
        yield f"train.micro_batch_tokens={longest}", SAME_RUN
    if device and device.four_bit and not config.adapter.trains_model and config.model.quantization in ("auto", "none"):
        yield f"model.quantization={device.four_bit}", f"the base is rounded to 4 bits; {NEW_RUN}"
    if longest > 2:
        yield f"data.max_length={longest // 2}", f"longer documents are cut; {NEW_RUN}"


def _last_resorts(backend: Backend, config: Config) -> Iterator[tuple[str, str]]:
    """Yield settings that change what is trained or how exactly."""
    honoured, device = backend.capabilities(), card_of(backend.name).device(_device(backend))
    is_full = config.adapter.trains_model
    dtype = config.model.dtype if device is None or config.model.dtype != "auto" else device.auto_dtype
    if dtype == "float32" and "bfloat16" in honoured.get("model.dtype", ()):
        yield "model.dtype=bfloat16", "the run resumes, and rounds more coarsely"
    if config.adapter.rank > 1 and not is_full:
        yield f"adapter.rank={config.adapter.rank // 2}", NEW_RUN
    yield "model.name=<a smaller model>", NEW_RUN
    if config.train.schedule != "schedule_free":  # which is a form of AdamW in float32
        for name in {"adamw": ("adamw_8bit", "sgd"), "adamw_8bit": ("sgd",)}.get(config.train.optimizer, ()):
            if name in honoured.get("train.optimizer", ()):
                yield f"train.optimizer={name}", NEW_RUN
    yield "adapter.method=lora" if is_full else "adapter.targets=[q_proj,v_proj]", NEW_RUN
