"""What a hostile hub may send in place of the names of files in the cache."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dualtune.base import hub
from dualtune.base.errors import FormatError

huggingface_hub = pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def server(monkeypatch):
    """A hub with one file; `server.headers` changes what it sends with it."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer()

        def do_GET(self):
            self.answer()
            self.wfile.write(b"{}")

        def answer(self):
            self.send_response(200)
            headers = {"ETag": '"abc"', "X-Repo-Commit": COMMIT, "Content-Length": "2"} | self.server.headers
            headers |= self.server.headers_of_get if self.command == "GET" else {}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.headers = made.headers_of_get = {}
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(hub, "_guarded", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield made
        made.shutdown()
    huggingface_hub.close_session()


def download(server, cache):
    endpoint = f"http://127.0.0.1:{server.server_port}"
    return huggingface_hub.hf_hub_download("a/b", "config.json", endpoint=endpoint, cache_dir=cache, token=False)


def test_an_ordinary_file_is_downloaded(server, tmp_path):
    hub.guard_hub()
    server.headers_of_get = {"ETag": 'W/"2d7-QqT/abc"'}  # as the API sends them
    assert Path(download(server, tmp_path / "cache")).read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("ETag", '"../../../../escaped"'), ("ETag", "../../../../escaped"), ("ETag", 'W/"../../x"'), ("ETag", '".."'),
        ("ETag", '"/tmp/escaped"'), ("ETag", '"a\\\\b"'), ("X-Linked-ETag", '"../../../../escaped"'),
        ("X-Repo-Commit", "../../../../escaped"), ("X-Repo-Commit", ".."),
    ],
)  # fmt: skip
def test_a_name_that_leads_out_of_the_cache_is_refused(server, tmp_path, header, value):
    server.headers = {header: value}
    hub.guard_hub()
    huggingface_hub.close_session()  # the next client is guarded too
    with pytest.raises(FormatError, match="leads out of the cache"):
        download(server, tmp_path / "some" / "cache")
    files = [path for path in tmp_path.rglob("*") if path.is_file() or path.is_symlink()]
    assert all(path.is_relative_to(tmp_path / "some" / "cache") for path in files)
    assert not any("escaped" in path.name for path in files)
