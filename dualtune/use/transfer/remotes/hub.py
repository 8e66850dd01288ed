"""A model repository of the Hugging Face hub: it holds an adapter directory with a model card, not a bundle.

So PEFT and transformers load it from there by its name. A push is one commit: all or nothing, and earlier versions stay
in the history.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, DualtuneError, EnvironmentFault
from dualtune.base.hub import guard_hub
from dualtune.base.redaction import redact
from dualtune.config import Config, load_config
from dualtune.model.formats.chat_template import TEMPLATE_FILE, describe_template
from dualtune.model.formats.directory import MANIFEST_FILE, Adapter, read_adapter
from dualtune.use.transfer.bundles.names import ADAPTER_FILES, CONFIG
from dualtune.use.transfer.remotes.retries import Cut, Patience

SCHEME = "hf://"
CARD = "README.md"
_NAME = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?/?", re.ASCII)
_TOO_MANY, _SERVER_FAILED = 429, 500


@dataclass(frozen=True, slots=True)
class Hub:
    """A repository and its branch, tag or commit."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{SCHEME}{self.repo}{f'@{self.revision}' if self.revision else ''}"

    @property
    def name(self) -> str:
        return self.repo.partition("/")[2]


def parse(text: str) -> Hub:
    match = _NAME.fullmatch(text)
    if match is None:
        raise ConfigError(f"TARGET: got {text!r}; allowed: hf://owner/name, or hf://owner/name@revision")
    return Hub(match[1], match[2])


def push(hub: Hub, unpacked: Path, *, public: bool, force: bool, patience: Patience) -> bool:
    """Commit the adapter of an unpacked bundle, with a model card. False if the same adapter is there already.

    A new repository is private unless `public`; an existing one must have the same visibility as requested.
    """
    api, directory = _api(), unpacked / "adapter"
    config = load_config(unpacked / CONFIG) if (unpacked / CONFIG).is_file() else None
    text = card(hub.repo, read_adapter(directory), config)

    def attempt() -> bool:
        with _own_errors(hub):
            info = _info(api, hub)
            if info is None:
                api.create_repo(hub.repo, private=not public, exist_ok=True)
                there: set[str] = set()
            else:
                there = {file.rfilename for file in info.siblings or ()} - {".gitattributes"}
                _check_visibility(hub, is_private=bool(info.private), public=public)
                if _is_same(hub, directory, there):
                    return False
                if there and not force:
                    raise ConfigError(f"{hub}: the repository already holds other files. Add a commit with --force")
            interrupt.poll()
            _commit(api, hub, directory, text, there)
            return True

    return patience.keep_trying(attempt, str(hub))


def pull(hub: Hub, into: Path, *, patience: Patience) -> None:
    """Copy the adapter's files into an existing empty directory. They are untrusted until they are packed."""
    from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType]

    def attempt() -> None:
        with _own_errors(hub):
            info = _info(_api(), hub)
            if info is None:
                raise EnvironmentFault(f"{hub}: no such repository, or no access to it. Log in with: hf auth login")
            there = {file.rfilename for file in info.siblings or ()}
            if ADAPTER_FILES[0] not in there:
                raise EnvironmentFault(f"{hub}: has no {ADAPTER_FILES[0]} at its top, so it is not an adapter")
            for name in sorted(there & {*ADAPTER_FILES}):
                interrupt.poll()
                shutil.copyfile(hf_hub_download(hub.repo, name, revision=info.sha), into / name)

    patience.keep_trying(attempt, str(hub))


def _commit(api: Any, hub: Hub, directory: Path, text: str, there: set[str]) -> None:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    names = [name for name in ADAPTER_FILES if (directory / name).is_file()]
    stale = sorted((there & {*ADAPTER_FILES}) - {*names})  # of another layout: the new dualtune.json lacks them
    operations = [
        CommitOperationAdd(CARD, text.encode()),
        *(CommitOperationAdd(name, str(directory / name)) for name in names),
        *(CommitOperationDelete(name) for name in stale),
    ]
    api.create_commit(hub.repo, operations, commit_message="Adapter by dualtune", revision=hub.revision)


