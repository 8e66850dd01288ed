"""What is trained, by method. A new one is a file in this folder and a line in METHODS (decision 0019).

Without NumPy at import time, because the config's schema imports the names from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dualtune.model.methods import dora, lora
from dualtune.model.methods.method import Method

METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in (lora.METHOD, dora.METHOD)})

# Full fine-tuning: all parameters of the model are trained, under their own names. No layer is adapted, so it has no
# record.
FULL = "full"
NAMES = (*METHODS, FULL)  # the values of adapter.method

# The values of adapter.init, the default first.
INITS = tuple(dict.fromkeys(init for method in METHODS.values() for init in method.inits))

# Those that are made of the weight. They are kept beside what is trained, so that the adapter has twice the rank.
KEPT_INITS = frozenset({"pissa", "olora"})

# Other adapters of PEFT, by peft_type in lower case -> what they are, and the nearest that is here.
_RANK, _FEW = "the nearest is lora of a higher rank", "the nearest is lora of rank 1"
OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "adalora": f"AdaLoRA moves ranks between modules while it trains; {_RANK}",
        "boft": f"BOFT rotates the weights; {_RANK}",
        "fourierft": f"FourierFT trains a few frequencies of the update; {_FEW}",
        "hira": f"HiRA multiplies the weights by the update; {_RANK}",
        "ia3": f"IA3 trains factors of activations; {_FEW}",
        "ln_tuning": "LN tuning trains norms; the nearest is adapter.method: full, which trains all parameters",
        "loha": f"LoHa multiplies two low-rank updates element by element; {_RANK}",
        "lokr": f"LoKr is a Kronecker product; {_RANK}",
        "oft": f"OFT rotates the weights; {_RANK}",
        "randlora": f"RandLoRA trains factors of random matrices; {_RANK}",
        "vblora": f"VB-LoRA takes its vectors from a bank that all layers share; {_FEW}",
        "vera": f"VeRA trains vectors between random matrices that all layers share; {_FEW}",
        "xlora": "X-LoRA mixes several adapters token by token; the nearest is one lora, trained on all of their data",
    }
)
