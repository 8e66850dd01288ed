"""A model directory converted for another program by that program's own tools, and what the result computes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from dualtune.backend import Backend
from dualtune.base_model import copy_model, read_config, stored_precision
from dualtune.data.tokens.stop_tokens import stop_texts, stop_tokens
from dualtune.errors import EnvironmentFault
from dualtune.evaluate.inference import load_model
from dualtune.export import gguf_file
from dualtune.export.deviation import Deviation, Logprobs, deviation, logprobs
from dualtune.export.gguf_keys import set_numbers
from dualtune.export.held_out import HeldOut
from dualtune.export.llama_environment import QUANTIZED, LlamaCpp, last_line
from dualtune.export.ollama import modelfile, template_for
from dualtune.export.request import MLX_BITS, Expected, Request, Tell, WritesNf4
from dualtune.io.disk import write_file


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
