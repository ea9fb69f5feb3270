"""What users of torch do with its own attention layers, done with ours; each function fails if a number is wrong."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.testing import assert_close

import torch_attn
from torch_attn import compat, functional

from .table import refusal
from .torch_layers import CONFIG, IDS, PADDING, X, layer, model
from .torch_training import USES


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


@USES.add("no gradients (inference mode)")
def inference() -> None:
    with torch.inference_mode():
        assert not layer()(X).requires_grad


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


@USES.add("names in a state changed by hooks")
def renamed() -> None:
    def lower(_: Any, state: Any, *__: Any) -> None:
        state.update({key.lower(): state.pop(key) for key in list(state)})

    def raised(_: Any, state: Any, *__: Any) -> None:
        state.update({key.replace("w_", "W_"): state.pop(key) for key in list(state)})

    module, other = layer(), layer()
    module.register_state_dict_post_hook(lower)
    other.register_load_state_dict_pre_hook(raised)
    assert "w_query.weight" in module.state_dict()
    nn.init.zeros_(other.W_query.weight)
    other.load_state_dict(module.state_dict())
    assert_close(other(X), layer()(X))


@USES.add("a state of several processes (DCP, Orbax)")
def distributed_state() -> None:
    from torch.distributed import checkpoint

    with tempfile.TemporaryDirectory() as path:
        checkpoint.save(layer().state_dict(), checkpoint_id=path)
        state = torch_attn.GroupedQueryAttention(CONFIG).state_dict()
        checkpoint.load(state, checkpoint_id=path)
    module = layer()
    module.load_state_dict(state)
    assert_close(module(X), layer()(X))


@USES.add("float16 weights")
def half_precision() -> None:
    assert_close(layer().half()(X.half()).float(), layer()(X), rtol=0.02, atol=0.01)


@USES.add("the drop-in in the stock encoder layer")
def encoder_layer() -> None:
    same_with_drop_ins(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), X)


@USES.add("the drop-in in the stock decoder layer")
def decoder_layer() -> None:
    same_with_drop_ins(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), X, X.flip(1))


def same_with_drop_ins(stock: Any, *inputs: Any) -> None:
    """Check that a stock layer gives the same numbers with our attention in it."""
    ours = copy.deepcopy(stock)
    for name, part in stock.named_children():
        if isinstance(part, nn.MultiheadAttention):
            drop_in = compat.MultiheadAttention(part.embed_dim, part.num_heads, batch_first=True)
            drop_in.load_state_dict(part.state_dict())
            setattr(ours, name, drop_in)
    assert_close(ours(*inputs), stock(*inputs), rtol=1e-4, atol=1e-5)


@USES.add("a subclass that changes the call")
def subclassed() -> None:
    class Doubled(torch_attn.GroupedQueryAttention):
        def forward(self, x: Any, **options: Any) -> Any:
            return 2 * super().forward(x, **options)

    torch.manual_seed(0)
    assert_close(Doubled(CONFIG).eval()(X), 2 * layer()(X))
