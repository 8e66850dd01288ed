"""The stages of a family: what a user does with a model, each compared with what it must give.

A stage is a function of a `Case` and the name of a backend. It returns a number to show or None, and raises otherwise:
a DualtuneError is a refusal, Told what another tool cannot do and the user is told of, Differs and Lost are wrong
results, and every other exception is a crash.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dualtune.base.errors import ConfigError, DualtuneError
from dualtune.config import to_yaml
from dualtune.engine.peft_trial import NO_MODEL
from dualtune.model.adapter import modules_of
from dualtune.model.base_model import find_weights
from dualtune.model.formats.directory import read_adapter
from dualtune.model.merging import write_merged as copy_base
from dualtune.show.run import run
from dualtune.use.export.merge import load_to_merge, write_merged
from dualtune.use.verify.verify import verify
from family.case import Case, Differs, Lost, Needs, Told, check_close, stored
from family.make import make, write_data
from family.memory import share_of_peak
from family.mlx_only import make_mlx_only

LOGPROBS, MERGED, STEP = 1e-3, 2e-3, 1e-4
PEAK = (0.9, 1.5)  # of planned memory; a plan that is too high costs a user speed, one that is too low the run
NEW_TOKENS, TIE = 12, 1e-3

Stage = Callable[[Case, str], float | str | None]


def make_model(case: Case, _: str) -> float:
    """The tiny model is written."""
    size = (make if case.in_transformers else make_mlx_only)(case.family, case.model_dir)
    write_data(case.data)
    return size


def check(case: Case, name: str) -> str | None:
    """`check-config` finds nothing that fails; the share of adapted weights is what it reports."""
    from dualtune.doctor.check_config import check_config

    file = case.directory / f"{name}.yaml"
    file.write_text(to_yaml(case.config(name)), encoding="utf-8")
    report = check_config(file, platform=name)
    failed = [row for row in report.checks if row.level == "fail"]
    if failed:
        raise ConfigError(f"{failed[0].name}: {failed[0].found}")
    return None


def plan(case: Case, name: str) -> float:
    """`plan` knows the memory; the number is in bytes."""
    from dualtune.doctor.check_config import plan_config
    from dualtune.doctor.check_config_data import look_at_data, with_lengths_of
    from dualtune.engine.choose import choose
    from dualtune.engine.detect import detect

    config = case.config(name)
    steps, evaluated = with_lengths_of(config, look_at_data(config))
    machine = detect()
    return plan_config(steps, machine, choose(name, machine), evaluated).estimate.total_bytes


def base(case: Case, name: str) -> float:
    """Where it trains, the loaded base computes what transformers computes, document by document."""
    case.losses(name)
    return check_close(case.logprobs(name), case.stock, LOGPROBS)


def train(case: Case, name: str) -> float:
    """Four steps; the first loss is finite."""
    run(case.config(name), case.backend(name), resume="never")
    losses = case.losses(name)
    if not all(np.isfinite(losses)):
        raise Differs(f"losses {losses}")
    return losses[-1]


def packs(case: Case, name: str) -> float:
    """The same four steps with packed rows have the same losses."""
    expected = case.losses(name)
    run(case.config(name, packing=True), case.backend(name), resume="never")
    return _same_losses(case.losses(name, packing=True), expected)


def planned(case: Case, name: str) -> float:
    """A packed step takes what was planned, and the plan counts the engine's parameters; the number is the share."""
    case.losses(name, packing=True)
    try:
        share = share_of_peak(case.model_dir, case.backend(name))
    except ValueError as error:
        raise Differs(str(error)) from error
    if not PEAK[0] <= share <= PEAK[1]:
        raise Differs(f"{share:.2f} of the peak is planned")
    return round(share, 3)


def parity(case: Case, _: str) -> float:
    """Both backends adapt the same modules and have the same losses."""
    modules = [set(modules_of(read_adapter(case.adapter(each)).tensors)) for each in ("torch", "mlx")]
    if only := modules[0] ^ modules[1]:
        raise Differs(f"{len(only)} modules are adapted by one backend alone, such as {min(only)}")
    return _same_losses(case.losses("mlx"), case.losses("torch"))


