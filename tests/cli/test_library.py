"""dualtune as a library: what README.md imports."""

import json

from dualtune.config import load_config

PROGRAM = """
import json, sys
import dualtune
from dualtune import train
path, elsewhere = sys.argv[1:]
first = dualtune.train(path, "numpy")  # the name is that of a package too, which is imported meanwhile
second = dualtune.train(json.load(sys.stdin) | {"run": {"dir": elsewhere}}, platform="numpy")
third = train(dualtune.load_config(path), "numpy")
print(json.dumps([first.final_loss, second.final_loss, third.was_finished]))
"""


def test_train_takes_a_path_a_mapping_and_a_config_again_and_again(python, config_file, tmp_path):
    path = config_file()
    table = load_config(path).model_dump(mode="json", exclude_unset=True)
    done = python("-c", PROGRAM, path, tmp_path / "elsewhere", input=json.dumps(table))
    assert done.returncode == 0, done.stderr
    first, second, was_finished = json.loads(done.stdout)
    assert first == second > 0
    assert was_finished
