"""GPT-2 small (124M) trained whole with what saves memory: all of it at once, or each technique alone beside the rest.

    python examples/gpt2_small_memory_optimized.py --smoke            # a tiny GPT-2 by the same code, on a CPU
    python examples/gpt2_small_memory_optimized.py --each --smoke     # each technique in a process of its own
    python examples/gpt2_small_memory_optimized.py --platform cuda    # the real size, 1000 steps

bfloat16 halves the activations, four micro-batches in a step quarter them, all layers are recomputed, and the optimizer
keeps its state in 8 bits. The masters of the weights stay float32, so small updates add up.
"""

import re
import subprocess
import sys

from gpt2_whole import main

BASELINE = {"model.dtype": "float32", "train.micro_batch_tokens": 4096, "train.learning_rate": 6e-4}
BASELINE |= {"memory.checkpointing": "none"}
TECHNIQUES = {
    "baseline": {},
    "bfloat16": {"model.dtype": "bfloat16"},
    "micro-batches": {"train.micro_batch_tokens": 1024},
    "8-bit optimizer": {"train.optimizer": "adamw_8bit"},
    "recomputed layers": {"memory.checkpointing": "full"},
}
ALL = {key: value for settings in TECHNIQUES.values() for key, value in settings.items()}


def each():
    """Run every technique, and print its planned and its measured peak below each other.

    Each in a process of its own, because what a process has used once it keeps. With --smoke, libraries are nearly all.
    """
    args = [arg for arg in sys.argv[1:] if arg != "--each"]
    print(f"{'technique':<18} {'planned':>10}  {'measured':>10}")
    for name in (*TECHNIQUES, "all"):
        command = [sys.executable, __file__, "--technique", name, *args]
        if "--out" not in args:
            command += ["--out", f"runs/gpt2_each/{name.replace(' ', '_')}"]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        planned = re.search(r"^ +(.*B)  in all$", result.stdout, re.M)[1]
        measured = re.search(r"^measured peak (.*B) ", result.stdout, re.M)[1]
        print(f"{name:<18} {planned:>10}  {measured:>10}")


if __name__ == "__main__":
    if "--each" in sys.argv:
        each()
    else:
        main(__doc__, "124M", BASELINE | ALL, techniques={name: BASELINE | TECHNIQUES[name] for name in TECHNIQUES})
