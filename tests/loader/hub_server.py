"""A local server with the part of the Hugging Face hub's interface that a download needs."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "someone/tiny"
GATED = "someone/gated"


class HubServer(ThreadingHTTPServer):
    """Serves the files of `folder` as the repository someone/tiny."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        self.requested: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def answer(self, *, with_body: bool) -> None:
        path = urlsplit(self.path).path
        self.server.requested.append(path)
        files = self.server.files
        file_prefixes = [f"/{REPO}/resolve/{revision}/" for revision in (COMMIT, "main")]
        name = next((path[len(p) :] for p in file_prefixes if path.startswith(p)), None)
        if path == f"/api/models/{REPO}/revision/main":
            info = {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self.send(200, json.dumps(info).encode(), with_body=with_body)
        elif path.startswith(f"/api/models/{REPO}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                for name, data in files.items()
            ]
            self.send(200, json.dumps(tree).encode(), with_body=with_body)
        elif name in files:
            self.send(200, files[name], with_body=with_body)
        elif path.startswith(f"/api/models/{GATED}/"):
            self.send(403, b"{}", error="GatedRepo", with_body=with_body)
        else:
            self.send(404, b"{}", error="RepoNotFound", with_body=with_body)

    def send(self, status: int, data: bytes, *, error: str = "", with_body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{etag(data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if error:
            self.send_header("X-Error-Code", error)
            self.send_header("X-Error-Message", error)
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Quiet."""


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def running(folder: Path) -> Iterator[HubServer]:
    server = HubServer(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
