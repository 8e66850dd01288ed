"""What writes GGUF files: llama.cpp's converter, quantizer and arithmetic, or pip's `gguf`, as far as they are here.

Everything that is needed and missing is named at once, before any work begins.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dualtune.base.errors import ConfigError, EnvironmentFault, FormatError
from dualtune.base.files import expanded
from dualtune.base.text import one_line
from dualtune.use.export import gguf_file

VARIABLE = "DUALTUNE_LLAMA_CPP"
# The kinds of llama.cpp's quantizer that are offered; f32, f16 and bf16 are written by the converter.
QUANTIZED = ("q8_0", "q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q4_0", "iq4_nl", "q3_k_m", "q2_k")
PLAIN = ("f32", "f16", "bf16")
_HOW = (
    "Or name an environment with all of it: scripts/interop_llama.sh DIR makes one, then --llama-cpp DIR (or the "
    f"variable {VARIABLE})"
)
_NEEDED_BY_CONVERTER = ("torch", "transformers", "safetensors")  # besides gguf, of which a checkout has its own
_QUANTIZER = "llama-quantize"
CONVERTER = "convert_hf_to_gguf.py"
_UNKNOWN = "BPE pre-tokenizer was not recognized"  # it knows them by a hash of what they make of a text
_MOST_LOGITS = 2 << 30  # bytes of an answer
_SHOWN = 300  # characters of an error of llama.cpp's
_IN_LLAMA_CPP = Path(__file__).with_name("in_llama_cpp.py")


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """What writes, quantizes and computes GGUF files: llama.cpp in an environment of its own, or what is installed."""

    python: Path  # that has the library, and the packages of the converter
    converter: Path | None  # convert_hf_to_gguf.py; None: pip's `gguf`
    quantizer: Path | None = None  # llama-quantize; None: the library's
    computes: bool = True  # whether the library is there, for `logprobs`
    kinds: tuple[str, ...] = PLAIN  # what `convert` writes

    @property
    def is_foreign(self) -> bool:
        """Whether `convert` runs another program, which takes more from a directory than the model."""
        return self.converter is not None

    def check_tokenizer(self, model: Path) -> None:
        """Convert only the vocabulary of a model, without a result. ConfigError if llama.cpp does not know its kind.

        Of pip's `gguf` also that it knows the family: ConfigError with every reason.
        """
        if self.converter is None:
            gguf_file.check(model)
            return
        try:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "vocabulary.gguf"
                self._run(self.converter, model, "--vocab-only", "--outfile", out)
        except EnvironmentFault as error:
            if _UNKNOWN not in str(error):
                raise
            raise ConfigError(
                f"{model}: llama.cpp does not know the tokenizer of this model, so it cannot write a GGUF. "
                "Export to another format: --to hf or --to mlx"
            ) from error

    def convert(self, model: Path, out: Path, kind: str) -> None:
        """Write a model directory as GGUF, in one of `kinds`."""
        if self.converter is None:
            gguf_file.write(model, out, kind)
        else:
            self._run(self.converter, model, "--outtype", kind, "--outfile", out)

    def quantize(self, model: Path, out: Path, kind: str) -> None:
        """Write a GGUF in one of QUANTIZED."""
        if self.quantizer is None:
            self._run(_IN_LLAMA_CPP, "quantize", json.dumps({"model": str(model), "kind": kind, "out": str(out)}))
            return
        command = [str(self.quantizer), str(model), str(out), kind.upper()]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0 or not out.is_file():
            raise EnvironmentFault(f"{self.quantizer} ended with {done.returncode}: {last_line(done.stderr)}")

    def logprobs(self, model: Path, prompts: Sequence[Sequence[int]], adapter: Path | None = None) -> list[np.ndarray]:
        """Return float64 [T, V] of each prompt (token ids), computed in float32. FormatError for a wrong answer."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "logits"
            job = {"model": str(model), "adapter": adapter and str(adapter), "prompts": prompts, "out": str(out)}
            answer = self._run(_IN_LLAMA_CPP, "logits", json.dumps(job)).strip()
            num_rows, size = sum(map(len, prompts)), out.stat().st_size if out.is_file() else 0
            if not answer.isdecimal() or len(answer) > 9 or size != 4 * num_rows * int(answer) or size > _MOST_LOGITS:
                words = one_line(answer)[:20]
                raise FormatError(f"llama.cpp: got {size} bytes of logits for {num_rows} tokens of '{words}' words")
            logits_NV = np.fromfile(out, np.float32).reshape(num_rows, -1)
        ends = np.cumsum([len(prompt) for prompt in prompts])[:-1]
        return [_log_softmax(logits_TV) for logits_TV in np.split(logits_NV, ends)]

    def _run(self, program: Path, *args: object) -> str:
        done = subprocess.run(
            [self.python, program, *map(str, args)], capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode != 0:
            raise EnvironmentFault(f"llama.cpp: {program.name} ended with {done.returncode}: {last_line(done.stderr)}")
        return done.stdout


def last_line(text: str) -> str:
    """Return the last line of another program's standard error, which says what is wrong."""
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "without a message")
    return one_line(last)[:_SHOWN]