def _is_same(hub: Hub, directory: Path, there: set[str]) -> bool:
    """Compare by dualtune.json, which has the sha256 of every other file."""
    from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType]

    ours = {name for name in ADAPTER_FILES if (directory / name).is_file()}
    if MANIFEST_FILE not in ours or there & {*ADAPTER_FILES} != ours:
        return False
    theirs = Path(hf_hub_download(hub.repo, MANIFEST_FILE, revision=hub.revision))
    return theirs.read_bytes() == (directory / MANIFEST_FILE).read_bytes()


def _check_visibility(hub: Hub, *, is_private: bool, public: bool) -> None:
    if is_private and public:
        raise ConfigError(f"--public: {hub} exists and is private. Change that in the settings of the repository")
    if not is_private and not public:
        raise ConfigError(
            f"{hub}: the repository is public, and so would be the adapter. If you want that, add --public"
        )


def _api() -> Any:
    from huggingface_hub import HfApi

    guard_hub()
    return cast(Any, HfApi())


def _info(api: Any, hub: Hub) -> Any:
    """Return the hub's information on the repository, None if it does not exist."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return api.model_info(hub.repo, revision=hub.revision)
    except RepositoryNotFoundError:
        return None


@contextlib.contextmanager
def _own_errors(hub: Hub) -> Generator[None]:
    """Turn the errors of huggingface_hub and the libraries below it into our own."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        yield
    except (Cut, DualtuneError):
        raise
    except HFValidationError as error:
        raise ConfigError(f"{hub}: {error}") from error
    except OfflineModeIsEnabled as error:
        raise EnvironmentFault(f"{hub}: HF_HUB_OFFLINE is set, so the hub cannot be reached. Unset it") from error
    except HfHubHTTPError as error:
        code = cast(Any, error).response.status_code
        text = redact(" ".join(str(error).split()))[:300]
        if code == _TOO_MANY or code >= _SERVER_FAILED:
            raise Cut(f"the hub answered {code}: {text}") from error
        raise EnvironmentFault(
            f"{hub}: the hub answered {code}: {text}. Check your access with: hf auth whoami"
        ) from error
    except OSError as error:  # includes network errors
        raise Cut(redact(f"{type(error).__name__}: {error}")[:300]) from error
    except Exception as error:  # from the HTTP and xet libraries, which differ by version
        if any(kind.__name__ == "TransportError" for kind in type(error).__mro__):  # httpx: refused, timed out, cut
            raise Cut(redact(f"{type(error).__name__}: {error}")[:300]) from error
        raise EnvironmentFault(f"{hub}: failed: {redact(f'{type(error).__name__}: {error}')[:300]}") from error


# ----------------------------------------------------------------------------------------------------------------------
# The model card of an adapter on the hub: only what dualtune.json and the config say.
#
# Metadata: https://huggingface.co/docs/hub/model-cards

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_NUMBERS = (  # of `training` in dualtune.json
    ("final_loss", "training loss, last step"),
    ("eval_loss_before", "evaluation loss, before training"),
    ("eval_loss", "evaluation loss, after training"),
    ("best_eval_loss", "best evaluation loss"),
    ("best_step", "step of the best evaluation loss"),
)
_SETTINGS = ("train.optimizer", "train.learning_rate", "train.schedule", "train.warmup", "train.weight_decay",
             "data.max_length", "data.loss_on", "model.dtype", "model.quantization")  # fmt: skip


