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
from pathlib import Path
from typing import Any

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


class LlamaCpp:
    """llama.cpp in an environment that scripts/interop_llama.sh makes."""

    kinds: tuple[str, ...] = PLAIN  # what `convert` writes
    computes = True  # whether `logprobs` is there
    is_foreign = True  # whether `convert` runs another program, which takes more from a directory than the model

    def __init__(self, environment: Path) -> None:
        """Raise EnvironmentFault if it is none."""
        self._python = environment.absolute() / "bin" / "python"
        self._converters = environment.absolute() / "source" / "vendor" / "llama.cpp"
        for path in (self._python, self._converters / CONVERTER):
            if not path.exists():
                raise EnvironmentFault(
                    f"{environment}: is no environment with llama.cpp ({path} is missing), nor a checkout of it, which "
                    f"has {CONVERTER}. {_HOW}"
                )

    def check_tokenizer(self, model: Path) -> None:
        """Convert only the vocabulary of a model, without a result. ConfigError if llama.cpp does not know its kind."""
        try:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "vocabulary.gguf"
                self._run(self._converters / CONVERTER, model, "--vocab-only", "--outfile", out)
        except EnvironmentFault as error:
            if _UNKNOWN not in str(error):
                raise
            raise ConfigError(
                f"{model}: llama.cpp does not know the tokenizer of this model, so it cannot write a GGUF. "
                "Export to another format: --to hf or --to mlx"
            ) from error

    def convert(self, model: Path, out: Path, kind: str) -> None:
        """Write a model directory as GGUF, in one of PLAIN."""
        self._run(self._converters / CONVERTER, model, "--outtype", kind, "--outfile", out)

    def quantize(self, model: Path, out: Path, kind: str) -> None:
        """Write a GGUF in one of QUANTIZED."""
        self._ask("quantize", {"model": str(model), "kind": kind, "out": str(out)})

    def logprobs(self, model: Path, prompts: Sequence[Sequence[int]], adapter: Path | None = None) -> list[np.ndarray]:
        """Return float64 [T, V] of each prompt (token ids), computed in float32. FormatError for a wrong answer."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "logits"
            adapter_path = None if adapter is None else str(adapter)
            job = {"model": str(model), "adapter": adapter_path, "prompts": prompts, "out": str(out)}
            said = self._ask("logits", job).strip()
            num_rows, size = sum(map(len, prompts)), out.stat().st_size if out.is_file() else 0
            if not said.isdecimal() or len(said) > 9 or size != 4 * num_rows * int(said) or size > _MOST_LOGITS:
                words = one_line(said)[:20]
                raise FormatError(f"llama.cpp: got {size} bytes of logits for {num_rows} tokens of '{words}' words")
            logits_NV = np.fromfile(out, np.float32).reshape(num_rows, -1)
        ends = np.cumsum([len(prompt) for prompt in prompts])[:-1]
        return [_log_softmax(logits_TV) for logits_TV in np.split(logits_NV, ends)]

    def _ask(self, task: str, job: dict[str, Any]) -> str:
        return self._run(Path(__file__).with_name("in_llama_cpp.py"), task, json.dumps(job))

    def _run(self, program: Path, *args: object) -> str:
        done = subprocess.run(
            [self._python, program, *map(str, args)], capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode != 0:
            raise EnvironmentFault(f"llama.cpp: {program.name} ended with {done.returncode}: {last_line(done.stderr)}")
        return done.stdout


class FoundTools(LlamaCpp):
    """What is installed: a converter or pip's `gguf`, and a quantizer if there is one."""

    kinds = gguf_file.KINDS

    def __init__(self, converter: Path | None, quantizer: Path | None, *, has_library: bool) -> None:
        """`converter`: convert_hf_to_gguf.py; None: pip's `gguf`. `quantizer`: llama-quantize; None: the library's."""
        self._python, self._converter, self._quantizer = Path(sys.executable), converter, quantizer
        self._converters = converter.parent if converter else Path()
        self.computes, self.is_foreign = has_library, converter is not None

    def check_tokenizer(self, model: Path) -> None:
        """As for llama.cpp; of pip's `gguf` also that it knows the family. ConfigError with every reason."""
        if self._converter is not None:
            super().check_tokenizer(model)
        else:
            gguf_file.check(model)

    def convert(self, model: Path, out: Path, kind: str) -> None:
        """Write a model directory as GGUF, in one of `kinds`."""
        if self._converter is not None:
            super().convert(model, out, kind)
        else:
            gguf_file.write(model, out, kind)

    def quantize(self, model: Path, out: Path, kind: str) -> None:
        """Write a GGUF in one of QUANTIZED."""
        if self._quantizer is None:
            return super().quantize(model, out, kind)
        command = [str(self._quantizer), str(model), str(out), kind.upper()]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0 or not out.is_file():
            raise EnvironmentFault(f"{self._quantizer} ended with {done.returncode}: {last_line(done.stderr)}")
        return None


def last_line(text: str) -> str:
    """Return the last line of another program's standard error, which says what is wrong."""
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "without a message")
    return one_line(last)[:_SHOWN]


def find_llama_cpp(directory: Path | None, kind: str = "bf16") -> LlamaCpp:
    """Return what writes GGUF files of this kind: what a directory has, or without one what is installed.

    The directory, given or named by the variable, is an environment of scripts/interop_llama.sh or a checkout of
    llama.cpp, built or not.
    EnvironmentFault, which names all that is missing, if something is.
    """
    named = directory or os.environ.get(VARIABLE)
    place = expanded(named) if named else None
    if place is not None and not (place / CONVERTER).is_file():
        return LlamaCpp(place)
    converter = place / CONVERTER if place else _program(CONVERTER, None)
    missing = [*_missing_for(converter)]
    has_library = _is_installed("llama_cpp")
    quantizer = _program(_QUANTIZER, place)
    if kind not in FoundTools.kinds and quantizer is None and not has_library:
        missing.append(
            f"a quantizer for {kind} ({_QUANTIZER} on the PATH or in the checkout's build/bin, or pip install "
            f"llama-cpp-python; without one: --quantize {', '.join(FoundTools.kinds)})"
        )
    if missing:
        raise EnvironmentFault(f"--to GGUF: missing are {'; '.join(missing)}. {_HOW}")
    return FoundTools(converter, quantizer, has_library=has_library)


def _missing_for(converter: Path | None) -> list[str]:
    """Return what the converter, or without one pip's `gguf` by itself, needs and does not find."""
    has_gguf = _is_installed("gguf")
    if converter is None:
        return (
            [] if has_gguf else ["a writer (pip install 'dualtune[gguf]', or a checkout of llama.cpp: --llama-cpp DIR)"]
        )
    modules = [] if has_gguf or (converter.parent / "gguf-py").is_dir() else ["gguf"]
    modules += [name for name in _NEEDED_BY_CONVERTER if not _is_installed(name)]
    return [f"Python packages of {converter} (pip install {' '.join(modules)})"] if modules else []


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
