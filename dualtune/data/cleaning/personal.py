"""Personal data in the values of rows, found by the pattern recognizers of presidio-analyzer (an optional package).

Only recognizers that work by pattern and checksum are used: they need no language model, no download and no idea of the
language. Names and addresses of people, which need a model, are not found. Nothing is ever removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from dualtune.extras import import_extra

RECOGNIZERS = (
    "EmailRecognizer", "PhoneRecognizer", "CreditCardRecognizer", "IbanRecognizer", "UsSsnRecognizer",
    "CryptoRecognizer", "IpRecognizer", "MacAddressRecognizer",
)  # fmt: skip
LEAST_SCORE = 0.4  # that of a phone number without a word about phones beside it

Recognize = Callable[[str], list["Personal"]]


class Personal(NamedTuple):
    """A value that identifies somebody."""

    kind: str  # presidio's name, such as EMAIL_ADDRESS
    masked: str  # its first letter or digit, and its form


def recognizer() -> Recognize:
    """Return the function that finds personal data in a text. EnvironmentFault if presidio is not installed."""
    predefined = import_extra("presidio_analyzer.predefined_recognizers", "pii", "--pii")
    tldextract = import_extra("tldextract", "pii", "--pii")
    recognizers = [getattr(predefined, name)() for name in RECOGNIZERS]
    # With the list of domains that is in the package: by default it is downloaded.
    domains = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)

    def is_address(text: str) -> bool:
        return bool(domains(text).fqdn)

    recognizers[0].validate_result = is_address

    def recognize(text: str) -> list[Personal]:
        found = [result for each in recognizers for result in each.analyze(text, each.supported_entities, None)]
        return [
            Personal(result.entity_type, masked(text[result.start : result.end]))
            for result in sorted(found, key=lambda result: (result.start, result.end, result.entity_type))
            if result.score >= LEAST_SCORE
        ]

    return recognize


def masked(value: str) -> str:
    """Return the value with all letters and digits but the first as *."""
    hidden = "".join("*" if char.isalnum() else char for char in value)
    first = next((i for i, char in enumerate(value) if char.isalnum()), 0)
    return hidden[:first] + value[first : first + 1] + hidden[first + 1 :]


def texts_in(value: Any) -> Iterator[str]:
    """Yield the strings of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in cast(Mapping[str, Any], value).values():
            yield from texts_in(item)
    elif isinstance(value, list):
        for item in cast(list[Any], value):
            yield from texts_in(item)
