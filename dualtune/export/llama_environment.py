"""llama.cpp: its converter to GGUF, its quantizer and its arithmetic, in a Python environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.errors import ConfigError, EnvironmentFault, FormatError
from dualtune.text.escape import one_line

VARIABLE = "DUALTUNE_LLAMA_CPP"
# The kinds of llama.cpp's quantizer that are offered; f32, f16 and bf16 are written by the converter.
QUANTIZED = ("q8_0", "q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q4_0", "iq4_nl", "q3_k_m", "q2_k")
PLAIN = ("f32", "f16", "bf16")
_HOW = "To make one: scripts/interop_llama.sh DIR, then --llama-cpp DIR (or the variable DUALTUNE_LLAMA_CPP)"
CONVERTER = "convert_hf_to_gguf.py"
_UNKNOWN = "BPE pre-tokenizer was not recognized"  # it knows them by a hash of what they make of a text
_MOST_LOGITS = 2 << 30  # bytes of an answer
_SHOWN = 300  # characters of an error of llama.cpp's


class LlamaCpp:
    """llama.cpp in an environment that scripts/interop_llama.sh makes."""

    def __init__(self, environment: Path) -> None:
        """Raise EnvironmentFault if it is none."""
        self._python = environment.absolute() / "bin" / "python"
        self._converters = environment.absolute() / "source" / "vendor" / "llama.cpp"
        for path in (self._python, self._converters / CONVERTER):
            if not path.exists():
                raise EnvironmentFault(f"{environment}: is no environment with llama.cpp ({path} is missing). {_HOW}")

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


def last_line(text: str) -> str:
    """Return the last line of another program's standard error, which says what is wrong."""
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "without a message")
    return one_line(last)[:_SHOWN]


def find_llama_cpp(given: Path | None) -> LlamaCpp:
    """Return llama.cpp in the given directory, else in that of the variable. EnvironmentFault if there is none."""
    place = given or os.environ.get(VARIABLE)
    if not place:
        raise EnvironmentFault(
            f"GGUF is written by llama.cpp's own tools, and no environment with them is named. {_HOW}"
        )
    return LlamaCpp(Path(place).expanduser())


def _log_softmax(logits_TV: np.ndarray) -> np.ndarray:
    shifted_TV = logits_TV.astype(np.float64)
    shifted_TV -= shifted_TV.max(-1, keepdims=True)
    return shifted_TV - np.log(np.exp(shifted_TV).sum(-1, keepdims=True))
