"""A stand-in for the package `verifiers`, where it is not installed: as much of 0.1 to 0.3 as dualtune calls.

It shows that our side of the protocol works, not that the package does: `make test-verifiers` runs the same tests with
the package.
"""

import asyncio
import importlib
import inspect
import json

__version__ = "stand-in"


class Rubric:
    def __init__(self, funcs):
        self.funcs = funcs

    async def score_group(self, states):
        for state in states:
            state["reward"] = 0.0
        for function in self.funcs:
            names = inspect.signature(function).parameters
            if "completions" in names:
                for state, value in zip(states, function(completions=[s["completion"] for s in states]), strict=True):
                    state["reward"] += value
                continue
            for state in states:
                state["reward"] += function(completion=state["completion"], answer=state["answer"])


class MultiTurnEnv:
    def __init__(self, dataset, rubric, max_turns=-1, eval_dataset=None):
        self.rubric, self.max_turns, self.tools = rubric, max_turns, []
        self._rows, self._eval = dataset, eval_dataset or dataset

    def get_dataset(self):
        return [{"prompt": [{"role": "user", "content": row["question"]}], **row} for row in self._rows]

    get_eval_dataset = get_dataset

    async def get_prompt_messages(self, state):
        if not state["trajectory"]:
            return state["prompt"]
        messages = [*state["trajectory"][-1]["prompt"], *state["trajectory"][-1]["completion"]]
        return [*messages, *await self.env_response(messages, state)]

    def goes_on(self, state):
        return self.max_turns < 0 or len(state["trajectory"]) < self.max_turns

    async def rollout(self, input, client, model, sampling_args):
        import openai

        state = {**input, "trajectory": [], "error": None, "is_truncated": False}
        while self.goes_on(state):
            try:
                messages = await self.get_prompt_messages(state)
                options = {"tools": self.tools} if self.tools else {}
                answer = await client.chat.completions.create(model=model, messages=messages, **options)
                said = answer.choices[0].message.model_dump(exclude_none=True)
            except openai.BadRequestError as error:
                state["is_truncated"] = "exceeds the configured limit" in str(error)
                state["error"] = None if state["is_truncated"] else error
                break
            except ValueError as error:
                state["error"] = error
                break
            state["trajectory"].append({"prompt": messages, "completion": [said]})
        last = state["trajectory"][-1] if state["trajectory"] else {"prompt": [], "completion": []}
        state["completion"] = [*last["prompt"], *last["completion"]][len(state["prompt"]) :]
        return state


class SingleTurnEnv(MultiTurnEnv):
    def __init__(self, **options):
        super().__init__(max_turns=1, **options)


class ToolEnv(MultiTurnEnv):
    def __init__(self, tools, **options):
        super().__init__(**options)
        self._functions = {tool.__name__: tool for tool in tools}
        kinds = {int: "integer"}
        for tool in tools:
            values = {name: {"type": kinds[kind]} for name, kind in tool.__annotations__.items() if name != "return"}
            schema = {"type": "object", "properties": values, "required": [*values]}
            function = {"name": tool.__name__, "description": tool.__doc__, "parameters": schema}
            self.tools.append({"type": "function", "function": function})

    def goes_on(self, state):
        calls = not state["trajectory"] or state["trajectory"][-1]["completion"][0].get("tool_calls")
        return bool(calls) and super().goes_on(state)

    async def env_response(self, messages, state):
        await asyncio.sleep(0)
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": str(
                self._functions[call["function"]["name"]](**json.loads(call["function"]["arguments"]))
            )}
            for call in messages[-1]["tool_calls"]
        ]  # fmt: skip


def load_environment(name, **arguments):
    return importlib.import_module(name.replace("-", "_")).load_environment(**arguments)
