"""The names that a bundle may hold, and why others are refused.

The list decides: a name that is not in it is refused. The rest only explains the refusal.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from dualtune.model.optimizer import OPTIMIZERS, slots_of
from dualtune.train.state.checkpoint_files import FILES, MANIFEST, MAX_STATE_BYTES, POLICY, slot_file

BUNDLE_FILE = "BUNDLE.json"
IN_DIRECTORY = "bundle.tar"  # file name of a bundle if only its directory is given
CONFIG = "config.yaml"
MIB = 1 << 20
MAX_BUNDLE_FILE_BYTES = MIB // 8
MAX_LISTING_BYTES = MIB // 2  # of manifests that are parsed here: JSON takes up to sixty times its size in memory
MAX_CONFIG_BYTES = MIB
MAX_TEXT_BYTES = 64 * MIB  # of a tokenizer: the tokenizer.json of a vocabulary of 262,144 tokens has 33 MiB
MAX_WEIGHTS_BYTES = (1 << 33) - 1  # the largest number of eleven octal digits
MAX_TOTAL_BYTES = 32 << 30
MAX_ENTRIES = 32
MAX_CHECKPOINTS = 2  # the one to resume from, and the best one, which guards.restore_best returns to

TEMPLATE = "chat_template.jinja"  # of a run to resume
ADAPTER_FILES = (
    "adapter_config.json", "adapter_model.safetensors", "adapters.safetensors", "dualtune.json", TEMPLATE,
    "tokenizer.json", "tokenizer_config.json",
)  # fmt: skip
CHECKPOINT_FILES = FILES | {MANIFEST}  # and those of the optimizer's slots
# The files of the slots of each optimizer, without an average and with one.
OPTIMIZER_FILES = tuple(
    frozenset(map(slot_file, slots_of(rule, averages=averages))) for rule in OPTIMIZERS for averages in (False, True)
)
SLOT_FILES = frozenset[str]().union(*OPTIMIZER_FILES)
OPTIONAL_FILES = SLOT_FILES | {POLICY}  # POLICY: only if the step policy has tensors
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "tokenizer.model",
    "vocab.json", "merges.txt", TEMPLATE,
)  # fmt: skip

_SLOT_FILE = re.compile(r"optimizer_[a-z][a-z0-9_]{0,30}\.safetensors")
_STEP = re.compile(r"checkpoints/step-(\d{8,12})/(.+)", re.ASCII)
LISTINGS = (MANIFEST, "dualtune.json")  # of checkpoint and adapter: they also hold hashes of the other files
_CODE = (".py", ".pyc", ".pyd", ".so", ".dll", ".dylib", ".exe", ".sh", ".bat", ".ps1", ".js", ".pth")
_PICKLES = (".pkl", ".pickle", ".bin", ".pt", ".ckpt", ".joblib", ".npy", ".npz")
_ARCHIVES = (".tar", ".zip", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".whl", ".rar")


def is_allowed(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    if folder in ("adapter", "tokenizer"):
        return file in (ADAPTER_FILES if folder == "adapter" else TOKENIZER_FILES)
    return name in (BUNDLE_FILE, CONFIG, TEMPLATE) or step_of(name) is not None


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint file; None for any other name, and for a file that no checkpoint has."""
    match = _STEP.fullmatch(name)
    is_file = match and (match[2] in CHECKPOINT_FILES | OPTIONAL_FILES or _SLOT_FILE.fullmatch(match[2]))
    is_ours = match and is_file and match[1] == f"{int(match[1]):08d}"
    return int(match[1]) if match and is_ours else None


def files_of_checkpoint(present: Collection[str]) -> frozenset[str]:
    """Return the files that a checkpoint with these files must have: of the slots of an optimizer, all or none.

    Of the optimizer of another package only the checkpoint's own manifest says which slots it has.
    """
    own = {file for file in present if _SLOT_FILE.fullmatch(file)}
    fitting = [slots for slots in OPTIMIZER_FILES if own <= slots] or [frozenset(own)]
    return CHECKPOINT_FILES | min(fitting, key=len)


def max_bytes(name: str) -> int:
    """Return the size limit of a member with an allowed name."""
    folder, _, file = name.rpartition("/")
    if file.endswith(".safetensors"):
        return MAX_WEIGHTS_BYTES
    if folder == "tokenizer":
        return MAX_TEXT_BYTES
    if file == "state.json":
        return MAX_STATE_BYTES
    return MAX_LISTING_BYTES if file in LISTINGS else MAX_CONFIG_BYTES


def problem_of(name: str) -> str | None:
    """Return why a name cannot be in a bundle. The name is left out, as it may be long or chosen to confuse."""
    if is_allowed(name):
        return None
    lower = name.lower()
    reasons = (
        (not name, "has no name"),
        (len(name) > 100, f"has a name of {len(name)} characters, at most 100 are allowed"),
        (not name.isascii() or not name.isprintable(), "has a name with other characters than printable ASCII"),
        (name.startswith("/"), "is an absolute path"),
        (re.match(r"[a-zA-Z]:[\\/]", name), "is an absolute path with a drive letter"),
        (".." in re.split(r"[\\/]", name), "leads out of the directory (..)"),
        ("\\" in name, "has a backslash in its name"),
        (":" in name, "has a colon in its name, which on NTFS means a stream of another file"),
        (name.endswith("/"), "is a directory; only files are allowed"),
        ("//" in name or "." in name.split("/"), "has an empty part or a dot as a part of its path"),
        (name.endswith((".", " ")), "ends with a dot or a space, which Windows drops"),
        (lower != name and is_allowed_in_any_case(lower), "differs from an allowed name only in upper and lower case"),
        (lower.endswith(_CODE), "is code, which is not allowed in a bundle"),
        (lower.endswith(_PICKLES), "is a format that can run code when it is loaded (pickle)"),
        (lower.endswith(_ARCHIVES), "is an archive inside the bundle"),
    )
    problem = next((text for applies, text in reasons if applies), None)
    return problem or "is not one of the names that a bundle may hold (docs/adapter_format.md lists them)"


def is_allowed_in_any_case(lower: str) -> bool:
    folder, _, file = lower.rpartition("/")
    spellings = {name.lower(): name for name in (BUNDLE_FILE, CONFIG, *CHECKPOINT_FILES, *OPTIONAL_FILES)}
    file = spellings.get(file, file)
    return is_allowed(f"{folder}/{file}" if folder else file)


def shown(name: str) -> str:
    """Return a name from a file, safe for a terminal."""
    return ascii(name[:120])
