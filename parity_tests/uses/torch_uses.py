"""What users of torch do with its own attention layers, done with ours; each function fails if a number is wrong."""

from __future__ import annotations

import copy
import io
import pickle
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import prune
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import torch_attn
from attn_bridge import specs
from torch_attn import functional

from .table import Uses, refusal

USES = Uses()
CONFIG = specs.GroupedQueryAttentionConfig(8, 4, num_kv_heads=2, position=specs.Rotary(), dropout=0.2)
BLOCK = specs.DecoderBlockConfig(
    specs.GroupedQueryAttentionConfig(8, 2), specs.FeedForwardConfig(8, 12), specs.RMSNormConfig(8)
)
MODEL = specs.DecoderConfig(11, 8, (BLOCK, BLOCK), specs.RMSNormConfig(8))
X, IDS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
PADDING = torch.tensor([[False, False, True, True, True], [True] * 5])


def layer(**options: Any) -> Any:
    torch.manual_seed(0)
    return torch_attn.GroupedQueryAttention(CONFIG, **options).eval()


def model() -> Any:
    torch.manual_seed(0)
    return torch_attn.DecoderModel(MODEL).eval()


def slopes(module: Any, call: Any = None) -> list[torch.Tensor]:
    module.zero_grad()
    ((module if call is None else call)(X) ** 2).sum().backward()
    return [one.grad.clone() for one in module.parameters()]


def same_slopes(call: Any) -> None:
    """Check that a way of calling gives the gradients of plain calls."""
    plain, module = slopes(layer()), layer()
    for found, wanted in zip(slopes(module, call(module)), plain, strict=True):
        assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@USES.add("compiled, with gradients")
def compiled() -> None:
    same_slopes(lambda module: torch.compile(module, backend="aot_eager", fullgraph=True))


@USES.add("exported for any batch and length")
def exported() -> None:
    dims = ({0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("length", min=2, max=64)},)
    program = torch.export.export(layer(), (X,), dynamic_shapes=dims).module()
    assert_close(program(X[:1, :3]), layer()(X[:1, :3]))


@USES.add("a step of decoding exported, its cache an argument")
def exported_step() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer()

        def forward(self, x: Any, cache: Any) -> Any:
            return self.inner(x, cache=cache)

    with torch.no_grad():
        caches = [layer()(X, cache=layer().init_cache(2, 9))[1] for _ in range(2)]
        found, _ = torch.export.export(Step(), (X[:, :1], caches[0])).module()(X[:, :1], caches[0])
        assert_close(found, layer()(X[:, :1], cache=caches[1])[0])


@USES.add("exported to ONNX", needs=("onnxscript",))
def onnx() -> None:
    torch.onnx.export(layer(), (X,), dynamo=True)


@USES.add("traced (torch.jit)")
def traced() -> None:
    assert_close(torch.jit.trace(layer(), (X,))(X + 1), layer()(X + 1))


@USES.add("data parallel (DDP, a mesh)")
def data_parallel() -> None:
    with process_group():
        same_slopes(lambda module: nn.parallel.DistributedDataParallel(module))


@USES.add("sharded parameters (FSDP2, a mesh)")
def fsdp() -> None:
    from torch.distributed.fsdp import fully_shard

    with process_group():
        module = layer()
        fully_shard(module)
        assert_close(module(X), layer()(X))


@USES.add("adapters (peft)", needs=("peft",))
def adapters() -> None:
    import peft

    peft.get_peft_model(layer(), peft.LoraConfig(target_modules=["W_query"]))(X)


@USES.add("a Trainer of transformers", needs=("accelerate",))
def trainer() -> None:
    raise NotImplementedError


@USES.add("dynamic quantisation")
def quantised() -> None:
    torch.backends.quantized.engine = torch.backends.quantized.supported_engines[-1]
    found = torch.ao.quantization.quantize_dynamic(layer(), {nn.Linear})(X)
    assert_close(found, layer()(X), rtol=0.2, atol=0.1)


