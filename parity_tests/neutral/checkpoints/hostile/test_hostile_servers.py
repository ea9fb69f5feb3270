"""Web servers that send requests in circles, trickle, or answer every name: refused in one line, and soon."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest

pytest.importorskip("s3fs", reason="pip install 'attn-bridge[remote]'")

from aiohttp import web

from attn_bridge import checkpoints
from attn_bridge.checkpoints import containers
from attn_bridge.checkpoints.containers import CheckpointError
from attn_bridge.checkpoints.containers.remote import faults
from attn_bridge.cli.app import run
from parity_tests.neutral.checkpoints.checkpoints import CONFIG, attention

PAGES = {
    "html": ("text/html", b"<!DOCTYPE html>\n<html><body>Please sign in</body></html>"),
    "unlabelled html": ("application/octet-stream", b"\xef\xbb\xbf <HTML lang=en><p>404</p></HTML>"),
    "json": ("application/json", b'{"error": "not found"}'),
    "text": ("text/plain", b"nothing to be seen"),
}


class Server:
    """A web server in a thread of its own, which answers GET by a coroutine.

    Attributes:
        paths: what was asked for, in order.
    """

    def __init__(self, answer):
        self._answer, self.paths = answer, []

    def __enter__(self):
        self._loop, ready = asyncio.new_event_loop(), threading.Event()

        async def begin():
            async def handle(request):
                self.paths.append(request.path)
                return await self._answer(request)

            app = web.Application()
            app.router.add_route("GET", "/{path:.*}", handle)
            self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
            ready.set()

        def serve():
            self._loop.run_until_complete(begin())
            self._loop.run_forever()

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()
        ready.wait()
        return self

    def __exit__(self, *error):
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Requests are made again at once, and proxies are left alone."""
    monkeypatch.setattr(faults, "PAUSE", 0.001)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "x.npz"
    np.savez(path, **attention(bias=False))
    return path


def refused(url, capsys):
    """Return the one line that says why a URL is not inspected, without the URL."""
    assert run(["inspect", url]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    start = f"error: {url}: "
    assert shown.err.startswith(start)
    return shown.err.removeprefix(start).rstrip("\n")


# ---- redirects


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("/x.safetensors", "its server redirects requests without end"),
        ("file:///etc/hostname", "its server redirects requests to what is no http or https URL"),
        ("ftp://127.0.0.1/x", "its server redirects requests to what is no http or https URL"),
        ("http://", "its server redirects requests to what is no http or https URL"),
        ("", "its server answers HTTP 302 and no URL to go to"),
    ],
)
def test_redirects_that_lead_nowhere_end_at_once(location, said, capsys):
    async def answer(request):
        return web.Response(status=302, headers={"Location": location} if location else {})

    with Server(answer) as server:
        assert refused(f"{server.url}/x.safetensors", capsys) == said
        assert len(server.paths) <= 11


def test_redirects_that_lead_to_the_file_are_followed(weights):
    async def answer(request):
        if request.path == "/x.npz":
            return web.FileResponse(weights)
        if request.path == "/old.npz":
            return web.Response(status=307, headers={"Location": "/x.npz"})
        return web.Response(status=404)

    with Server(answer) as server:
        assert checkpoints.inspect(f"{server.url}/old.npz").layout == "torch"


# ---- speed


def slowly(announced):
    """Return an answer that sends a byte at a time for as long as its reader stays."""

    async def answer(request):
        reply = web.StreamResponse(headers={"Content-Length": str(announced)})
        await reply.prepare(request)
        while True:
            await reply.write(b"\0")
            await asyncio.sleep(0.001)

    return answer


@pytest.mark.parametrize("announced", [100_000, 10**15])
def test_a_server_that_trickles_is_left_after_a_window(announced, monkeypatch, capsys):
    monkeypatch.setattr(faults, "WINDOW", 0.05)
    monkeypatch.setattr(faults, "MIN_SPEED", 10**6)
    with Server(slowly(announced)) as server:
        said = refused(f"{server.url}/x.npz", capsys)
        assert len(server.paths) == faults.SLOW_TRIES
    assert said.startswith("given up after 2 tries: its server sends ")
    assert said.endswith(": fewer than 1000000 a second")


