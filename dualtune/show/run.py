"""A run as a person sees it: what it will do, its log, its trackers, its page, and in a notebook a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualtune.base.fields import shown, subtable
from dualtune.base.files import write_file
from dualtune.config import Config, load_config
from dualtune.data.documents import notices, unused_valid
from dualtune.data.survey import unseen_tokens
from dualtune.data.tokens.control_tokens import control_token_warning
from dualtune.engine.choose import choose
from dualtune.engine.deferred import deferred
from dualtune.model.formats.chat_template import mismatch
from dualtune.model.methods import INITS
from dualtune.model.targets import ALL_LAYERS
from dualtune.show.report.run_page import run_page
from dualtune.show.trackers.tracker import TrackerProcesses, check_installed
from dualtune.show.view.lines import RunLog, log_result
from dualtune.show.view.notebook import NotebookView, notebook_display
from dualtune.show.view.run_view import RunView
from dualtune.train import run as training
from dualtune.train.evaluation import layout_of
from dualtune.train.hooks import Hook
from dualtune.train.prepare import Prepared, template_of
from dualtune.train.state.run_dir import LOG, REPORT

if TYPE_CHECKING:
    from dualtune.engine.backend import Backend
    from dualtune.train.run import TrainResult


class RunDisplay(training.Display):
    """The log and the page in the run directory, and the trackers of `run.track`."""

    def check(self, config: Config) -> None:
        check_installed(config.run.track)

    def hooks(self, prepared: Prepared, run_dir: Path) -> Sequence[Hook]:
        every = prepared.config.run
        view, first = RunView(every.eval_every, every.save_every), [*summary(prepared), *prepared.memory.lines()]
        log = RunLog(run_dir / LOG, view, every.log_every, first)
        return [log, *([TrackerProcesses(run_dir, every.track)] if every.track else [])]

    def write_report(self, run_dir: Path) -> None:
        write_file(run_dir / REPORT, run_page([run_dir]))

    def log_result(self, run_dir: Path, result: Path) -> None:
        log_result(run_dir / LOG, result.name, result)


DISPLAY = RunDisplay()
run = partial(training.run, display=DISPLAY)
execute = partial(training.execute, display=DISPLAY)


def train_on(
    config: Config | str | Path | Mapping[str, Any], platform: str = "auto", hooks: Sequence[Hook] = (), *,
    resume: str = "auto",
) -> TrainResult:  # fmt: skip
    """Train as `dualtune.train` does; see its docstring."""
    settings = config if isinstance(config, Config) else load_config(config)
    backend = deferred(choose(platform))
    views = _in_notebook(settings, backend)

    def announce(prepared: Prepared) -> None:
        for view in views:
            view.adopt(prepared.config.run)

    return run(settings, backend, [*hooks, *views], resume=resume, announce=announce)


def _in_notebook(settings: Config, backend: Backend) -> list[NotebookView]:
    """Return what shows the run in a notebook, if this process is the kernel of one."""
    display, every = notebook_display(), settings.run
    if display is None or backend.world().rank > 0:
        return []
    view = RunView(every.eval_every, every.save_every, backend.memory, settings.memory.limit_bytes)
    return [NotebookView(view, every.log_every, display)]


# ----------------------------------------------------------------------------------------------------------------------
# What a prepared run will do, in lines for people: printed before it starts, and the first lines of its log.


def summary(prepared: Prepared) -> list[str]:
    """Describe what the run will do, one line each."""
    config, data, spec, tokenizer = prepared.config, prepared.data, prepared.spec, prepared.model.tokenizer
    chat = "chat template" if tokenizer.template else "no chat template: prompt and completion as they are"
    start = "" if spec.init == INITS[0] else f"start {spec.init}, "
    others = "".join(f"{target}: {shown}, " for target, shown in spec.differences().items())
    copy, template = template_of(config, prepared.checkpoint), config.data.template
    return [
        f"model       {config.model.name}, {chat}",
        *([f"template    {copy}, because {template} does not exist here"] if copy != template else []),
        *(f"warning     {doubt}" for doubt in _doubts(prepared) if doubt),
        "adapter     none: all parameters of the model are trained"
        if spec.trains_model
        else f"adapter     rank {spec.rank}, scale {spec.scale:g}, {others}dropout {spec.dropout:g}, {start}"
        f"on {', '.join(spec.targets[:8])}{' …' if len(spec.targets) > 8 else ''}"
        f"{'' if spec.layers == ALL_LAYERS else f' in layers {spec.layers}'}",
        *_start(prepared),
        f"train data  {data.train.summary()}",
        f"eval data   {data.eval.summary() if data.eval.num_rows else data.eval.remark or 'none'}",
        *(
            ["cache       hidden states below the adapter, computed first unless they are on disk"]
            if config.train.activation_cache == "disk"
            else []
        ),
        _steps(prepared),
    ]


def _start(prepared: Prepared) -> list[str]:
    """Return the line on what a new run starts from: a resumed one has its own checkpoint."""
    path, state = prepared.config.adapter.init_from, prepared.start_state
    if path is None or prepared.resumed is not None:
        return []
    optimizer = "a new optimizer" if state is None else f"its optimizer after {state.optimizer.step} updates"
    assert prepared.start is not None
    base, here = subtable(prepared.start.metadata, "base", path), prepared.model.identity["weights_sha256"]
    is_other = base.get("weights_sha256", here) != here
    other = f"; it was trained on other weights, those of {shown(str(base.get('name')))}" if is_other else ""
    return [f"start       {path}, with {optimizer}{other}"]


def _doubts(prepared: Prepared) -> list[str | None]:
    data, tokenizer, settings = prepared.data, prepared.model.tokenizer, prepared.config.data
    of_rows = prepared.config.rollouts.reads_columns
    doubts = [tokenizer.warning, *notices(data.train, data.eval, all_columns_used=of_rows), *unused_valid(settings)]
    doubts += unseen_tokens(settings, data.train, tokenizer)
    if rows := data.train.with_control_text() + data.eval.with_control_text():
        doubts.append(control_token_warning(len(rows), rows[0], settings.special_tokens_in_text))
    if prepared.start is not None:
        doubts.append(mismatch(prepared.start.template_hash, tokenizer.template_hash))
    return doubts


def _steps(prepared: Prepared) -> str:
    train, layout, number = prepared.config.train, prepared.data.layout, prepared.config.train.documents_per_step
    per_step = prepared.data.train.counted(number) if number else f"up to {train.tokens_per_step} tokens"
    why = " (auto)" if train.micro_batch_tokens == "auto" else ""
    if layout.max_tokens < layout_of(prepared.config).max_tokens:
        why = " (since memory ran out)"
    rows = "packed rows" if layout.row_length else "one document a row"
    return (
        f"steps       {prepared.data.order.num_steps} of {per_step}, "
        f"in micro-batches of up to {layout.max_tokens} tokens{why}, {rows}"
    )
