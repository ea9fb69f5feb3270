"""An object store for the tests of checkpoints behind URLs."""

from __future__ import annotations

import pytest


@pytest.fixture
def store(monkeypatch):
    """An object store on loopback, as AWS's environment names it; requests that fail are made again at once."""
    from attn_bridge.checkpoints.containers.remote import faults
    from parity_tests.support.object_store import ObjectStore

    with ObjectStore() as found:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "AKIASECRETKEY",
            "AWS_SECRET_ACCESS_KEY": "topsecret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": found.url,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(faults, "PAUSE", 0.001)
        yield found