@USES.add("activations recomputed")
def recomputed() -> None:
    for reentrant in (False, True):
        options = {"use_reentrant": reentrant}
        same_slopes(lambda module, options=options: lambda x: checkpoint(module, x.clone().requires_grad_(), **options))


@USES.add("gradients as a function")
def functional_gradients() -> None:
    module = layer()
    weights = dict(module.named_parameters())
    found = torch.func.grad(lambda weights: (torch.func.functional_call(module, weights, (X,)) ** 2).sum())(weights)
    for one, wanted in zip(found.values(), slopes(layer()), strict=True):
        assert_close(one, wanted)


@USES.add("vmap over inputs")
def vmapped() -> None:
    assert_close(torch.vmap(layer())(torch.stack([X, 2 * X]))[1], layer()(2 * X))


@USES.add("vmap over weights (an ensemble)")
def ensemble() -> None:
    members = [layer(), torch_attn.GroupedQueryAttention(CONFIG).eval()]
    weights, buffers = torch.func.stack_module_state(members)
    found = torch.vmap(lambda w, b: torch.func.functional_call(members[0], (w, b), (X,)))(weights, buffers)
    assert_close(found[1], members[1](X))


@USES.add("derivatives forward (jvp)")
def forward_derivatives() -> None:
    slope = torch.func.jvp(lambda x: (layer()(x) ** 2).sum(), (X,), (X,))[1]
    x = X.clone().requires_grad_()
    (layer()(x) ** 2).sum().backward()
    assert_close(slope, (x.grad * X).sum(), rtol=1e-4, atol=1e-4)


@USES.add("second derivatives (hessian)")
def hessian() -> None:
    module = layer()
    found = torch.func.hessian(lambda s: (module(X * s) ** 2).sum())(torch.tensor(1.0))
    assert torch.isfinite(found)


@USES.add("a deep copy")
def copied() -> None:
    module = layer()
    other = copy.deepcopy(module)
    nn.init.zeros_(module.W_query.weight)
    assert_close(other(X), layer()(X))


@USES.add("pickled")
def pickled() -> None:
    assert_close(pickle.loads(pickle.dumps(layer()))(X), layer()(X))


@USES.add("a state saved and loaded")
def saved() -> None:
    file = io.BytesIO()
    torch.save(layer().state_dict(), file)
    file.seek(0)
    module = torch_attn.GroupedQueryAttention(CONFIG).eval()
    module.load_state_dict(torch.load(file))
    assert_close(module(X), layer()(X))


@USES.add("a state with a missing weight")
def missing_weight() -> str:
    state = layer().state_dict()
    del state["W_key.weight"]
    try:
        layer().load_state_dict(state)
    except RuntimeError as error:
        return str(error).splitlines()[-1].strip()
    raise AssertionError


@USES.add("built without memory, then filled")
def meta() -> None:
    module = torch_attn.GroupedQueryAttention(CONFIG, device="meta").to_empty(device="cpu")
    module.reset_parameters()
    assert torch.isfinite(module(X)).all()


@USES.add("shapes without numbers")
def shapes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert torch_attn.GroupedQueryAttention(CONFIG)(torch.zeros(2, 5, 8)).shape == (2, 5, 8)


@USES.add("bfloat16 weights")
def half() -> None:
    assert_close(layer().bfloat16()(X.bfloat16()).float(), layer()(X), rtol=0.1, atol=0.05)


@USES.add("float64 weights")
def double() -> None:
    assert_close(layer().double()(X.double()).float(), layer()(X))


@USES.add("float32 weights, bfloat16 computation")
def autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = layer()(X)
    assert_close(found.float(), layer()(X), rtol=0.1, atol=0.05)


@USES.add("input of another dtype than the weights")
def other_dtype() -> str:
    return refusal(lambda: layer()(X.double()), TypeError)


@USES.add("hooks on layers")
def hooks() -> None:
    seen: list[Any] = []
    module = layer()
    module.W_query.register_forward_hook(lambda *given: seen.append(given[2].shape))
    module.register_full_backward_hook(lambda *given: seen.append(given[2][0].shape))
    module(X.clone().requires_grad_()).sum().backward()
    assert seen == [(2, 5, 8), (2, 5, 8)]


