"""What the config's sections are made of: their base class, and the types of their values."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from dualtune.base.redaction import secret_in
from dualtune.model.methods import INITS, NAMES
from dualtune.model.targets import LAYERS

# ----------------------------------------------------------------------------------------------------------------------
# Problems of a config and their places: the lines of a ConfigError.

KeyPath = tuple[str | int, ...]  # ("data", "train", 0, "weight")


@dataclass(frozen=True, slots=True)
class Location:
    """The origin of a value: a line of a file (0: unknown), or an override."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return ":".join([self.source, *(str(number) for number in (self.line, self.column) if number)])


class ConfigProblem(NamedTuple):
    """One problem. The path is empty if it is not about a key."""

    place: Location
    path: KeyPath
    message: str

    def __str__(self) -> str:
        key = dotted(self.path)
        if not key or self.place.source == f"--set {key}":  # such a place already names the key
            return f"{self.place}: {self.message}"
        return f"{self.place}: {key}: {self.message}"


def dotted(path: KeyPath) -> str:
    """Format a path, such as `data.train[0].weight`; unprintable names are escaped."""
    names = (
        f"[{part}]" if isinstance(part, int) else "." + (part if part.isprintable() else repr(part)) for part in path
    )
    return "".join(names).removeprefix(".")


# ----------------------------------------------------------------------------------------------------------------------
RULES = ConfigDict(
    extra="forbid",
    frozen=True,
    strict=True,  # "16" is not 16, true is not 1, 3.7 is not 3; an integer is valid where a number is expected
    allow_inf_nan=False,
    hide_input_in_errors=True,  # a value can be a secret
    use_attribute_docstrings=True,
)


def refuse(message: str) -> PydanticCustomError:
    """Return a validation error with this message, which is shown unchanged."""
    return PydanticCustomError("refused", "{message}", {"message": message})


def all_different(names: tuple[str, ...]) -> tuple[str, ...]:
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise refuse(f"lists {', '.join(map(repr, repeated))} more than once")
    return names


def as_list(value: object) -> object:
    """Return a list of one for a single text: `--run.track trackio` can only mean that."""
    return (value,) if isinstance(value, str) else value


def _listed(value: object) -> object:
    """Return the text for a number, or a list of them: [0, 4] is the same as 0,4."""
    numbers: list[object] = [*cast(list[object], value)] if isinstance(value, list | tuple) else [value]
    is_listed = bool(numbers) and all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    return ",".join(map(str, numbers)) if is_listed else cast(object, value)


# `format` is a free annotation in JSON schema: it names the meaning of a string, list or mapping for `words.py`.
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Factor = Annotated[float, Field(ge=1e-9, le=1e9)]  # as `dualtune.base.fields.positive` reads one from an adapter
Share = Annotated[float, Field(gt=0, lt=1)]
Name = Annotated[str, Field(pattern=r"\S", json_schema_extra={"format": "name"})]
TemplateName = Literal[
    "chatml", "llama-3", "llama-3.1", "qwen-2.5", "qwen-3", "gemma-2", "gemma-3", "mistral-small", "phi-3"
]  # fmt: skip
# Short names mean the newest version that is here. A config holds the full name once it is read, and so does its run.
NEWEST_TEMPLATES = {"qwen": "qwen-3", "gemma": "gemma-3", "mistral": "mistral-small", "phi": "phi-3"}
# What a chat template is given by those who render it, and options of transformers' apply_chat_template.
RESERVED_VARIABLES = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip


def template_variables(variables: dict[str, JsonValue]) -> dict[str, JsonValue]:
    for name in variables:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise refuse(f"got the variable {name!r}, allowed: letters, digits and _, such as enable_thinking")
        if name in RESERVED_VARIABLES or name.endswith(("_token", "_tokens")):
            raise refuse(f"got the variable {name!r}, which every template is given; allowed: the template's own ones")
    return variables


