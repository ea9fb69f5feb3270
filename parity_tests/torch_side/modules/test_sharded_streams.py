"""Streams of tokens from models on a mesh."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import torch_attn
from attn_bridge import specs
from torch_attn.parallel import parallelize

BLOCK = specs.DecoderBlockConfig(
    specs.GroupedQueryAttentionConfig(8, 2), specs.FeedForwardConfig(8, 12), specs.RMSNormConfig(8)
)
MODELS = {
    "DecoderModel": specs.DecoderConfig(11, 8, (BLOCK,), specs.RMSNormConfig(8)),
    "GPTModel": specs.GPTModelConfig(11, 8, 8, 2, 1),
}
IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), world_size=1, rank=0)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", MODELS)
def test_a_sharded_model_streams_the_whole_tokens_of_the_plain_one(mesh, name):
    torch.manual_seed(0)
    model = getattr(torch_attn, name)(MODELS[name]).eval()
    plain = torch.stack(list(model.stream(IDS, 5)), 1)
    steps = parallelize(model, mesh, tensor="tensor").stream(IDS, 5)
    first = next(steps)
    assert type(first) is torch.Tensor
    assert type(model(IDS)) is not torch.Tensor  # between the tokens, outputs are shared as ever
    assert torch.equal(torch.stack([first, *steps], 1), plain)


def test_a_sharded_stream_checks_its_arguments_at_once(mesh):
    model = parallelize(torch_attn.GPTModel(MODELS["GPTModel"]), mesh, tensor="tensor")
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.stream(IDS, 0)