def _same_losses(found: list[float], expected: list[float]) -> float:
    gap = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    if not gap <= STEP:
        raise Differs(f"step losses differ by {gap:.1e}")
    return gap


def verifies(case: Case, name: str) -> None:
    """`verify` accepts the adapter where it was trained."""
    _verify(case, name, name)


def crosses(case: Case, name: str) -> None:
    """`verify` accepts the adapter of this backend on the other one."""
    other = "mlx" if name == "torch" else "torch"
    case.losses(other)  # it trains there
    _verify(case, name, other)


def _verify(case: Case, trained: str, here: str) -> None:
    result = verify(case.adapter(trained), str(case.model_dir), lambda: case.backend(here), dtype="float32")
    if not result.ok:
        raise Differs(f"{result.verdict}: {result.sentence}")


def peft(case: Case, name: str) -> float | None:
    """In the model of each auto class PEFT computes the same, or the notes say that it does not; never both."""
    adapter = case.adapter(name)
    expected, notes = case.logprobs(name, adapter), read_adapter(adapter).naming.notes
    gaps: list[float] = []
    for kind in case.kinds():
        try:
            check_close(case.of_transformers(case.stock_model(kind=kind)[0]), case.stock, LOGPROBS)
        except Exception:  # noqa: BLE001  transformers itself does not compute the base in this class
            continue
        is_told = any(NO_MODEL in note or kind in note.partition("not of")[2] for note in notes)
        try:
            gaps.append(_gap_in_peft(case, adapter, kind, expected))
        except Exception:
            if not is_told:
                raise
        else:
            if is_told:
                raise Differs(f"told of {kind}, where PEFT computes the same")
    if any(NO_MODEL in note for note in notes):
        raise Told(notes[0])
    if not gaps:
        raise Needs
    return max(gaps)


def _gap_in_peft(case: Case, adapter: Path, kind: str, expected: np.ndarray) -> float:
    import warnings

    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(case.stock_model(kind=kind)[0], str(adapter))
    return check_close(case.of_transformers(model), expected, LOGPROBS)


def in_mlx_lm(case: Case, name: str) -> float:
    """Stock mlx-lm loads the adapter and computes the same. Not looked at where it computes another base."""
    expected = case.logprobs(name, case.adapter(name))
    _needs_mlx_lm(case, case.model_dir)
    return check_close(case.of_mlx_lm(case.model_dir, case.adapter(name)), expected, LOGPROBS)


def _needs_mlx_lm(case: Case, model_dir: Path) -> None:
    """Need a base that mlx-lm's class computes; some classes end the process instead."""
    try:
        check_close(case.of_mlx_lm(model_dir), case.stock, LOGPROBS)
    except (Exception, SystemExit) as error:
        raise Needs from error


def merges(case: Case, name: str) -> None:
    """A merge has the files of the base: every name, shape and dtype, and other numbers only where it is adapted."""
    adapter, out = read_adapter(case.adapter(name)), _merged(case, name)
    engine = load_to_merge(adapter, case.model_dir, case.backend(name))
    write_merged(engine, adapter, out, lambda line: None)
    before, after = stored(case.model_dir), stored(out)
    if gone := before.keys() - after.keys():
        raise Lost(f"{len(gone)} of {len(before)} tensors, such as {min(gone)}")
    if new := after.keys() - before.keys():
        raise Differs(f"{len(new)} new names, such as {min(new)}")
    for tensor, old in before.items():
        if old.shape != after[tensor].shape or old.dtype != after[tensor].dtype:
            raise Differs(f"{tensor} is {tuple(after[tensor].shape)} {after[tensor].dtype}")


def _merged(case: Case, name: str) -> Path:
    return case.directory / f"{name}-merged"


