"""What huggingface_hub takes from a server and uses as the name of a file: checked before it does.

The names of files in its cache are the ETag and the commit that the server sends, as they are. A hostile mirror, or
whoever answers in its place, would have it write outside of the cache.
"""

from __future__ import annotations

import re
from typing import Any

from dualtune.errors import FormatError

_NAMING = ("etag", "x-linked-etag", "x-repo-commit", "x-xet-hash")
_SAFE = re.compile(r'(W/)?"?(?!\.{1,2}"?$)[\w.+=:~-]{1,200}"?', re.ASCII)
_guarded = False


def guard_hub() -> None:
    """Check the answers that huggingface_hub gets in this process, from now on. FormatError for a name with a path."""
    global _guarded
    if _guarded:
        return
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http as http  # pyright: ignore[reportPrivateUsage]

    make: Any = getattr(http, "_GLOBAL_CLIENT_FACTORY", None) or http.default_client_factory

    def factory() -> Any:
        client: Any = make()
        hooks: dict[str, list[Any]] = client.event_hooks
        client.event_hooks = hooks | {"response": [*hooks.get("response", []), _check]}
        return client

    set_client_factory(factory)
    _guarded = True


def _check(response: Any) -> None:
    if response.request.method != "HEAD":  # by which a file's names are asked; an ETag of the API may be anything
        return
    for name in _NAMING:
        value: str = response.headers.get(name, "")
        if value and not _SAFE.fullmatch(value):
            raise FormatError(
                f"{response.request.url.host}: sent the header {name} {value[:100]!r}, which leads out of the cache. "
                "Nothing of this answer is kept. This is no hub, or somebody answers in its place: check HF_ENDPOINT"
            )
