"""dualtune: LoRA and QLoRA fine-tuning on Apple silicon (MLX) and NVIDIA GPUs (PyTorch) from one config.

from dualtune import load_config, train

result = train(load_config("config.yaml", overrides=["train.steps=50"]), platform="auto")
print(result.adapter_dir, result.eval_loss)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualtune.base.moved import find_moved_modules
from dualtune.base.versions import VERSION

if TYPE_CHECKING:
    from dualtune.config import Config
    from dualtune.train.hooks import Hook
    from dualtune.train.run import TrainResult

find_moved_modules()

__version__ = VERSION
__all__ = ["load_config", "train"]

# The functions import late because `dualtune --help` imports this file and must answer at once.


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Read a config from a YAML file or a mapping of its sections, with overrides such as "train.steps=50".

    ConfigError lists every problem, with its line.
    """
    from dualtune.config import load_config as load

    return load(source, overrides)


def train(
    config: Config | str | Path | Mapping[str, Any], platform: str = "auto", hooks: Sequence[Hook] = (), *,
    resume: str = "auto",
) -> TrainResult:  # fmt: skip
    """Train an adapter and return where it is. `config` may also be a path or a mapping, as in `load_config`.

    `platform` is auto, mlx, cuda or cpu; see `dualtune.train.hooks` for hooks. If the run directory holds a checkpoint,
    the run resumes from it, unless `resume` is "never"; `resume` can also be a path. In a
    notebook, a table and a curve below the cell show the run.
    """
    from dualtune.show.run import train_on

    return train_on(config, platform, hooks, resume=resume)
