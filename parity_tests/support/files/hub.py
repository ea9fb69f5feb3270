"""A stand-in of the Hugging Face hub on the loopback address: repositories, branches, commits; parts of files."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

TOKEN = "hf_" + "standInStandInStandIn" + "0123"
REPOSITORY = "org/name"
COMMIT = "a" * 40
"""Of a folder that is served."""

LARGE = (".safetensors",)
"""What the hub stores apart, by its hash."""


@dataclasses.dataclass
class Repository:
    """A repository.

    Attributes:
        commits: commit -> path -> content.
        branches: branch -> commit.
        messages: commit -> its first line.
        private: as it was asked for.
        is_gated: whether access has to be asked for.
    """

    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str]
    messages: dict[str, str] = dataclasses.field(default_factory=dict)
    private: bool | None = None
    is_gated: bool = False

    def at(self, revision: str) -> str | None:
        """Return the commit of a branch or a commit."""
        return self.branches.get(revision, revision if revision in self.commits else None)


class Hub(http.server.ThreadingHTTPServer):
    """The hub.

    Attributes:
        repositories: id -> repository.
        objects: hash -> large file.
        received: hashes of large files that were sent, in order.
        cut_after: how many large files are taken before the connection breaks; None for all.
        taking: held while a large file is taken.
        endpoint: its address, what HF_ENDPOINT has to be.
        requests: method and path of each request.
        names: files that were read.
        served: bytes of files that were sent.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.received: list[str] = []
        self.requests: list[tuple[str, str]] = []
        self.names: set[str] = set()
        self.served = 0
        self.cut_after: int | None = None
        self.taking = threading.Lock()
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def create(self, name: str, **more: Any) -> Repository:
        """Make a repository with an empty commit."""
        first = hashlib.sha1(name.encode()).hexdigest()
        self.repositories[name] = Repository({first: {}}, {"main": first}, **more)
        return self.repositories[name]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over a connection that a test breaks."""


@contextlib.contextmanager
def serving(folder: Path | None = None) -> Iterator[Hub]:
    """Run a hub without repositories, or with the files of a folder as the repository `REPOSITORY`."""
    with Hub() as hub:
        if folder is not None:
            files = {one.relative_to(folder).as_posix(): one.read_bytes() for one in folder.rglob("*") if one.is_file()}
            hub.repositories[REPOSITORY] = Repository({COMMIT: files}, {"main": COMMIT})
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _RefusedError(Exception):
    def __init__(self, status: int, code: str = "", **data: Any):
        self.status, self.code, self.data = status, code, data


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answered(self._get)

    def do_HEAD(self) -> None:
        self._answered(self._get)

    def do_POST(self) -> None:
        self._answered(self._post)

    def do_PUT(self) -> None:
        self._answered(self._put)

    def _answered(self, answer: Any) -> None:
        self.body = self._read()
        parts = [unquote(one) for one in urlparse(self.path).path.strip("/").split("/")]
        self.server.requests.append((self.command, "/".join(parts)))
        try:
            answer(parts)
        except _RefusedError as error:
            said = {"error": error.code or "refused", **error.data}
            self._send(json.dumps(said).encode(), {"X-Error-Code": error.code}, error.status)

    def _read(self) -> bytes:
        if self.headers["Transfer-Encoding"] != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"] or 0))
        found = []
        while size := int(self.rfile.readline(), 16):
            found.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(found)

    # ---- reading

    def _get(self, parts: list[str]) -> None:
        if parts[:2] == ["api", "models"]:
            name, what = "/".join(parts[2:4]), parts[4:]
            repository = self._repository(name)
            commit = self._commit(repository, what[1] if what[1:] else "main")
            files = repository.commits[commit]
            if what[:1] == ["tree"]:
                self._send_json([self._entry(path, data) for path, data in sorted(files.items())])
            else:
                siblings = [{"rfilename": path} for path in sorted(files)]
                self._send_json({"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": []})
        elif parts[2:3] == ["resolve"]:
            repository = self._repository("/".join(parts[:2]))
            commit, path = self._commit(repository, parts[3]), "/".join(parts[4:])
            if path not in repository.commits[commit]:
                raise _RefusedError(404, "EntryNotFound")
            self._send_file(path, repository.commits[commit][path], commit)
        else:
            raise _RefusedError(404)

    def _send_file(self, path: str, data: bytes, commit: str) -> None:
        headers, status = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}, 200
        if self.headers["Range"]:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1 if last else len(data), len(data))
            headers["Content-Range"], status = f"bytes {start}-{stop - 1}/{len(data)}", 206
            data = data[start:stop]
        if self.command == "GET":
            self.server.names.add(path)
            self.server.served += len(data)
        self._send(data, headers, status)

    def _entry(self, path: str, data: bytes) -> dict[str, Any]:
        found = {"type": "file", "path": path, "oid": hashlib.sha1(data).hexdigest(), "size": len(data)}
        if path.endswith(LARGE):
            found["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return found

    # ---- writing

    def _post(self, parts: list[str]) -> None:
        if parts == ["api", "validate-yaml"]:
            self._send_json({"errors": [], "warnings": []})
            return
        self._check_token()
        if parts == ["api", "repos", "create"]:
            asked = json.loads(self.body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if name in self.server.repositories:
                raise _RefusedError(409, url=f"{self.server.endpoint}/{name}")
            private = asked.get("private", {"private": True, "public": False}.get(asked.get("visibility")))
            self.server.create(name, private=private)
            self._send_json({"url": f"{self.server.endpoint}/{name}", "name": name, "id": name})
        elif parts[-3:] == ["lfs", "objects", "batch"]:
            self._send_json({"transfer": "basic", "objects": list(map(self._object, json.loads(self.body)["objects"]))})
        elif parts[4] == "branch":
            repository = self._repository("/".join(parts[2:4]))
            if parts[5] in repository.branches:
                raise _RefusedError(409)
            repository.branches[parts[5]] = repository.branches["main"]
            self._send_json({})
        elif parts[4] == "preupload":
            files = [
                {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular",
                 "shouldIgnore": False, "oid": None}
                for one in json.loads(self.body)["files"]
            ]  # fmt: skip
            self._send_json({"files": files})
        elif parts[4] == "commit":
            self._commit_files("/".join(parts[2:4]), "/".join(parts[5:]))
        else:
            raise _RefusedError(404)

    def _object(self, asked: dict[str, Any]) -> dict[str, Any]:
        found = {"oid": asked["oid"], "size": asked["size"]}
        if asked["oid"] in self.server.objects:
            return found
        return {**found, "actions": {"upload": {"href": f"{self.server.endpoint}/objects/{asked['oid']}"}}}

    def _put(self, parts: list[str]) -> None:
        with self.server.taking:  # the client sends several at a time
            if self.server.cut_after is not None and len(self.server.received) >= self.server.cut_after:
                raise _RefusedError(400, "cut off")
            assert hashlib.sha256(self.body).hexdigest() == parts[1]
            self.server.objects[parts[1]] = self.body
            self.server.received.append(parts[1])
        self._send_json({})

    def _commit_files(self, name: str, branch: str) -> None:
        repository = self._repository(name)
        is_request = "create_pr=1" in self.path
        files = dict(repository.commits[self._commit(repository, branch)])
        message = ""
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            else:
                del files[value["path"]]
        commit = hashlib.sha1(f"{name} {len(repository.commits)}".encode()).hexdigest()
        repository.commits[commit], repository.messages[commit] = files, message
        repository.branches["refs/pr/1" if is_request else branch] = commit
        page = f"{self.server.endpoint}/{name}"
        request = {"pullRequestUrl": f"{page}/discussions/1"} if is_request else {}
        self._send_json({"commitUrl": f"{page}/commit/{commit}", "commitOid": commit, **request})

    # ---- both

    def _check_token(self, code: str = "") -> None:
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ")
        if token != TOKEN:
            raise _RefusedError(401, code or f"the token {token} opens nothing")

    def _repository(self, name: str) -> Repository:
        if name not in self.server.repositories:
            raise _RefusedError(404, "RepoNotFound")
        found = self.server.repositories[name]
        if found.private:
            self._check_token("RepoNotFound")
        if found.is_gated:
            raise _RefusedError(403, "GatedRepo")
        return found

    def _commit(self, repository: Repository, revision: str) -> str:
        found = repository.at(revision)
        if found is None:
            raise _RefusedError(404, "RevisionNotFound")
        return found

    def _send_json(self, data: Any) -> None:
        self._send(json.dumps(data).encode(), {"Content-Type": "application/json"})

    def _send(self, data: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
