"""Object stores for the tests of checkpoints behind URLs, and what is written to them."""

from __future__ import annotations

import urllib.request

import numpy as np
import pytest

from parity_tests.neutral.checkpoints.checkpoints import gpt


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small checkpoint of a GPT."""
    root = tmp_path_factory.mktemp("source")
    np.savez(root / "x.npz", **gpt(3, width=48, words=301))
    return root / "x.npz"


@pytest.fixture
def store(monkeypatch):
    """An object store on loopback, as AWS's environment names it; requests that fail are made again at once."""
    from attn_bridge.checkpoints.containers.remote import faults
    from parity_tests.support.files.object_store import ObjectStore

    with ObjectStore() as found:
        name_in_environment(monkeypatch, found.url)
        monkeypatch.setattr(faults, "PAUSE", 0.001)
        yield found


@pytest.fixture
def moto(monkeypatch):
    """An object store by others on loopback, with the bucket ``bucket``, as a file system of fsspec."""
    import fsspec

    server = pytest.importorskip("moto.server", reason="pip install 'moto[server]'").ThreadedMotoServer(
        port=0, verbose=False
    )
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host.replace('0.0.0.0', '127.0.0.1')}:{port}"
        name_in_environment(monkeypatch, url)
        urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST")).close()  # it keeps all
        system = fsspec.filesystem("s3", skip_instance_cache=True)
        system.mkdir("bucket")
        yield system
    finally:
        server.stop()


def name_in_environment(monkeypatch, url):
    """Have AWS's environment name a store, and credentials that no message may show."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIASECRETKEY",
        "AWS_SECRET_ACCESS_KEY": "topsecret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
