"""Exporting: the verified merge, its conversion for another program, and what each step has changed.

The result is written whole or not at all, with `export.json`: what was made of what, by which tools, and the distances.
"""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dualtune.adapter.formats.directory import Adapter, adapter_directory, read_adapter
from dualtune.backend import Backend, Engine
from dualtune.base_model import copy_model, read_config, resolve_model, stored_precision
from dualtune.data.tokens.stop_tokens import stop_tokens
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.errors import ConfigError, EnvironmentFault
from dualtune.evaluate.fingerprints import without_adapter
from dualtune.evaluate.inference import load_model
from dualtune.export import gguf_file
from dualtune.export.card import CARD, card
from dualtune.export.deviation import (
    LOST,
    Deviation,
    Logprobs,
    deviation,
    logprobs,
    lost_share,
    prompts_of,
)
from dualtune.export.gguf_keys import set_numbers
from dualtune.export.held_out import HeldOut, last_evaluation, manifest_of, open_held_out
from dualtune.export.llama_environment import PLAIN, QUANTIZED, LlamaCpp, last_line
from dualtune.export.merge import (
    check_base,
    check_free,
    check_plain,
    load_to_merge,
    named_stops,
    note_of_base,
    write_merged,
)
from dualtune.export.ollama import modelfile, template_for
from dualtune.io.disk import write_file, write_whole
from dualtune.io.fields import shown
from dualtune.verify.verdict import VerifyVerdict
from dualtune.verify.verify import verify_loaded
from dualtune.versions import VERSION

RECORD = "export.json"
MLX_BITS = {f"affine{bits}": bits for bits in (2, 3, 4, 6, 8)}
# target -> the values of --quantize, the first of which is the default
KINDS = {
    "hf": ("none", "nf4"),
    "mlx": ("none", *MLX_BITS),
    "gguf": ("bf16", *(kind for kind in PLAIN if kind != "bf16"), *QUANTIZED),
    "ollama": ("q4_k_m", *PLAIN, *(kind for kind in QUANTIZED if kind != "q4_k_m")),
    "lmstudio": ("q4_k_m", *PLAIN, *(kind for kind in QUANTIZED if kind != "q4_k_m")),
}
Tell = Callable[[str], None]