TemplateVariables = Annotated[
    dict[str, JsonValue], AfterValidator(template_variables), Field(json_schema_extra={"format": "variables"})
]
Arguments = Annotated[dict[str, JsonValue], Field(json_schema_extra={"format": "arguments"})]
Layers = Annotated[
    str,
    Field(pattern=rf"^({LAYERS})$", json_schema_extra={"format": "layers"}),
    BeforeValidator(_listed),
]
# Of modules: the first name that selects one counts, as in `dualtune.model.targets.value_of`.
Ranks = Annotated[dict[str, Count], Field(json_schema_extra={"format": "ranks"})]
Alphas = Annotated[dict[str, Factor], Field(json_schema_extra={"format": "alphas"})]
PathText = Annotated[str, Field(pattern=r"\S", json_schema_extra={"format": "path"})]
Size = Annotated[str, Field(pattern=r"^[1-9][0-9]*(\.[0-9]+)? ?[MGT]i?B$", json_schema_extra={"format": "size"})]
ModuleNames = Annotated[
    tuple[Name, ...],
    Field(strict=False),  # a YAML list becomes a tuple; the names stay strict
    Field(min_length=1, json_schema_extra={"format": "modules", "uniqueItems": True}),
    AfterValidator(all_different),
]
Names = Annotated[
    tuple[Name, ...],
    Field(strict=False, json_schema_extra={"format": "names", "uniqueItems": True}),
    AfterValidator(all_different),
    BeforeValidator(as_list),
]
Tokens = Annotated[
    tuple[Name, ...],
    Field(strict=False, json_schema_extra={"format": "texts", "uniqueItems": True}),
    AfterValidator(all_different),
    BeforeValidator(as_list),
]
TokenRows = Annotated[
    tuple[Annotated[int, Field(ge=0)] | Name, ...],
    Field(strict=False, json_schema_extra={"format": "tokens", "uniqueItems": True}),
    AfterValidator(all_different),
    BeforeValidator(as_list),
]
Roles = Annotated[
    dict[str, Literal["system", "user", "assistant", "tool"]], Field(json_schema_extra={"format": "roles"})
]
Template = Annotated[
    Literal["auto", "none"] | TemplateName | PathText,
    BeforeValidator(lambda value: NEWEST_TEMPLATES.get(value, value) if isinstance(value, str) else value),
]
MULTILINE = ("sample_prompts", "stop")  # keys whose texts may have line breaks and tabs
Numbers = Annotated[
    tuple[Annotated[float, Field(allow_inf_nan=False)], ...],
    Field(strict=False, json_schema_extra={"format": "numbers"}),
    BeforeValidator(as_list),
]
StopTexts = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=200)], ...],
    Field(strict=False, max_length=8, json_schema_extra={"format": "stop texts"}),
    BeforeValidator(as_list),
]
Prompts = Annotated[
    tuple[Annotated[str, Field(pattern=r"\S", max_length=4000, json_schema_extra={"format": "prompt"})], ...],
    Field(strict=False),
    Field(max_length=8, json_schema_extra={"format": "prompts"}),
    BeforeValidator(as_list),
]


Trackers = Annotated[
    tuple[Literal["trackio", "wandb", "mlflow", "tensorboard"], ...],
    Field(strict=False, json_schema_extra={"format": "trackers", "uniqueItems": True}),
    AfterValidator(all_different),
    BeforeValidator(as_list),
]
if TYPE_CHECKING:
    MethodName = InitName = str
else:
    MethodName, InitName = Literal[NAMES], Literal[INITS]  # the only lists of them


class Section(BaseModel):
    """The base class of all sections."""

    model_config = RULES

    @field_validator("*", mode="before")
    @classmethod
    def _safe_text(cls, value: object, info: ValidationInfo) -> object:
        """Refuse secrets, which would end up in logs and bundles, and characters that no file name can hold."""
        for text in _texts(value):
            if kind := secret_in(text):
                raise refuse(
                    f"looks like {kind} (not shown). Remove it from the config, and revoke it if the file was shared; "
                    "put it in an environment variable such as HF_TOKEN, or run `hf auth login`"
                )
            plain = text.replace("\n", "").replace("\t", "") if info.field_name in MULTILINE else text
            if any(unicodedata.category(char) in ("Cc", "Cs") for char in plain):
                raise refuse(f"got {text!r}, must not contain control characters or lone surrogates")
        return value


def _texts(value: object) -> Iterator[str]:
    """Yield all strings in a nested value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in cast(dict[object, object], value).items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in cast(list[object], value):
            yield from _texts(item)


# Objectives that learn from the model's own samples (`train/objectives/policy_gradient.py`).
PolicyObjectiveName = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]
POLICY_OBJECTIVES: tuple[str, ...] = get_args(PolicyObjectiveName)
OBJECTIVES_GROUP = "dualtune.objectives"  # of entry points
OwnObjectiveName = Literal["sft", "dpo", "orpo", "simpo", "cpo", "kto", "distill", "on_policy_distill"]
OBJECTIVE_NAMES: tuple[str, ...] = (*get_args(OwnObjectiveName), *POLICY_OBJECTIVES)
ON_POLICY = "on_policy_distill"  # the other one that draws samples: a teacher judges each token of them
BASE_TEACHER, SELF_TEACHER = "base", "self"  # values of distill.teacher that name no other model
DEFAULT_TOP_K = 32
