"""What a prepared run will do, in lines for people: printed before it starts, and the first lines of its log."""

from __future__ import annotations

from dualtune.data.documents import notices, unused_valid
from dualtune.data.tokens.control_tokens import control_token_warning
from dualtune.model.formats.chat_template import mismatch
from dualtune.train.evaluation import layout_of
from dualtune.train.prepare import Prepared, template_of


def summary(prepared: Prepared) -> list[str]:
    """Describe what the run will do, one line each."""
    config, data, spec, tokenizer = prepared.config, prepared.data, prepared.spec, prepared.model.tokenizer
    chat = "chat template" if tokenizer.template else "no chat template: prompt and completion as they are"
    copy, asked = template_of(config, prepared.checkpoint), config.data.template
    return [
        f"model       {config.model.name}, {chat}",
        *([f"template    {copy}, because {asked} does not exist here"] if copy != asked else []),
        *(f"warning     {doubt}" for doubt in _doubts(prepared) if doubt),
        "adapter     none: all parameters of the model are trained"
        if spec.trains_model
        else f"adapter     rank {spec.rank}, scale {spec.scale:g}, dropout {spec.dropout:g}, "
        f"on {', '.join(spec.targets[:8])}{' …' if len(spec.targets) > 8 else ''}",
        f"train data  {data.train.summary()}",
        f"eval data   {data.eval.summary() if data.eval.num_rows else data.eval.remark or 'none'}",
        *(
            ["cache       hidden states below the adapter, computed first unless they are on disk"]
            if config.train.activation_cache == "disk"
            else []
        ),
        _steps(prepared),
    ]


def _doubts(prepared: Prepared) -> list[str | None]:
    data, tokenizer, settings = prepared.data, prepared.model.tokenizer, prepared.config.data
    doubts = [tokenizer.warning, *notices(data.train, data.eval), *unused_valid(settings)]
    if rows := data.train.with_control_text() + data.eval.with_control_text():
        doubts.append(control_token_warning(len(rows), rows[0], settings.special_tokens_in_text))
    if prepared.start is not None:
        doubts.append(mismatch(prepared.start.template_hash, tokenizer.template_hash))
    return doubts


def _steps(prepared: Prepared) -> str:
    train, layout = prepared.config.train, prepared.data.layout
    per_step = (
        f"{train.documents_per_step} documents" if train.documents_per_step else f"up to {train.tokens_per_step} tokens"
    )
    why = " (auto)" if train.micro_batch_tokens == "auto" else ""
    if layout.max_tokens < layout_of(prepared.config).max_tokens:
        why = " (since memory ran out)"
    rows = "packed rows" if layout.row_length else "one document a row"
    return (
        f"steps       {prepared.data.order.num_steps} of {per_step}, "
        f"in micro-batches of up to {layout.max_tokens} tokens{why}, {rows}"
    )
