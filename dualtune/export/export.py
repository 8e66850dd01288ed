"""Exporting: the verified merge, its conversion for another program, and what each step has changed.

The result is written whole or not at all, with `export.json`: what was made of what, by which tools, and the distances.
"""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dualtune.adapter.formats.directory import Adapter, adapter_directory, read_adapter
from dualtune.backend import Backend, Engine
from dualtune.base_model import copy_model, resolve_model
from dualtune.data.tokens.stop_tokens import stop_texts
from dualtune.errors import ConfigError
from dualtune.evaluate.fingerprints import without_adapter
from dualtune.evaluate.inference import load_model
from dualtune.export.card import CARD, card
from dualtune.export.deviation import LOST, deviation, logprobs, lost_share, prompts_of
from dualtune.export.held_out import HeldOut, last_evaluation, manifest_of, open_held_out
from dualtune.export.llama_environment import LlamaCpp
from dualtune.export.maker import Maker, copy_of_base, is_foreign, move_out
from dualtune.export.merge import (
    check_base,
    check_free,
    check_plain,
    load_to_merge,
    named_stops,
    note_of_base,
    write_merged,
)
from dualtune.export.request import Expected, Exported, Request, Tell, WritesNf4
from dualtune.io.disk import write_file, write_whole
from dualtune.io.fields import shown
from dualtune.verify.verdict import VerifyVerdict
from dualtune.verify.verify import verify_loaded
from dualtune.versions import VERSION

RECORD = "export.json"


def export(request: Request, backend: Backend, llama_cpp: LlamaCpp | None, tell: Tell) -> Exported:
    """Write the export. ConfigError if the merge changes the function, with the number; then nothing is left."""
    check_free(request.out)
    if request.kind == "nf4" and not isinstance(backend, WritesNf4):
        raise ConfigError(f"--quantize nf4: the backend {backend.name} cannot write it. Give --platform cpu or cuda")
    adapter, base = None, request.adapter
    if request.base is not None:
        adapter, base = read_adapter(request.adapter), resolve_model(request.base)
        check_plain(base)
        if not request.other_base:
            check_base(adapter, base)
    exported = Exported()
    held_out = _held_out(request, adapter, base, exported)

    def write(directory: Path) -> None:
        is_plain = request.target == "hf" and request.kind == "none"
        if llama_cpp is not None:
            with copy_of_base(base, directory / "base", llama_cpp) as source:
                llama_cpp.check_tokenizer(source)
        merged = directory / "merged"
        if adapter is None:
            exported.notes += _note_of_left_out(copy_model(base, merged, link_weights=not is_plain))
            tell(f"stops at    {named_stops(merged)}")
            expected = _expected_of_model(base, backend, held_out, exported)
        else:
            expected = _merge(request, adapter, base, merged, backend, held_out, exported, tell)
        checked = base if adapter is None else merged  # with the weights themselves, not links to them
        made = Maker(request, backend, llama_cpp, expected, held_out, tell)
        if not is_plain:
            written = made.write(merged if is_foreign(llama_cpp) else checked, directory)
            exported.result = made.distance(expected.tuned, written, checked)
            exported.loss.written = made.loss
            if expected.base is not None and made.quantizes and request.compares_base:
                exported.base = made.distance_of_base(expected.base, base, directory)
        else:
            move_out(merged)
        if merged.exists():
            shutil.rmtree(merged)
        exported.notes += [note for note in (adapter and note_of_base(adapter), *made.notes) if note]
        exported.stops = stop_texts(expected.tokenizer)
        if (text := expected.tokenizer.stop_text) and request.target != "ollama":
            exported.notes.append(
                f"note: a turn ends with the text {shown(text)}, which no single token is. A program that reads no "
                "stop_strings of generation_config.json (vLLM, llama.cpp, LM Studio, mlx-lm) needs it as a stop text "
                "of each request; transformers needs generate(..., tokenizer=tokenizer)"
            )
        if adapter is not None or not (directory / CARD).exists():  # the author's own one stays
            write_file(
                directory / CARD,
                card(request.name, _record(request, exported), adapter.naming.notes if adapter else ()),
            )
        exported.files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
        write_file(directory / RECORD, json.dumps(_record(request, exported), indent=2) + "\n")

    write_whole(request.out, write)
    return exported