@runtime_checkable
class WritesNf4(Protocol):
    """A backend that writes bitsandbytes' NF4."""

    def write_nf4(self, source: Path, out: Path) -> None:
        """Write a plain model directory in NF4 to a new directory."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """What to export."""

    adapter: Path  # without a base: a model, which was trained whole
    base: str | None
    out: Path
    target: str  # a key of KINDS
    kind: str  # one of KINDS[target]
    name: str  # of the model, in the names of files
    dtype: str = "auto"  # of the merged weights; auto: as the base is stored
    system: str | None = None  # ollama: the system message
    other_base: bool = False  # whether the base may be another one than that of the training
    compares_base: bool = True  # whether the base is quantized too, to compare what that costs
    run: Path | None = None  # the run whose held-out rows the export is evaluated on; None: it is not


@dataclass(slots=True)
class HeldOutLosses:
    """Mean losses on the rows that the run held out, in nats; None where nothing was measured."""

    run: float | None = None  # of the run's last evaluation
    merged: float | None = None  # of the merged model, or of the one that was trained whole
    written: float | None = None  # of what was written, if that is not the merged model
    unknown: str | None = None  # why the export was not evaluated


@dataclass(slots=True)
class Exported:
    """What was written, and how far each step is from what it stands for. A whole model has no `effect` and `merge`."""

    files: list[str] = field(default_factory=lambda: [])
    verdict: VerifyVerdict | None = None  # on base and adapter as they are here; None: nothing to compare them with
    effect: Deviation | None = None  # of base and adapter from the base: what the adapter changes
    merge: Deviation | None = None  # of the merged model from base and adapter
    lost: float | None = None  # the merge's share of what the adapter changes that it loses
    result: Deviation | None = None  # of what was written from base and adapter, if it is not the merged model
    base: Deviation | None = None  # of the base, quantized alike, from the base
    loss: HeldOutLosses = field(default_factory=HeldOutLosses)
    stops: list[str] = field(default_factory=lambda: [])  # the texts of the tokens that end an answer
    trained_on: str | None = None  # the form of the base in the adapter's training: none, nf4, …; None: not recorded
    notes: list[str] = field(default_factory=lambda: [])


@dataclass(frozen=True, slots=True)
class Expected:
    """What the exported model is to compute."""

    tokenizer: Tokenizer
    prompts: list[list[int]]
    tuned: Logprobs
    base: Logprobs | None = None


def export(request: Request, backend: Backend, llama_cpp: LlamaCpp | None, tell: Tell) -> Exported:
    """Write the export. ConfigError if the merge changes the function, with the number; then nothing is left."""
    check_free(request.out)
    if request.kind == "nf4" and not isinstance(backend, WritesNf4):
        raise ConfigError(f"--quantize nf4: the backend {backend.name} cannot write it. Give --platform cpu or cuda")
    adapter, base = None, request.adapter
    if request.base is not None:
        adapter, base = read_adapter(request.adapter), resolve_model(request.base)
        check_plain(base)
        if not request.other_base:
            check_base(adapter, base)
    exported = Exported()
    held_out = _held_out(request, adapter, base, exported)

    def write(directory: Path) -> None:
        is_plain = request.target == "hf" and request.kind == "none"
        if llama_cpp is not None:
            with _copy_of_base(base, directory / "base", llama_cpp) as source:
                llama_cpp.check_tokenizer(source)
        merged = directory / "merged"
        if adapter is None:
            exported.notes += _note_of_left_out(copy_model(base, merged, link_weights=not is_plain))
            tell(f"stops at    {named_stops(merged)}")
            expected = _expected_of_model(base, backend, held_out, exported)
        else:
            expected = _merge(request, adapter, base, merged, backend, held_out, exported, tell)
        checked = base if adapter is None else merged  # with the weights themselves, not links to them
        made = _Maker(request, backend, llama_cpp, expected, held_out, tell)
        if not is_plain:
            written = made.write(merged if _is_foreign(llama_cpp) else checked, directory)
            exported.result = made.distance(expected.tuned, written, checked)
            exported.loss.written = made.loss
            if expected.base is not None and made.quantizes and request.compares_base:
                exported.base = made.distance_of_base(expected.base, base, directory)
        else:
            _move_out(merged)
        if merged.exists():
            shutil.rmtree(merged)
        exported.notes += [note for note in (adapter and note_of_base(adapter), *made.notes) if note]
        exported.stops = stop_tokens(expected.tokenizer).texts
        if adapter is not None or not (directory / CARD).exists():  # the author's own one stays
            write_file(directory / CARD, card(request.name, _record(request, exported)))
        exported.files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
        write_file(directory / RECORD, json.dumps(_record(request, exported), indent=2) + "\n")

    write_whole(request.out, write)
    return exported


def _held_out(request: Request, adapter: Adapter | None, base: Path, exported: Exported) -> HeldOut | None:
    """Return the held-out rows of the run, and note its last evaluation, or why the export cannot be evaluated."""
    metadata = adapter.metadata if adapter else manifest_of(base)
    exported.loss.run = last_evaluation(metadata)
    recorded: dict[str, Any] = metadata.get("base") or {}
    exported.trained_on = recorded.get("loaded_as")
    if request.run is None:
        return None
    found = open_held_out(request.run, base, adapter, adapter and adapter_directory(request.adapter))
    if isinstance(found, str):
        exported.loss.unknown = found
        return None
    return found


def _expected_of_model(model: Path, backend: Backend, held_out: HeldOut | None, exported: Exported) -> Expected:
    loaded = load_model(backend, str(model), dtype="float32")
    if held_out is not None:
        exported.loss.merged = held_out.loss(loaded.engine)
    prompts = prompts_of(loaded.tokenizer)
    expected = Expected(loaded.tokenizer, prompts, logprobs(loaded.engine, prompts))
    del loaded
    gc.collect()
    return expected


def _merge(
    request: Request, adapter: Adapter, base: Path, out: Path, backend: Backend, held_out: HeldOut | None,
    exported: Exported, tell: Tell,
) -> Expected:  # fmt: skip
    """Write the merged model, load it again, and compare it with base and adapter."""
    loaded = load_model(backend, str(base), request.adapter, dtype="float32", quantization="none")
    if not request.other_base:
        exported.verdict = _verify(loaded.engine, adapter, base, tell)
    prompts = prompts_of(loaded.tokenizer)
    tuned = logprobs(loaded.engine, prompts)
    with without_adapter(loaded.engine):
        expected = Expected(loaded.tokenizer, prompts, tuned, before := logprobs(loaded.engine, prompts))
    del loaded
    gc.collect()
    engine = load_to_merge(adapter, base, backend, request.dtype)
    write_merged(engine, adapter, out, tell)
    del engine
    gc.collect()
    engine = load_model(backend, str(out), dtype="float32", quantization="none").engine
    merged = logprobs(engine, prompts)
    if held_out is not None:
        tell("evaluating  the merged model on the rows that the run held out")
        exported.loss.merged = held_out.loss(engine)
    del engine
    gc.collect()
    effect, merge = deviation(before, tuned), deviation(tuned, merged)
    lost = lost_share(merge, effect)
    if not lost <= LOST:
        raise ConfigError(
            f"export: the merged model is not base and adapter: it differs by {merge.kl:.2e} nats, {lost:.0%} of what "
            f"the adapter changes ({effect.kl:.2e}), allowed: {LOST:.0%}. The base's precision may be too coarse for "
            "so small a change: merge with --dtype float32"
        )
    exported.effect, exported.merge, exported.lost = effect, merge, lost
    tell(f"merge       verified: it loses {lost:.2%} of what the adapter changes")
    return expected


def _verify(engine: Engine, adapter: Adapter, base_dir: Path, tell: Tell) -> VerifyVerdict | None:
    """Compare base and adapter with the fingerprints of the training. ConfigError if they compute something else."""
    verdict = verify_loaded(engine, adapter, base_dir)
    if verdict is None:
        tell("adapter     has no fingerprints of its training: whether it does here what it did there is unknown")
        return None
    if verdict.kind in ("wrong-base", "broken-adapter"):
        raise ConfigError(
            f"export: {verdict.sentence}. `dualtune verify` shows the numbers; --other-base exports without comparing"
        )
    tell(f"adapter     {verdict.sentence}")
    return verdict


class _Maker:
    """Converts a model directory for the target, and computes with the result."""

    def __init__(
        self, request: Request, backend: Backend, llama_cpp: LlamaCpp | None, expected: Expected,
        held_out: HeldOut | None, tell: Tell,
    ) -> None:  # fmt: skip
        self._request, self._backend, self._llama_cpp = request, backend, llama_cpp
        self._tokenizer, self._prompts, self._tell = expected.tokenizer, expected.prompts, tell
        self._held_out, self.loss = held_out, None  # of what was written first, which is the tuned model
        self.notes: list[str] = []

    @property
    def quantizes(self) -> bool:
        return self._request.kind in (*QUANTIZED, *MLX_BITS, "nf4")

    def write(self, model: Path, out: Path) -> Path:
        """Write what the target wants into the directory, and return what can be computed with."""
        name, kind = self._request.name, self._request.kind
        if self._request.target in ("hf", "mlx"):
            _move_out(self._convert(model, out / "converted"))
            return out
        file = f"{name}-{kind.upper()}.gguf"
        if self._request.target == "lmstudio":  # publisher/model/file, as in LM Studio's directory of models
            (out / "dualtune" / name).mkdir(parents=True)
            return self._convert(model, out / "dualtune" / name / file)
        result = self._convert(model, out / file)
        if self._request.target == "ollama":
            template = template_for(self._tokenizer)
            text = modelfile(file, template, stop_tokens(self._tokenizer).texts, self._request.system)
            write_file(out / "Modelfile", text)
            if template is None:
                self.notes.append(
                    "note: the chat template is none of the named ones, so the Modelfile has none: Ollama takes "
                    "the one that it recognizes in the GGUF, or writes prompts as they are. Add a TEMPLATE by hand"
                )
        return result

    def distance(self, expected: Logprobs, written: Path, source: Path) -> Deviation | None:
        """Return how far what `write` has made of the model `source` is from what it stands for.

        None, with a note, for a GGUF that nothing here can compute.
        """
        self._tell(f"computing   the prompts with the {'GGUF' if written.suffix == '.gguf' else 'model'} just written")
        if written.suffix != ".gguf":
            return deviation(expected, self._logprobs(written))
        assert self._llama_cpp is not None
        if self._llama_cpp.computes:
            return deviation(expected, self._llama_cpp.logprobs(written, self._prompts))
        if not gguf_file.can_unpack(source):
            self.notes.append("note: what was written is not computed here: that takes llama.cpp's library")
            return None
        with _removed_after(written.with_suffix(".unpacked")) as plain:
            gguf_file.unpack(written, source, plain)
            return deviation(expected, self._logprobs(plain))

    def _logprobs(self, model: Path) -> Logprobs:
        engine = load_model(self._backend, str(model), dtype="float32").engine
        if self._held_out is not None:
            self.loss, self._held_out = self._held_out.loss(engine), None
        return logprobs(engine, self._prompts)

    def distance_of_base(self, expected: Logprobs, base: Path, scratch: Path) -> Deviation | None:
        """Return how far the base without the adapter, quantized alike, is from the base."""
        with (
            _copy_of_base(base, scratch / "plain-base", self._llama_cpp) as plain,
            _removed_after(scratch / ("base.gguf" if self._llama_cpp else "base")) as place,
        ):
            return self.distance(expected, self._convert(plain, place), base)

    def _convert(self, model: Path, out: Path) -> Path:
        kind = self._request.kind
        self._tell(f"writing     {out.name if out.suffix else kind}")
        if self._request.target == "mlx":
            _convert_to_mlx(model, out, MLX_BITS.get(kind))
            return out
        if isinstance(self._backend, WritesNf4) and kind == "nf4":
            self._backend.write_nf4(model, out)
            return out
        assert self._llama_cpp is not None
        if kind in self._llama_cpp.kinds:
            return self._to_gguf(model, out, kind)
        with _removed_after(out.with_name(f"{out.stem}.plain.gguf")) as plain:
            self._llama_cpp.quantize(self._to_gguf(model, plain, _plain_kind(model)), out, kind)
        return out

    def _to_gguf(self, model: Path, out: Path, kind: str) -> Path:
        """Convert a model directory, and name the tokens that end a turn, of which a converter may know but one."""
        assert self._llama_cpp is not None
        self._llama_cpp.convert(model, out, kind)
        set_numbers(out, gguf_file.stop_keys(stop_tokens(self._tokenizer)))
        return out


def _move_out(directory: Path) -> None:
    """Move the files of a directory into the one that it is in."""
    for path in directory.iterdir():
        path.rename(directory.parent / path.name)
    directory.rmdir()


def _plain_kind(model: Path) -> str:
    """Return the GGUF kind that holds the stored weights exactly: float32 of a large model fills a disk."""
    return {"bfloat16": "bf16", "float16": "f16"}.get(stored_precision(read_config(model)) or "", "f32")


def _convert_to_mlx(model: Path, out: Path, bits: int | None) -> None:
    """Write a model as mlx-lm's own converter does. EnvironmentFault if it fails or is not installed."""
    command = [sys.executable, "-P", "-m", "mlx_lm", "convert", "--hf-path", str(model), "--mlx-path", str(out)]
    command += [] if bits is None else ["-q", "--q-bits", str(bits), "--q-group-size", "64"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0 or not (out / "config.json").is_file():
        raise EnvironmentFault(f"mlx_lm convert failed: {last_line(done.stderr)}. `pip install 'dualtune[mlx]'` has it")


@contextmanager
def _copy_of_base(base: Path, place: Path, llama_cpp: LlamaCpp | None) -> Generator[Path]:
    """The base for a converter of another program, which takes more from a directory than the model."""
    if not _is_foreign(llama_cpp):
        yield base
        return
    with _removed_after(place):
        copy_model(base, place, link_weights=True)
        yield place


def _is_foreign(llama_cpp: LlamaCpp | None) -> bool:
    return llama_cpp is None or llama_cpp.is_foreign


def _note_of_left_out(names: list[str]) -> list[str]:
    """Return the note that names the files of a model directory that are not copied."""
    listed = ", ".join(shown(name) for name in names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return [f"note: left out, as no files of the model: {listed}"] if names else []


@contextmanager
def _removed_after(path: Path) -> Generator[Path]:
    try:
        yield path
    finally:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _record(request: Request, exported: Exported) -> dict[str, Any]:
    return {
        "dualtune": VERSION, "target": request.target, "quantization": request.kind, "base": request.base,
        "adapter": str(request.adapter), "files": exported.files,
        "verified": exported.verdict and exported.verdict._asdict(),
        "divergence_nats": {
            "adapter from base": exported.effect and asdict(exported.effect),
            "merged from adapter": exported.merge and asdict(exported.merge),
            "written from adapter": exported.result and asdict(exported.result),
            "base, quantized alike, from base": exported.base and asdict(exported.base),
        },
        "lost_share_of_merge": exported.lost, "loss": asdict(exported.loss), "stops": exported.stops,
        "trained_on": exported.trained_on, "notes": exported.notes,
    }  # fmt: skip
