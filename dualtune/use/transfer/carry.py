"""`dualtune push` and `dualtune pull`: copy a bundle to or from a remote, and verify it before it gets its final name.

This file packs and unpacks bundles, with `pack` and `bundle`; the folder `remotes` transfers them.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path

from dualtune.base import fields, interrupt
from dualtune.base.errors import ConfigError, DiskError, FormatError
from dualtune.base.files import did_you_mean_path, expanded, fsync, umask
from dualtune.model.formats.directory import CONFIG_FILE, MANIFEST_FILE, read_manifest
from dualtune.train.state import checkpoint
from dualtune.train.state.listing import list_runs
from dualtune.train.state.run_dir import ADAPTER as ADAPTER_DIR
from dualtune.train.state.run_dir import CHECKPOINTS, METRICS, is_run_dir
from dualtune.use.transfer.bundles import bundle, signature
from dualtune.use.transfer.bundles.bundle import BundleReport
from dualtune.use.transfer.bundles.manifest import ADAPTER, RequiredBinding
from dualtune.use.transfer.bundles.names import IN_DIRECTORY
from dualtune.use.transfer.bundles.pack import pack
from dualtune.use.transfer.bundles.signature import Trust
from dualtune.use.transfer.remotes import hub, target
from dualtune.use.transfer.remotes.hub import Hub
from dualtune.use.transfer.remotes.retries import AbsentFault, Patience
from dualtune.use.transfer.remotes.target import RemoteTarget

RUNS = Path("runs")
SIGNATURE_ENDING = ".sig"


@dataclass(frozen=True, slots=True)
class PushRequest:
    """What to push: the options of `dualtune bundle pack`, or an existing bundle.

    Of a run that is finished the default is its adapter, of another one its newest checkpoint, as with `to_resume`.
    """

    source: Path
    step: int | None = None
    adapter: bool = False
    tokenizer: str | None = None
    key: Path | None = None
    to_resume: bool = False


@dataclass(frozen=True, slots=True)
class Pushed:
    where: str
    is_new: bool  # False: the remote had the same already
    report: BundleReport
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Pulled:
    where: str
    path: Path  # the directory, or the bundle
    report: BundleReport


def newest_run() -> Path:
    """Return the run directory below `runs` that was written to last."""
    runs = [Path(run.path) for run in list_runs(RUNS)] if RUNS.is_dir() else []
    if not runs:
        raise ConfigError(f"SOURCE: there is no run in {RUNS}/. Give a run directory, an adapter or a bundle")
    return max(runs, key=lambda run: (file if (file := run / METRICS).exists() else run).stat().st_mtime)


def sends_adapter(request: PushRequest) -> bool:
    """Return whether of a run its adapter is sent, without being asked for: the run has ended."""
    is_chosen = request.adapter or request.step is not None or request.to_resume or request.source.is_file()
    return not is_chosen and is_finished(request.source)


def is_finished(run: Path) -> bool:
    """Return whether a run directory holds the adapter that it ended with: no checkpoint is of a later step."""
    if not (run / ADAPTER_DIR / CONFIG_FILE).is_file():
        return False
    trained = fields.subtable(read_manifest(run / ADAPTER_DIR) or {}, "training", run / ADAPTER_DIR / MANIFEST_FILE)
    saved = checkpoint.steps(run / CHECKPOINTS) if (run / CHECKPOINTS).is_dir() else []
    return max(saved, default=0) <= (fields.number(trained.get("steps")) or 0)


def push(text: str, request: PushRequest, *, force: bool, public: bool, patience: Patience) -> Pushed:
    """Copy a bundle to a remote, or an adapter to the hub. Another try resumes from what was sent.

    ConfigError if another file is there, unless `force`; FormatError if there is nothing valid to push.
    """
    remote = _parse(text)
    if is_run_dir(folder := Path(text)) or (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"TARGET: {text} is a run or an adapter, not a remote. The order is: push TARGET SOURCE")
    if public and not isinstance(remote, Hub):
        raise ConfigError(f"--public: got {text}, allowed only with hf://. Set the access rights on the remote itself")
    if request.to_resume and (request.adapter or isinstance(remote, Hub)):
        raise ConfigError("--run: sends a checkpoint to resume, so it goes with neither --adapter nor hf://")
    if isinstance(remote, Hub) and request.step is not None:
        raise ConfigError(
            "--checkpoint: the hub takes only adapters. Push a checkpoint to ssh, a directory or a bucket"
        )
    with interrupt.handled(), _bundle_to_push(request, remote) as report:
        file, bound = report.path, report.bundle.name
        notes = [*report.notes]
        if bound not in (None, remote.name):
            notes.append(
                f"the bundle is bound to the name {bound!r}: to pull it from here with a signature, add --name {bound}"
            )
        interrupt.poll()
        if isinstance(remote, Hub):
            if report.bundle.kind != ADAPTER:
                raise ConfigError(
                    f"{file}: holds a checkpoint, and the hub takes only adapters. Push the run with --adapter"
                )
            with tempfile.TemporaryDirectory(prefix="dualtune-push-") as directory:
                # Unpacked again, so that what is published has passed every check of a bundle.
                unpacked = Path(directory) / "unpacked"
                bundle.unpack(file, unpacked)
                is_new = hub.push(remote, unpacked, public=public, force=force, patience=patience)
        else:
            if (signed := signature.path_of(file)).is_file():  # first, so that a bundle there never lacks it
                remote.push(signed, ending=SIGNATURE_ENDING, force=force, patience=_quiet(patience))
            is_new = remote.push(file, verified=report.sha256, force=force, patience=patience)
    return Pushed(str(remote), is_new, report, notes)


@contextlib.contextmanager
def _bundle_to_push(request: PushRequest, remote: RemoteTarget | Hub) -> Generator[BundleReport]:
    """Yield the verified bundle to push. One that is packed here is bound to the remote's name, and removed."""
    source, for_hub = request.source, isinstance(remote, Hub)
    if not source.exists():
        advice = did_you_mean_path(source) or ". The order is: dualtune push TARGET SOURCE"
        raise ConfigError(f"SOURCE: {source}: no such file or directory{advice}")
    if source.is_file():
        if request.step is not None or request.adapter or request.tokenizer is not None or request.key is not None:
            raise ConfigError(
                f"{source}: is already a bundle; --checkpoint, --adapter, --tokenizer and --sign are for packing one"
            )
        yield replace(bundle.inspect(source), notes=[])  # they are about its present name
        return
    if for_hub and (request.tokenizer is not None or request.key is not None):
        raise ConfigError("--tokenizer, --sign: the hub takes only the files of an adapter directory")
    with tempfile.TemporaryDirectory(prefix="dualtune-push-") as directory:
        yield pack(
            source, Path(directory) / IN_DIRECTORY, step=request.step,
            adapter=request.adapter or sends_adapter(request) or (for_hub and not (source / CONFIG_FILE).is_file()),
            tokenizer=request.tokenizer, key=request.key, name=remote.name,
        )  # fmt: skip