def environment_of(directory: Path) -> LlamaCpp:
    """Return llama.cpp of an environment that scripts/interop_llama.sh makes. EnvironmentFault if it is none."""
    directory = directory.absolute()
    python, converter = directory / "bin" / "python", directory / "source" / "vendor" / "llama.cpp" / CONVERTER
    for path in (python, converter):
        if not path.exists():
            raise EnvironmentFault(
                f"{directory}: is not an environment with llama.cpp ({path} is missing), nor a checkout of it, which "
                f"has {CONVERTER}. {_HOW}"
            )
    return LlamaCpp(python, converter)


def find_llama_cpp(directory: Path | None, kind: str = "bf16") -> LlamaCpp:
    """Return what writes GGUF files of this kind: what a directory has, or without one what is installed.

    The directory, given or named by the variable, is an environment of scripts/interop_llama.sh or a checkout of
    llama.cpp, built or not.
    EnvironmentFault, which names all that is missing, if something is.
    """
    named = directory or os.environ.get(VARIABLE)
    checkout = expanded(named) if named else None
    if checkout is not None and not (checkout / CONVERTER).is_file():
        return environment_of(checkout)
    converter = checkout / CONVERTER if checkout else _program(CONVERTER, None)
    quantizer, has_library, has_gguf = _program(_QUANTIZER, checkout), _is_installed("llama_cpp"), _is_installed("gguf")

    missing: list[str] = []
    if converter is None and not has_gguf:
        missing.append("a writer (pip install 'dualtune[gguf]', or a checkout of llama.cpp: --llama-cpp DIR)")
    if converter is not None:
        modules = [] if has_gguf or (converter.parent / "gguf-py").is_dir() else ["gguf"]
        modules += [name for name in _NEEDED_BY_CONVERTER if not _is_installed(name)]
        missing += [f"Python packages of {converter} (pip install {' '.join(modules)})"] if modules else []
    if kind not in gguf_file.KINDS and quantizer is None and not has_library:
        missing.append(
            f"a quantizer for {kind} ({_QUANTIZER} on the PATH or in the checkout's build/bin, or pip install "
            f"llama-cpp-python; without one: --quantize {', '.join(gguf_file.KINDS)})"
        )
    if missing:
        raise EnvironmentFault(f"--to GGUF: missing are {'; '.join(missing)}. {_HOW}")
    return LlamaCpp(Path(sys.executable), converter, quantizer, has_library, gguf_file.KINDS)


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _program(name: str, checkout: Path | None) -> Path | None:
    """Return a program of llama.cpp's, in a checkout or on the PATH."""
    for folder in ("build/bin", "bin", ".") if checkout else ():
        if checkout and (path := checkout / folder / name).is_file():
            return path.absolute()
    path = shutil.which(name)
    return Path(path) if path else None


def _log_softmax(logits_TV: np.ndarray) -> np.ndarray:
    shifted_TV = logits_TV.astype(np.float64)
    shifted_TV -= shifted_TV.max(-1, keepdims=True)
    return shifted_TV - np.log(np.exp(shifted_TV).sum(-1, keepdims=True))
