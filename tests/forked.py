"""A program in a process of its own, as `forked` of conftest.py starts it: TASK is put into this module before it runs.

The process is forked from a server that has imported what takes long, and is from then on what `python …` would be.
"""

import gc
import io
import json
import os
import runpy
import sys
from pathlib import Path


def take_over(task) -> None:
    """Take the streams, the directory, the variables and the search path that the program is to have."""
    os.chdir(task["cwd"])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        file = os.open(task[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY, 0o644)
        os.dup2(file, number)
        os.close(file)
        raw = open(number, "wb" if number else "rb", closefd=False)  # noqa: SIM115
        setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", line_buffering=name == "stderr"))
    os.environ.clear()
    os.environ.update(task["env"])
    for place in filter(None, reversed(task["env"].get("PYTHONPATH", "").split(os.pathsep))):
        sys.path.insert(0, place)
        if (Path(place) / "sitecustomize.py").exists():
            runpy.run_path(f"{place}/sitecustomize.py")


def run(program: str, arguments: list[str]) -> None:
    if program == "dualtune":
        from dualtune.cli.main import main

        sys.argv = ["dualtune", *arguments]
        main()
    elif program == "-m":
        os.setsid()  # who starts a module ends all that it has started
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__")
    else:
        sys.argv, sys.path[0] = [program, *arguments], str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    gc.freeze()  # what the server had imported is no garbage
    task = json.loads(TASK)  # noqa: F821  pyright: ignore
    take_over(task)
    try:
        run(task["program"], task["arguments"])
    except Exception:  # noqa: BLE001  as the interpreter shows it
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
