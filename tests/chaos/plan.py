"""When to kill: drawn from the seed, and fitted to what an uninterrupted run is known to do."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import victim

SHARE_AT_THE_END = 0.15
SHARE_DAMAGED = 0.15  # of the kills are followed by damage to the newest checkpoint


@dataclass(frozen=True, slots=True)
class Draw:
    """The randomness of one kill. What it means depends on where the run stands by then."""

    by_time: bool
    which: float
    where: float
    inside: float
    at_the_end: bool  # among the fault points of writing the adapter, which are few
    damages: bool  # and then a disk fails


@dataclass(frozen=True, slots=True)
class Plan:
    """What an uninterrupted run does: its seconds, and its passings of fault points, in order.

    `passings` are (point, amount): 1, or the bytes of a file for `write`. `after[step]` is where those begin that a run
    resumed from that step has before it.
    """

    num_steps: int
    setup_seconds: float
    seconds: float
    passings: tuple[tuple[str, int], ...]
    after: dict[int, int]

    def kill(self, draw: Draw, first_step: int) -> victim.Kill:
        """A time, uniform over what the run will take from this step on; or a fault point that it will pass."""
        begin = self.after.get(first_step, 0) if first_step else 0
        ahead = self.passings[begin:]
        if draw.by_time or not ahead:
            left = (self.seconds - self.setup_seconds) * (1 - first_step / self.num_steps)
            spared = 0 if victim.FORKS else 0.9 * self.setup_seconds  # nearly all of it is spent on imports
            return victim.Kill(after=spared + draw.where * (self.setup_seconds - spared + left))
        aimed_at = self.passings[self.after[self.num_steps] :] if draw.at_the_end else ahead
        points = [*sorted({point for point, _ in aimed_at}), "write", "write"]  # where the most can happen
        point = points[int(draw.which * len(points))]
        amounts = [amount for name, amount in ahead if name == point]
        num_aimed_at = sum(name == point for name, _ in aimed_at)
        chosen = len(amounts) - num_aimed_at + int(draw.where * num_aimed_at)
        if point == "write":  # a file, then a place in it: small files matter as much as large ones
            return victim.Kill(fault=f"write:{sum(amounts[:chosen]) + int(draw.inside * amounts[chosen])}")
        return victim.Kill(fault=f"{point}:{chosen + 1}")


def draws(seed: int, backend: str, trial: int) -> list[Draw]:
    """One to three kills."""
    rng = random.Random(f"{seed} {backend} {trial}")
    return [
        Draw(
            rng.random() < 0.5, rng.random(), rng.random(), rng.random(), rng.random() < SHARE_AT_THE_END,
            rng.random() < SHARE_DAMAGED,
        )
        for _ in range(rng.randint(1, 3))
    ]  # fmt: skip


def read_trace(path: Path) -> tuple[tuple[tuple[str, int], ...], dict[int, int]]:
    """(passings, after) of a plan, from what the spy of an uninterrupted run has written."""
    passings: list[tuple[str, int]] = []
    after: dict[int, int] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        kind, value = line.split()
        if kind == "saved":
            after[int(value)] = len(passings)
        else:
            passings.append(("write", int(value)) if kind == "write" else (value, 1))
    return tuple(passings), after
