"""The preview page: its structure, and what a browser makes of it, where Chromium is installed."""

import base64
import hashlib
import html
import re
from html.parser import HTMLParser

import pytest

from dualtune.data.preview import Sample, ShownToken, Turn, TurnPart
from dualtune.data.survey import Bar, Lengths, SourceNumbers, Survey
from dualtune.show.report.preview_page import FOLDED, Page, preview_page

EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>\" ' & </style> \x1b[31m"
LONG = "a-directory/with-a-very-long-name-of-somebody/" * 5 + "train.jsonl"
SAID = "The answer is here."
VOID = {"meta", "input", "rect"}


def tokens(text, is_target=False, special=False):
    return [ShownToken(number, word, is_target, special) for number, word in enumerate(re.findall(r"\s*\S+", text))]


def sample(line, *kinds, text=SAID, lost=0, original=None, repeat=1):
    turns = [
        Turn("template", [TurnPart("tools", tokens('{"name": "f"}'))]),
        Turn("user", [TurnPart("frame", tokens("<|start|>", special=True)), TurnPart("content", tokens(text))]),
        Turn("assistant", [
            TurnPart("content", tokens(f"{text} " * repeat, is_target=True)),
            TurnPart("call", tokens('{"f": 1}', is_target=True)),
            TurnPart("frame", tokens("<|end|>", is_target=True, special=True)),
        ]),
        Turn("tool", [TurnPart("content", tokens("x" * 300))]),
    ]  # fmt: skip
    number = sum(len(part.tokens) for turn in turns for part in turn.parts)
    return Sample(f"{LONG}:{line}", frozenset(kinds), turns, number, 3, lost, original)


@pytest.fixture(scope="module")
def page() -> str:
    lengths = Lengths(3, 20.0, 25.5, 60, 90_000)
    bars = [Bar(3 + 10 * i, 12 + 10 * i, 40 - i) for i in range(9)] + [Bar(93, 90_000, 1)]
    numbers = dict.fromkeys(Survey.__slots__, 0) | {
        "first_bad_rows": [f"{LONG}:7: {EVIL}"] * 5, "bad_rows": 12, "lengths": lengths, "histogram": bars,
        "documents": 1234, "tokens": 1_234_567, "trained_share": 0.5, "cut": 3, "duplicates": 1, "eval_documents": 9,
    }  # fmt: skip
    return preview_page(
        Page(
            title=f"{EVIL}.yaml",
            survey=Survey(**numbers),
            numbers=[("rows", "1 to train on"), ("", "a reason"), ("duplicates", f"{LONG}:1 equals {LONG}:2")],
            warnings=[f"{LONG}: {EVIL}"],
            sources=[SourceNumbers(LONG, 1234, 1_234_567, 600_000, lengths), SourceNumbers("empty", 0, 0, 0, None)],
            samples=[
                sample(1, "first"), sample(2, "first", "longest", repeat=FOLDED), sample(3, "cut", lost=77),
                sample(4, "duplicate", original=f"{LONG}:1"), sample(5, "evaluation", text=EVIL),
            ],
        )
    )  # fmt: skip


class Tags(HTMLParser):
    """Every tag with its attributes; raises where tags do not nest."""

    def __init__(self, text):
        super().__init__()
        self.tags, self._open = [], []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


# --- without a browser -----------------------------------------------------------------------------------------------


def test_nothing_runs_and_nothing_is_loaded_whatever_the_data_say(page):
    tags = Tags(page).tags
    assert not {tag for tag, _ in tags} & {"script", "link", "img", "iframe", "object", "a", "form", "base"}
    names = {name for _, attrs in tags for name in attrs}
    assert not names & {"src", "href", "style", "srcset", "action"} and not [n for n in names if n.startswith("on")]
    assert "http:" not in page and "https:" not in page and "url(" not in page and "@import" not in page
    assert EVIL.replace("\x1b", "␛") in html.unescape(page) and "\x1b" not in page


