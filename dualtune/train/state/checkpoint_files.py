"""The names of a checkpoint's files. Bundles list them without reading any, so this imports nothing."""

from __future__ import annotations

MANIFEST = "MANIFEST.json"
FILES = frozenset({"adapter.safetensors", "state.json"})  # and one for each slot of the optimizer
POLICY = "policy.safetensors"  # besides, where the step policy has tensors


def slot_file(slot: str) -> str:
    return f"optimizer_{slot}.safetensors"
