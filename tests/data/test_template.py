"""Chat templates: the text that transformers gives, and nothing that a hostile template can do with it."""

from pathlib import Path

import pytest

from dualtune.base.errors import ConfigError, DataError
from dualtune.data.chat.sandbox import TemplateLimit
from dualtune.data.chat.template import MAX_SOURCE, ChatTemplate
from dualtune.data.sources.rows import RowError

GOLDEN = Path(__file__).parents[1] / "golden" / "templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": "Be <b>brief</b>."}
ASKS = {"role": "user", "content": ' "2+2"?\n'}
SAYS = {"role": "assistant", "content": "It's 4 — é\u2028 "}
THINKS = {"role": "assistant", "content": "6", "thinking": " 3+3 ", "name": None}
CALLS = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": ["é", None, 2.5, True]}}}]}  # fmt: skip
ANSWERS = {"role": "tool", "content": "3"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "<Adds> 'é'", "parameters": {}}}]
CONVERSATIONS = {
    "one turn": ([ASKS, SAYS], []),
    "two turns": ([SYSTEM, ASKS, SAYS, ASKS, THINKS], []),
    "a question": ([SYSTEM, ASKS], []),
    "tools": ([ASKS, CALLS, ANSWERS, SAYS], TOOLS),
    "system and tools": ([SYSTEM, ASKS, CALLS, ANSWERS, THINKS], TOOLS),
}


