"""Load a model directory's tokenizer like transformers 5, but without its import, which takes seconds.

`tokenizer.json` contains the tokenizer. `tokenizer_config.json` and older files beside it name its special tokens, its
chat templates, and a transformers class, which may rebuild parts of it (`tokenizer_classes.py`). A tokenizer for which
the same result is not certain is loaded by transformers itself, imported late.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken

from dualtune.base.errors import DualtuneError, EnvironmentFault, FormatError
from dualtune.base.untrusted import open_file, parse_object, read_json
from dualtune.data.tokens import tokenizer_classes
from dualtune.data.tokens.tokenizer_classes import NAMED, Unknown
from dualtune.data.tokens.tokenizer_vetting import MAX_FILE_BYTES, MAX_STRUCTURES, reason_of, rust_errors, vet

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
# Files that transformers can convert if there is no tokenizer.json.
CONVERTIBLE = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json", "tiktoken.model")
FILES = (TOKENIZER, CONFIG, "added_tokens.json", "special_tokens_map.json", *CONVERTIBLE)
MISSING = "Copy the whole model directory, or download the model again"
TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"
MAX_TEMPLATE_BYTES = 1 << 20
# Keys of a tokenizer_config.json that change how transformers builds a tokenizer, and are not in use today.
UNUSUAL = {
    "auto_map", "fast_tokenizer_files", "fix_mistral_regex", "gguf_file", "init_inputs", "merges",
    "model_specific_special_tokens", "post_processor", "tokenizer_object", "tokenizer_padding", "tokenizer_truncation",
    "vocab",
}  # fmt: skip
TOKEN_KEYS = {"content", "single_word", "lstrip", "rstrip", "normalized", "special"}
LISTS = ("additional_special_tokens", "extra_special_tokens")
_CLEANED = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"),
    (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip

Token = str | AddedToken
Table = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A tokenizer, with the settings from the files beside it."""

    directory: Path
    rust: Any  # tokenizers.Tokenizer
    named: Mapping[str, str]  # bos_token, eos_token, … -> text
    special_ids: frozenset[int]
    templates: str | Mapping[str, str] | None  # one chat template, or several by name
    cleans_up: bool = False  # whether spaces before punctuation are removed from decoded text

    def id_of(self, name: str) -> int | None:
        """Return the id of a named token. An unknown token has the id of unk_token."""
        return _id_of(self.rust, self.named, self.named.get(name))

    def encode_batch(self, texts: Sequence[str], *, special: bool) -> list[Any]:
        """Return the Rust library's encoding of each text. Raises FormatError if the tokenizer cannot encode one."""
        with rust_errors(self.directory):
            return self.rust.encode_batch(list(texts), add_special_tokens=special)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, without special tokens."""
        with rust_errors(self.directory):
            text = self.rust.decode(list(ids), skip_special_tokens=True)
        for long, short in _CLEANED if self.cleans_up else ():
            text = text.replace(long, short)
        return text


def load(model_dir: Path) -> Loaded:
    """Load the tokenizer of a model directory; it gives the same ids as transformers' AutoTokenizer.

    Raises EnvironmentFault if there is none or transformers cannot load it, FormatError for a damaged or unsafe file.
    """
    for name in FILES:
        if (model_dir / name).is_file() and (size := (model_dir / name).stat().st_size) > MAX_FILE_BYTES:
            raise FormatError(f"{model_dir / name}: {size} bytes, at most {MAX_FILE_BYTES} are allowed. {MISSING}")
    if not (model_dir / TOKENIZER).is_file():
        if not any((model_dir / name).is_file() for name in CONVERTIBLE):
            raise EnvironmentFault(f"{model_dir}: its tokenizer cannot be loaded: there is no {TOKENIZER}. {MISSING}")
        return _by_transformers(model_dir)
    data = (model_dir / TOKENIZER).read_bytes()
    vet(data, model_dir / TOKENIZER)
    try:
        with rust_errors(model_dir), _mute():
            return _rehearsed(_load(model_dir, data))
    except Unknown:
        return _by_transformers(model_dir)


def _rehearsed(loaded: Loaded) -> Loaded:
    """Return the tokenizer after its first use: some faults in the files show only then, as panics.

    That it has no token for a character is an ordinary error, and only matters where the data have it.
    """
    # Some tokenizer.json files contain the truncation and padding settings of a training.
    loaded.rust.no_truncation()
    loaded.rust.no_padding()
    for text in ("", "a", "Aé 1\n"):
        with contextlib.suppress(Exception):
            loaded.rust.decode(loaded.rust.encode(text).ids)
    return loaded


def _load(model_dir: Path, data: bytes) -> Loaded:
    """Load a tokenizer.json. Raises Unknown if transformers may load it differently."""
    config = _read(model_dir / CONFIG)
    family = tokenizer_classes.family_of(_read(model_dir / "config.json"), config, data)
    if UNUSUAL & config.keys() or (model_dir / "tekken.json").exists():
        raise Unknown
    table = parse_object(data, model_dir / TOKENIZER, strict=False, allowance=MAX_STRUCTURES)
    names, extra, added = _special_tokens(model_dir, config, table)
    named: dict[str, Token | None] = {**family.defaults, **names}
    if padding := table.get("padding"):
        named.setdefault("pad_token", padding["pad_token"])
    present = {name: token for name in (*NAMED, *named) if (token := named.get(name)) is not None}
    special = [*present.values(), *extra]
    texts = {name: str(token) for name, token in present.items()}
    rust = family.build(table, data, named, config)
    rust.add_tokens(_missing(rust, added, special, {*texts.values()}))
    if family.marks_all:
        rust.add_tokens([AddedToken(str(token), special=True) for token in special])
    return _loaded(model_dir, rust, texts, [str(token) for token in extra], config)


def _loaded(directory: Path, rust: Any, named: Mapping[str, str], extra: Sequence[str], config: Table) -> Loaded:
    ids = {_id_of(rust, named, text) for text in (*named.values(), *extra)}
    ids |= {id for id, token in rust.get_added_tokens_decoder().items() if token.special}
    even_bpe = config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
    is_cleaned = type(rust.model).__name__ != "BPE" or even_bpe
    cleans_up = bool(config.get("clean_up_tokenization_spaces") and is_cleaned)
    templates = _templates(directory, config)
    return Loaded(directory, rust, named, frozenset(id for id in ids if id is not None), templates, cleans_up)


def _missing(rust: Any, added: Mapping[int, AddedToken], special: Sequence[Token], named: set[str]) -> list[AddedToken]:
    """Return the tokens to add to the tokenizer, in order: the listed ones by id, then missing special tokens."""
    tokens: list[Token] = [token for _, token in sorted(added.items())]
    texts = {token.content for token in rust.get_added_tokens_decoder().values()} | {str(token) for token in tokens}
    for token in special:
        if str(token) not in texts and token not in tokens:
            tokens.append(token)
    whole = [AddedToken(token, special=True) if isinstance(token, str) else token for token in tokens]
    for token in whole:
        token.special = token.special or str(token) in named
    return whole


def _special_tokens(model_dir: Path, config: Table, table: Table) -> tuple[Table, list[Token], dict[int, AddedToken]]:
    """Return (tokens by name, further special tokens, added tokens by id)."""
    config = dict(config)
    if LISTS[0] in config and not config.get(LISTS[1]):
        config[LISTS[1]] = config.pop(LISTS[0])
    own = {name: config.pop(name) for name in [*config] if _is_own(name) and isinstance(config[name], str)}
    if isinstance(config.get(LISTS[1]), dict):
        own |= config.pop(LISTS[1])
    if "added_tokens_decoder" in config:
        listed = _object(config["added_tokens_decoder"])
        added = {int(id): _token(_object(token)) for id, token in listed.items()}
    else:
        config |= _older_special_tokens(model_dir)
        added = _older_added_tokens(model_dir, config)
        for entry in cast("list[Table]", table.get("added_tokens") or []):
            added[entry["id"]] = _token({key: value for key, value in entry.items() if key != "id"})
    named = {name: config[name] for name in (*NAMED, *filter(_is_own, config)) if name in config}
    names = {name: _special(value) for name, value in (named | own).items()}
    return names, [_special(token) for token in _list(config.get(LISTS[1], config.get(LISTS[0])))], added


def _is_own(name: str) -> bool:
    """Return whether a key names a model-specific special token, such as image_token."""
    return name.endswith("_token") and name not in (*NAMED, "add_bos_token", "add_eos_token")


def _older_special_tokens(model_dir: Path) -> Table:
    """Read special_tokens_map.json, used if tokenizer_config.json lists no added tokens."""
    tokens = _read(model_dir / "special_tokens_map.json")
    for name, value in tokens.items():
        if name == LISTS[1] or not (name == LISTS[0] or name in NAMED or _is_own(name)):
            raise Unknown
        if isinstance(value, dict):
            tokens[name] = _token({**cast(Table, value), "special": True})
    return tokens


def _older_added_tokens(model_dir: Path, config: Table) -> dict[int, AddedToken]:
    """Read added_tokens.json, which maps text to id."""
    special = {str(config[name]) for name in NAMED if config.get(name)} | {*map(str, _list(config.get(LISTS[1])))}
    return {
        id: AddedToken(text, normalized=text not in special, special=text in special)
        for text, id in _read(model_dir / "added_tokens.json").items()
    }


def _special(value: Any) -> Any:
    """Read a special token of a config: null, a string, or an object marked as AddedToken."""
    if value is None or isinstance(value, (str, AddedToken)):
        return value
    table = _object(value)
    if table.get("__type") != "AddedToken":
        raise Unknown
    return _token({key: x for key, x in table.items() if key != "__type"})


def _token(table: Table) -> AddedToken:
    try:
        return AddedToken(**{key: value for key, value in table.items() if key in TOKEN_KEYS})
    except (TypeError, ValueError):
        raise Unknown from None


def _object(value: Any) -> Table:
    if not isinstance(value, dict):
        raise Unknown
    return cast(Table, value)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list | None):
        raise Unknown
    return cast("list[Any]", value or [])


def _id_of(rust: Any, named: Mapping[str, str], text: str | None) -> int | None:
    if text is None:
        return None
    id = rust.token_to_id(text)
    return id if id is not None else rust.token_to_id(named.get("unk_token", ""))


def _templates(directory: Path, config: Table) -> str | Mapping[str, str] | None:
    files = {"default": directory / TEMPLATE} if (directory / TEMPLATE).is_file() else {}
    if (directory / TEMPLATES).is_dir():
        files |= {path.stem: path for path in sorted((directory / TEMPLATES).glob("*.jinja"))}
    if files:
        texts = {name: _text(path) for name, path in files.items()}
        return texts["default"] if texts.keys() == {"default"} else texts
    own = config.get("chat_template")
    if own is None or isinstance(own, str):
        return own
    if isinstance(own, dict):  # converted to the list form, as in the file
        listed: Sequence[Any] = [{"name": n, "template": text} for n, text in cast("dict[Any, Any]", own).items()]
    else:
        listed = cast("list[Any]", own) if isinstance(own, list) else [own]
    named: dict[str, str] = {}
    for entry in listed:
        match entry:
            case {"name": str(name), "template": str(template)}:
                named[name] = template
            case _:
                raise FormatError(
                    f"{directory / CONFIG}: chat_template: must be a text, or a list of names and templates"
                )
    return named


def _text(path: Path) -> str:
    with open_file(path) as file:
        data = file.read(MAX_TEMPLATE_BYTES + 1)
    if len(data) > MAX_TEMPLATE_BYTES:
        raise FormatError(f"{path}: more than {MAX_TEMPLATE_BYTES} bytes, which no chat template has")
    try:
        return data.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: is not UTF-8 (byte {error.start})") from None


def _read(path: Path) -> Table:
    """Read the object in a JSON file; an empty one if there is no file."""
    if not path.is_file():
        return {}
    return read_json(path, max_bytes=MAX_FILE_BYTES, strict=False, allowance=4)


@contextlib.contextmanager
def _mute() -> Generator[None]:
    """Silence both streams: the Rust library prints untrusted keys of the files there, and backtraces of its panics."""
    sys.stdout.flush()
    sys.stderr.flush()
    copies = {stream: os.dup(stream) for stream in (1, 2)}
    with Path(os.devnull).open("w") as nowhere:
        for stream in copies:
            os.dup2(nowhere.fileno(), stream)
    try:
        yield
    finally:
        for stream, copy in copies.items():
            os.dup2(copy, stream)
            os.close(copy)


def _by_transformers(model_dir: Path) -> Loaded:
    """Load the tokenizer with transformers."""
    # On an MLX-only machine its import warns "PyTorch was not found", but the engines load the models.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        from transformers import AutoTokenizer

        with _mute():
            tokenizer = cast(Any, AutoTokenizer).from_pretrained(
                model_dir, trust_remote_code=False, local_files_only=True
            )
    except BaseException as error:  # any fault in the files, also a panic of the Rust library
        if isinstance(error, (KeyboardInterrupt, SystemExit, DualtuneError)):
            raise
        reason = reason_of(error)
        if "Couldn't instantiate the backend tokenizer" in reason:  # followed by a list of the supported formats
            present = ", ".join(name for name in FILES if (model_dir / name).exists())
            reason = f"there is no tokenizer.json, and its files ({present}) cannot be converted to one"
        raise EnvironmentFault(f"{model_dir}: its tokenizer cannot be loaded: {reason}. {MISSING}") from error
    if not tokenizer.is_fast:
        raise EnvironmentFault(f"{model_dir}: a tokenizer.json is needed (a fast tokenizer, with character offsets)")
    config = {key: getattr(tokenizer, key) for key in ("chat_template", "clean_up_tokenization_spaces")}
    with rust_errors(model_dir), _mute():
        return _rehearsed(
            _loaded(
                model_dir,
                tokenizer.backend_tokenizer,
                tokenizer.special_tokens_map,
                tokenizer.extra_special_tokens,
                config,
            )
        )
