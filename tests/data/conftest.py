"""What the tests of data share."""

import pytest

from dualtune.data.tokens.tokenizer import Tokenizer


@pytest.fixture
def with_template(tiny_llama, tmp_path):
    """The byte tokenizer with a chat template of this source."""

    def make(source: str) -> Tokenizer:
        path = tmp_path / "template.jinja"
        path.write_text(source, encoding="utf-8")
        return Tokenizer(tiny_llama, str(path))

    return make
