"""Environments written with the classes of the package `verifiers`, or of its stand-in."""

import asyncio
import os
import time

import verifiers as vf

ROWS = [{"question": f"{n} + {n} =", "answer": str(2 * n)} for n in range(9)]
TURNS = 3


def _content(message):
    return (message["content"] if isinstance(message, dict) else message.content) or ""


def _role(message):
    return message["role"] if isinstance(message, dict) else message.role


def said(completion):
    return [_content(message) for message in completion if _role(message) == "assistant"]


def length(completion, **_):
    return sum(len(text) / 10 for text in said(completion))


def rank(completions, **_):
    """Only in company: how many answers of the prompt are shorter."""
    lengths = [length(completion) for completion in completions]
    return [float(sum(other < own for other in lengths)) for own in lengths]


class Game(vf.MultiTurnEnv):
    """Says how long an answer was."""

    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": f"<{len(_content(messages[-1]))}>"}]


class Bad(Game):
    async def env_response(self, messages, state, **options):
        number = len(_content(messages[-1])) % 6
        if number == 0:
            raise ValueError("no")
        if number == 1:
            os._exit(3)
        if number == 2:
            await asyncio.sleep(60)
        if number == 3:
            time.sleep(60)
        return await super().env_response(messages, state, **options)


class Forgetful(Game):
    """Asks about its own last reply alone, so nothing continues what was there."""

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages[-1:]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def load_environment(kind="game", max_turns=TURNS):
    rows = ROWS
    if vf.__version__ != "stand-in":
        from datasets import Dataset

        rows = Dataset.from_list(ROWS)
    options = {"dataset": rows, "rubric": vf.Rubric(funcs=[rank if kind == "ranked" else length])}
    if kind == "single":
        return vf.SingleTurnEnv(**options)
    if kind == "tool":
        return vf.ToolEnv(tools=[add], max_turns=max_turns, **options)
    game = {"bad": Bad, "forgetful": Forgetful}.get(kind, Game)
    return game(max_turns=max_turns, **options)
