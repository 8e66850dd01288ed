"""A hub on loopback with one model: what huggingface_hub asks for, and every way in which the answers may be wrong."""

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

NAME, COMMIT = "org/name", "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True)
class Answer:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    sent: int | None = None  # bytes after which the connection is cut; None: all are sent
    stalls: bool = False  # instead of what is not sent: nothing, until the test ends


class FakeHub(ThreadingHTTPServer):
    """Serves the files of a directory. `change(pattern, function)`: what a path is answered becomes what that returns.

    `asked`: the method, path and Range of each request so far.
    """

    daemon_threads = True

    def __init__(self, model: Path, large: tuple[str, ...] = ("model.safetensors", "tokenizer.json")) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {path.name: path.read_bytes() for path in sorted(model.iterdir())}
        self.large, self.changes = large, []
        self.asked: list[tuple[str, str, str]] = []
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def store(self) -> str:
        """Where large files are: on another host, by its name."""
        return f"http://localhost:{self.server_port}"

    def change(self, pattern: str, function, times: int = 10**6) -> None:
        """Answer the next `times` requests for a path that matches differently; the latest change comes first."""
        self.changes.insert(0, [re.compile(pattern), function, times])

    def fetched(self, name: str) -> list[str]:
        """Return the Range of every request for the content of a file."""
        return [begin for method, path, begin in self.asked if method == "GET" and path.endswith(name)]

    def answer(self, method: str, path: str, begin: str) -> Answer:
        self.asked.append((method, path, begin))
        answer = self.honest(path)
        for change in self.changes:
            if change[0].search(path) and change[2] > 0:
                change[2] -= 1
                answer = change[1](answer)
                break
        if answer.status == 200 and begin and method == "GET":
            first = int(re.fullmatch(r"bytes=(\d+)-", begin)[1])
            last = len(answer.body) - 1
            headers = answer.headers | {"Content-Range": f"bytes {first}-{last}/{last + 1}"}
            answer = replace(answer, status=206, headers=headers, body=answer.body[first:])
        return answer

    def honest(self, path: str) -> Answer:
        if path in (f"/api/models/{NAME}", f"/api/models/{NAME}/revision/main"):
            siblings = [{"rfilename": name} for name in self.files]
            return as_json({"_id": "0", "id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": siblings})
        if path == f"/api/models/{NAME}/tree/{COMMIT}":
            return as_json([self.entry(name) for name in self.files])
        name = path.rpartition("/")[2]
        if name in self.files and path in (f"/{NAME}/resolve/{COMMIT}/{name}", f"/{NAME}/resolve/main/{name}"):
            entry = self.entry(name)
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{entry["oid"]}"', "Accept-Ranges": "bytes"}
            if name in self.large:
                linked = {"X-Linked-ETag": f'"{entry["lfs"]["oid"]}"', "X-Linked-Size": str(entry["size"])}
                return Answer(302, headers | linked | {"Location": f"{self.store}/store/{name}"})
            return Answer(200, headers, self.files[name])
        if path.startswith("/store/") and name in self.files:
            return Answer(200, {"Accept-Ranges": "bytes"}, self.files[name])
        return Answer(404, {"X-Error-Code": "RepoNotFound"})

    def entry(self, name: str) -> dict:
        """Return the row of a file in the tree: its hash as Git has it, and for a large file its SHA-256."""
        data = self.files[name]
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        row = {"type": "file", "path": name, "size": len(data), "oid": oid}
        if name in self.large:
            row["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return row


def as_json(value: object) -> Answer:
    return Answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        answer = self.server.answer(self.command, urlsplit(self.path).path, self.headers.get("Range", ""))
        self.send_response(answer.status)
        for name, value in ({"Content-Length": str(len(answer.body))} | answer.headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(answer.body[: answer.sent])
        if answer.stalls:
            self.server.ended.wait(8)
        self.close_connection = answer.stalls or answer.sent is not None

    do_HEAD = do_GET

    def log_message(self, *_) -> None:
        pass
