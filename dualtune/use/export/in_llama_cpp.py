"""What runs in llama.cpp's own environment: quantization and log-probabilities, by llama-cpp-python.

python in_llama_cpp.py quantize '{"model": GGUF, "kind": "q4_k_m", "out": GGUF}'
python in_llama_cpp.py logits '{"model": GGUF, "adapter": GGUF or null, "prompts": [[1, 2], …], "out": FILE}'

`logits` writes float32 [T, V] of each prompt, one after another, and V to standard output. The file imports nothing of
dualtune, which need not be there.
"""

# pyright: basic, reportMissingImports=false
import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def main() -> None:
    task, job = sys.argv[1], json.loads(sys.argv[2])
    {"quantize": quantize, "logits": logits}[task](job)


def quantize(job: dict) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{job['kind'].upper()}")
    code = llama_cpp.llama_model_quantize(job["model"].encode(), job["out"].encode(), params)
    if code != 0:
        sys.exit(f"llama_model_quantize ended with {code}")


def opened(job: dict) -> "llama_cpp.Llama":
    """Load a model to compute in float32, the cache of keys and values included, which is float16 by default."""
    longest = max(map(len, job["prompts"])) + job.get("num_tokens", 0)
    return llama_cpp.Llama(
        job["model"], lora_path=job.get("adapter"), logits_all=True, n_ctx=max(256, longest), n_gpu_layers=0,
        n_threads=job.get("threads"), verbose=False, flash_attn=False, type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
    )  # fmt: skip


def logits(job: dict) -> None:
    llama = opened(job)
    with Path(job["out"]).open("wb") as file:
        for prompt in job["prompts"]:
            llama.reset()
            llama.eval(prompt)
            llama.scores[: len(prompt)].astype(np.float32).tofile(file)
    sys.stdout.write(f"{llama.n_vocab()}\n")


if __name__ == "__main__":
    main()
