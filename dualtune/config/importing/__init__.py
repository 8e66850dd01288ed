"""Configs of other trainers, translated: one table a trainer, and what reads a file by it."""

from dualtune.config.importing.table import ImportedConfig
from dualtune.config.importing.translate import TRAINERS, import_config

__all__ = ["TRAINERS", "ImportedConfig", "import_config"]