def by_transformers(source, messages, tools=(), **options):
    """(text, generation ranges), by transformers' own functions."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    texts, ranges = render_jinja_template(
        [messages], tools=list(tools) or None, chat_template=source, **options, **SPECIAL
    )
    return texts[0], ranges


def render(source, messages=(ASKS,), **options):
    return ChatTemplate(source, SPECIAL).render(messages, **options)


# --- the same text as transformers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.jinja")), ids=lambda path: path.stem)
def test_a_golden_template_renders_as_in_transformers(path, name, prompt):
    source, (messages, tools) = path.read_text(encoding="utf-8"), CONVERSATIONS[name]
    if path.stem == "mistral_v03" and "tools" in name:
        with pytest.raises(RowError, match="roles must alternate"):
            render(source, messages, tools=tools)
        return
    expected, _ = by_transformers(source, messages, tools, add_generation_prompt=prompt)
    assert render(source, messages, tools=tools, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("prompt", [False, True])
def test_smollm2_renders_as_apply_chat_template(shared, prompt):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared("tokenizers/smollm2"))
    ours = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens_map)
    for messages, _ in CONVERSATIONS.values():
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert ours.render(messages, add_generation_prompt=prompt) == expected


SNIPPETS = [
    "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "{% for m in messages -%}\n  {{ loop.length ~ loop.revindex ~ loop.last ~ loop.previtem }}\n{%- endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }} {% else %}none{% endfor %}",
    "{% for x in [1, [2, [3, 4]], 5] recursive %}{{ loop(x) if x is iterable else x }},{% endfor %}",
    "{% if messages | selectattr('role', 'equalto', 'nobody') %}a generator is true{% endif %}",
    "{{ messages | map(attribute='content') | map('trim') | join(', ') | upper }}",
    "{{ messages | selectattr('role', 'in', ['user', 'system']) | list | length }}{{ messages[::-1][0].role }}",
    "{{ tools | tojson }}{{ messages | tojson(indent=2) }}"
    "{{ messages[0] | tojson(sort_keys=true, ensure_ascii=true) }}",
    "{{ tools | tojson(separators=(',', ':')) }}{{ none | string ~ 1.0 ~ true ~ [1, 'a'] ~ {'k': 'é'} }}",
    "{% set ns = namespace(n=0, text='') %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}"
    "{% set ns.text = ns.text + m.content %}{% endfor %}{{ ns.n }}{{ ns.text }}",
    "{% macro turn(m, end='!') %}{{ m.role }}{{ caller() if caller else end }}{% endmacro %}"
    "{{ turn(messages[0]) }}{% call turn(messages[0]) %}?{% endcall %}{{ turn(messages[0], end='.') }}",
    "{% set text %} {{ messages[0].content | trim }} {% endset %}[{{ text }}]"
    "{% filter upper %}abc{{ bos_token }}{% endfilter %}",
    "{{ '%s is %05.1f%%' % (messages[0].role, 2.5) }}{{ '{0:>8}|{a!r}'.format(bos_token, a='x') }}"
    "{{ '%s' | format(3) }}",
    "{{ 'a</think>b'.split('</think>')[-1].strip('b ') ~ 'a,b'.replace(',', ';') ~ 'x'.startswith(('x', 'y')) }}",
    "{% for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}{{ messages[0] | items | list }}",
    "{{ undefined_thing is defined }}{{ undefined_thing | default('d') }}{{ undefined_thing }}",
    "{{ 7 // 2 * 3 ** 2 - 5 % 3 + 1.5 }}{{ [1] * 3 + [2] }}{{ 'ab' * 2 }}{{ range(3) | list }}{{ -3 | abs }}",
    "{% set c = cycler('a', 'b') %}{% set j = joiner('-') %}{% for m in messages %}{{ j() }}{{ c.next() }}{% endfor %}",
    "{{ '<b>' | e }}{{ ('<b>' | e) + '<i>' }}{{ '<b>' | safe }}{{ 'a b' | title | indent(2, true) }}",
    "{% set a, b = 1, 2 %}{{ a < b <= 2 }}{{ a in [b] }}{{ (a, b) == (1, 2) }}{{ 'x' if a else 'y' }}",
    "{{ [3, 1, 2] | sort | join }}{{ [1, 2] | first }}{{ {'b': 1, 'a': 2} | dictsort }}{{ [1, 1] | unique | list }}",
    "{% raw %}{{ raw }}{% endraw %}  {# gone #}  {%- if true %} kept\n  {% endif %}\n  end\n",
    "{{ dict(a=1) }}{{ messages | groupby('role') | map('first') | list }}{{ 3.14159 | round(2) }}{{ '7' | int + 1 }}",
    "{% block top %}{{ messages | length }}{% endblock %}{{ self.top() }}{% with x = 3 %}{{ x }}{% endwith %}",
    "{{ strftime_now('%%') }}{{ documents }}{{ tools is none }}{{ bos_token }}{{ add_generation_prompt }}",
]  # fmt: skip


def test_the_date_is_the_same_on_every_day():
    """Otherwise a run that goes on tomorrow, or on another machine, would see other data."""
    assert ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}).render([]) == "26 Jul 2024"


@pytest.mark.parametrize("source", SNIPPETS)
def test_a_feature_of_jinja_works_as_in_transformers(source):
    messages, tools = CONVERSATIONS["system and tools"]
    expected, _ = by_transformers(source, messages, tools)
    assert render(source, messages, tools=tools) == expected
    assert expected  # the snippet says something


def test_generation_markers_give_the_spans_of_transformers():
    source = (GOLDEN / "chatml_with_markers.jinja").read_text(encoding="utf-8")
    messages, _ = CONVERSATIONS["two turns"]
    template = ChatTemplate(source, SPECIAL)
    text, (ranges,) = by_transformers(source, messages, return_assistant_tokens_mask=True)
    assert template.render_marked(messages) == (text, ranges) and len(ranges) == 2
    assert template.marks_turns and not ChatTemplate("{# {% generation %} #}", SPECIAL).marks_turns


def test_markers_whose_place_is_unknown_are_refused():
    nested = "ab{% set x %}cd{% generation %}{{ messages[0].content }}{% endgeneration %}{% endset %}ef{{ x }}"
    twice = "{% generation %}{% generation %}{{ 'b' }}{% endgeneration %}b{% endgeneration %}"
    for source in (nested, twice):
        with pytest.raises(RowError, match="generation markers are nested, or inside a macro or"):
            render(source)


def test_without_tools_a_template_is_given_none():
    assert render("{{ tools is none }}") == by_transformers("{{ tools is none }}", [ASKS])[0] == "True"


def test_equal_sources_have_equal_hashes_and_others_do_not():
    assert ChatTemplate("{{ 1 }}", SPECIAL).hash == ChatTemplate("{{ 1 }}", {}).hash != ChatTemplate("{{ 2 }}", {}).hash
    assert len(ChatTemplate("", {}).hash) == len("sha256 ") + 16


# --- what a template refuses, and what is no template ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('no\n system') }}", "refuses this conversation: no system"),
        ("{{ messages[0].no.such }}", "has no attribute 'no'"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ raise_exception('x ' * 5000000) }}", "(x ){99}x$"),
    ],
)
def test_what_goes_wrong_in_a_template_is_a_matter_of_the_row(source, reason):
    with pytest.raises(RowError, match=reason) as caught:
        render(source)
    assert len(str(caught.value)) < 400


def test_what_is_not_json_does_not_reach_a_template():
    with pytest.raises(RowError, match="holds a PosixPath, which is not JSON"):
        render("", [{"role": "user", "content": "", "file": Path("/etc")}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% for m in %}", r"data.template: line 2 of the chat template: "),
        ("\n\n{% if true %}", r"line 3 of the chat template: "),
        ("{{ 1 | pprint }}", r"line 1 of the chat template: No filter named 'pprint'"),
        ("{% include '/etc/passwd' %}", "include is not available"),
        ("\n{% import 'x' as x %}", "line 2 of the chat template: import is not available"),
        ("{% autoescape true %}{% endautoescape %}", "autoescape is not available"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
        ("{% for x in y %}" * 200 + "{% endfor %}" * 200, "cannot be compiled"),
        ("{{ 1" + " + 1" * 10000 + " }}", "cannot be compiled"),
        ("{{ 1" + " + 1" * 50000 + " }}", "line 1 of the chat template: more than 30000 Jinja tokens"),
        ("x" * (MAX_SOURCE + 1), "has 262145 characters, allowed: 262144"),
    ],
)
def test_what_is_no_template_is_refused_with_its_line(source, message):
    with pytest.raises(ConfigError, match=message):
        ChatTemplate(source, SPECIAL)


# --- hostile templates -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ (''|attr('__class__')).mro() }}",
        "{{ messages|map(attribute='__class__')|map(attribute='__mro__')|list|string }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ '{0.__class__.__mro__}'.format_map({'0': 1}) }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ strftime_now.__closure__[0] }}",
        "{{ joiner.__init__.__builtins__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ messages[0].pop('role') }}",
        "{{ lipsum() }}",
        "{{ (5).to_bytes(9, 'big') }}",
        "{{ 'a'.encode() }}",
        "{{ 'a'.translate({97: 'b'}) }}",
        "{{ ('a'|e).format(1) }}",
        "{{ {(1,): 2}[(1,)] }}",
        "{{ (messages|map('upper')).gi_frame.f_globals }}",
        "{% for m in messages %}{{ loop._iterator }}{{ loop.__init__() }}{% endfor %}",
    ],
)
def test_a_template_does_not_get_out_of_its_sandbox(source):
    messages = [dict(ASKS)]
    with pytest.raises(RowError):
        render(source, messages)
    assert messages == [ASKS]


DOUBLED = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
LAUGHS = DOUBLED.replace("START", "['ha']").replace("STEP", "[ns.x, ns.x]")
# A list that holds a namespace in many places, which becomes large afterwards.
HOLDER = "{% set ns = namespace(x='') %}{% set many = [ns] * 90000 %}{% set ns.x = 'a' * 2000000 %}"
BIG = "{% set big = 'a' * 2000000 %}"
LIMITS = {
    "nested loops": "{% for i in range(100000) %}" * 3 + "{% endfor %}" * 3,
    "nested loops over one list": "{% set r = range(100000) %}" + "{% for i in r %}" * 3 + "{% endfor %}" * 3,
    "nested loops that filter everything": "{% for i in range(100000) %}" * 2 + "{% for i in range(100000) if 0 %}"
    "{% endfor %}" + "{% endfor %}" * 2,
    "a recursive loop": "{% for i in range(9) recursive %}{% if loop.depth < 9 %}{{ loop(range(100000)) }}{% endif %}"
    "{% endfor %}",
    "exponential macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "exponential blocks": "".join(
        f"{{% block b{i} %}}{{{{ self.b{i + 1}() if self.b{i + 1} }}}}{{{{ self.b{i + 1}() if self.b{i + 1} }}}}"
        "{% endblock %}" for i in range(60)),
    "a gigabyte of output": "{% set x = 'a' * 1000000 %}{% for i in range(1000) %}{{ x }}{% endfor %}",
    "a gigabyte of literal output": "{% for i in range(100000) %}" + "x" * 20000 + "{% endfor %}",
    "a gigabyte in a set block": "{% set y %}{% for i in range(100000) %}" + "x" * 20000 + "{% endfor %}{% endset %}",
    "a gigabyte in a macro": "{% macro f() %}{% for i in range(100000) %}" + "x" * 20000 + "{% endfor %}{% endmacro %}"
    "{{ f() }}",
    "a huge string": "{{ 'a' * 10000000000 }}",
    "a huge string, the other way": "{{ 10000000000 * 'a' }}",
    "a huge list": "{{ [0] * 10000000000 }}",
    "a huge number": "{{ 10 ** (10 ** 8) }}",
    "a number multiplied with itself": DOUBLED.replace("START", "3").replace("STEP", "ns.x * ns.x"),
    "text doubled by ~": DOUBLED.replace("START", "'a'").replace("STEP", "ns.x ~ ns.x"),
    "text doubled by +": DOUBLED.replace("START", "'a'").replace("STEP", "ns.x + ns.x"),
    "text doubled by a set block": "{% set x = 'a' * 1000 %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40,
    "text doubled by format": DOUBLED.replace("START", "'a'").replace("STEP", "'%s%s' % (ns.x, ns.x)"),
    "text doubled by str.format": DOUBLED.replace("START", "'a'").replace("STEP", "'{0}{0}'.format(ns.x)"),
    "text doubled by join": DOUBLED.replace("START", "'a'").replace("STEP", "ns.x.join(['', '', ''])"),
    "text doubled by the filter join": DOUBLED.replace("START", "'a'").replace("STEP", "['', '', ''] | join(ns.x)"),
    "text doubled by replace": DOUBLED.replace("START", "'aa'").replace("STEP", "ns.x.replace('a', ns.x)"),
    "text doubled by the filter replace": DOUBLED.replace("START", "'aa'").replace("STEP", "ns.x | replace('a', ns.x)"),
    "text doubled by concatenated macros": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}"
    + DOUBLED.replace("START", "'a'").replace("STEP", "f(ns.x)"),
    "a list doubled": DOUBLED.replace("START", "[1]").replace("STEP", "ns.x + ns.x"),
    "a billion laughs": LAUGHS,
    "a billion laughs in a dict": LAUGHS.replace("[ns.x, ns.x]", "{1: ns.x, 2: ns.x}"),
    "a billion laughs in tuples": LAUGHS.replace("[ns.x, ns.x]", "(ns.x, ns.x)"),
    "a billion laughs by dict": LAUGHS.replace("[ns.x, ns.x]", "dict(a=ns.x, b=ns.x)"),
    "a billion laughs compared": LAUGHS + LAUGHS.replace("ns", "other") + "{{ ns.x == other.x }}",
    "a list in itself": "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x }}",
    "a deep list": DOUBLED.replace("60", "100000").replace("START", "1").replace("STEP", "[ns.x]"),
    "a namespace in many places": HOLDER + "{{ many }}",
    "a namespace in many places, joined": HOLDER + "{{ many | join }}",
    "a namespace in many places, mapped": HOLDER + "{{ many | map(attribute='x') | list | length }}",
    "a namespace in many places, sorted": HOLDER + "{{ many | map(attribute='x') | sort | length }}",
    "a default in many places": BIG + "{{ range(100000) | map(attribute='no', default=big) | list | length }}",
    "slices in many variables": "{% set x = [0] * 100000 %}" + "".join(f"{{% set v{i} = x[:] %}}" for i in range(2500)),
    "literals that are kept": "{% set ns = namespace(k=[]) %}{% for i in range(100000) %}"
    "{% set ns.k = [[" + "0," * 10000 + "], ns.k] %}{% endfor %}",
    "copies in many variables": "{% set x = [0] * 100000 %}"
    + "".join(f"{{% set v{i} = x.copy() %}}" for i in range(2500)),
    "a text in small pieces": "{% set big = 'ab ' * 2000000 %}{{ big.split() | length }}",
    "a text in characters": "{% set big = 'é語' * 500000 %}{{ big | list | length }}",
    "a text in characters, joined": BIG + "{{ big | join(big) | length }}",
    "a long text joined to others": BIG + "{{ big.join(['', ''] * 500) | length }}",
    "a long text joined to others by the filter": BIG + "{{ (['', ''] * 500) | join(big) | length }}",
    "a long text formatted often": BIG + "{{ ('%(x)s' * 500) % {'x': big} }}",
    "a long text formatted often by the filter": BIG + "{{ ('%(x)s' * 500) | format(x=big) }}",
    "a long text as JSON": "{% set big = '\\x01' * 12000000 %}{{ big | tojson | length }}",
    "a wide field": "{{ '%1000000000d' % 1 }}",
    "a precise field": "{{ '%.1000000000f' % 1 }}",
    "a field of given width": "{{ '%*d' % (1000000000, 1) }}",
    "a wide field of the filter": "{{ '%1000000000d' | format(1) }}",
    "a wide field of str.format": "{{ '{:>1000000000}'.format(1) }}",
    "a field of given width of str.format": "{{ '{:>{w}}'.format(1, w=1000000000) }}",
    "a list printed often": "{% set x = ['a' * 1000000] %}{{ ('{0}' * 1000).format(x) }}",
    "center": "{{ 'a'.center(10000000000) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "rjust": "{{ 'a'.rjust(10000000000) }}",
    "zfill": "{{ 'a'.zfill(10000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "expandtabs by name": "{{ '\t'.expandtabs(tabsize=1000000000) }}",
    "indent": "{{ 'a\nb' | indent(1000000000) }}",
    "indent by name": "{{ 'a\nb' | indent(width=1000000000) }}",
    "tojson far in": "{{ [1] | tojson(indent=1000000000) }}",
    "round": "{{ 5 | round(-1000000000) }}",
    "round by name": "{{ 5.5 | round(precision=1000000000, method='ceil') }}",
    "a search from the right": "{% set big = 'a' * 4000000 %}{{ big.rfind('a' * 20000 + 'b' + 'a' * 20000) }}",
    "a strip of many characters": BIG + "{{ big.strip('b' * 1000000 + 'a') | length }}",
    "a strip of many characters by the filter": BIG + "{{ big | trim('b' * 1000000 + 'a') | length }}",
    "a text in words": "{% set big = 'é語-' * 500000 %}{{ big | title | length }}",
    "a text in lines": "{% set big = 'é語\n' * 500000 %}{{ big.splitlines() | length }}",
    "a text in lines, indented": "{% set big = 'é語\n' * 500000 %}{{ big | indent | length }}",
    "a text as arguments": "{% set big = 'é語' * 500000 %}{{ cycler(*big) }}",
    "many searches without a loop": BIG + "{% if 'aaaaaaaaab' in big %}{% endif %}" * 2900,
    "an error that shows much": HOLDER + "{{ [].index(many) }}",
    "an exception that shows much": HOLDER + "{{ raise_exception(many) }}",
    "a filter's argument that shows much": HOLDER + "{{ 1 | attr(many) }}",
    "a format that shows much": HOLDER + "{{ many | format }}",
    "many tests without a loop": BIG + "{% if big is lower %}{% endif %}" * 2900,
    "a long date": "{{ strftime_now('%1000000000d' * 1000) }}",
    "a number of many digits": "{{ ('f' * 4000000) | int(0, 16) }}",
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(render_apart):
    return render_apart(LIMITS, address_space=640 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_a_template_that_runs_away_is_stopped(outcomes, name):
    outcome, took_s = outcomes[name]
    assert outcome.startswith("TemplateLimit: data.template: the chat template was stopped: ")
    assert took_s < 10


@pytest.mark.parametrize(
    "prepared",
    ["'a' * 2000000", "'ab ' * 2000000", "'é語-' * 500000", "[0] * 100000", "[ns] * 90000"],
)
def test_what_the_attacks_prepare_is_within_the_limits(prepared):
    assert any(prepared in attack for attack in LIMITS.values())
    assert render(f"{{% set ns = namespace() %}}{{{{ ({prepared}) | length }}}}") >= "1"


def test_a_limit_is_no_matter_of_a_row_and_says_what_to_do():
    with pytest.raises(
        TemplateLimit, match=r"more than 16 MiB of text .* Set data.template to another Jinja file"
    ) as caught:
        render(LIMITS["a huge string"])
    assert isinstance(caught.value, DataError) and not isinstance(caught.value, RowError)


def test_a_template_works_again_after_it_was_stopped():
    template = ChatTemplate("{{ 'a' * (messages[0].content | int) }}", SPECIAL)
    with pytest.raises(TemplateLimit):
        template.render([{"role": "user", "content": "9999999999"}])
    assert template.render([{"role": "user", "content": "3"}]) == "aaa"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.jinja")), ids=lambda path: path.stem)
def test_a_very_long_conversation_is_within_the_limits(path):
    """Two thousand turns, and twenty megabytes in one."""
    turns = [{"role": role, "content": "word " * 100} for _ in range(1000) for role in ("user", "assistant")]
    turns[0] = {"role": "user", "content": "word " * 4_000_000}
    text = render(path.read_text(encoding="utf-8"), turns)
    assert text.count("word") == 4_000_000 + 100 * (len(turns) - 1)