@USES.add("weights tied between layers")
def tied() -> None:
    first, second = layer(), layer()
    second.W_query.weight = first.W_query.weight
    second(first(X)).sum().backward()
    assert len({id(one) for one in (*first.parameters(), *second.parameters())}) == 7


@USES.add("in a Sequential")
def sequential() -> None:
    assert_close(nn.Sequential(layer(), layer())(X), layer()(layer()(X)))


@USES.add("a projection replaced")
def replaced() -> None:
    module = layer()
    module.W_query = nn.Sequential(module.W_query)
    assert_close(module(X, cache=module.init_cache(2, 5))[0], layer()(X), rtol=1e-4, atol=1e-5)


@USES.add("weights frozen")
def frozen() -> None:
    module = layer()
    module.W_query.requires_grad_(False)
    module(X).sum().backward()
    assert module.W_query.weight.grad is None
    assert module.W_key.weight.grad is not None


@USES.add("trained by an optimizer")
def trained() -> None:
    module = layer()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    losses = []
    for _ in range(5):
        loss = (module(X) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]


@USES.add("an average of weights (EMA)")
def averaged() -> None:
    average = torch.optim.swa_utils.AveragedModel(layer())
    average.update_parameters(layer())
    assert_close(average(X), layer()(X))


@USES.add("weights as one vector")
def vector() -> None:
    module = layer()
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(module.parameters()), module.parameters())
    assert_close(module(X), layer()(X))


@USES.add("weights pruned or parametrised")
def parametrised() -> None:
    module = layer()
    prune.l1_unstructured(module.W_query, "weight", 0.0)
    nn.utils.parametrizations.weight_norm(module.W_key)
    assert_close(module(X), layer()(X), rtol=1e-4, atol=1e-5)


@USES.add("dropout in training alone")
def dropout() -> None:
    module = layer()
    assert_close(module(X), module(X))
    module.train()
    assert (module(X) - module(X)).abs().max() > 1e-3


@USES.add("dropout drawn again from a seed")
def seeded() -> None:
    module = layer().train()
    found = [(torch.manual_seed(3), module(X))[1] for _ in range(2)]
    assert_close(*found)


@USES.add("no gradients (inference mode)")
def inference() -> None:
    with torch.inference_mode():
        assert not layer()(X).requires_grad


@USES.add("NaN looked for")
def anomalies() -> None:
    with torch.autograd.set_detect_anomaly(True):
        slopes(layer())


@USES.add("weights of attention returned")
def weights() -> None:
    module = torch_attn.MultiHeadAttention(8, 8, 6, num_heads=2)
    assert_close(module(X, return_weights=True)[1].sum(-1), torch.ones(2, 2, 5))


@USES.add("input without a batch axis")
def no_batch() -> None:
    assert_close(layer()(X[0]), layer()(X)[0])


@USES.add("a batch of 0")
def empty() -> None:
    assert layer()(X[:0]).shape == (0, 5, 8)


@USES.add("no token")
def no_token() -> str:
    return refusal(lambda: layer()(X[:, :0]), ValueError)


@USES.add("padding as a bool mask")
def bool_mask() -> None:
    assert_close(layer()(X, attention_mask=PADDING)[0, 2:], layer()(X[:1, 2:])[0], rtol=1e-4, atol=1e-5)


@USES.add("padding as a tokenizer's mask of 0 and 1")
def integer_mask() -> None:
    assert_close(layer()(X, attention_mask=PADDING.long()), layer()(X, attention_mask=PADDING))


@USES.add("documents as a mask of 1, 2, 3")
def documents() -> str:
    return refusal(lambda: layer()(X, attention_mask=torch.arange(5).expand(2, 5)), ValueError)


@USES.add("a mask of floats")
def float_mask() -> str:
    return refusal(lambda: layer()(X, attention_mask=torch.zeros(2, 5)), TypeError)


@USES.add("a mask of three axes")
def ambiguous_mask() -> str:
    return refusal(lambda: layer()(X, attention_mask=torch.ones(2, 5, 5, dtype=torch.bool)), ValueError)


