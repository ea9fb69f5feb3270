"""Models of both frameworks to a hub and from it: one commit with a card, revisions, pushes that were cut off."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("huggingface_hub", reason="pip install 'attn-bridge[hub]'")
import huggingface_hub
import torch
from flax import nnx
from huggingface_hub import constants

import jax_attn
import torch_attn
from attn_bridge import checkpoints, parity
from attn_bridge.checkpoints.containers.base import CheckpointError
from attn_bridge.checkpoints.hub import reading
from parity_tests.support.files.hub import TOKEN, serving

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"
)  # huggingface_hub's own call of httpx

NAME = "org/small"
GPT = {
    "vocab_size": 31,
    "context_length": 12,
    "emb_dim": 8,
    "n_heads": 2,
    "n_layers": 2,
    "drop_rate": 0.0,
    "qkv_bias": True,
}
IDS = np.random.default_rng(0).integers(0, 31, size=(2, 9))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield server


def gpt(side, seed=0):
    if side == "torch":
        torch.manual_seed(seed)
        return torch_attn.GPTModel(GPT).eval()
    model = jax_attn.GPTModel(GPT, rngs=nnx.Rngs(seed))
    model.eval()
    return model


def logits(model):
    return np.asarray(model(torch.from_numpy(IDS)).detach() if isinstance(model, torch.nn.Module) else model(IDS))


def files(hub, revision="main"):
    found = hub.repositories[NAME]
    return found.commits[found.at(revision)]


@pytest.mark.parametrize("side", ["torch", "flax"])
def test_both_frameworks_read_a_pushed_model(hub, side):
    model = gpt(side)
    pushed = model.push_to_hub(NAME)
    assert pushed.repo_id == NAME
    assert pushed.commit == hub.repositories[NAME].branches["main"]
    assert files(hub).keys() == {"README.md", "attn-bridge.json", "config.json", "model.safetensors"}
    for package in (torch_attn, jax_attn):
        np.testing.assert_allclose(logits(package.GPTModel.from_pretrained(NAME)), logits(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("package", [torch_attn, jax_attn])
def test_a_revision_is_a_commit_or_a_branch(hub, package):
    first, second = gpt("torch", 1), gpt("torch", 2)
    commit = first.push_to_hub(NAME).commit
    second.push_to_hub(NAME)
    gpt("torch", 3).push_to_hub(NAME, revision="next")
    read = package.GPTModel.from_pretrained
    np.testing.assert_allclose(logits(read(NAME, revision=commit)), logits(first), rtol=0, atol=1e-5)
    np.testing.assert_allclose(logits(read(NAME)), logits(second), rtol=0, atol=1e-5)
    np.testing.assert_allclose(logits(read(NAME, revision="next")), logits(gpt("torch", 3)), rtol=0, atol=1e-5)
    with pytest.raises(CheckpointError, match=r"does not give org/small@v9: it has no such revision"):
        read(NAME, revision="v9")


def test_the_card_carries_the_parity_report(hub):
    model, twin = gpt("torch"), gpt("flax")
    report = parity.compare(model, twin, IDS, seeds=1)
    model.push_to_hub(NAME, report=report, license="apache-2.0")
    card = files(hub)["README.md"].decode()
    assert card.startswith('---\nlicense: "apache-2.0"\nlibrary_name: attn-bridge\n')
    assert f"**equal**: GPTModel (torch) and GPTModel (Flax), {len(report.tensors)} tensors" in card
    assert 'torch_attn.GPTModel.from_pretrained("org/small")' in card
    assert "[parity.json](parity.json), [parity.html](parity.html)" in card
    assert json.loads(files(hub)["parity.json"])["verdict"] == "equal"
    assert files(hub)["parity.html"].startswith(b"<!doctype html>")
    huggingface_hub.ModelCard(card)  # its metadata are YAML


def test_pushing_keeps_foreign_card_text_and_renews_the_report(hub):
    gpt("torch").push_to_hub(NAME, report={"passed": False, "verdict": "different", "summary": "different: old"})
    repository = hub.repositories[NAME]
    card = files(hub)["README.md"].decode()
    changed = card.replace("# small", "# Small\n\nMine.") + "\n## After\n"
    repository.commits[repository.branches["main"]]["README.md"] = changed.encode()
    gpt("torch").push_to_hub(NAME)
    found = files(hub)["README.md"].decode()
    assert "# Small\n\nMine." in found
    assert found.endswith("\n## After\n")
    assert "different" not in found
    assert "No parity report came with these weights" in found
    assert "parity.json" not in files(hub)


def test_a_resumed_push_sends_only_missing_files(hub, tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    gpt("torch").save_pretrained(tmp_path / "whole")
    arrays = checkpoints.read(tmp_path / "whole")
    split_in_three(arrays, folder)
    (folder / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    hub.cut_after = 2
    with pytest.raises(
        CheckpointError, match=r"org/small can't be pushed: .*model-0000[123]-of-00003\.safetensors.*400"
    ):
        checkpoints.push_to_hub(folder, NAME)
    assert files(hub) == {}
    assert len(hub.received) == 2
    hub.cut_after = None
    checkpoints.push_to_hub(folder, NAME)
    assert len(hub.received) == len(set(hub.received)) == 3
    np.testing.assert_allclose(logits(jax_attn.GPTModel.from_pretrained(NAME)), logits(gpt("torch")), rtol=0, atol=1e-5)
    # One file in place of three: none of theirs stays.
    gpt("torch", 4).push_to_hub(NAME)
    assert [name for name in files(hub) if name.endswith((".safetensors", "index.json"))] == ["model.safetensors"]


def split_in_three(arrays, folder):
    from safetensors.numpy import save_file

    names, places = sorted(arrays), {}
    for i in range(3):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        save_file({name: np.ascontiguousarray(arrays[name]) for name in names[i::3]}, folder / file)
        places |= dict.fromkeys(names[i::3], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_errors_are_one_line_without_the_token(hub):
    model, wrong = gpt("flax"), "hf_" + "secretSecretSecret"
    with pytest.raises(CheckpointError) as caught:
        model.push_to_hub(NAME, token=wrong)
    assert "401" in str(caught.value)
    assert "hf auth login" in str(caught.value)
    assert wrong not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__  # a traceback does not show the hub's
    hub.create("org/gated", is_gated=True)
    for name, said in (("org/absent", "there is no such repository, or it is private"),
                       ("org/gated", "access to it has to be asked for")):  # fmt: skip
        with pytest.raises(CheckpointError, match=said):
            jax_attn.GPTModel.from_pretrained(name)


def test_private_repositories_and_requests(hub):
    pushed = gpt("torch").push_to_hub(NAME, private=True)
    assert hub.repositories[NAME].private is True
    asked = gpt("torch", 1).push_to_hub(NAME, create_pr=True, commit_message="better")
    assert asked.url.endswith("/discussions/1")
    assert hub.repositories[NAME].messages[asked.commit] == "better"
    assert hub.repositories[NAME].branches["main"] == pushed.commit
    with pytest.raises(CheckpointError, match="does not give org/small"):
        torch_attn.GPTModel.from_pretrained(NAME, token=False)


def test_a_link_out_of_the_folder_is_never_pushed(hub, tmp_path):
    gpt("torch").save_pretrained(tmp_path / "model")
    (tmp_path / "secret.json").write_text('{"secret": 1}')
    (tmp_path / "model" / "notes.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(
        CheckpointError, match=r"model: the file notes\.json is a link out of its folder; put a copy of the file there$"
    ):
        checkpoints.push_to_hub(tmp_path / "model", NAME)
    assert hub.requests == []
    (tmp_path / "model" / "notes.json").unlink()
    (tmp_path / "model" / "notes.json").symlink_to("config.json")
    checkpoints.push_to_hub(tmp_path / "model", NAME)
    assert files(hub)["notes.json"] == files(hub)["config.json"]


def test_arguments_are_refused_before_anything_is_written(hub):
    model = gpt("torch")
    for call, said in (
        ({"repo_id": "a/b/c"}, r"repo_id \(a/b/c\) must be the id of a repository: name or org/name"),
        ({"repo_id": NAME, "revision": "x", "create_pr": True}, r"revision \(x\) does not go with create_pr"),
        ({"repo_id": NAME, "report": {"verdict": "equal"}}, "report holds no parity report"),
        ({"repo_id": NAME, "report": "absent.json"}, "report absent.json can't be read"),
    ):
        with pytest.raises(ValueError, match=said):
            model.push_to_hub(**call)
    assert hub.requests == []


def test_a_model_is_downloaded_unless_the_cache_alone_may_serve(hub):
    gpt("torch").push_to_hub(NAME)
    with pytest.raises(CheckpointError, match=r"the cache does not hold it$"):
        reading.find_folder(NAME, local_files_only=True)
    folder = reading.find_folder(NAME)
    assert (folder / "model.safetensors").is_file()
    assert reading.find_folder(NAME, local_files_only=True) == folder


def test_a_folder_has_no_revision(tmp_path):
    gpt("torch").save_pretrained(tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"is a folder, which has no revision \(main\)"):
        torch_attn.GPTModel.from_pretrained(tmp_path / "one", revision="main")


def test_hostile_reports_are_shown_as_text(hub):
    report = {"passed": False, "verdict": "different", "summary": "different: <script>x</script> | [a](b)\n# c",
              "tensors": [{"name": "`x` | <b>", "verdict": "different", "relative": None}]}  # fmt: skip
    gpt("torch").push_to_hub(NAME, report=report)
    card = files(hub)["README.md"].decode()
    assert "<script>" not in card
    assert "\n# c" not in card
    assert "| `'x' \\| <b>` | different |  |" in card


def test_weights_that_devices_share_are_pushed_in_two_steps(hub, monkeypatch):
    model = gpt("torch")
    monkeypatch.setattr(torch_attn.backend, "shared_names", lambda module: {"x"})
    with pytest.raises(ValueError, match=r"save_pretrained\(folder\) in every process"):
        model.push_to_hub(NAME)
    assert hub.requests == []


@pytest.mark.parametrize("kind", ["GPTModel", "BertEncoder"])
def test_a_transformers_folder_is_pushed_with_its_class(hub, tmp_path, kind):
    folder = tmp_path / "hf"
    if kind == "GPTModel":
        gpt("torch").save_pretrained(tmp_path / "ours")
        checkpoints.convert(tmp_path / "ours", folder, to_layout="hf-gpt2", settings={"tie": 0})
    else:
        from parity_tests.twins.families.test_pretrained import hf_bert

        hf_bert(folder)
    checkpoints.push_to_hub(str(folder), NAME)
    assert (
        f"torch_attn.{ {'GPTModel': 'DecoderModel'}.get(kind, kind) }.from_pretrained"
        in files(hub)["README.md"].decode()
    )
    for package in (torch_attn, jax_attn):
        getattr(package, kind).from_pretrained(NAME)


def test_no_token_stands_in_what_the_hub_says(monkeypatch):
    mine, given, another = "hf_" + "mineMineMine", "given-token-of-a-mirror", "hf_" + "someoneElses"
    monkeypatch.setenv("HF_TOKEN", mine)
    error = OSError(f"Bearer {mine}, {given} and {another} at https://user:{given}@host/x\nare refused")
    said = reading.reason(error, given)
    assert said == "Bearer ***, *** and *** at https://***host/x are refused"
