"""A copy of the setup scripts in a directory of their own, with commands that only write down that they were called.

Nothing but these stubs and a few tools of the system is on PATH, so a script can reach neither the network nor this
repository's environment.
"""

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ("setup_m4.sh", "scripts/setup_cuda.sh", "scripts/setup_common.sh")
LOOKS = {"uname", "sysctl", "sw_vers", "nvidia-smi"}
TOOLS = ("bash", "dirname", "basename", "cat", "touch", "mkdir", "cp", "chmod")
# `python3 -m venv DIR` makes an environment out of the stubs; the check of an interpreter fails where it is not wanted.
PYTHON = """
case "$1" in
  --version) echo "Python 3.12.0" ;;
  -c) {fits} ;;
  -m) if [ "$2" = venv ]; then
        mkdir -p "$3/bin"
        cp "$0" "$3/bin/python"
        cp "$STUBS/dualtune" "$3/bin/dualtune"
      fi ;;
esac
{last}
"""


@dataclass
class Machine:
    """A machine of stubs, on which a script can be run."""

    root: Path  # of the copy of the repository
    commands: Path
    calls: Path
    environment: dict[str, str] = field(default_factory=dict)

    def stub(self, name: str, body: str = "") -> None:
        """A command that writes down its call, and then does `body`."""
        path = self.commands / name
        path.write_text(f'#!/bin/bash\necho "${{0##*/}} $*" >>"$CALLS"\n{body}\n')
        path.chmod(0o755)

    def python(self, name: str = "python3.12", fits: str = "exit 0", last: str = "") -> None:
        self.stub(name, PYTHON.format(fits=fits, last=last))

    def run(self, script: str, *options: str) -> subprocess.CompletedProcess:
        environment = {"PATH": str(self.commands), "CALLS": str(self.calls), "STUBS": str(self.commands)}
        return subprocess.run(
            [self.root / script, *options], env=environment | self.environment, cwd="/", capture_output=True,
            text=True, timeout=1800, check=False,
        )  # fmt: skip

    @property
    def called(self) -> list[str]:
        """Every call, with the interpreter's own checks left out."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [line for line in lines if " -c " not in line and " --version" not in line]

    @property
    def changes(self) -> list[str]:
        """The calls that do more than look."""
        return [line for line in self.called if line.split()[0] not in LOOKS]


@pytest.fixture
def stubs(tmp_path) -> Machine:
    root, commands = tmp_path / "repository", tmp_path / "commands"
    commands.mkdir()
    for script in SCRIPTS:
        (root / script).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / script, root / script)
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found
        (commands / tool).symlink_to(found)
    machine = Machine(root, commands, tmp_path / "calls")
    machine.stub("dualtune")
    machine.python()
    return machine
