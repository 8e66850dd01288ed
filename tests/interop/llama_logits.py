"""The logits of llama.cpp for prompts given as token ids. Runs in the environment of `scripts/interop_llama.sh`.

python llama_logits.py '{"model": GGUF, "adapter": GGUF or null, "prompts": [[1, 2], …], "out": NPZ}'
"""

import json
import sys

import numpy as np
from llama_cpp import GGML_TYPE_F32, Llama

job = json.loads(sys.argv[1])
# Everything in float32, the cache of keys and values included, which is float16 by default.
llama = Llama(
    job["model"], lora_path=job["adapter"], logits_all=True, n_ctx=256, n_threads=1, n_gpu_layers=0, verbose=False,
    flash_attn=False, type_k=GGML_TYPE_F32, type_v=GGML_TYPE_F32,
)  # fmt: skip
found = {}
for i, prompt in enumerate(job["prompts"]):
    llama.reset()
    llama.eval(prompt)
    found[str(i)] = llama.scores[: len(prompt)].copy()
np.savez(job["out"], **found)
