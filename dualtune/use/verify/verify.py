"""`dualtune verify`: recompute what dualtune.json recorded of a base model and its adapter, and say what the gap means.

Three questions, cheap ones first: are the files unchanged, is the base model the recorded one, and do base and adapter
compute the recorded function. The base is also compared without the adapter: a gap that exists there is not the
adapter's fault.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dualtune.base.checks import Check, Level
from dualtune.data.tokens.new_tokens import with_new_tokens
from dualtune.engine.backend import Backend, Engine
from dualtune.engine.libraries import OtherLibrary, open_library
from dualtune.engine.peft_trial import peft_notes
from dualtune.model.base_model import resolve_model
from dualtune.model.config_file import vocabulary_size
from dualtune.model.formats.directory import MANIFEST_FILE, Adapter, adapter_directory, read_adapter
from dualtune.train.fingerprints import Entry, Gap, effect, gap, recompute, recorded_tops, without_adapter
from dualtune.train.generation.inference import load_model
from dualtune.use.transfer.bundles import manifest as unpacked
from dualtune.use.transfer.bundles.manifest import ANY, RequiredBinding
from dualtune.use.verify import identity
from dualtune.use.verify.identity import ComparedPart, Fit
from dualtune.use.verify.verdict import (
    MIN_EFFECT_IN_16_BITS,
    Function,
    Kind,
    Limit,
    Precision,
    Recorded,
    VerifyVerdict,
    does_not_fit,
    effect_is_within,
    judge,
    limit_for,
    pair_of,
    recorded_in,
    with_control,
    within,
)

LEVELS: dict[identity.State, Level] = {"same": "ok", "note": "advice", "differs": "fail", "unknown": "skipped"}


@dataclass(frozen=True, slots=True)
class Verification:
    """The verdict and the findings behind it."""

    verdict: Kind
    ok: bool
    sentence: str
    checks: tuple[Check, ...]
    function: Function | None = None  # None: not computed, and the sentence says why

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`; a number that is not finite becomes null."""
        report = asdict(self) | {"checks": [check.to_json() for check in self.checks]}
        plain = json.loads(json.dumps(report), parse_constant=lambda _: None)
        for row in plain["checks"]:
            del row["exit_code"]  # the verdict has one exit code for all
        return plain


def verify(
    directory: str | os.PathLike[str],
    base: str,
    open_backend: Callable[[], Backend],
    *,
    dtype: str = "auto",
    quantization: str = "auto",
    required: RequiredBinding = ANY,
    library: str | None = None,
) -> Verification:
    """Verify an adapter directory, or an unpacked bundle of one, on a base model given by directory or hub id.

    FormatError if it is damaged or its bundle is not the wanted one, EnvironmentFault if the base is not available,
    ConfigError if the backend does not honour dtype or quantization. The backend is loaded only after the files fit.
    With a `library` (`engine/libraries.py`), that library computes instead of a backend, which is not opened.
    """
    path, origin = unpacked.find(adapter_directory(directory), required)
    adapter = read_adapter(path)
    recorded = recorded_in(adapter.metadata, path / MANIFEST_FILE)
    model_dir = with_new_tokens(resolve_model(base), adapter.new_tokens)
    fit = identity.fit(adapter, model_dir)

    # Without a record, or where it cannot be of this base, there is nothing to compute.
    if recorded is None:
        return _nothing_recorded(adapter, fit, [*origin, *_peft_checks(adapter, model_dir)])
    if recorded.base_model.get("init") == "random":
        text = "it was trained on random weights (model.init: random), which are not saved anywhere"
        return _result(VerifyVerdict("nothing-recorded", False, text), origin)
    if problem := _beyond_vocabulary(recorded, vocabulary_size(model_dir)):
        return _result(_other_vocabulary(problem), [*origin, _fit_check(fit), Check("vocabulary", "fail", problem)])

    # The files come first: they cost seconds, and say why the numbers differ if they do.
    parts = identity.compare(recorded.base_model, recorded.training, recorded.adapter, model_dir, adapter.template)
    checks = [*origin, Check("files", "ok", f"as {MANIFEST_FILE} lists them"), *_part_checks(parts), _fit_check(fit)]
    checks += _peft_checks(adapter, model_dir)
    if fit.problems:
        return _result(does_not_fit(parts, fit), checks)

    # Whatever the files say, what base and adapter compute decides.
    if library is None:
        engine = load_model(open_backend(), base, path, dtype=dtype, quantization=quantization).engine
        function = compute(engine, recorded)
    else:
        other = open_library(library, model_dir, path)
        checks += [Check(library, "fail", warning) for warning in other.warnings]
        checks += [] if other.warnings else [Check(library, "ok", f"loads both ({other.version})")]
        function = compute_with(other, recorded)
    return _result(judge(parts, fit, function), [*checks, *_function_checks(function)], function)


