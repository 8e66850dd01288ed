"""Hostile chat templates: each is stopped by the meter, and SIGTERM ends a render.

The attacks run in one process with little address space, whose processor time is counted. Those on the sandbox's
loops, operators and strings are in tests/data/test_template.py; here is what reaches the cost by another way.
"""

import os
import signal
import threading

import pytest

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, Preempted
from dualtune.data.chat import sandbox
from dualtune.data.chat.template import ChatTemplate

# A namespace in many places, which becomes large afterwards: the keys of a sort are then larger than the list.
HOLDER = "{% set ns = namespace(x='') %}{% set many = [ns] * 90000 %}{% set ns.x = 'a' * 2000000 %}"
PATH = "{% set ns = namespace() %}{% set ns.a = ns %}{% set path = 'a.' * 2000000 ~ 'a' %}"
BIG = "{% set a = 'a' * 4000000 ~ 'b' %}{% set b = 'a' * 4000000 ~ 'c' %}"
LISTS = "{% set a = [0] * 100000 %}{% set b = [0.0] * 100000 %}"
STOPPED = {
    **{f"{name} by a long path": PATH + f"{{{{ ([ns] * 1000) | {name} | list | length }}}}" for name in (
        "sort(attribute=path)", "sort(false, false, path)", "groupby(path)", "unique(attribute=path)",
        "map(attribute=path)", "selectattr(path)", "rejectattr(path)", "min(attribute=path)", "max(attribute=path)",
        "join('', attribute=path)", "selectattr(path, 'equalto', 1)")},
    **{f"{name} of what has grown": HOLDER + f"{{{{ many | {name} | list | length }}}}" for name in (
        "sort(attribute='x')", "groupby('x')", "unique(attribute='x')", "min(attribute='x')", "max(attribute='x')",
        "join('', attribute='x')")},
    "a chain of ==": LISTS + "{{ a" + " == b == a" * 3000 + " }}",
    "many == without a loop": LISTS + "{% if a == b %}{% endif %}" * 2500,
    "many `in` without a loop": BIG + "{% if 'd' ~ a in b %}{% endif %}" * 2500,
    "tests by name that compare": BIG + "{% set ns = namespace(x='') %}{% set many = [ns] * 90000 %}{% set ns.x = a %}"
    "{{ many | selectattr('x', 'eq', b) | list | length }}",
    "tests by name that search": BIG + "{% set ns = namespace(x='') %}{% set many = [ns] * 90000 %}{% set ns.x = a %}"
    "{{ many | selectattr('x', 'in', b) | list | length }}",
    "tests that compare, one by one": LISTS + "{% if a is eq b %}{% endif %}" * 2500,
    "a filter that keeps nothing, often": "{% set x = [0] * 90000 %}"
    + "{% if x | select('gt', 1) | list %}{% endif %}" * 900,
    "is divisibleby that formats": "{{ '%1000000000d' is divisibleby(3) }}",
    "is odd that formats": "{{ '%1000000000d' is odd }}",
    "is even that formats": "{{ '%.1000000000f' is even }}",
    "round of a text": "{{ 'a' | round(9, 'ceil') }}",
    "round of a list": "{{ [0] | round(9, 'floor') }}",
    "escaping makes a text larger": "{% set x = '\"' * 9000000 %}{{ (x | e) | length }}",
    "escaping by +": "{% set x = '\"' * 9000000 %}{{ (('' | e) + x) | length }}",
    "escaping by join": "{% set x = '\"' * 9000000 %}{{ ('' | e).join([x]) | length }}",
    "a long format": "{% set x = '{0.a}' * 90000 %}{{ x.format(1) }}",
    "a long path in a format": "{% set x = '{0' ~ '.a' * 2000000 ~ '}' %}{{ x.format(1) }}",
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(render_apart):
    return render_apart(STOPPED, address_space=512 << 20)


@pytest.mark.parametrize("name", STOPPED)
def test_a_costly_template_is_stopped_in_time(outcomes, name):
    outcome, took_s = outcomes[name]
    assert outcome.startswith(("TemplateLimit: ", "RowError: ")) and "MemoryError" not in outcome, outcome
    assert outcome.startswith("TemplateLimit: ") or name in ("round of a text", "round of a list"), outcome
    assert took_s < 5  # of the processor; the limit is 1


COMPILED = {
    "a chain of ==": "{{ 1" + " == 1" * 40_000 + " }}",
    "arguments by name": "{{ f(" + ",".join(f"a{i}=1" for i in range(30_000)) + ") }}",
    "macros": "".join(f"{{%macro m{i}()%}}{{%endmacro%}}" for i in range(9_000)),
    "branches": "{% if 1 %}" + "{% elif 1 %}" * 20_000 + "{% endif %}",
    "a list": "{{ [" + "1," * 120_000 + "] }}",
}


@pytest.mark.parametrize("name", COMPILED)
def test_a_template_of_too_many_words_is_refused_before_it_is_parsed(name):
    with pytest.raises(ConfigError, match="line 1 of the chat template: more than 30000 Jinja tokens"):
        ChatTemplate(COMPILED[name], {})


def test_sigterm_ends_a_render(monkeypatch):
    monkeypatch.setattr(sandbox, "CPU_S", 60.0)
    endless = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    with interrupt.handled():
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Preempted, match="Stopped by SIGTERM"):
            ChatTemplate(endless, {}).render([])
