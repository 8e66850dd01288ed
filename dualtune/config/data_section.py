"""The section `data` of the config: sources of rows, and how to read them.

The names are a public interface, like all of `schema.py`.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from dualtune.config.values import (
    Count,
    Fraction,
    Name,
    PathText,
    Positive,
    Roles,
    Section,
    Template,
    TemplateVariables,
    Tokens,
    refuse,
)
from dualtune.model.beside import NewToken

Format = Literal[
    "auto", "messages", "prompt_completion", "text", "alpaca", "sharegpt", "preference", "unpaired_preference",
    "comparison", "prompt",
]  # fmt: skip
Consecutive = Literal["join", "keep", "refuse"]
Columns = Annotated[dict[str, Name | None], Field(json_schema_extra={"format": "columns"})]


class SourceConfig(Section):
    """Data to read, and how to read it."""

    path: Annotated[PathText, Field(examples=["data/train.jsonl"])]
    """A file, a directory, or the name of a Hugging Face dataset."""
    weight: Positive = 1.0
    """How often its documents are used per epoch: 0.5 uses half of them, 2 uses each twice."""
    format: Format | None = None
    """The format of its rows; null uses data.format."""
    columns: Columns | None = None
    """Columns that have other names in its files; null uses data.columns."""
    subset: Name | None = None
    """The subset of a Hugging Face dataset, such as main."""
    split: Name | None = None
    """The split of a Hugging Face dataset, such as train."""
    roles: Roles | None = None
    """Names of roles in its messages; null uses data.roles."""
    consecutive: Consecutive | None = None
    """What becomes of two turns of one role in a row; null uses data.consecutive."""

    @property
    def identity(self) -> tuple[str, str | None, str | None]:
        """A key that is equal for sources with the same rows."""
        return os.path.normpath(self.path), self.subset, self.split

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize without defaults, to keep a long list of sources short."""
        fields = type(self).model_fields
        return {key: value for key, value in handler(self).items() if value != fields[key].default}


def _listed(sources: str | SourceConfig | tuple[str | SourceConfig, ...]) -> list[SourceConfig]:
    """Normalize the value of data.train or data.eval to a list of sources."""
    items = sources if isinstance(sources, tuple) else (sources,)
    return [SourceConfig(path=item) if isinstance(item, str) else item for item in items]


def _all_different_sources(sources: tuple[str | SourceConfig, ...]) -> tuple[str | SourceConfig, ...]:
    identities: set[object] = set()
    for source in _listed(sources):
        if source.identity in identities:
            raise refuse(f"lists {source.path!r} more than once; to use it more often, give it a weight")
        identities.add(source.identity)
    return sources


Sources = Annotated[
    tuple[PathText | SourceConfig, ...],
    Field(strict=False),
    Field(min_length=1, json_schema_extra={"format": "sources"}),
    AfterValidator(_all_different_sources),
]


DEFAULT_SHARE = 0.1  # of the training rows, held out by data.eval: auto


def with_old_default(data: dict[str, Any]) -> dict[str, Any]:
    """Return the section `data` with `auto` for the default that an older dualtune wrote out.

    It wrote every key, and 0.1 for the default of data.eval, which was replaced by a valid file too.
    """
    written_out = {"eval", "max_length", "loss_on", "on_bad_row", "max_bad_rows"} <= data.keys()
    is_old = written_out and "consecutive" not in data
    return data | {"eval": "auto"} if is_old and data["eval"] == DEFAULT_SHARE else data