def verify_loaded(engine: Engine, adapter: Adapter, model_dir: Path) -> VerifyVerdict | None:
    """Judge an engine that holds the adapter on the model of a directory. None: the adapter has no fingerprints."""
    recorded = recorded_in(adapter.metadata, MANIFEST_FILE)
    if recorded is None:
        return None
    if problem := _beyond_vocabulary(recorded, vocabulary_size(model_dir)):
        return _other_vocabulary(problem)
    parts = identity.compare(recorded.base_model, recorded.training, recorded.adapter, model_dir, adapter.template)
    return judge(parts, identity.fit(adapter, model_dir), compute(engine, recorded))


def compute(engine: Engine, recorded: Recorded) -> Function:
    """Recompute what was recorded on an engine that holds the adapter."""
    with without_adapter(engine):
        base_values = recompute(engine, recorded.base)
    here = Precision(engine.description.quantization, engine.description.dtype)
    return _measured(recorded, here, base_values, recompute(engine, recorded.adapter))


def compute_with(library: OtherLibrary, recorded: Recorded) -> Function:
    """Recompute what was recorded in another library that holds the base and the adapter."""

    def values(entries: Sequence[Entry], *, adapted: bool) -> list[np.ndarray]:
        return [library.logprobs(entry["tokens"], adapted=adapted)[-len(recorded_tops(entry)) :] for entry in entries]

    here = Precision("none", library.dtype)
    return _measured(recorded, here, values(recorded.base, adapted=False), values(recorded.adapter, adapted=True))


def _measured(
    recorded: Recorded, here: Precision, base_values: list[np.ndarray], adapter_values: list[np.ndarray]
) -> Function:
    pair = pair_of(recorded.precision, here)
    limit, base_gap = limit_for(pair), gap(recorded.base, base_values)
    change = effect(recorded.base, recorded.adapter, base_values, adapter_values)
    adapter_limit = limit and with_control(limit, base_gap.kl)
    is_faint = (recorded.precision.is_16_bit or here.is_16_bit) and change and change.rms < MIN_EFFECT_IN_16_BITS
    if adapter_limit and (change is None or is_faint):
        adapter_limit = replace(adapter_limit, effect=None)
    by_effect = adapter_limit is not None and adapter_limit.effect is not None
    return Function(
        recorded.precision, here, pair, limit, adapter_limit, base_gap, gap(recorded.adapter, adapter_values), change,
        idle=not by_effect and adapter_limit is not None and within(gap(recorded.adapter, base_values), adapter_limit),
    )  # fmt: skip


def _result(verdict: VerifyVerdict, checks: Sequence[Check], function: Function | None = None) -> Verification:
    return Verification(verdict.kind, verdict.ok, verdict.sentence, tuple(checks), function)


