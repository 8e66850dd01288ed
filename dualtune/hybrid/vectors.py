"""Tensors of an adapter as one flat vector, and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dualtune.adapter.spec import Tensors


def flatten(tensors: Tensors) -> np.ndarray:
    """Return all weights as one vector, float32 [P], in the order of the tensors' names."""
    return np.concatenate([tensors[name].astype(np.float32, copy=False).ravel() for name in sorted(tensors)])


def split(vector_P: np.ndarray, like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a flat vector as tensors with the names and shapes of `like`; the inverse of `flatten`."""
    found: dict[str, np.ndarray] = {}
    end = 0
    for name in sorted(like):
        start, end = end, end + like[name].size
        found[name] = vector_P[start:end].reshape(like[name].shape)
    return found


def norm(vector_P: np.ndarray) -> float:
    """Return the L2 norm, summed in float64."""
    return float(np.sqrt(np.sum(np.square(vector_P, dtype=np.float64))))


def cosine(a_P: np.ndarray, b_P: np.ndarray) -> float:
    """Return the cosine of the angle between two vectors; 0 if one of them is zero."""
    lengths = norm(a_P) * norm(b_P)
    return float(np.sum(np.multiply(a_P, b_P, dtype=np.float64))) / lengths if lengths else 0.0
