"""The base model on disk: found, checked before anything is loaded, and fingerprinted.

A model directory is untrusted. `find_weights` is the only place that decides which of its files are the model; exactly
these files are checked, fingerprinted and loaded, on either backend.
"""

from dualtune.base_model.config_file import (
    MAX_CONFIG_BYTES,
    ignored_code,
    longest_text,
    position_table_size,
    read_config,
    stored_precision,
    vocabulary_size,
)
from dualtune.base_model.copies import MODEL_FILES, copy_model, copy_without_weights, staged
from dualtune.base_model.embeddings import untied_head, untrained_rows
from dualtune.base_model.fingerprint import fingerprint
from dualtune.base_model.names import naming_of
from dualtune.base_model.resolve import (
    HUB_PATTERNS,
    find_weights,
    is_elsewhere,
    is_here,
    model_here,
    plain_name,
    resolve_model,
)
from dualtune.base_model.weights import BaseWeights, check_complete, has_weights
from dualtune.io.inside import file_in

__all__ = [
    "HUB_PATTERNS",
    "MAX_CONFIG_BYTES",
    "MODEL_FILES",
    "BaseWeights",
    "check_complete",
    "copy_model",
    "copy_without_weights",
    "file_in",
    "find_weights",
    "fingerprint",
    "has_weights",
    "ignored_code",
    "is_elsewhere",
    "is_here",
    "longest_text",
    "model_here",
    "naming_of",
    "plain_name",
    "position_table_size",
    "read_config",
    "resolve_model",
    "staged",
    "stored_precision",
    "untied_head",
    "untrained_rows",
    "vocabulary_size",
]