def reloads(case: Case, name: str) -> float:
    """transformers loads the merge without a missing tensor and computes what the adapter does."""
    expected, out = case.logprobs(name, case.adapter(name)), _ready(case, name)
    model, told = case.stock_model(out)
    if told["missing_keys"]:
        raise Lost(f"{len(told['missing_keys'])} missing, such as {min(told['missing_keys'])}")
    return check_close(case.of_transformers(model), expected, MERGED)


def reloads_in_mlx_lm(case: Case, name: str) -> float:
    """Stock mlx-lm loads the merge and computes what the adapter does, where it computes the base of such a config."""
    expected, out = case.logprobs(name, case.adapter(name)), _ready(case, name)
    base = case.directory / "base-as-merged"
    if not base.exists():
        base.mkdir()
        copy_base(find_weights(case.model_dir), base, {}, lambda module: np.zeros(0), "float32")
    _needs_mlx_lm(case, base)
    return check_close(case.of_mlx_lm(out), expected, MERGED)


def _ready(case: Case, name: str) -> Path:
    out = _merged(case, name)
    if not (out / "config.json").exists():
        raise Needs
    return out


def generates(case: Case, name: str) -> None:
    """Greedy decoding gives the tokens that the whole text gives again and again, ties apart."""
    from dataclasses import replace

    engine = case.engine(name, case.adapter(name))
    prompt = case.batch.tokens_BT[0, :9]
    found = list(itertools.islice(engine.generate(prompt, choose=lambda logits: int(np.argmax(logits))), NEW_TOKENS))
    text = [*prompt.tolist(), *found]
    row = np.array([text], np.int32)
    batch = replace(
        case.batch, tokens_BT=row, labels_BT=np.full_like(row, -100), segments_BT=np.ones_like(row),
        positions_BT=np.arange(len(text), dtype=np.int32)[None], dropout_seeds_BT=np.zeros_like(row, np.uint32),
    )  # fmt: skip
    logprobs = engine.logprobs(batch)[0, len(prompt) - 1 : -1]
    behind = logprobs.max(-1) - logprobs[np.arange(len(found)), found]
    if not behind.max() <= TIE:
        raise Differs(f"token {int(np.argmax(behind > TIE)) + 1} is {behind.max():.2f} below the most probable one")


STAGES: dict[str, Stage] = {
    "check": check, "plan": plan, "train": train, "base": base, "packs": packs, "memory": planned, "verify": verifies,
    "parity": parity, "crosses": crosses, "generates": generates, "peft": peft, "mlx-lm": in_mlx_lm, "merge": merges,
    "reload": reloads, "reload-mlx-lm": reloads_in_mlx_lm,
}  # fmt: skip
CHEAP = ("check", "train", "base", "parity", "packs")


def outcome(stage: Stage, case: Case, name: str) -> dict[str, object]:
    """Run a stage. Return its outcome with the number or the reason."""
    from family.make import CannotMake

    try:
        value = stage(case, name)
    except Needs:
        return {"outcome": "-"}
    except CannotMake as error:
        return {"outcome": "not made", "why": _line(error)}
    except Told as error:
        return {"outcome": "told", "why": _line(error)}
    except Differs as error:
        return {"outcome": "WRONG", "why": str(error)}
    except Lost as error:
        return {"outcome": "LOST", "why": str(error)}
    except DualtuneError as error:
        return {"outcome": "refused", "error": type(error).__name__, "why": _line(error)}
    except Exception as error:  # noqa: BLE001  a crash is what it looks for
        return {"outcome": "CRASH", "error": type(error).__name__, "why": _line(error), "where": _place(error)}
    return {"outcome": "ok"} | ({} if value is None else {"value": value})


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def _place(error: Exception) -> str:
    """Return the last lines of code that an exception came through: of dualtune, and at all."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(f"{Path(trace.tb_frame.f_code.co_filename).as_posix()}:{trace.tb_lineno}")
        trace = trace.tb_next
    ours = [each for each in frames if "/dualtune" in each and "site-packages" not in each]
    return " > ".join(dict.fromkeys([*ours[-1:], *frames[-1:]]))
