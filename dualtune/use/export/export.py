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

from dualtune.base.errors import ConfigError, DualtuneError, EnvironmentFault
from dualtune.base.fields import shown
from dualtune.base.files import new_directory, write_file
from dualtune.base.versions import VERSION
from dualtune.data.tokens.new_tokens import with_new_tokens
from dualtune.data.tokens.stop_tokens import stop_texts, stop_tokens
from dualtune.engine.backend import Backend, Engine
from dualtune.model.base_model import resolve_model
from dualtune.model.config_file import read_config, stored_precision
from dualtune.model.copies import copy_model
from dualtune.model.formats.directory import Adapter, adapter_directory, read_adapter
from dualtune.train.fingerprints import without_adapter
from dualtune.train.generation.inference import load_model
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
    Begin,
    Deviation,
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
    prompts_of,
)
from dualtune.use.verify.verdict import VerifyVerdict
from dualtune.use.verify.verify import verify_loaded

RECORD = "export.json"


def export(request: Request, backend: Backend, llama_cpp: LlamaCpp | None, tell: Tell, begin: Begin) -> Exported:
    """Write the export. ConfigError if the merge changes the function, with the number; then nothing is left."""
    check_free(request.out)
    if request.kind == "nf4" and not isinstance(backend, WritesNf4):
        raise ConfigError(f"--quantize nf4: the backend {backend.name} cannot write it. Give --platform cpu or cuda")
    work = _Export(request, backend, llama_cpp, tell, begin)
    with new_directory(request.out.resolve(), by_library=True) as directory:
        work.write(directory)
    return work.exported


