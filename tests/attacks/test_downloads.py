"""Downloads that fail: one line that says what happened and what to do, whatever the server answers."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dualtune.base_model import resolve_model
from dualtune.errors import EnvironmentFault

huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A server in place of the hub; `hub.answer` is the status, headers and body of all its answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, headers, body = self.server.answer
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        endpoint = f"http://127.0.0.1:{made.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.chdir(tmp_path)
        yield made
        made.shutdown()
    huggingface_hub.close_session()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b""), "hf auth login"),
        ((403, {"X-Error-Code": "GatedRepo"}, b""), "accept its terms"),
        ((404, {"X-Error-Code": "RepoNotFound"}, b""), "(404)"),
        ((429, {"Retry-After": "0"}, b""), "(429)"),
        ((500, {}, b""), "(500)"),
        ((302, {"Location": "/api/models/nobody/nothing/revision/main"}, b""), "in a circle"),
        ((200, {"Content-Type": "text/html"}, b"<html>Log in to this network</html>"), "login page"),
        ((200, {"Content-Length": "4096"}, b"{"), "the connection broke"),
    ],
    ids=["private", "gated", "missing", "busy", "fault", "circle", "portal", "cut"],
)
def test_an_answer_that_is_no_model_is_told_in_one_line(hub, answer, told):
    hub.answer = answer
    with pytest.raises(EnvironmentFault) as caught:
        resolve_model("nobody/nothing")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
