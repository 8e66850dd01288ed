"""The base model on disk: found, checked before anything is loaded, and fingerprinted.

A model directory comes from a stranger. Which of its files are the model is decided once, in `find_weights`; what is
checked, fingerprinted and loaded on either backend are those files and no others.
"""

from dualtune.base_model.config_file import MAX_CONFIG_BYTES, learned_positions, read_config, vocabulary_size
from dualtune.base_model.copies import copy_without_weights, staged
from dualtune.base_model.fingerprint import fingerprint
from dualtune.base_model.inside import file_in
from dualtune.base_model.resolve import HUB_PATTERNS, find_weights, resolve_model
from dualtune.base_model.weights import BaseWeights, check_complete, has_weights

__all__ = [
    "HUB_PATTERNS",
    "MAX_CONFIG_BYTES",
    "BaseWeights",
    "check_complete",
    "copy_without_weights",
    "file_in",
    "find_weights",
    "fingerprint",
    "has_weights",
    "learned_positions",
    "read_config",
    "resolve_model",
    "staged",
    "vocabulary_size",
]
