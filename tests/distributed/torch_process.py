"""One process of a run, as conftest.py starts it: TASK is put into this module before it runs."""

import gc
import json
import os
import runpy
import sys

if __name__ == "__main__":
    gc.freeze()  # what the server had imported is no garbage
    task = json.loads(TASK)  # noqa: F821  pyright: ignore
    output = os.open(task["output"], os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(task["env"])
    exec(task["inject"], {})  # noqa: S102  the test's own lines
    if task["file"]:
        runpy.run_path(task["file"])["main"](*task["arguments"])
    else:
        from dualtune.cli.main import main

        sys.argv = ["dualtune", *task["arguments"]]
        main()
