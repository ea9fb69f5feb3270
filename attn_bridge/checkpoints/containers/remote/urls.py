"""URLs of checkpoints: which texts are some, and how they are shown without what is secret in them."""

from __future__ import annotations

import re

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)

WEB = ("http", "https")
"""Protocols of web servers, whose URLs may have a query."""

LOCAL = ("file", "local")
"""Protocols of what lies on this machine."""

UNWRITABLE = {
    **dict.fromkeys(WEB, "a web server can't be written to"),
    "hf": "a repository of the hub is written by its own tools: convert to a folder, and upload that",
}
"""Protocol -> why nothing is written there."""

EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "fsspec and s3fs: pip install 'attn-bridge[remote]'"),
    **dict.fromkeys(("gs", "gcs"), "fsspec and gcsfs: pip install 'attn-bridge[remote]' gcsfs"),
    "hf": "fsspec and huggingface_hub: pip install 'attn-bridge[remote]' huggingface_hub",
}
"""Protocol -> what reading it needs."""


def is_url(text: str) -> bool:
    """Whether a text is a URL, and not a path."""
    return URL.fullmatch(text) is not None


def split(text: str) -> tuple[str, str]:
    """Return a URL's protocol, in lower case, and what follows it."""
    found = URL.fullmatch(text)
    if found is None:
        raise ValueError("is no URL")
    return found[1].lower(), found[2]


def shown(text: str) -> str:
    """Return a URL without the user, the password and the query, which may be a signature."""
    protocol, rest = split(text)
    place, slash, path = rest.partition("/")
    if ":" in place.rpartition("@")[0] or protocol in WEB:
        place = place.rpartition("@")[2]
    if protocol in WEB:
        path = re.split(r"[?#]", path, maxsplit=1)[0]
        place = re.split(r"[?#]", place, maxsplit=1)[0]
    return f"{protocol}://{place}{slash}{path}"


def needed(protocol: str) -> str:
    """Return what has to be installed for a protocol."""
    return EXTRAS.get(protocol, "fsspec and its package for that protocol: pip install 'attn-bridge[remote]'")
