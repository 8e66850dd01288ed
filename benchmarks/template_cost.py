"""What the metered sandbox costs a render, beside plain jinja2, here and in a child that is sent each conversation.

python benchmarks/template_cost.py [TEMPLATE]
"""

import json
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dualtune.data.chat.template import ChatTemplate, named_template

ROUNDS, RENDERS = 5, 2000
Messages = list[dict[str, str]]
TURNS = [{"role": role, "content": "What is the colour of the sky? " * 8} for role in ("user", "assistant")]
MESSAGES = [{"role": "system", "content": "You are helpful."}, *TURNS]


def plain_template(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    return environment.from_string(source)


def answer(source: str, connection: Connection) -> None:
    template = plain_template(source)
    while messages := json.loads(connection.recv_bytes()):
        connection.send_bytes(template.render(messages=messages, tools=None).encode())


def microseconds(render: Callable[[Messages], str]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(RENDERS):
            render(MESSAGES)
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / RENDERS


def main() -> None:
    source = named_template(sys.argv[1] if len(sys.argv) > 1 else "qwen-2.5")
    metered, template = ChatTemplate(source, {}), plain_template(source)
    here, there = Pipe()
    Process(target=answer, args=(source, there), daemon=True).start()

    def plain(messages: Messages) -> str:
        return template.render(messages=messages, tools=None)

    def remote(messages: Messages) -> str:
        here.send_bytes(json.dumps(messages).encode())
        return here.recv_bytes().decode()

    assert plain(MESSAGES) == remote(MESSAGES) == metered.render(MESSAGES)
    renders: dict[str, Any] = {"metered": metered.render, "plain": plain, "plain, in a child": remote}
    for name, render in renders.items():
        print(f"{name}: {microseconds(render):.0f} µs")
    here.send_bytes(b"[]")


if __name__ == "__main__":
    main()
