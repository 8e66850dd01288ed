"""YAML text -> data: what is read, what is refused, and where an error points."""

import json

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from dualtune.base.errors import ConfigError
from dualtune.config import load, parse_config
from dualtune.config.load import BadYaml, read_yaml


def error_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, source="c.yaml")
    return str(caught.value)


def value_of(scalar: str) -> object:
    document = read_yaml(f"key: {scalar}", "c.yaml")
    assert not document.problems
    return document.data["key"]


@pytest.mark.parametrize(("text", "number"), [("1e-4", 1e-4), ("2E5", 2e5), ("1.5e3", 1500.0), ("-3e-2", -0.03)])
def test_exponents_are_floats(text: str, number: float) -> None:
    assert value_of(text) == number
    assert isinstance(value_of(text), float)


@pytest.mark.parametrize(
    "text", ["on", "off", "yes", "no", "1:30", "2024-01-01", "0x10", "1__0", "e5", "1e", ".", "inf"]
)
def test_what_only_yaml_1_1_reads_as_something_else_stays_text(text: str) -> None:
    assert value_of(text) == text


def test_a_leading_zero_is_not_octal() -> None:
    assert value_of("016") == 16


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("~", None),
        ("null", None),
        ("True", True),
        ("false", False),
        ("+5", 5),
        ("16_384", 16384),
        (".5", 0.5),
    ],
)
def test_plain_scalars(text: str, value: object) -> None:
    assert value_of(text) == value
    assert type(value_of(text)) is type(value)


@pytest.mark.parametrize("text", ["'1e-4'", '"true"', "'~'", "''"])
def test_quoted_scalars_are_text(text: str) -> None:
    assert value_of(text) == text[1:-1]


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**62), 2**62)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text("ab é:#,'\"-1e~\\\n"),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
        max_leaves=8,
    )
)
def test_json_is_read_as_json(data: object) -> None:
    assert read_yaml(json.dumps(data), "c.yaml").data == data


def test_places_are_the_lines_of_keys_and_items() -> None:
    document = read_yaml("a:\n  b: 1\n  c:\n  - 2\n  -\n    3\nd: {e: 4,\n f: 5}\n", "c.yaml")
    lines = {path: place.line for path, place in document.places.items() if path}
    assert lines == {
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "c"): 3,
        ("a", "c", 0): 4,
        ("a", "c", 1): 6,
        ("d",): 7,
        ("d", "e"): 7,
        ("d", "f"): 8,
    }


def test_duplicate_key_names_both_lines(wording) -> None:
    text = "model: {name: m}\ndata: {train: t}\ntrain:\n  epochs: 1\n  steps: 5\n  epochs: 2\n"
    wording(error_of(text))


def test_duplicate_section_names_both_lines(wording) -> None:
    text = "model: {name: m}\ndata: {train: t}\nrun: {seed: 1}\nrun:\n  seed: [2, {a: b}]\n"
    wording(error_of(text))


def test_aliases_are_refused(wording) -> None:
    text = "model: &m {name: m}\ndata: {train: t}\nrun: *m\n"
    wording(error_of(text))


def test_an_alias_bomb_is_refused_unexpanded() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    document = read_yaml("\n".join(lines), "c.yaml")
    assert len(document.problems) == 29 * 9


def test_merge_keys_are_no_exception(wording) -> None:
    wording(error_of("model: &m {name: m}\ndata: {<<: *m, train: t}\n"))


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!!python/name:os.system", "!!str", "!local"])
def test_tags_are_refused_by_name(tag: str, wording) -> None:
    message = error_of(f"model:\n  name: {tag} [x]\ndata: {{train: t}}\n")
    wording(message)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("model: {name: m}\ndata:\n\ttrain: t\n", "c.yaml:3:1: a tab is not allowed here"),
        ("model: {name: m}\ndata: train: t\n", "c.yaml:2:12: a ':' is not allowed here"),
        ("model: {name: m\ndata: x", "c.yaml:2:5: not valid YAML: "),
        ("model: 'm", "c.yaml:1:10: not valid YAML: "),
        ("model: m\n---\ndata: x\n", "c.yaml:2:1: a second YAML document begins here"),
        ("model: m\nrun: \x07\n", "c.yaml:2:6: character U+0007 is not allowed"),
        ("model: " + "[" * 50 + "]" * 50, "c.yaml:1:27: nested too deeply"),
        ('model: "\\UFFFFFFFF"', "c.yaml: not valid YAML: "),
    ],
)
def test_syntax_errors_point_at_line_and_column(text: str, place: str) -> None:
    assert error_of(text).startswith(place)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null"])
def test_an_empty_text_says_how_to_get_a_default(text: str, wording) -> None:
    wording(error_of(text))


@pytest.mark.parametrize("text", ["[a, b]", "just text", "3"])
def test_the_top_must_be_a_mapping(text: str, wording) -> None:
    wording(error_of(text))


def test_keys_are_text_as_written() -> None:
    assert read_yaml("1: a\ntrue: b\n", "c.yaml").data == {"1": "a", "true": "b"}


def test_a_mapping_cannot_be_a_key() -> None:
    message = error_of("model: {name: m}\ndata:\n  train: t\n  ? {a: b}\n  : [c]\n  packing: 3\n")
    assert message.splitlines() == [
        "c.yaml:4: data.?: a key must be a name, not a list or mapping",
        "c.yaml:6: data.packing: got 3, must be true or false",
    ]


@pytest.mark.parametrize("digits", ["9" * 19, "9" * 5000])
def test_integers_beyond_64_bits_are_refused(digits: str, wording) -> None:
    wording(error_of(f"run: {{seed: {digits}}}"))


def test_a_byte_order_mark_is_accepted() -> None:
    assert parse_config("\ufeffmodel: {name: m}\ndata: {train: t}\n").model.name == "m"


def read(text: str) -> str:
    """What is read, with places and problems, or the error."""
    try:
        return repr(read_yaml(text, "c.yaml"))
    except BadYaml as error:
        assert str(error.problem).startswith("c.yaml")
        return str(error.problem)


@given(st.text(st.sampled_from("ab:-[]{}#&*!|>'\"%@` \t\n?,\\U0~<\ufeff\r\x85\x07"), max_size=40))
@example("a: a\tb")  # these two libyaml reads
@example("a: |#\n")
def test_any_text_is_read_or_refused_cleanly_and_alike_by_both_parsers(text: str) -> None:
    by_either = read(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "LIBYAML", yaml.SafeLoader)
        assert read(text) == by_either
