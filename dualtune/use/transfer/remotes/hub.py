"""A model repository of the Hugging Face hub: it holds an adapter directory with a model card, not a bundle.

So PEFT and transformers load it from there by its name. A push is one commit: all or nothing, and earlier versions stay
in the history.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, DualtuneError, EnvironmentFault
from dualtune.base.hub import guard_hub
from dualtune.base.redaction import redact
from dualtune.config import load_config
from dualtune.model.formats.directory import MANIFEST_FILE, read_adapter
from dualtune.use.model_card import FILE, adapter_card
from dualtune.use.transfer.bundles.names import ADAPTER_FILES, CONFIG
from dualtune.use.transfer.remotes.retries import Cut, Patience

SCHEME = "hf://"
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
    card = adapter_card(hub.repo, read_adapter(directory), config)
    names = {name for name in ADAPTER_FILES if (directory / name).is_file()}

    def attempt() -> bool:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        with _own_errors(hub):
            present: set[str] = set()
            if (info := _info(api, hub)) is None:
                api.create_repo(hub.repo, private=not public, exist_ok=True)
            else:
                if info.private and public:
                    raise ConfigError(
                        f"--public: {hub} exists and is private. Change that in the settings of the repository"
                    )
                if not info.private and not public:
                    raise ConfigError(
                        f"{hub}: the repository is public, and so would be the adapter. If you want that, add --public"
                    )
                present = {file.rfilename for file in info.siblings or ()} - {".gitattributes"}
                if names == present & {*ADAPTER_FILES} and _has_manifest_of(hub, directory):
                    return False
                if present and not force:
                    raise ConfigError(f"{hub}: the repository already holds other files. Add a commit with --force")
            interrupt.poll()
            # One commit, all or nothing. Files of another layout go: the new dualtune.json does not list them.
            operations = [
                CommitOperationAdd(FILE, card.encode()),
                *(CommitOperationAdd(name, str(directory / name)) for name in ADAPTER_FILES if name in names),
                *(CommitOperationDelete(name) for name in sorted((present & {*ADAPTER_FILES}) - names)),
            ]
            api.create_commit(hub.repo, operations, commit_message="Adapter by dualtune", revision=hub.revision)
            return True

    return patience.keep_trying(attempt, str(hub))


def _has_manifest_of(hub: Hub, directory: Path) -> bool:
    """Return whether the repository has the same dualtune.json, which has the sha256 of every other file."""
    from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType]

    manifest = directory / MANIFEST_FILE
    if not manifest.is_file():
        return False
    stored = Path(hf_hub_download(hub.repo, MANIFEST_FILE, revision=hub.revision))
    return stored.read_bytes() == manifest.read_bytes()


def pull(hub: Hub, into: Path, *, patience: Patience) -> None:
    """Copy the adapter's files into an existing empty directory. They are untrusted until they are packed."""
    from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType]

    def attempt() -> None:
        with _own_errors(hub):
            info = _info(_api(), hub)
            if info is None:
                raise EnvironmentFault(f"{hub}: no such repository, or no access to it. Log in with: hf auth login")
            present = {file.rfilename for file in info.siblings or ()}
            if ADAPTER_FILES[0] not in present:
                raise EnvironmentFault(f"{hub}: has no {ADAPTER_FILES[0]} at its top, so it is not an adapter")
            for name in sorted(present & {*ADAPTER_FILES}):
                interrupt.poll()
                shutil.copyfile(hf_hub_download(hub.repo, name, revision=info.sha), into / name)

    patience.keep_trying(attempt, str(hub))


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
