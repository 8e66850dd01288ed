"""The table of a notebook: with a display that follows IPython's protocol, and with IPython's own where it is here."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

import dualtune
from dualtune.show.view.notebook import notebook_display

SETTINGS = {"train.steps": 3, "run.eval_every": 1, "run.sample_prompts": ["<script>alert(1)</script>"]}


@pytest.fixture
def config(make_config, write_rows, qa_rows, tmp_path, tiny_softmax):
    return make_config(write_rows(qa_rows), {"run.dir": tmp_path / "run", "data.eval": 0.25} | SETTINGS, tiny_softmax)


def check(pages):
    """The pages that were shown one after another, as HTML."""
    assert len(pages) >= 6 and "<svg" not in pages[0]
    assert "<th>step</th><td>3/3</td>" in pages[-1]
    assert pages[-1].count("<circle") == 4 and pages[-1].count("<polyline") == 1
    assert "<script" not in pages[-1] and "&lt;script&gt;alert(1)&lt;/script&gt;" in pages[-1]
    assert "verdict" in pages[-1]


def test_a_notebook_shows_one_output_that_is_updated(config, monkeypatch, tmp_path):
    shown, updates = [], []

    def display(page, *, display_id):
        assert display_id is True
        shown.append(page._repr_html_())
        return SimpleNamespace(update=lambda page: updates.append(page._repr_html_()))

    modules = {"IPython": ModuleType("IPython"), "IPython.display": ModuleType("IPython.display")}
    modules["IPython"].get_ipython = lambda: SimpleNamespace(kernel=object())
    modules["IPython.display"].display = display
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    dualtune.train(config, "numpy")
    assert len(shown) == 1, (tmp_path / "run" / "log.txt").read_text()
    check([*shown, *updates])


def test_without_a_kernel_nothing_is_shown(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert notebook_display() is None and "IPython" not in sys.modules
    module = ModuleType("IPython")
    monkeypatch.setitem(sys.modules, "IPython", module)
    for shell in (None, SimpleNamespace()):  # no session, and one in a terminal
        module.get_ipython = lambda shell=shell: shell
        assert notebook_display() is None


def test_ipython_itself_publishes_it(config):
    pytest.importorskip("IPython")
    from IPython.core.displaypub import CapturingDisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    try:
        shell.kernel = object()
        shell.display_pub = publisher = CapturingDisplayPublisher()
        dualtune.train(config, "numpy")
    finally:
        InteractiveShell.clear_instance()
    ids = {output["transient"]["display_id"] for output in publisher.outputs}
    assert len(ids) == 1 and [output["update"] for output in publisher.outputs][:2] == [False, True]
    check([output["data"]["text/html"] for output in publisher.outputs])