def test_the_policy_allows_this_style_and_nothing_else(page):
    (policy,) = [attrs["content"] for tag, attrs in Tags(page).tags if attrs.get("http-equiv")]
    style = re.search(r"<style>(.*?)</style>", page, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def test_rows_say_what_they_are(page):
    rows = re.findall(r'<article class="row ([^"]*)"', page)
    assert rows == ["first", "first longest", "cut", "duplicate", "evaluation", *["bad"] * 5]
    assert re.search(r"cut at \d+ tokens: 77 more are lost", page)
    assert f"; the same as {LONG}:1" in page
    assert page.count("<details>") == 1  # the long one
    assert 'class="part call"' in page and 'class="part tools"' in page
    assert 'class="special target"' in page


def test_each_filter_says_how_many_of_how_many_it_shows(page):
    labels = re.findall(r'<label><input type="radio" name="show" id="show-(\w+)"( checked)?> ([^<]*)</label>', page)
    assert labels == [
        ("all", " checked", "All (10)"), ("first", "", "Trained first (2 of 1,234)"), ("bad", "", "Bad (5 of 12)"),
        ("cut", "", "Cut (1 of 3)"), ("duplicate", "", "Duplicates (1)"), ("longest", "", "Longest (1 of 1,234)"),
        ("evaluation", "", "Evaluation (1 of 9)"),
    ]  # fmt: skip


def test_headings_labels_and_names_are_there_for_a_screen_reader(page):
    tags = Tags(page).tags
    assert ("html", {"lang": "en"}) in tags and ("main", {}) in tags
    assert [tag for tag, _ in tags if tag in ("h1", "h2")] == ["h1", "h2", "h2", "h2", "h2"]
    ids = {attrs["id"] for _, attrs in tags if "id" in attrs}
    named = [attrs["aria-labelledby"] for _, attrs in tags if "aria-labelledby" in attrs]
    assert len(named) == 5 and set(named) <= ids
    assert all("scope" in attrs for tag, attrs in tags if tag == "th")
    assert all(attrs.get("aria-hidden") == "true" for tag, attrs in tags if tag == "svg")  # the numbers stand beside it
    assert [attrs for _, attrs in tags if attrs.get("tabindex") == "0"] == [
        {"class": "scroll", "role": "region", "aria-label": "Numbers by source", "tabindex": "0"}
    ]


# --- in a browser ----------------------------------------------------------------------------------------------------

# What the page shows at two widths; run by a page around it, because nothing runs in the page itself.
LOOK = """
const ratio = (a, b) => { const l = c => c.map(v => v / 255)
  .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((s, v, i) => s + v * [.2126, .7152, .0722][i], 0); const [x, y] = [l(a), l(b)].sort((p, q) => q - p);
  return (x + .05) / (y + .05) };
const rgb = c => c.match(/[\\d.]+/g).map(Number);
function ground(e) { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
  if (c.length < 4 || c[3] > 0) return c.slice(0, 3) } return [255, 255, 255] }
function shown(frame) { const d = frame.contentDocument, all = [...d.body.querySelectorAll("*")];
  const texts = all.filter(e => e.getClientRects().length && [...e.childNodes].some(n => n.nodeType == 3 &&
    n.data.trim()));
  const rows = kind => { d.getElementById("show-" + kind).click();
    return [...d.querySelectorAll(".row")].filter(r => r.getClientRects().length).map(r => r.className) };
  const lines = e => { const r = d.createRange(); r.selectNodeContents(e);
    return new Set([...r.getClientRects()].map(box => Math.round(box.top))).size };
  const numbers = [...d.querySelectorAll("td, .bars th, .tiles b")].filter(e => e.innerText.trim());
  return { width: d.defaultView.innerWidth, scroll: d.documentElement.scrollWidth, text: d.body.innerText,
    contrast: Math.min(...texts.map(e => ratio(rgb(getComputedStyle(e).color).slice(0, 3), ground(e)))),
    dark: getComputedStyle(d.body).backgroundColor, lines: Math.max(...numbers.map(lines)),
    shown: Object.fromEntries(["cut", "bad", "longest", "all"].map(k => [k, rows(k)])) } }
const look = async frames => frames.map(shown);
"""


@pytest.fixture(scope="module", params=["light", "dark"])
def looks(request, page, browse):
    """What Chromium shows at 1280 and at 390 pixels."""
    found, said = browse([(page, 1280), (page, 390)], LOOK, is_dark=request.param == "dark")
    assert said == []
    return request.param, found


def test_nothing_runs_off_the_edge_and_no_number_is_broken(looks):
    _, (wide, phone) = looks
    assert (wide["width"], phone["width"]) == (1280, 390)
    for look in (wide, phone):
        assert look["scroll"] <= look["width"]
        assert look["lines"] == 1  # of a number
        for text in ("1,234", "1,234,567", "93 to 90,000", SAID, "Show these rows", "cut at"):
            assert text in look["text"]


def test_texts_stand_out_in_light_and_dark(looks):
    scheme, found = looks
    assert all(look["contrast"] >= 4.5 for look in found), [look["contrast"] for look in found]
    is_dark = sum(map(int, re.findall(r"\d+", found[0]["dark"]))) < 3 * 128
    assert is_dark == (scheme == "dark")


def test_a_filter_shows_its_rows_alone(looks):
    for look in looks[1]:
        assert look["shown"]["cut"] == ["row cut"]
        assert look["shown"]["bad"] == ["row bad"] * 5
        assert look["shown"]["longest"] == ["row first longest"]
        assert len(look["shown"]["all"]) == 10
