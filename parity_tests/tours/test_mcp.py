"""The server for agents, driven by the client of the official SDK, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401 - the sides need it

from attn_bridge.backends import usable_cores

from ..support.files import judged_files

ROOT = Path(__file__).parents[2]

NET = f"""{judged_files.NET}
def hang():
    while True:
        pass

hang_too = hang

def write():
    open("net.py", "a").write("#")

def example_inputs():
    return torch.ones(2, 4)
"""


def served(root, options=()):
    """Return the server of a root, for a client."""
    from mcp.client.stdio import StdioServerParameters

    words = ["-P", "-m", "attn_bridge", "mcp", "--root", str(root), *options]
    return StdioServerParameters(command=sys.executable, args=words, env={"PYTHONPATH": str(ROOT)}, cwd=str(root))


def talk(root, *calls, options=()):
    """Return the names of the tools, (is_error, text) of each call, and the resources that the texts name."""
    import anyio
    from mcp.client import Client

    async def session():
        answers, resources = [], []
        async with Client(served(root, options)) as client:
            tools = [tool.name for tool in (await client.list_tools()).tools]
            for name, arguments in calls:
                result = await client.call_tool(name, arguments)
                [content] = result.content
                answers.append((bool(result.is_error), content.text))
                if "parity://" in content.text:
                    address = content.text[content.text.index("parity://") :].split(")")[0]
                    [resource] = (await client.read_resource(address)).contents
                    resources.append(json.loads(resource.text))
        return tools, answers, resources

    return anyio.run(session)


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "net.py").write_text(NET)
    (tmp_path / "outside.py").write_text(NET)
    return folder


def test_tools_answer_in_short_with_the_next_step_and_the_report_as_a_resource(root, tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"fc.weight": np.zeros((4, 4), np.float32)}, root / "weights.safetensors")
    tools, answers, resources = talk(
        root,
        ("compare", {"first": "net.py:Net", "second": "net.py:tanh", "seeds": 1}),
        ("explain", {"report": "r1", "path": "output"}),
        ("explain", {"report": "r1", "path": "nope"}),
        ("convert_plan", {"source": "weights.safetensors", "target": "new.npz", "to_layout": "same"}),
        ("compare", {"first": "../outside.py:Net", "second": "net.py:Net"}),
        ("compare", {"first": "net.py:write", "second": "net.py:Net"}),
    )
    assert set(tools) >= {"compare", "explain", "convert_plan"}
    compared, explained, unknown, planned, outside, written = answers
    assert compared[0] is False
    assert compared[1].startswith("different: Net (first) and Net (second), 4 tensors, ")
    step = "compare the code of both sides between fc and the outputs, mend the second side, and call compare again"
    assert compared[1].splitlines()[-1] == f"next: {step}"
    assert resources[0]["verdict"] == "different"
    assert len(resources[0]["tensors"]) == 4
    assert explained[1].startswith("output (float32): different, ")
    assert "\n  at (0, 3): first 0, second -0.837916012, on " in explained[1]
    assert unknown[0]
    assert "nope is no tensor or submodule of r1; it has output, " in unknown[1]
    assert planned[1].startswith("plan: 1 tensors, 64 bytes, from safetensors ")
    assert not (root / "new.npz").exists()
    assert outside[0]
    assert f"../outside.py is not below the root {root}" in outside[1]
    assert written[0]
    assert (root / "net.py").read_text() == NET
    assert all(len(text.encode()) < 2000 for _, text in answers)


def test_a_call_beyond_its_limits_is_ended_and_the_server_goes_on(root):
    hang = ("compare", {"first": "net.py:hang", "second": "net.py:Net"})
    _, answers, _ = talk(root, hang, ("explain", {"report": "r9", "path": "x"}), options=["--timeout", "0.5"])
    assert [is_error for is_error, _ in answers] == [True, True]
    assert "took longer than 0.5 s" in answers[0][1]
    assert "report (r9) is not known; reports: none yet" in answers[1][1]
    _, [(is_error, text)], _ = talk(root, hang, options=["--memory", "0.1"])
    assert is_error
    assert "needed more than 0.1 GiB of memory" in text


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_a_cancelled_call_ends_its_process_and_the_server_goes_on(root):
    """Two calls hang; the client sees both processes, cancels both, and waits until they are gone."""
    import anyio
    from mcp.client import Client

    async def session():
        async with Client(served(root)) as client:
            async with anyio.create_task_group() as group:
                for side in ("hang", "hang_too"):
                    group.start_soon(client.call_tool, "laws", {"side": f"net.py:{side}"})
                while len(running(root, "net.py:hang")) < min(2, usable_cores()):
                    await anyio.sleep(0.02)
                assert [tool.name for tool in (await client.list_tools()).tools]
                group.cancel_scope.cancel()
            while running(root, "net.py:hang"):
                await anyio.sleep(0.02)
            return (await client.call_tool("explain", {"report": "r1", "path": "x"})).content[0].text

    assert "report (r1) is not known; reports: none yet" in anyio.run(session)


def running(root, word):
    """Return the commands of the judge that run in a folder with an argument that begins with a word."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if (
                "attn_bridge" in words
                and (path.parent / "cwd").readlink() == root
                and any(argument.startswith(word) for argument in words)
            ):
                commands.append(words)
    return commands