class _Export:
    """An export on its way: what it is made of, what makes it, and what has been measured so far."""

    def __init__(
        self, request: Request, backend: Backend, llama_cpp: LlamaCpp | None, tell: Tell, begin: Begin
    ) -> None:
        self._request, self._backend, self._llama_cpp = request, backend, llama_cpp
        self._tell, self._begin = tell, begin
        # A converter that is another program takes more from a directory than the model, so it gets a copy.
        self._needs_copy = llama_cpp is None or llama_cpp.is_foreign
        self._adapter: Adapter | None = None
        self._base = request.adapter
        if request.base is not None:
            self._adapter = read_adapter(request.adapter)
            self._base = with_new_tokens(resolve_model(request.base), self._adapter.new_tokens)
            check_plain(self._base)
            if not request.other_base:
                check_base(self._adapter, self._base)

        metadata = self._adapter.metadata if self._adapter else manifest_of(self._base)
        recorded: dict[str, Any] = metadata.get("base") or {}
        self.exported = Exported(trained_on=recorded.get("loaded_as"))
        self.exported.loss.run = last_evaluation(metadata)
        self._held_out: HeldOut | None = None
        if request.run is not None:
            directory = adapter_directory(request.adapter) if self._adapter else None
            try:
                self._held_out = HeldOut(request.run, self._base, self._adapter, directory)
            except DualtuneError as error:  # the export is written without this number
                self.exported.loss.unknown = str(error).splitlines()[0]

    def write(self, directory: Path) -> None:
        """Write all files of the export: the plain model, what it becomes for its target, and what was measured."""
        request, adapter, exported = self._request, self._adapter, self.exported
        merged = directory / "merged"
        is_plain = request.target == "hf" and request.kind == "none"

        # A tokenizer that the converter does not know is found before the merge, which may take an hour.
        if self._llama_cpp is not None:
            with self._copy_of_base(directory / "base") as source:
                self._llama_cpp.check_tokenizer(source)
        if adapter is None:
            exported.notes += _note_of_left_out(copy_model(self._base, merged, link_weights=not is_plain))
            self._tell(f"stops at    {named_stops(merged)}")
            self._measure_model()
        else:
            self._merge(adapter, merged)
            exported.notes += [note] if (note := note_of_base(adapter)) else []

        if is_plain:
            _move_out(merged)
        else:
            source = self._base if adapter is None else merged  # with the weights themselves, not links to them
            file = self._write_for_target(merged if self._needs_copy else source, directory)
            exported.result = self._distance(self._tuned_logprobs, file, source)
            quantizes = request.kind in (*QUANTIZED, *MLX_BITS, "nf4")
            if self._base_logprobs is not None and quantizes and request.compares_base:
                with (
                    self._copy_of_base(directory / "plain-base") as base,
                    _removed_after(directory / ("base.gguf" if self._llama_cpp else "base")) as path,
                ):
                    exported.base = self._distance(self._base_logprobs, self._convert(base, path), self._base)
            shutil.rmtree(merged)

        exported.stops = stop_texts(self._tokenizer)
        if (text := self._tokenizer.stop_text) and request.target != "ollama":
            exported.notes.append(
                f"note: a turn ends with the text {shown(text)}, which no single token is. A program that reads no "
                "stop_strings of generation_config.json (vLLM, llama.cpp, LM Studio, mlx-lm) needs it as a stop text "
                "of each request; transformers needs generate(..., tokenizer=tokenizer)"
            )
        # The files that say what the others are come last. A model's own card stays.
        if adapter is not None or not (directory / model_card.FILE).exists():
            notes = adapter.naming.notes if adapter else ()
            card = model_card.export_card(request.name, _record(request, exported), notes)
            write_file(directory / model_card.FILE, card)
        exported.files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
        write_file(directory / RECORD, json.dumps(_record(request, exported), indent=2) + "\n")

    # --- what the exported model is to compute ------------------------------------------------------------------------

    def _measure_model(self) -> None:
        self._begin("computing", "the prompts with the model")
        loaded = load_model(self._backend, str(self._base), dtype="float32")
        if self._held_out is not None:
            self.exported.loss.merged = self._held_out.loss(loaded.engine)
        self._tokenizer, self._prompts = loaded.tokenizer, prompts_of(loaded.tokenizer)
        self._tuned_logprobs, self._base_logprobs = logprobs(loaded.engine, self._prompts), None
        del loaded
        gc.collect()

    def _merge(self, adapter: Adapter, out: Path) -> None:
        """Write the merged model, load it again, and compare it with base and adapter."""
        request, base, exported = self._request, self._base, self.exported
        self._begin("loading", "base and adapter")
        loaded = load_model(self._backend, str(base), request.adapter, dtype="float32", quantization="none")
        if not request.other_base:
            exported.verdict = self._verify(loaded.engine, adapter)
        self._tokenizer, self._prompts = loaded.tokenizer, prompts_of(loaded.tokenizer)
        self._tuned_logprobs = logprobs(loaded.engine, self._prompts)
        with without_adapter(loaded.engine):
            self._base_logprobs = logprobs(loaded.engine, self._prompts)
        del loaded
        gc.collect()  # an engine is part of reference cycles: there may be no room for two
        # Merged in the precision that is written, then loaded from the files: what is compared is what a reader gets.
        self._begin("merging", "the adapter")
        engine = load_to_merge(adapter, base, self._backend, request.dtype)
        write_merged(engine, adapter, out, self._tell)
        del engine
        gc.collect()
        self._begin("computing", "the prompts with the merged model")
        engine = load_model(self._backend, str(out), dtype="float32", quantization="none").engine
        merged = logprobs(engine, self._prompts)
        if self._held_out is not None:
            self._begin("evaluating", "the merged model on the rows that the run held out")
            exported.loss.merged = self._held_out.loss(engine)
        del engine
        gc.collect()

        effect, merge = deviation(self._base_logprobs, self._tuned_logprobs), deviation(self._tuned_logprobs, merged)
        lost = lost_share(merge, effect)
        if not lost <= LOST:
            raise ConfigError(
                f"export: the merged model is not base and adapter: it differs by {merge.kl:.2e} nats, {lost:.0%} of "
                f"what the adapter changes ({effect.kl:.2e}), allowed: {LOST:.0%}. The base's precision may be too "
                "coarse for so small a change: merge with --dtype float32"
            )
        exported.effect, exported.merge, exported.lost = effect, merge, lost
        self._tell(f"merge       verified: it loses {lost:.2%} of what the adapter changes")

    def _verify(self, engine: Engine, adapter: Adapter) -> VerifyVerdict | None:
        """Compare base and adapter with the fingerprints of the training. ConfigError if they are not the same."""
        verdict = verify_loaded(engine, adapter, self._base)
        if verdict is None:
            self._tell(
                "adapter     has no fingerprints of its training: whether it does here what it did there is unknown"
            )
            return None
        if verdict.kind in ("wrong-base", "broken-adapter"):
            raise ConfigError(
                f"export: {verdict.sentence}. `dualtune verify` shows the numbers; --other-base exports without "
                "comparing"
            )
        self._tell(f"adapter     {verdict.sentence}")
        return verdict

    # --- a model directory converted for another program by that program's own tools ---------------------------------

    def _write_for_target(self, model: Path, out: Path) -> Path:
        """Write what the target wants into the directory, and return what can be computed with."""
        name, target = self._request.name, self._request.target
        if target in ("hf", "mlx"):
            _move_out(self._convert(model, out / "converted"))
            return out
        file = f"{name}-{self._request.kind.upper()}.gguf"
        if target == "lmstudio":  # publisher/model/file, as in LM Studio's directory of models
            (out / "dualtune" / name).mkdir(parents=True)
            return self._convert(model, out / "dualtune" / name / file)
        gguf = self._convert(model, out / file)
        if target == "ollama":
            template = template_for(self._tokenizer)
            text = modelfile(file, template, stop_texts(self._tokenizer), self._request.system)
            write_file(out / "Modelfile", text)
            if template is None:
                self.exported.notes.append(
                    "note: the chat template is none of the named ones, so the Modelfile has none: Ollama takes "
                    "the one that it recognizes in the GGUF, or writes prompts as they are. Add a TEMPLATE by hand"
                )
        return gguf

    def _convert(self, model: Path, out: Path) -> Path:
        kind, llama_cpp = self._request.kind, self._llama_cpp
        self._begin("writing", out.name if out.suffix else f"{self._request.target}, {kind}")
        if self._request.target == "mlx":
            _convert_to_mlx(model, out, MLX_BITS.get(kind))
            return out
        if isinstance(self._backend, WritesNf4) and kind == "nf4":
            self._backend.write_nf4(model, out)
            return out
        assert llama_cpp is not None
        if kind in llama_cpp.kinds:
            return self._to_gguf(llama_cpp, model, out, kind)
        # The quantizer starts from a GGUF that holds the stored weights exactly: float32 of a large model fills a disk.
        plain_kind = {"bfloat16": "bf16", "float16": "f16"}.get(stored_precision(read_config(model)) or "", "f32")
        with _removed_after(out.with_name(f"{out.stem}.plain.gguf")) as plain:
            llama_cpp.quantize(self._to_gguf(llama_cpp, model, plain, plain_kind), out, kind)
        return out

    def _to_gguf(self, llama_cpp: LlamaCpp, model: Path, out: Path, kind: str) -> Path:
        """Convert a model directory, and name the tokens that end a turn: a converter may know only one of them."""
        llama_cpp.convert(model, out, kind)
        set_numbers(out, gguf_file.stop_keys(stop_tokens(self._tokenizer)))
        return out

    @contextmanager
    def _copy_of_base(self, path: Path) -> Generator[Path]:
        if not self._needs_copy:
            yield self._base
            return
        with _removed_after(path):
            copy_model(self._base, path, link_weights=True)
            yield path

    # --- what the result computes ------------------------------------------------------------------------------------

    def _distance(self, expected: Logprobs, written: Path, source: Path) -> Deviation | None:
        """Return how far what was made of the model `source` is from what it stands for.

        None, with a note, for a GGUF that nothing here can compute.
        """
        is_gguf = written.suffix == ".gguf"
        self._begin("computing", f"the prompts with the {'GGUF' if is_gguf else 'model'} just written")
        if not is_gguf:
            return deviation(expected, self._logprobs(written))
        assert self._llama_cpp is not None
        if self._llama_cpp.computes:
            return deviation(expected, self._llama_cpp.logprobs(written, self._prompts))
        if not gguf_file.can_unpack(source):
            self.exported.notes.append("note: what was written is not computed here: that takes llama.cpp's library")
            return None
        with _removed_after(written.with_suffix(".unpacked")) as plain:
            gguf_file.unpack(written, source, plain)
            return deviation(expected, self._logprobs(plain))

    def _logprobs(self, model: Path) -> Logprobs:
        engine = load_model(self._backend, str(model), dtype="float32").engine
        loss = self.exported.loss
        if self._held_out is not None and loss.written is None:  # the tuned model comes first, the base after it
            loss.written = self._held_out.loss(engine)
        return logprobs(engine, self._prompts)


def _move_out(directory: Path) -> None:
    """Move the files of a directory into the one that it is in."""
    for path in directory.iterdir():
        path.rename(directory.parent / path.name)
    directory.rmdir()


@contextmanager
def _removed_after(path: Path) -> Generator[Path]:
    try:
        yield path
    finally:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _convert_to_mlx(model: Path, out: Path, bits: int | None) -> None:
    """Write a model as mlx-lm's own converter does. EnvironmentFault if it fails or is not installed."""
    command = [sys.executable, "-P", "-m", "mlx_lm", "convert", "--hf-path", str(model), "--mlx-path", str(out)]
    command += [] if bits is None else ["-q", "--q-bits", str(bits), "--q-group-size", "64"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0 or not (out / "config.json").is_file():
        raise EnvironmentFault(f"mlx_lm convert failed: {last_line(done.stderr)}. `pip install 'dualtune[mlx]'` has it")


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