def _beyond_vocabulary(recorded: Recorded, size: int | None) -> str | None:
    """Check the token ids before anything is loaded: backends treat ids outside of the vocabulary differently."""
    entries = (*recorded.base, *recorded.adapter)
    largest = max(max([*entry["tokens"], *(i for top in recorded_tops(entry) for i, _ in top)]) for entry in entries)
    if size is None or largest < size:
        return None
    return f"token {largest} was recorded, but the vocabulary here has {size}"


def _other_vocabulary(problem: str) -> VerifyVerdict:
    return VerifyVerdict("wrong-base", False, f"the base is not the recorded one: {problem}")


def _nothing_recorded(adapter: Adapter, fit: Fit, origin: list[Check]) -> Verification:
    """Verify only the shapes: for an adapter of another tool, or without fingerprints in dualtune.json."""
    num_idle = sum(not x.any() for name, x in adapter.tensors.items() if ".lora_B." in name)
    finite = f"{len(adapter.tensors)} tensors, all finite"
    checks = [
        *origin,
        Check("files", "ok", f"readable, layout {adapter.layout}"),
        Check("numbers", "advice" if num_idle else "ok", f"{finite}; B is zero in {num_idle} modules"),
        _fit_check(fit),
    ]
    text = (
        f"there is nothing to compare with: {MANIFEST_FILE} has no fingerprints, which `dualtune train` writes. "
        "Only the checks above were possible; whether the function is the trained one is unknown"
    )
    return _result(VerifyVerdict("nothing-recorded", False, text), checks)


# --- rows -------------------------------------------------------------------------------------------------------------


def _part_checks(parts: Sequence[ComparedPart]) -> list[Check]:
    checks: list[Check] = []
    for part in parts:
        # Another config or other weights fail only by their results: until then they are only advice.
        is_other_file = part.state == "differs" and part.name in ("config", "weights")
        checks.append(Check(part.name, "advice" if is_other_file else LEVELS[part.state], part.found))
    return checks


def _fit_check(fit: Fit) -> Check:
    if fit.problems:
        return Check("shapes", "fail", f"{len(fit.problems)} modules do not fit the base: {fit.problems[0]}")
    if fit.missing:
        return Check("shapes", "advice", f"{fit.note}; {len(fit.missing)} targets without tensors: {fit.missing[0]}, …")
    return Check("shapes", "ok", fit.note)


def _peft_checks(adapter: Adapter, model_dir: Path) -> list[Check]:
    """What PEFT does not load: no fault of the adapter, and of no interest if it is not in PEFT's files."""
    return [Check("PEFT", "advice", note) for note in peft_notes(adapter, model_dir)] if adapter.is_for_peft else []


def _function_checks(function: Function) -> list[Check]:
    precision = f"recorded {function.recorded}; here {function.here}; limits of {function.pair}"
    limit = function.limit
    rows = [
        Check("precision", "ok" if limit else "fail", precision),
        _gap_check("base", function.base, limit),
        _gap_check("adapter", function.adapter, function.adapter_limit),
    ]
    if function.effect is not None:
        limit = function.adapter_limit
        allowed = "" if limit is None or limit.effect is None else f" (allowed {limit.effect:.0%})"
        text = f"{function.effect.size:.3f} times the recorded one, error {function.effect.error:.1%}{allowed}"
        rows.append(Check("effect", "fail" if limit and not effect_is_within(function.effect, limit) else "ok", text))
    return rows


def _gap_check(name: str, measured: Gap, limit: Limit | None) -> Check:
    def allowed(number: str) -> str:
        return f" (allowed {number})" if limit else ""

    text = (
        f"top-1 {measured.top1:.0%} of {measured.num_positions}{allowed(f'{limit.top1:.0%}' if limit else '')}, "
        f"KL >= {measured.kl:.1e}{allowed(f'{limit.kl:.2g}' if limit else '')}, "
        f"largest gap of log p {measured.logprob:.1e}{allowed(f'{limit.logprob:.2g}' if limit else '')}"
    )
    return Check(name, "ok" if limit is None or within(measured, limit) else "fail", text)