@USES.add("query, key and value by position")
def three_arguments() -> str:
    return refusal(lambda: layer()(X, X, X), TypeError)


@USES.add("a config given as a dict")
def config_as_dict() -> str:
    return refusal(lambda: torch_attn.GroupedQueryAttention({"d_in": 8}), TypeError)


@USES.add("an array of another library")
def other_array() -> str:
    return refusal(lambda: layer()(np.zeros((2, 5, 8), np.float32)), TypeError)


@USES.add("sequences of different lengths (nested)")
def nested() -> str:
    x = torch.nested.nested_tensor([X[0], X[1, :3]], layout=torch.jagged)
    return refusal(lambda: layer()(x), TypeError)


@USES.add("a kernel chosen by name")
def chosen() -> None:
    with functional.use_implementation("reference"):
        found = layer()(X)
    assert_close(found, layer(implementation="reference")(X))


@USES.add("a kernel that is none")
def unknown_kernel() -> str:
    return refusal(lambda: layer(implementation="flash"), ValueError)


@USES.add("decoding with a cache")
def decoded() -> None:
    module, cache, parts = layer(), layer().init_cache(2, 5), []
    for at in range(5):
        part, cache = module(X[:, at : at + 1], cache=cache)
        parts.append(part)
    assert_close(torch.cat(parts, 1), module(X), rtol=1e-4, atol=1e-5)


@USES.add("a cache that is full")
def full_cache() -> str:
    return refusal(lambda: layer()(X, cache=layer().init_cache(2, 4)), ValueError)


@USES.add("rows of a cache in another order (beams)")
def reordered() -> None:
    cache = layer()(X, cache=layer().init_cache(2, 6))[1].reorder(torch.tensor([1, 1]))
    out, _ = layer()(X[:, :1], cache=cache)
    assert out.shape == (2, 1, 8)


@USES.add("a cache cut back (speculative decoding)")
def trimmed() -> None:
    cache = layer()(X, cache=layer().init_cache(2, 6))[1].trim(3)
    assert_close(layer()(X[:, 3:], cache=cache)[0], layer()(X)[:, 3:], rtol=1e-4, atol=1e-5)


@USES.add("a whole model called with input_ids and labels")
def labelled() -> None:
    loss, logits = model()(input_ids=IDS, labels=IDS)
    assert_close(loss, nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()))


@USES.add("a label that is no token")
def bad_label() -> str:
    return refusal(lambda: model()(IDS, labels=IDS + 9), ValueError)


@USES.add("a token that is none")
def bad_token() -> str:
    return refusal(lambda: model()(IDS + 9), ValueError)


@USES.add("tokens generated")
def generated() -> None:
    assert model().generate(input_ids=IDS, max_new_tokens=3, attention_mask=torch.ones_like(IDS)).shape == (2, 7)


@USES.add("tokens sampled from a seed")
def sampled() -> None:
    rng = [torch.Generator().manual_seed(5) for _ in range(2)]
    assert_close(*(model().generate(IDS, 4, temperature=0.9, top_k=5, rng=one) for one in rng))


@USES.add("tokens streamed")
def streamed() -> None:
    assert_close(torch.stack(list(model().stream(IDS, 3)), 1), model().generate(IDS, 3)[:, 4:])


@USES.add("rows padded on the left")
def left_padded() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert_close(model()(IDS, attention_mask=mask)[:1, 2:], model()(IDS[:1, 2:]), rtol=1e-4, atol=1e-5)


@USES.add("a model in a folder")
def folder() -> None:
    with tempfile.TemporaryDirectory() as path:
        model().save_pretrained(Path(path) / "model")
        assert_close(torch_attn.DecoderModel.from_pretrained(Path(path) / "model")(IDS), model()(IDS))


@USES.add("a module printed")
def printed() -> None:
    assert "num_heads=4" in repr(layer())


class process_group:
    """A group of one process."""

    def __enter__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=1, rank=0)

    def __exit__(self, *error: object) -> None:
        torch.distributed.destroy_process_group()