class DataConfig(Section):
    """The training and evaluation data."""

    train: Annotated[PathText | SourceConfig | Sources, Field(examples=["data/train.jsonl"])]
    """The training data: a file, a directory or a Hugging Face dataset; a mapping says how to read it."""
    eval: Literal["auto"] | Fraction | PathText | SourceConfig | Sources | None = "auto"
    """The evaluation data, or the fraction of the training rows to hold out for it; with 0 or null
    nothing is evaluated; auto is the valid file in the data directory if there is one, else 0.1."""
    format: Format = "auto"
    """The format of a row; auto detects it from the column names, unpaired_preference by a label that is a boolean."""
    columns: Columns = {}  # noqa: RUF012  pydantic copies it
    """Columns that have other names in the file, such as {prompt: question}; null leaves one out: {reasoning: null}."""
    roles: Roles = {}  # noqa: RUF012  pydantic copies it
    """Further names of roles in messages, such as {critic: user}; common names are known in any case."""
    consecutive: Consecutive = "join"
    """What becomes of two user or two assistant turns in a row: one turn with a blank line, two turns, or a bad row."""
    system: Literal["fold", "refuse"] = "fold"
    """What becomes of a system message where the chat template writes none: it is put before the question, or the row
    is a bad row."""
    template: Template = "auto"
    """The chat template: the tokenizer's own, none at all, that of a model family by name, or a Jinja file."""
    template_variables: TemplateVariables = {}  # noqa: RUF012  pydantic copies it
    """Variables of the chat template and their values, such as {enable_thinking: false}; they are saved with the
    adapter's template, so that it is used with them."""
    special_tokens_in_text: Literal["error", "text", "allow"] = "text"
    """What a control token such as <|im_end|> in a row's text means: a bad row, plain text, or the control token."""
    new_tokens: Tokens = ()
    """Texts that become tokens of their own, such as [<tool>]; their rows in embedding and output head are trained."""
    new_special_tokens: Tokens = ()
    """The same for control tokens, which are left out where text is shown, such as [<|call|>]."""
    max_length: Annotated[int, Field(ge=2)] = 2048
    """The largest number of tokens in a document."""
    packing: bool = True
    """Whether several documents share a row, each seeing only itself."""
    loss_on: Literal["assistant", "all", "last"] = "assistant"
    """Which tokens are targets of the loss: every assistant turn, everything, or the last assistant turn."""
    dedup: Literal["off", "exact", "near"] = "off"
    """Which rows to leave out that repeat an earlier training row or an evaluation row: none, equal ones, near ones."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with rows that cannot be used: stop with an error that lists them, or skip them."""
    max_bad_rows: Fraction | Count = 0.01
    """How many rows may be skipped: below 1 a fraction of them, from 1 on a number."""
    on_lost_text: Literal["error", "accept"] = "error"
    """What to do if the chat template leaves out what the assistant says in more than 5 % of the rows: stop with an
    error, or train on the rest."""

    def sources(self) -> tuple[SourceConfig, ...]:
        """Return the training sources. What a source lacks is taken from `data`."""
        return self._complete(_listed(self.train))

    def eval_sources(self) -> tuple[SourceConfig, ...]:
        """Return the evaluation sources, like `sources`. Empty if data.eval is auto, a share, 0 or null."""
        if self.eval is None or self.eval == "auto" or isinstance(self.eval, int | float):
            return ()
        return self._complete(_listed(self.eval))

    @property
    def added_tokens(self) -> tuple[NewToken, ...]:
        """The tokens of new_tokens and new_special_tokens, in the order of their ids."""
        return (*map(NewToken, self.new_tokens), *(NewToken(text, special=True) for text in self.new_special_tokens))

    @property
    def held_out_share(self) -> float:
        """The fraction of the training rows to hold out if there are no evaluation data of their own."""
        if self.eval == "auto":
            return DEFAULT_SHARE
        return self.eval if isinstance(self.eval, int | float) else 0.0

    @field_validator("eval")
    @classmethod
    def _is_not_off(cls, value: object) -> object:
        if value in ("none", "off", "no", "false"):
            raise refuse(f"got {value}, null or 0 evaluates nothing; a directory of that name is ./{value}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _with_old_default(cls, value: object) -> object:
        return with_old_default(cast(dict[str, Any], value)) if isinstance(value, dict) else value

    def _complete(self, sources: list[SourceConfig]) -> tuple[SourceConfig, ...]:
        return tuple(
            source.model_copy(
                update={
                    "format": source.format or self.format,
                    "columns": self.columns if source.columns is None else source.columns,
                    "roles": self.roles if source.roles is None else source.roles,
                    "consecutive": source.consecutive or self.consecutive,
                }
            )
            for source in sources
        )
