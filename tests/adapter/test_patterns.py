"""Patterns of a stranger's config. The oracle is Python's own `re`, where it comes to an end."""

import itertools
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualtune.base.errors import FormatError
from dualtune.model.formats.patterns import full_match, matches_end

ATOMS = ["a", "b", ".", "[ab]", "[^a]", r"\.", r"\w", r"\d", "^", "$", r"\b", "", "(?=a)", "(?!b)", "(?:a|)", "(b|ab)"]
PATTERNS = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, min_size=2, max_size=3).map(lambda ways: f"({'|'.join(ways)})")
        | st.tuples(inner, st.sampled_from(["*", "+?", "?", "{2}", "{1,2}", "{,3}?"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        )
        | inner.map(lambda p: f"(?!{p})")
    ),
    max_leaves=8,
)
LAYER = "model.layers.11.self_attn.q_proj"
REAL = [  # of PEFT's documentation, of Unsloth and of ms-swift
    r".*\.(q_proj|v_proj)$",
    r"model\.layers\.\d+\.self_attn\.(q|k|v|o)_proj",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|k_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|k_proj)))",
    r"^(model)(?!.*(lm_head|output|emb|wte|shared)).*",
    r"^(model)(?!.*(self_attn|output|emb|wte|shared)).*",
    r"(?i)MODEL\..*q_proj",
]


@given(PATTERNS, st.text("ab.", max_size=6))
def test_a_pattern_matches_what_re_matches(pattern, text):
    assert full_match(pattern, text, "test") == (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize(
    "pattern", ["a{2}", "a{2,}b?", "a{,2}", "(ab){1,2}", "(a|ab)(b|ba)?", "(a*)*b", "(a?){3}", "(?!a).{2}", "a(?=b).*"]
)
def test_repetitions_and_choices_are_those_of_re(pattern):
    for length in range(5):
        for text in map("".join, itertools.product("ab", repeat=length)):
            assert full_match(pattern, text, "test") == (re.fullmatch(pattern, text) is not None), text


@pytest.mark.parametrize("pattern", REAL)
@pytest.mark.parametrize("module", [LAYER, "model.vision.3.mlp.q_proj.x", "lm_head"])
def test_patterns_of_other_tools_match_as_in_re(pattern, module):
    assert full_match(pattern, module, "test") == (re.fullmatch(pattern, module) is not None)


@pytest.mark.parametrize(
    "pattern", [r"(\w+)+!", r"(a|a)*" * 20 + "!", ".*" * 200 + "!", "(.*)*" * 50 + "!", "((a*)*)*!", "a{99999999}!"]
)
def test_what_takes_re_years_is_answered_at_once(pattern):
    begun = time.process_time()
    try:
        assert full_match(pattern, "a" * 300, "test") is False
    except FormatError as refusal:
        assert "takes too long to match" in str(refusal)
    assert time.process_time() - begun < 10  # a tenth of a second on an idle machine


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (".*" * 2000, "takes too long to match"),
        ("(", "is not a regular expression: missing"),
        ("a{99999999999999999999}", "is not a regular expression"),
        ("(" * 3000 + ")" * 1000, "is not a regular expression"),
        (r"(a)\1", "uses groupref"),
        ("(?<=a)b", "uses assert"),
        ("(?>a*)b", "uses atomic_group"),
        ("x" * 5000, "at most 4096 characters"),
    ],
)
def test_a_pattern_that_cannot_be_followed_is_refused_by_name(pattern, message):
    with pytest.raises(FormatError, match=message):
        full_match(pattern, "aa" * 200, "test")


@pytest.mark.parametrize(
    "pattern", ["q_proj", "self_attn.q_proj", "proj", "q.proj", "(q|k)_proj", "11.*", LAYER, "x" * 600]
)
def test_the_end_of_a_path_is_what_peft_takes_for_it(pattern):
    for module in (LAYER, "q_proj", "xq_proj"):
        expected = re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
        assert matches_end(pattern, module, "test") == expected
