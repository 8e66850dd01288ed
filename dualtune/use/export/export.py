"""Exporting: the verified merge, its conversion for another program, and what each step has changed.

The result is written whole or not at all, with `export.json`: what was made of what, by which tools, and the distances.
"""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.base.fields import shown
from dualtune.base.files import write_file, write_whole
from dualtune.base.versions import VERSION
from dualtune.data.tokens.stop_tokens import stop_texts, stop_tokens
from dualtune.engine.backend import Backend, Engine
from dualtune.model.base_model import resolve_model
from dualtune.model.config_file import read_config, stored_precision
from dualtune.model.copies import copy_model
from dualtune.model.formats.directory import Adapter, adapter_directory, read_adapter
from dualtune.train.fingerprints import without_adapter
from dualtune.train.inference import load_model
from dualtune.use import model_card
from dualtune.use.export import gguf_file
from dualtune.use.export.gguf_file import set_numbers
from dualtune.use.export.llama_environment import QUANTIZED, LlamaCpp, last_line
from dualtune.use.export.merge import (
    check_base,
    check_free,
    check_plain,
    load_to_merge,
    named_stops,
    note_of_base,
    write_merged,
)
from dualtune.use.export.ollama import modelfile, template_for
from dualtune.use.export.request import (
    LOST,
    MLX_BITS,
    Deviation,
    Expected,
    Exported,
    HeldOut,
    Logprobs,
    Request,
    Tell,
    WritesNf4,
    deviation,
    last_evaluation,
    logprobs,
    lost_share,
    manifest_of,
    open_held_out,
    prompts_of,
)
from dualtune.use.verify.verdict import VerifyVerdict
from dualtune.use.verify.verify import verify_loaded

RECORD = "export.json"


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
            with copy_of_base(base, directory / "base", llama_cpp) as source:
                llama_cpp.check_tokenizer(source)
        merged = directory / "merged"
        if adapter is None:
            exported.notes += _note_of_left_out(copy_model(base, merged, link_weights=not is_plain))
            tell(f"stops at    {named_stops(merged)}")
            expected = _expected_of_model(base, backend, held_out, exported)
        else:
            expected = _merge(request, adapter, base, merged, backend, held_out, exported, tell)
        checked = base if adapter is None else merged  # with the weights themselves, not links to them
        made = Maker(request, backend, llama_cpp, expected, held_out, tell)
        if not is_plain:
            written = made.write(merged if is_foreign(llama_cpp) else checked, directory)
            exported.result = made.distance(expected.tuned, written, checked)
            exported.loss.written = made.loss
            if expected.base is not None and made.quantizes and request.compares_base:
                exported.base = made.distance_of_base(expected.base, base, directory)
        else:
            move_out(merged)
        if merged.exists():
            shutil.rmtree(merged)
        exported.notes += [note for note in (adapter and note_of_base(adapter), *made.notes) if note]
        exported.stops = stop_texts(expected.tokenizer)
        if (text := expected.tokenizer.stop_text) and request.target != "ollama":
            exported.notes.append(
                f"note: a turn ends with the text {shown(text)}, which no single token is. A program that reads no "
                "stop_strings of generation_config.json (vLLM, llama.cpp, LM Studio, mlx-lm) needs it as a stop text "
                "of each request; transformers needs generate(..., tokenizer=tokenizer)"
            )
        if adapter is not None or not (directory / model_card.FILE).exists():  # the author's own one stays
            notes = adapter.naming.notes if adapter else ()
            write_file(
                directory / model_card.FILE, model_card.export_card(request.name, _record(request, exported), notes)
            )
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
    held_out = open_held_out(request.run, base, adapter, adapter and adapter_directory(request.adapter))
    if isinstance(held_out, str):
        exported.loss.unknown = held_out
        return None
    return held_out


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


def _note_of_left_out(names: list[str]) -> list[str]:
    """Return the note that names the files of a model directory that are not copied."""
    listed = ", ".join(shown(name) for name in names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return [f"note: left out, as no files of the model: {listed}"] if names else []


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


# ----------------------------------------------------------------------------------------------------------------------
# A model directory converted for another program by that program's own tools, and what the result computes.


class Maker:
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
            move_out(self._convert(model, out / "converted"))
            return out
        file = f"{name}-{kind.upper()}.gguf"
        if self._request.target == "lmstudio":  # publisher/model/file, as in LM Studio's directory of models
            (out / "dualtune" / name).mkdir(parents=True)
            return self._convert(model, out / "dualtune" / name / file)
        result = self._convert(model, out / file)
        if self._request.target == "ollama":
            template = template_for(self._tokenizer)
            text = modelfile(file, template, stop_texts(self._tokenizer), self._request.system)
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
            copy_of_base(base, scratch / "plain-base", self._llama_cpp) as plain,
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


def move_out(directory: Path) -> None:
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
def copy_of_base(base: Path, place: Path, llama_cpp: LlamaCpp | None) -> Generator[Path]:
    """The base for a converter of another program, which takes more from a directory than the model."""
    if not is_foreign(llama_cpp):
        yield base
        return
    with _removed_after(place):
        copy_model(base, place, link_weights=True)
        yield place


def is_foreign(llama_cpp: LlamaCpp | None) -> bool:
    return llama_cpp is None or llama_cpp.is_foreign


@contextmanager
def _removed_after(path: Path) -> Generator[Path]:
    try:
        yield path
    finally:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
