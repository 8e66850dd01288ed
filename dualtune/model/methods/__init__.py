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

# Methods of PEFT that are not supported here: the key in adapter_config.json -> why the adapter is refused.
UNSUPPORTED = {
    "modules_to_save": "whole modules were trained next to the adapter",
}
