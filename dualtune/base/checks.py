"""One row of a checking command: what was looked at, what was found, and what fixes it.

Every command that checks something makes these rows: check-gpu, check-env, check-config, verify, selftest, validate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dualtune.base.errors import EnvironmentFault

# fail: it will not work. advice: it works, but could be better. skipped: not checked, `found` says why.
Level = Literal["ok", "advice", "skipped", "fail"]
# In a sentence about a test, and in the JSON of `selftest` and `validate`.
VERDICTS: Mapping[Level, str] = {"ok": "passed", "advice": "passed", "skipped": "skipped", "fail": "failed"}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was checked."""

    name: str
    level: Level
    found: str
    fix: str | None = None  # the command that fixes it, or the next step if no command can
    exit_code: int = EnvironmentFault.exit_code  # of the program if this check fails
    figures: Mapping[str, Any] = field(default_factory=lambda: {})  # what was measured, as JSON values
    limits: Mapping[str, float] = field(default_factory=lambda: {})  # of the figures that were judged
    title: str = ""  # what is checked, where the name is only an identifier
    seconds: float = 0.0  # that it took, if that was measured

    @property
    def verdict(self) -> str:
        return VERDICTS[self.level]

    def to_json(self) -> dict[str, Any]:
        """Return its row in `--json`. `mend` is the old name of `fix`, still written until 0.2."""
        return {
            "name": self.name, "level": self.level, "found": self.found, "fix": self.fix, "mend": self.fix,
            "exit_code": self.exit_code,
        }  # fmt: skip


def exit_code(checks: Sequence[Check]) -> int:
    """Return 0, or the lowest exit code of the failed checks: a wrong config explains the later failures."""
    return min((check.exit_code for check in checks if check.level == "fail"), default=0)
