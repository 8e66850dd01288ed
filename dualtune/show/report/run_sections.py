"""What a report says of one run: its verdict and numbers, its data, how to repeat it, and what to do next.

These are the values that `run.html` shows.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, cast

from dualtune.base.errors import FormatError
from dualtune.base.fields import number
from dualtune.base.text import in_bytes, in_time
from dualtune.base.untrusted import read_json
from dualtune.config.schema import sections
from dualtune.engine.routing import BUSIEST, IDLE
from dualtune.show.report.page import MAX_TEXT, cut
from dualtune.show.report.run_files import RunFiles, as_table
from dualtune.train.health import LAST_SHARE
from dualtune.train.state import resume
from dualtune.train.state.run_dir import BASE_FORMATS, PREDICTIONS, served_run

# ----------------------------------------------------------------------------------------------------------------------
# The config of a run beside the defaults, and the configs of several runs beside each other.

Table = Mapping[str, Mapping[str, Any]]
MAX_SHOWN = 300  # characters of a value
ABSENT = "–"


def changed(config: Table) -> list[tuple[str, str, str]]:
    """Return (key, value, default) of each value that is not the default; the default of a required key is empty."""
    defaults = _defaults()
    return [
        (key, shown_value(value), shown_value(defaults[key]) if key in defaults else "")
        for key, value in flat(config).items()
        if key not in defaults or value != defaults[key]
    ]


def differing(configs: Sequence[Table]) -> list[tuple[str, list[str]]]:
    """Return (key, its value in each config) of the keys with different values. A key that is not set has a dash."""
    tables = [flat(config) for config in configs]
    keys = resume.differing(tables)
    return [(key, [shown_value(table[key]) if key in table else ABSENT for table in tables]) for key in keys]


def flat(config: Table) -> dict[str, Any]:
    """Return the values by their dotted keys."""
    return {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}


def shown_value(value: Any) -> str:
    """Return a value as a config writes it, in bounded length."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def _defaults() -> dict[str, Any]:
    """Return the defaults by their dotted keys, with lists for tuples, as YAML has them."""
    return {
        f"{section}.{key}": json.loads(json.dumps(field.default))
        for section, model in sections().items()
        for key, field in model.model_fields.items()
        if not field.is_required()
    }


# ----------------------------------------------------------------------------------------------------------------------
WORDS = {
    "learning": "The run has learned.",
    "still falling": "The run has learned, and its loss was still falling at the end.",
    "flat": "The run has not learned anything that can be measured.",
    "diverged": "The training has diverged.",
    "overfitting": "The run overfits: it has memorized its training data.",
    "too few steps": "There are too few steps for a verdict.",
    "both fall": "The run tells the answers apart, but the chosen ones became less probable as well.",
    "length": "The run has learned the length of the answers.",
    "far away": "The run has moved far from its reference.",
    "rewards failed": "Many samples could not be rewarded.",
    "constant reward": "The rewards do not tell the samples apart.",
    "gamed": "The run has learned what its rewards pay for, at the cost of what was asked.",
    "collapsed": "The samples have become alike, and no better.",
    "few experts": "The routers send ever more of the tokens to few of the experts.",
}
Pairs = Sequence[tuple[str, str]]
MAX_SOURCES = 50
MAX_SAMPLES = 10
MAX_FORMATS_BYTES = 1 << 16  # of base_formats.json
MAX_SAMPLE = 1 << 15  # characters of a sample row: `counts` records fewer


def sections_of(run: RunFiles) -> dict[str, Any]:
    """Return what the page says of a run: alone, or folded below the table of several."""
    return {
        "run": run, "words": WORDS[run.verdict.word], "tiles": _tiles(run), "data": data(run),
        "again": reproduce(run), "next": next_commands(run),
    }  # fmt: skip


