"""The config of a run: its schema, reading it from YAML with overrides, and writing it."""

from dualtune.config.data_section import DataConfig, SourceConfig
from dualtune.config.load import get_value, load_config, parse_config
from dualtune.config.render import default_yaml, json_schema, to_yaml
from dualtune.config.schema import (
    AdapterConfig,
    Config,
    HybridConfig,
    MemoryConfig,
    ModelConfig,
    PreferenceConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "AdapterConfig",
    "Config",
    "DataConfig",
    "HybridConfig",
    "MemoryConfig",
    "ModelConfig",
    "PreferenceConfig",
    "RunConfig",
    "SourceConfig",
    "TrainConfig",
    "default_yaml",
    "get_value",
    "json_schema",
    "load_config",
    "parse_config",
    "to_yaml",
]
