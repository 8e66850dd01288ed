"""One trial: a run is killed one to three times, each time started again with the same command, and then judged."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field

import judge
import victim
from judge import Sight
from lab import SAVE_EVERY, Lab
from plan import Plan, draws
from victim import End, Kill

MAX_TRIES = 5  # to hit a run at all


@dataclass(slots=True)
class Result:
    """What became of a trial."""

    backend: str
    number: int
    resumed: bool = False
    lost: list[str] = field(default_factory=list)
    corrupted: list[str] = field(default_factory=list)
    not_bitwise: list[str] = field(default_factory=list)
    kills: list[tuple[str, str]] = field(default_factory=list)  # (time, or the fault point; the phase that it hit)
    num_missed: int = 0  # kills that came when the run was over
    num_damaged: int = 0  # checkpoints that were damaged besides
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return bool(self.lost or self.corrupted or self.not_bitwise)


def carry_out(lab: Lab, plan: Plan, backend: str, seed: int, number: int) -> Result:
    """Kill, start again, let it finish, judge. What a failed trial leaves in the lab is kept."""
    result, name = Result(backend, number), f"{backend}-{number}"
    config, log, run_dir = lab.write_config(name), lab.log(name), lab.run_dir(name)
    control, sight = lab.run_dir(lab.control(backend)), judge.look(run_dir, SAVE_EVERY)

    def live(kill: Kill | None) -> End:
        nonlocal sight
        end = victim.run(backend, config, log, kill)
        before, sight = sight, judge.look(run_dir, SAVE_EVERY)
        result.seconds += end.seconds
        result.resumed |= bool(end.first_step)
        result.corrupted += sight.corrupted
        result.lost += _losses(end, before, sight, may_die=kill is not None)
        return end

    for draw in draws(seed, backend, number):
        kill = plan.kill(draw, sight.newest)
        end = live(kill)
        while end.code == 0 and not result.kills and result.num_missed < MAX_TRIES:  # faster than the plan: once more
            result.num_missed += 1
            shutil.rmtree(run_dir)
            sight = judge.look(run_dir, SAVE_EVERY)
            kill = Kill(after=draw.where * end.seconds)
            end = live(kill)
        if end.code is None:
            result.kills.append((kill.point, end.phase))
        else:
            result.num_missed += 1
        if end.code is not None or sight.has_adapter or result.lost:
            break
        if draw.damages and not result.corrupted and judge.damage(run_dir, draw.inside):
            result.num_damaged += 1
            sight = judge.look(run_dir, SAVE_EVERY)
    if live(None).code == 0:  # also a run that is over: then the command must do nothing
        result.corrupted += judge.corruptions(run_dir, control)
        result.not_bitwise += judge.differences(run_dir, control)
    result.resumed &= not result.lost
    if not result.failed:
        shutil.rmtree(run_dir)
        log.unlink()
    return result


def _losses(end: End, before: Sight, after: Sight, *, may_die: bool) -> Iterator[str]:
    """How a run fell short of the guarantee: it goes on, and from the newest checkpoint that there was."""
    if end.hung:
        yield "it hung"
    elif end.code is None and not may_die:
        yield "somebody else killed it"
    elif end.code:
        yield f"exit code {end.code}"
    elif end.code == 0 and not after.has_adapter:
        yield "it ended without an adapter"
    if end.first_step is not None and end.first_step != before.newest:
        yield f"resumed from step {end.first_step}; the newest checkpoint was of step {before.newest}"
    if end.first_step is None and end.code == 0 and not before.has_adapter:
        yield "nothing was trained"
    if (due := max(before.newest, after.floor)) > max(after.newest, after.damaged):
        yield f"the newest checkpoint is of step {after.newest}, and one of step {due} had been due"
