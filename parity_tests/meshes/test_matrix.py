"""Sharded modules against plain ones in float64, outputs and all gradients: a part of what the command runs whole.

``python -m parity_tests.meshes.processes.mesh_matrix`` takes every mesh and method.
"""

from __future__ import annotations

from ..support.calls import cover
from .processes.mesh_matrix import run

FEW = ["MultiHeadAttention", "GroupedQueryAttention gpt-oss", "GatedDeltaNet qwen3-next", "DecoderModel"]

MATRIX = {
    "every module, tensor and context, by a ring": ([{"tensor": 2, "context": 2}], "ring", []),
    "context and fsdp, heads for tokens": ([{"fsdp": 2, "context": 2}], "ulysses", [*FEW, "SelfAttention_v1"]),
    "many devices for few key heads": ([{"tensor": 4}], "all_gather", [*FEW, "MultiHeadLatentAttention window"]),
}


@cover.rotated(("name", "framework"), list(MATRIX), ["torch", "flax"])
def test_a_sharded_module_matches_the_plain_one(framework, name):
    meshes, method, cases = MATRIX[name]
    found = run(framework, [tuple(mesh.items()) for mesh in meshes], [method], cases)
    ran = [one for one in found if not one.refused]
    assert len(ran) >= max(len(cases) - 1, 1)
    assert {(one.case, one.tensor): one.largest for one in ran if not one.largest <= 1e-12} == {}
    # What has one head, or channels alone, is refused by tensor and by the exchange of heads, and nothing else is.
    refused = {one.case.split()[0] for one in found if one.refused}
    assert refused <= {
        *("SelfAttention_v1", "SelfAttention_v2", "CausalAttention", "MultiHeadAttentionWrapper"),
        *("GatedConvolution", "Mamba", "LayerNorm", "RMSNorm"),
    }
