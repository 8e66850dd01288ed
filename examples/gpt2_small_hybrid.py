"""GPT-2 small (124M) trained whole with predictive training, which takes some steps along a line that it predicts.

    python examples/gpt2_small_hybrid.py --smoke                # a tiny GPT-2 by the same code, in seconds on a CPU
    python examples/gpt2_small_hybrid.py --platform cuda        # the real size, 1000 steps

The settings are the baseline's, with the careful preset. The run says at its end what was predicted, what of it was
accepted, and what that cost. Whether it is worth it: `dualtune hybrid bench` trains beside runs of the same cost.
"""

from gpt2_small_baseline import SETTINGS
from gpt2_whole import main

HYBRID = {"hybrid.enabled": True, "hybrid.preset": "conservative"}
SHORT = {"hybrid.warmup_steps": 2}  # a smoke run is over before the warm-up of the preset

if __name__ == "__main__":
    main(__doc__, "124M", SETTINGS | HYBRID, smoke=SHORT)
