"""Rows with two answers and a verdict: which column is which answer, and what the verdict says.

The same number says opposite things in different data sets, so a number is read by the name of its column alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dualtune.data.chat.row_values import shown
from dualtune.data.sources.rows import RowError

A, B, TIE = "answer_a", "answer_b", ""  # what a verdict may be: the key of the better answer, or neither
_WORDS = {
    **dict.fromkeys(("a", "answer_a", "first"), A), **dict.fromkeys(("b", "answer_b", "second"), B),
    **dict.fromkeys(("tie", "equal", "both", "neither"), TIE),
}  # fmt: skip
_MODELS = {"model_a": A, "model_b": B, **dict.fromkeys(("tie", "tie (bothbad)", "tie (both bad)"), TIE)}


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout of comparisons: the column of each key, and the meaning of its verdict."""

    columns: Mapping[str, tuple[str, ...]]
    verdict: Callable[[Any], str]
    keys: tuple[str, ...] = ("prompt", A, B, "better")

    @property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        return {"prompt": ("question", "instruction"), **self.columns}


def _named(meanings: Mapping[str, str]) -> Callable[[Any], str]:
    """Return a verdict that is one of these values."""

    def verdict(value: Any) -> str:
        meaning = meanings.get(str(value).strip().lower().removesuffix(".0"))
        if meaning is None:
            raise RowError(f"better: got {shown(value)}, allowed here: {', '.join(meanings)}")
        return meaning

    return verdict


def _signed(value: Any) -> str:
    """Return the verdict of a strength: below zero the first answer is better, above it the second."""
    try:
        strength = float(value)
    except (TypeError, ValueError) as error:
        raise RowError(f"better: got {shown(value)}, a number is needed, below 0 if the first is better") from error
    if strength != strength:
        raise RowError("better: got NaN, a number is needed, below 0 if the first is better")
    return TIE if strength == 0 else A if strength < 0 else B


LAYOUTS = (
    Layout({}, _named(_WORDS)),
    Layout(  # stanfordnlp/SHP
        {"prompt": ("history",), A: ("human_ref_A",), B: ("human_ref_B",), "better": ("labels",),
         "score_a": ("score_A",), "score_b": ("score_B",)},
        _named({"1": A, "0": B}),
    ),
    Layout(  # nvidia/HelpSteer2, preference/
        {A: ("response_1",), B: ("response_2",), "better": ("preference_strength",)}, _signed
    ),
    Layout(  # nvidia/HelpSteer3
        {"prompt": ("context",), A: ("response1",), B: ("response2",), "better": ("overall_preference",)}, _signed
    ),
    Layout(  # HelpSteer3's verdict beside HelpSteer2's names
        {A: ("response_1",), B: ("response_2",), "better": ("overall_preference",)}, _signed
    ),
    Layout(  # tatsu-lab/alpaca_farm, human_preference
        {A: ("output_1",), B: ("output_2",), "better": ("preference",)}, _named({"1": A, "2": B, "1.5": TIE})
    ),
    Layout(  # PKU-Alignment/PKU-SafeRLHF
        {A: ("response_0",), B: ("response_1",), "better": ("better_response_id",)}, _named({"0": A, "1": B})
    ),
    Layout(  # lmsys/chatbot_arena_conversations: whole conversations
        {A: ("conversation_a",), B: ("conversation_b",), "better": ("winner",)}, _named(_MODELS), (A, B, "better")
    ),
)  # fmt: skip
