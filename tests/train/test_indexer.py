"""Models that attend to a choice of tokens: what none of the libraries computes causally is refused before loading."""

import json
import shutil

import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import parse_config
from dualtune.show.run import run


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "text_config"])
def test_rows_beyond_what_an_indexer_chooses_are_refused(nested, tiny_llama, tmp_path, open_backend, monkeypatch):
    backend, model = open_backend("numpy"), shutil.copytree(tiny_llama, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    changes = {"text_config": config | {"index_topk": 32}} if nested else {"index_topk": 32}
    (model / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    text = f"model: {{name: {model}}}\ndata: {{train: {tmp_path}/rows.jsonl, eval: 0, max_length: 33}}\n"
    monkeypatch.setattr(type(backend), "load", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=r"got 33, but beyond 32 tokens \(index_topk\) .* data\.max_length=32"):
        run(parse_config(f"{text}run: {{dir: {tmp_path}/run}}"), backend)
