"""The game of `tiny_games.py` as a task set of verifiers 0.4, with a harness that asks in its own process."""

import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Asking", "Sums"]
TURNS = 3


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData]):
    @vf.reward
    async def length(self, trace) -> float:
        return sum(len(message.content or "") / 10 for message in trace.assistant_messages)


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for n in range(9):
            yield Sum(SumData(prompt=f"{n} + {n} =", answer=str(2 * n)), self.config.task)


class Asking(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(TURNS):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                text = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"<{len(text)}>"}]
        return ProgramResult(exit_code=0, stdout="", stderr="")
