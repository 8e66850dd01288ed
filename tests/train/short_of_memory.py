"""A run on torch in this process, which may allocate only so many MB more when training begins."""

import json
import resource
import sys
from pathlib import Path

from dualtune.base.errors import DualtuneError
from dualtune.config import parse_config
from dualtune.engine.backend import get_backend
from dualtune.show.run import run
from dualtune.train.hooks import Hook


class Limit(Hook):
    """Sets RLIMIT_DATA, which counts private memory; RLIMIT_AS would also count mapped weights."""

    def __init__(self, megabytes):
        self._bytes = megabytes << 20

    def on_start(self, info):
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        limit = int(status["VmData"].split()[0]) * 1024 + self._bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main(model, home, megabytes, words):
    """Train two steps on documents of `words` words, all of a step in one micro-batch."""
    home, count = Path(home), 600 if words < 100 else 4
    rows = [{"prompt": "x", "completion": f"{i} " + "word " * words} for i in range(count)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = {
        "model.name": str(model), "adapter.rank": 2, "adapter.targets": "all-linear",
        "data.train": str(home / "rows.jsonl"), "data.eval": 0, "data.max_length": 16384, "data.packing": False,
        "train.steps": 2, "train.documents_per_step": count // 2, "train.micro_batch_tokens": 65536,
        "run.dir": str(home / "run"),
    }  # fmt: skip
    config = parse_config("model: {}", overrides=[f"{key}={json.dumps(value)}" for key, value in settings.items()])
    run(config, get_backend("torch", "cpu"), [] if megabytes is None else [Limit(megabytes)])


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    except DualtuneError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