def card(repo: str, adapter: Adapter, config: Config | None) -> str:
    """Return README.md for a repository `owner/name`. The config must no longer hold directories of this machine."""
    training = _table(adapter.metadata.get("training"))
    base = _table(adapter.metadata.get("base")).get("name") or adapter.base_model
    numbers = [(words, training[key]) for key, words in _NUMBERS if training.get(key) is not None]
    sections = [
        _front_matter(base, config),
        f"# {repo}",
        _text_of_base(base),
        _section("How it was trained", _rows_of_training(adapter, training, config)),
        _section("Data", _rows_of_data(training, config)),
        _section("Measured", numbers) or "## Measured\n\nNothing was recorded.",
        _usage(repo, base if base and _HUB_NAME.fullmatch(base) else "BASE_MODEL"),
        _text_of_template(repo) if adapter.template is not None else "",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(base: str | None, config: Config | None) -> str:
    table: dict[str, Any] = {"library_name": "peft", "tags": ["lora", "dualtune", "mlx"]}
    if base and _HUB_NAME.fullmatch(base):
        table |= {"base_model": base, "base_model_relation": "adapter"}
    if datasets := [name for name in _sources(config) if _HUB_NAME.fullmatch(name) and "." not in name]:
        table["datasets"] = datasets
    return f"---\n{yaml.safe_dump(table, sort_keys=True, allow_unicode=True)}---"


def _text_of_base(base: str | None) -> str:
    name = f"`{_safe(base)}`" if base else "a base model that was not recorded"
    return (
        f"A LoRA adapter for {name}. It holds only the adapter: the base model is needed too. "
        "`dualtune.json` has the sha256 of each file and of parts of the base, and what both compute for fixed prompts."
    )


def _rows_of_training(adapter: Adapter, training: Mapping[str, Any], config: Config | None) -> list[tuple[str, Any]]:
    spec = adapter.spec
    rows: list[tuple[str, Any]] = [("method", spec.method_spec.title)] if training else []
    if adapter.template_hash is not None:
        rows.append(("chat template", describe_template(adapter.template, adapter.metadata)))
    how = "alpha / √rank" if spec.scaling == "rank_stabilized" else "alpha / rank"
    rows += [("rank", spec.rank), (f"scale ({how})", spec.scale), ("modules", ", ".join(spec.targets))]
    rows += [(key, training[key]) for key in ("backend", "steps", "skipped_steps", "seed") if key in training]
    if config is not None:
        values = config.model_dump(mode="json")
        rows += [(f"`{key}`", values[section][name]) for key in _SETTINGS for section, _, name in [key.partition(".")]]
    return rows


def _rows_of_data(training: Mapping[str, Any], config: Config | None) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [("source", ", ".join(_sources(config)))] if config is not None else []
    return rows + [("documents trained on", training[key]) for key in ("train_documents",) if key in training]


def _sources(config: Config | None) -> list[str]:
    """Return the names of the training data: files without their directories, datasets as on the hub."""
    if config is None:
        return []
    sources: Any = config.model_dump(mode="json")["data"]["train"]
    many = cast("list[Any]", sources) if isinstance(sources, list) else [sources]
    return [str(_table(one).get("path", one)) if isinstance(one, dict) else str(one) for one in many]


def _section(title: str, rows: list[tuple[str, Any]]) -> str:
    if not rows:
        return ""
    lines = [f"| {_safe(name)} | {_safe(value)} |" for name, value in rows]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines])


def _usage(repo: str, base: str) -> str:
    return f"""## Use it

```python
# PEFT: transformers, on torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{repo}")
```

```python
# mlx-lm
from huggingface_hub import snapshot_download
from mlx_lm import load

model, tokenizer = load("{base}", adapter_path=snapshot_download("{repo}"))
```

```sh
dualtune pull hf://{repo} pulled
dualtune verify pulled/adapter --base {base}    # does it compute the same here?
```"""


def _text_of_template(repo: str) -> str:
    return f"""The tokenizer of the base needs the chat template used in training:

```python
from huggingface_hub import hf_hub_download

tokenizer.chat_template = open(hf_hub_download("{repo}", "{TEMPLATE_FILE}"), encoding="utf-8").read()
```"""


def _safe(value: Any) -> str:
    """Return a value, escaped for a cell of a table."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return "".join(c if c.isprintable() else " " for c in text).replace("|", "\\|").replace("<", "&lt;")


def _table(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