def _held_out(request: Request, adapter: Adapter | None, base: Path, exported: Exported) -> HeldOut | None:
    """Return the held-out rows of the run, and note its last evaluation, or why the export cannot be evaluated."""
    metadata = adapter.metadata if adapter else manifest_of(base)
    exported.loss.run = last_evaluation(metadata)
    recorded: dict[str, Any] = metadata.get("base") or {}
    exported.trained_on = recorded.get("loaded_as")
    if request.run is None:
        return None
    found = open_held_out(request.run, base, adapter, adapter and adapter_directory(request.adapter))
    if isinstance(found, str):
        exported.loss.unknown = found
        return None
    return found


def _expected_of_model(model: Path, backend: Backend, held_out: HeldOut | None, exported: Exported) -> Expected:
    loaded = load_model(backend, str(model), dtype="float32")
    if held_out is not None:
        exported.loss.merged = held_out.loss(loaded.engine)
    prompts = prompts_of(loaded.tokenizer)
    expected = Expected(loaded.tokenizer, prompts, logprobs(loaded.engine, prompts))
    del loaded
    gc.collect()
    return expected


def _merge(
    request: Request, adapter: Adapter, base: Path, out: Path, backend: Backend, held_out: HeldOut | None,
    exported: Exported, tell: Tell,
) -> Expected:  # fmt: skip
    """Write the merged model, load it again, and compare it with base and adapter."""
    loaded = load_model(backend, str(base), request.adapter, dtype="float32", quantization="none")
    if not request.other_base:
        exported.verdict = _verify(loaded.engine, adapter, base, tell)
    prompts = prompts_of(loaded.tokenizer)
    tuned = logprobs(loaded.engine, prompts)
    with without_adapter(loaded.engine):
        expected = Expected(loaded.tokenizer, prompts, tuned, before := logprobs(loaded.engine, prompts))
    del loaded
    gc.collect()
    engine = load_to_merge(adapter, base, backend, request.dtype)
    write_merged(engine, adapter, out, tell)
    del engine
    gc.collect()
    engine = load_model(backend, str(out), dtype="float32", quantization="none").engine
    merged = logprobs(engine, prompts)
    if held_out is not None:
        tell("evaluating  the merged model on the rows that the run held out")
        exported.loss.merged = held_out.loss(engine)
    del engine
    gc.collect()
    effect, merge = deviation(before, tuned), deviation(tuned, merged)
    lost = lost_share(merge, effect)
    if not lost <= LOST:
        raise ConfigError(
            f"export: the merged model is not base and adapter: it differs by {merge.kl:.2e} nats, {lost:.0%} of what "
            f"the adapter changes ({effect.kl:.2e}), allowed: {LOST:.0%}. The base's precision may be too coarse for "
            "so small a change: merge with --dtype float32"
        )
    exported.effect, exported.merge, exported.lost = effect, merge, lost
    tell(f"merge       verified: it loses {lost:.2%} of what the adapter changes")
    return expected


def _verify(engine: Engine, adapter: Adapter, base_dir: Path, tell: Tell) -> VerifyVerdict | None:
    """Compare base and adapter with the fingerprints of the training. ConfigError if they compute something else."""
    verdict = verify_loaded(engine, adapter, base_dir)
    if verdict is None:
        tell("adapter     has no fingerprints of its training: whether it does here what it did there is unknown")
        return None
    if verdict.kind in ("wrong-base", "broken-adapter"):
        raise ConfigError(
            f"export: {verdict.sentence}. `dualtune verify` shows the numbers; --other-base exports without comparing"
        )
    tell(f"adapter     {verdict.sentence}")
    return verdict


def _note_of_left_out(names: list[str]) -> list[str]:
    """Return the note that names the files of a model directory that are not copied."""
    listed = ", ".join(shown(name) for name in names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return [f"note: left out, as no files of the model: {listed}"] if names else []


def _record(request: Request, exported: Exported) -> dict[str, Any]:
    return {
        "dualtune": VERSION, "target": request.target, "quantization": request.kind, "base": request.base,
        "adapter": str(request.adapter), "files": exported.files,
        "verified": exported.verdict and exported.verdict._asdict(),
        "divergence_nats": {
            "adapter from base": exported.effect and asdict(exported.effect),
            "merged from adapter": exported.merge and asdict(exported.merge),
            "written from adapter": exported.result and asdict(exported.result),
            "base, quantized alike, from base": exported.base and asdict(exported.base),
        },
        "lost_share_of_merge": exported.lost, "loss": asdict(exported.loss), "stops": exported.stops,
        "trained_on": exported.trained_on, "notes": exported.notes,
    }  # fmt: skip