def pull(
    text: str, dest: Path | None, *, keep_packed: bool, trust: Trust | None, required: RequiredBinding,
    patience: Patience,
) -> Pulled:  # fmt: skip
    """Fetch a bundle, verify it, and unpack it into a new directory, or keep the file.

    FormatError if it cannot be trusted; it is removed then. After a lost connection the next pull resumes.
    """
    remote = _parse(text)
    required = replace(required, found_as=remote.name)
    dest = dest or Path(f"{remote.name}.tar" if keep_packed else remote.name)
    dest = Path(os.path.abspath(expanded(dest)))  # noqa: PTH100  resolve() would follow a link at the target
    if os.path.lexists(dest) and (keep_packed or dest.is_symlink() or not dest.is_dir() or any(dest.iterdir())):
        kind = "" if keep_packed else " and is not an empty directory"
        raise ConfigError(f"{dest}: already exists{kind}. Choose another path or remove it")
    if isinstance(remote, Hub) and (trust or required.name is not None or required.max_age is not None):
        raise ConfigError("--verify-signature, --name, --max-age: not allowed with hf://, which has no signed bundles")
    with interrupt.handled(), _pulled_bundle(remote, dest, trust, patience) as file:
        try:
            if not keep_packed:
                return Pulled(str(remote), dest, bundle.unpack(file, dest, trust, required))
            report = bundle.inspect(file, trust, required)
        except FormatError as error:
            raise FormatError(str(error).replace(str(file), str(remote))) from error
        # The file is verified: it and its signature get their final names, and the usual rights.
        try:
            for part in [file] if trust is None else [signature.path_of(file), file]:
                part.chmod(0o666 & ~umask())  # until now only this user could read it
                part.rename(dest if part is file else signature.path_of(dest))
            fsync(dest.parent)
        except OSError as error:
            raise DiskError(f"{dest}: cannot be written: {error.strerror or error}") from error
        return Pulled(str(remote), dest, report)


@contextlib.contextmanager
def _pulled_bundle(remote: RemoteTarget | Hub, dest: Path, trust: Trust | None, patience: Patience) -> Generator[Path]:
    """Yield a hidden file beside `dest` with the bundle, and remove it; one that was cut stays for the next pull."""
    if isinstance(remote, Hub):
        # A repository holds an adapter, no bundle: packed here, it passes the same checks as any other.
        with tempfile.TemporaryDirectory(prefix="dualtune-pull-") as directory:
            adapter = Path(directory) / "adapter"
            adapter.mkdir()
            hub.pull(remote, adapter, patience=patience)
            file = dest.with_name(f".{dest.name}.part-hub")  # beside it, so that it can be renamed
            try:
                dest.parent.mkdir(parents=True, exist_ok=True)
                file.unlink(missing_ok=True)
            except OSError as error:
                raise DiskError(f"{dest}: cannot be written: {error.strerror or error}") from error
            pack(adapter, file, name=remote.name)
            try:
                yield file
            finally:
                file.unlink(missing_ok=True)
        return
    file = remote.pull(dest, patience=patience)
    signed = signature.path_of(file)
    if trust is not None:
        with contextlib.suppress(AbsentFault):  # the signature check has a better message
            most = signature.MAX_SIGNATURE_BYTES
            remote.pull(signed, ending=SIGNATURE_ENDING, patience=_quiet(patience), most=most).replace(signed)
    interrupt.poll()
    keeps_part = True  # a transfer that was cut, or a disk that is full: the next pull goes on with it
    try:
        yield file
        keeps_part = False
    except FormatError:
        keeps_part = False
        raise
    finally:
        for path in () if keeps_part else (file, signed):
            path.unlink(missing_ok=True)


def _quiet(patience: Patience) -> Patience:
    """Return the same without a progress display, for the small signature file."""
    return Patience(patience.retries, say=patience.say)


def _parse(text: str) -> RemoteTarget | Hub:
    return hub.parse(text) if text.startswith(hub.SCHEME) else target.parse(text)