# What evaluations measure beside the loss: how it is shown, and what it is.
_OF_ANSWERS = {
    "eval_reward_accuracy": (".1%", "of held-out pairs in the right order"),
    "eval_reward_margin": (".3f", "reward margin of the chosen answers"),
    "eval_kl": (".2f", "nats from the reference, on answers of other rows"),
    "eval_divergence": (".4f", "divergence from the teacher"),
}


def _tiles(run: RunFiles) -> list[tuple[str, str]]:
    """Return (number, what it is)."""
    curves, history = run.curves, run.curves.history
    tiles = [(f"{history.step or 0:,}", "steps")]
    if (loss := curves.end_loss) is not None:
        last = max(1, len(history.losses) // LAST_SHARE)
        label = "the last step" if last == 1 else f"the last {last:,} steps, the mean"
        tiles.append((loss_text(loss), f"training loss of {label}"))
    if history.eval_loss_before is not None:
        tiles.append((loss_text(history.eval_loss_before), "evaluation loss before"))
    if history.eval_loss is not None:
        tiles.append((loss_text(history.eval_loss), "evaluation loss, the last"))
    answers: Mapping[str, float] = history.metrics[-1] if history.metrics else {}
    measured = [(answers[name], form, what) for name, (form, what) in _OF_ANSWERS.items() if name in answers]
    tiles += [(format(number, form), f"{what}, the last evaluation") for number, form, what in measured]
    if shares := history.measured.get(BUSIEST):
        tiles.append((f"{shares[-1]:.0%}", "of a layer's tokens go to its busiest expert, the last step"))
        tiles.append((f"{history.measured[IDLE][-1]:,.0f}", "experts without a token, the last step"))
    if (best := curves.best) is not None:
        tiles.append((loss_text(best.loss), f"the best evaluation, after step {best.step:,}"))
    if curves.tokens:
        tiles.append((f"{curves.tokens[-1]:,.0f}", "tokens trained on"))
    if (speed := median_speed(run)) is not None:
        tiles.append((f"{speed:,.0f}", "tokens per second, the median step"))
    if (speed := median_speed(run, "documents_per_min")) is not None:
        tiles.append((f"{speed:,.0f}", "documents per minute, the median step"))
    if curves.seconds and curves.seconds[-1] < 1e9:
        tiles.append((in_time(curves.seconds[-1]), "from the first row to the last step"))
    plan = run.against_plan
    if (peak := curves.peak_bytes) is not None and peak > 0:
        beside = f", {in_bytes(plan.mapped_bytes)} of it mapped files" if plan and plan.mapped_bytes else ""
        tiles.append((in_bytes(peak), f"peak memory{beside}"))
    if plan is not None:
        tiles.append((in_bytes(plan.measured_bytes), f"peak of {plan.what}, planned {in_bytes(plan.planned_bytes)}"))
    return tiles


def loss_text(loss: float) -> str:
    """Return a loss with the digits that matter; also one that is not finite."""
    return f"{loss:.4f}" if not math.isfinite(loss) or abs(loss) < 1e6 else f"{loss:.3g}"


def median_speed(run: RunFiles, column: str = "tokens_per_s") -> float | None:
    """Return the speed of the median step; None before the first one, or if no row has it."""
    speeds = [speed for speed in run.curves.columns[column] if math.isfinite(speed)]
    return median(speeds) if speeds else None


def data(run: RunFiles) -> dict[str, Any] | None:
    """Return the counts of the documents that the run recorded; None for a run that recorded none."""
    counts = run.recorded("data")
    if not counts:
        return None
    lengths = as_table(counts.get("lengths"))
    text = f"{_count(lengths, 'min')} to {_count(lengths, 'max')}, median {_count(lengths, 'median')}"
    pairs = [
        ("rows", f"{_count(counts, 'rows')}, {_count(counts, 'bad_rows')} bad ones left out"),
        ("documents", f"{_count(counts, 'documents')} to train on, {_count(counts, 'eval_documents')} held out"),
        *_preferences(counts),
        ("tokens", f"{_count(counts, 'tokens')}, {_count(counts, 'trained_tokens')} of them targets"),
        ("tokens of a document", f"{text}, 90 % up to {_count(lengths, 'p90')}"),
        ("over-long", f"{_count(counts, 'cut')} cut, {_count(counts, 'split')} split"),
        *((f"dropped: {reason}", _count(counts["dropped"], reason)) for reason in as_table(counts.get("dropped"))),
        *_left_out(as_table(counts.get("left_out"))),
        ("duplicates", f"{_count(counts, 'duplicates')} documents equal an earlier one"),
        ("leaks", f"{_count(counts, 'eval_in_training')} held-out documents are training documents, too"),
    ]
    keys = ("first", "last", "documents")
    bars = [bar for bar in _tables(counts.get("histogram")) if all(type(bar.get(key)) is int for key in keys)]
    sources = [
        (source.get("path", ""), [_count(source, key) for key in ("documents", "tokens", "trained_tokens")])
        for source in _tables(counts.get("sources"))[:MAX_SOURCES]
    ]
    samples = [
        (
            ", ".join(str(row[key]) for key in ("where", "answer") if row.get(key)),
            _marked(str(row.get("text", "")), row.get("targets")),
        )
        for row in _tables(counts.get("samples"))[:MAX_SAMPLES]
    ]
    return {"counts": pairs, "bars": bars, "sources": sources, "samples": samples}


def _preferences(counts: Mapping[str, Any]) -> Pairs:
    """Return the facts of answers that are compared, if there are any."""
    rows: list[tuple[str, str]] = []
    if pairs := as_table(counts.get("pairs")):
        longer = f"{_count(pairs, 'chosen_longer')}, the rejected one in {_count(pairs, 'rejected_longer')}"
        rows.append(("pairs", f"{_count(pairs, 'pairs')}; the chosen answer is the longer one in {longer}"))
    if labels := as_table(counts.get("labels")):
        rows.append(("labels", f"{_count(labels, 'desirable')} desirable, {_count(labels, 'undesirable')} undesirable"))
    return rows


def _left_out(counts: Mapping[str, Any]) -> Pairs:
    """Return what data.dedup left out, if it was on and found any."""
    parts = [f"{_count(counts, kind)} {kind}" for kind in ("exact", "near") if counts.get(kind)]
    return [("duplicates left out", ", ".join(parts))] if parts else []


def _marked(text: str, targets: object) -> list[tuple[str, bool]]:
    """Return the parts of a text, and which are targets: pairs [start, end) in order; anything else is left out."""
    shown, parts, done = text[:MAX_SAMPLE], list[tuple[str, bool]](), 0
    for pair in cast("list[object]", targets) if isinstance(targets, list) else []:
        match pair:
            case [int(start), int(end)] if done <= start < min(end, len(shown)):
                parts += [(shown[done:start], False), (shown[start:end], True)]
                done = end
            case _:
                pass
    return [*parts, (shown[done:] + "…" * (len(text) > MAX_SAMPLE), False)]


def base_formats(run: RunFiles) -> dict[str, Any] | None:
    """Return the losses by format; a command where the base is quantized and nothing was measured; else None."""
    path, used = run.path / BASE_FORMATS, str(run.recorded("engine").get("quantization") or "none")[:MAX_TEXT]
    if not path.exists():
        command = f"dualtune quantize {run.path / 'config.yaml'} --compare"
        return None if used == "none" else {"used": used, "command": command}
    try:
        record = read_json(path, max_bytes=MAX_FORMATS_BYTES)
    except (FormatError, OSError) as error:
        return {"problem": str(error)}
    listed = record.get("formats")
    rows = cast("list[object]", listed)[:MAX_SOURCES] if isinstance(listed, list) else []
    on = cut(f"{record.get('rows')} rows, {record.get('targets')} targets, by {record.get('backend')}")
    caption = f"Measured without an adapter on {on}."
    return {"used": used, "caption": caption, "rows": [_format_row(as_table(row)) for row in rows]}


def _format_row(row: dict[str, object]) -> tuple[str, str, str]:
    name, loss, above = str(row.get("quantization"))[:MAX_TEXT], number(row.get("loss")), number(row.get("above"))
    problem = str(row.get("problem") or "")[:MAX_TEXT]
    difference = "" if above is None or name == "none" else f"{above:+.4f}"
    return name, "–" if loss is None or not math.isfinite(loss) else f"{loss:.4f}", problem or difference


def reproduce(run: RunFiles) -> dict[str, Any]:
    """Return what somebody needs to repeat the run: the command, the config beside the defaults, versions, hashes."""
    environment, machine = run.environment, run.recorded("hardware")
    devices = [f"{one.get('name')} ({_bytes(one, 'total_bytes')})" for one in _tables(environment.get("devices"))]
    processor = f"{machine.get('cpu')}, {machine.get('cores')} cores, {_bytes(machine, 'memory_bytes')}"
    facts = [
        ("started", environment.get("started") or run.curves.first_time),
        ("last row", run.curves.last_time),
        ("backend", environment.get("backend")),
        ("devices", ", ".join(devices)),
        ("processes", environment.get("processes")),
        ("system", machine.get("system") or environment.get("system")),
        ("processor", processor if machine else ""),
        ("driver", machine.get("driver")),
        ("python", environment.get("python")),
        *run.recorded("packages").items(),
    ]
    command, directory = environment.get("command"), environment.get("directory")
    where = f"the command, in {str(directory)[:MAX_TEXT]}" if directory else "the command"
    return {
        "commands": [(where, str(command)[: 4 * MAX_TEXT])] if command else [],
        "config": changed(run.config),
        "machine": [(label, value) for label, value in facts if value],
        "fingerprints": [*run.recorded("fingerprints").items()],
    }


def next_commands(run: RunFiles) -> list[tuple[str, str]]:
    """Return the next commands to run, each with what it does."""
    config, model = str(run.path / "config.yaml"), str(run.setting("model", "name") or "MODEL")
    at = ("train", config, "--set", f"run.dir={run.path}")
    if run.result is None:
        return [("continue", _command(*at))]
    result, step = str(run.result), run.curves.history.step or 0
    more = ("continue for as many steps again", _command(*at, "--set", f"train.steps={2 * step}"))
    if served_run(run.path):  # it has no data
        start = ("--set", f"adapter.init_from={run.path}/weights/NAME", "--set", "adapter.init_optimizer=true")
        more = ("continue from one of its states, with data of yours", _command("train", "config.yaml", *start))
    answers = _command("eval", *at[1:], "--compare", "--exact-match", "--predictions", str(run.path / PREDICTIONS))
    held_out = run.curves.history.eval_loss is not None
    judge = [("put its answers on this page", f"{answers} && {_command('report', str(run.path))}")] if held_out else []
    if run.result.name != "adapter":
        return [*judge, ("serve it", _command("serve", result)), more]
    return [
        ("talk to it", _command("chat", model, "--adapter", result, "--compare")),
        *judge,
        ("check it on another machine", _command("verify", result, "--base", model)),
        ("serve it", _command("serve", model, "--adapter", result)),
        ("merge it into its base", _command("export", result, "--base", model, "--to", "hf")),
        ("make a GGUF, for llama.cpp", _command("export", result, "--base", model, "--to", "gguf")),
        ("bring it to Ollama", _command("export", result, "--base", model, "--to", "ollama")),
        ("publish it", _command("push", "hf://OWNER/NAME", str(run.path), "--adapter")),
        more,
    ]


def _command(*words: str) -> str:
    return shlex.join(["dualtune", *words])


def _tables(value: object) -> list[dict[str, Any]]:
    """Return the objects of a list of JSON; of anything else none."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [table for item in items if (table := as_table(item))]


def _count(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    return f"{value:,g}" if type(value) is float else f"{value:,}" if type(value) is int else "?"


def _bytes(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    return in_bytes(value) if type(value) is int and 0 < value < 1 << 60 else "unknown memory"