def test_headers_that_never_end_are_left_after_two_windows(monkeypatch, capsys):
    monkeypatch.setattr(faults, "WINDOW", 0.05)

    async def answer(request):
        while True:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await asyncio.sleep(0.001)

    with Server(answer) as server:
        said = refused(f"{server.url}/x.npz", capsys)
    assert said == "given up after 2 tries: its server takes more than 0.1 s for an answer's headers"


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("step", [1.0, 7.3, 29.0, 600.0])
def test_a_slow_link_that_makes_the_minimum_speed_is_waited_for(step):
    clock = Clock()
    measured = faults.Pace(clock)
    for _ in range(1000):
        clock.now += step
        measured.add(int(step * faults.MIN_SPEED) + 1)


def test_a_link_below_the_minimum_speed_is_left_after_one_window():
    clock = Clock()
    measured = faults.Pace(clock)
    measured.add(2998)
    clock.now = 29.9
    measured.add(1)
    clock.now = 30.0
    with pytest.raises(faults.SlowError, match=r"^its server sends 2999 bytes in 30 s: fewer than 100 a second$"):
        measured.add(0)


def test_an_answer_shorter_than_announced_is_one_line(weights, capsys):
    async def answer(request):
        reply = web.StreamResponse(headers={"Content-Length": "100000"})
        await reply.prepare(request)
        await reply.write(bytes(100))
        request.transport.close()
        return reply

    with Server(answer) as server:
        assert refused(f"{server.url}/x.npz", capsys).startswith("given up after 10 tries: the connection fails")


# ---- one answer to every name


def everywhere(page, files):
    """Return an answer that sends some files, and a page for every other name."""
    kind, body = PAGES[page]

    async def answer(request):
        if request.path in files:
            return web.Response(body=files[request.path])
        return web.Response(body=body, content_type=kind)

    return answer


@pytest.mark.parametrize("page", PAGES)
def test_a_page_for_every_name_is_no_manifest_and_no_config(page, weights, tmp_path):
    with Server(everywhere(page, {"/x.npz": weights.read_bytes()})) as server:
        checkpoints.convert(
            f"{server.url}/x.npz", tmp_path / "got.npz", to_layout="linen-mha", settings={"num_heads": 4}
        )
        assert not checkpoints.inspect(f"{server.url}/x.npz").has_manifest
    checkpoints.convert(weights, tmp_path / "wanted.npz", to_layout="linen-mha", settings={"num_heads": 4})
    assert (tmp_path / "got.npz").read_bytes() == (tmp_path / "wanted.npz").read_bytes()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_for_every_name_is_no_index_of_a_folder(page, weights, capsys):
    with Server(everywhere(page, {})) as server:
        said = refused(f"{server.url}/model", capsys)
    assert said in {
        "html": ["its server answers with a web page"],
        "unlabelled html": ["its server answers with a web page"],
    }.get(page, [f"its extension says no format; name one of {', '.join(containers.READERS)} (--source-format)"])


def test_a_sign_in_page_in_place_of_the_file_is_named(capsys):
    with Server(everywhere("html", {})) as server:
        assert refused(f"{server.url}/x.npz", capsys) == "its server answers with a web page"


def test_a_real_config_is_read_where_every_other_name_gets_a_page(weights, tmp_path):
    config = json.dumps(CONFIG).encode()
    with Server(everywhere("json", {"/x.npz": weights.read_bytes(), "/config.json": config})) as server:
        checkpoints.convert(f"{server.url}/x.npz", tmp_path / "x.npz", to_layout="linen-mha")
        assert server.paths.count("/attn-bridge.no-file") == 1


def test_a_probe_that_fails_once_is_made_again(weights):
    pages = everywhere("json", {"/x.npz": weights.read_bytes()})

    async def answer(request):
        if request.path == "/attn-bridge.no-file" and server.paths.count(request.path) == 1:
            return web.Response(status=503)
        return await pages(request)

    with Server(answer) as server:
        assert not checkpoints.inspect(f"{server.url}/x.npz").has_manifest
        assert server.paths.count("/attn-bridge.no-file") == 2


def test_a_manifest_of_a_server_that_is_none_names_its_url(weights):
    files = {"/x.npz": weights.read_bytes(), "/x.npz.attn-bridge.json": b"[]"}
    with Server(everywhere("html", files)) as server, pytest.raises(CheckpointError) as caught:
        checkpoints.plan(f"{server.url}/x.npz", "y.npz", to_layout="linen-mha")
    assert str(caught.value) == f"{server.url}/x.npz.attn-bridge.json can't be used: it is no manifest of version 1"
