"""A stand-in of the Hugging Face hub on the loopback address: one repository of the files of a folder."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

REPOSITORY = "org/name"
COMMIT = "a" * 40


class Hub(http.server.ThreadingHTTPServer):
    """Answers what `huggingface_hub` asks to list a repository and to read parts of its files.

    Attributes:
        endpoint: what HF_ENDPOINT has to be.
        served: bytes of files that were sent.
        names: files that were asked for.
    """

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.served, self.names = folder, 0, set[str]()
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    """Serve a folder as the repository `REPOSITORY`."""
    with Hub(folder) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path).strip("/")
        api, files = f"api/models/{REPOSITORY}", f"{REPOSITORY}/resolve/{COMMIT}/"
        if path.startswith(f"{api}/tree/"):
            below = self.server.folder / path.removeprefix(f"{api}/tree/").partition("/")[2]
            found = [self._entry(one) for one in sorted(below.iterdir())] if below.is_dir() else []
            self._send(200 if below.is_dir() else 404, json.dumps(found).encode(), {"X-Error-Code": "EntryNotFound"})
        elif path == api or path.startswith(f"{api}/revision/"):
            said = {"id": REPOSITORY, "modelId": REPOSITORY, "sha": COMMIT, "siblings": [], "tags": []}
            self._send(200, json.dumps(said).encode(), {})
        elif path.startswith(files) and (self.server.folder / path.removeprefix(files)).is_file():
            self._send_file(path.removeprefix(files))
        else:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def _entry(self, path: Path) -> dict[str, Any]:
        kind = "directory" if path.is_dir() else "file"
        name = path.relative_to(self.server.folder).as_posix()
        return {"type": kind, "path": name, "oid": "b" * 40, "size": path.stat().st_size}

    def _send_file(self, name: str) -> None:
        data, status = (self.server.folder / name).read_bytes(), 200
        headers = {"ETag": f'"{"b" * 40}"', "X-Repo-Commit": COMMIT}
        if self.headers["Range"]:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1 if last else len(data), len(data))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            data, status = data[start:stop], 206
        self.server.served += len(data)
        self.server.names.add(name)
        self._send(status, data, headers)

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
