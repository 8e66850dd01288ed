"""The names of a checkpoint's files and the limit of its state. Bundles need them without NumPy: no import here."""

from __future__ import annotations

MANIFEST = "MANIFEST.json"
FILES = frozenset({"adapter.safetensors", "state.json"})  # and one for each slot of the optimizer
POLICY = "policy.safetensors"  # besides, where the step policy has tensors
MAX_STATE_BYTES = 4 << 20  # of state.json


def slot_file(slot: str) -> str:
    return f"optimizer_{slot}.safetensors"
