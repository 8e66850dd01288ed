"""The loss of an exported model on the rows that its run held out, beside the run's last evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dualtune.adapter.formats.directory import Adapter
from dualtune.adapter.formats.manifest import MANIFEST_FILE, MAX_BYTES
from dualtune.backend import Engine
from dualtune.config import load_config
from dualtune.data.documents import Data
from dualtune.errors import ConfigError, DataError, DualtuneError
from dualtune.evaluate.evaluation import evaluate, layout_of
from dualtune.evaluate.inference import load_tokenizer
from dualtune.io import fields
from dualtune.io.untrusted import read_json
from dualtune.train.state.run_dir import CONFIG


class HeldOut:
    """The rows that a run held out, tokenized as in its training."""

    def __init__(self, run: Path, model: Path, adapter: Adapter | None, directory: Path | None) -> None:
        """Open the data of a run's config. DualtuneError, which says what is missing, if that cannot be done.

        `model`: the base, or the model that was trained whole. `directory`: that of the adapter.
        """
        if not (run / CONFIG).is_file():
            raise ConfigError(f"there is no run with a {CONFIG} around the adapter")
        config = load_config(run / CONFIG)
        tokenizer, _ = load_tokenizer(model, adapter, directory, "auto", config.data.special_tokens_in_text)
        self._documents, self._layout = Data(config).held_out_only(tokenizer), layout_of(config)
        if not len(self._documents):
            raise DataError("the run held out no rows")

    def loss(self, engine: Engine) -> float:
        """Return the mean loss over the target tokens, in nats."""
        return evaluate(engine, self._documents, self._layout).eval_loss


def open_held_out(run: Path, model: Path, adapter: Adapter | None, directory: Path | None) -> HeldOut | str:
    """Return the held-out rows of a run, or why its loss cannot be measured here."""
    try:
        return HeldOut(run, model, adapter, directory)
    except DualtuneError as error:
        return str(error).splitlines()[0]


def manifest_of(model: Path) -> dict[str, Any]:
    """Return the record of a model that a run has trained whole; empty for another one."""
    file = model / MANIFEST_FILE
    return read_json(file, max_bytes=MAX_BYTES) if file.is_file() else {}


def last_evaluation(metadata: dict[str, Any]) -> float | None:
    """Return the loss of a run's last evaluation by the manifest of its result; None if there was none."""
    return fields.number(fields.subtable(metadata, "training", "dualtune.json").get("eval_loss"))
