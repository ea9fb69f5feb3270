"""What users of torch compile, export, differentiate and distribute; each function fails if a number is wrong."""

from __future__ import annotations

import concurrent.futures
import functools
import tempfile
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torch_attn
from attn_bridge import specs
from torch_attn.parallel import parallelize

from .table import refusal
from .torch_layers import CONFIG, IDS, USES, X, layer, model, process_group, same_slopes, slopes


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
    same_in_onnx(layer(), X, X[:1, :3])


@USES.add("recurrent layers exported to ONNX", needs=("onnxscript",))
def recurrent_onnx() -> None:
    same_in_onnx(recurrent("Mamba2"), X, X[:1, :3])
    same_in_onnx(recurrent("GatedDeltaNet"), X, X[:1])  # for one length: ONNX solves no triangular systems


def recurrent(name: str) -> nn.Module:
    """Return a recurrent layer of the width of `X`."""
    config = specs.find_variant(name).examples[0].config
    torch.manual_seed(0)
    return getattr(torch_attn, name)(config.replace(d_in=8, d_out=8)).eval()


def same_in_onnx(module: nn.Module, x: torch.Tensor, other: torch.Tensor) -> None:
    """Check a layer exported to ONNX on an input and on another; axes of which they differ in size are left open."""
    from onnx.reference import ReferenceEvaluator

    sizes = {axis: torch.export.Dim(f"axis{axis}", max=512) for axis in range(2) if x.shape[axis] != other.shape[axis]}
    program = torch.onnx.export(module, (x,), dynamo=True, dynamic_shapes=(sizes,), verbose=False)
    runner = ReferenceEvaluator(program.model_proto)
    for array in (x, other):
        (found,) = runner.run(None, {runner.input_names[0]: array.numpy()})
        assert_close(torch.from_numpy(found), module(array), rtol=1e-4, atol=1e-5)


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

    adapted = peft.get_peft_model(layer(), peft.LoraConfig(target_modules=["W_query"], init_lora_weights=False))
    found = adapted(X)
    assert (found - layer()(X)).abs().max() > 1e-3
    found.sum().backward()
    assert {name.split(".")[-3] for name, weight in adapted.named_parameters() if weight.grad is not None} == {
        "lora_A",
        "lora_B",
    }
    assert_close(adapted.merge_and_unload()(X), found, rtol=1e-4, atol=1e-5)


@USES.add("a Trainer of transformers", needs=("accelerate",))
def trainer() -> None:
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(4, 1)]
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "output_dir": folder,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "save_steps": 4,
            "seed": 0,
        }
        arguments = transformers.TrainingArguments(
            **options, max_steps=8, per_device_train_batch_size=2, learning_rate=1e-2, label_names=["labels"]
        )
        trainers = [
            transformers.Trainer(model(), arguments, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
            for _ in range(2)
        ]
        before = trainers[0].evaluate()["eval_loss"]
        trainers[0].train()
        assert trainers[0].evaluate()["eval_loss"] < before
        trainers[1].train(resume_from_checkpoint=f"{folder}/checkpoint-4")
        for found, wanted in zip(*(trainer.model.parameters() for trainer in trainers), strict=True):
            assert_close(found, wanted, rtol=1e-4, atol=1e-5)


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


@USES.add("compiled ahead of time (AOTInductor)")
def compiled_ahead() -> None:
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        program = torch.export.export(layer(), (X,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/layer.pt2")
        assert_close(torch._inductor.aoti_load_package(path)(X), layer()(X), rtol=1e-4, atol=1e-5)


@USES.add("compiled for any length")
def compiled_once() -> None:
    module = torch.compile(layer(), backend="aot_eager", dynamic=True, fullgraph=True)
    for length in (3, 5):
        assert_close(module(X[:, :length]), layer()(X[:, :length]), rtol=1e-4, atol=1e-5)


@USES.add("compiled steps with a cache (fullgraph)")
def compiled_steps() -> None:
    module, parts = layer(), []
    step = torch.compile(lambda x, cache: module(x, cache=cache), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        cache = module.init_cache(2, 5)
        for at in range(5):
            part, cache = step(X[:, at : at + 1], cache)
            parts.append(part)
    assert_close(torch.cat(parts, 1), layer()(X), rtol=1e-4, atol=1e-5)


@USES.add("a CUDA graph")
def cuda_graph() -> None:
    module, x = layer().cuda(), X.cuda()
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        module(x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        found = module(x)
    x.copy_(2 * X)
    graph.replay()
    assert_close(found.cpu(), layer()(2 * X), rtol=1e-4, atol=1e-4)


if not torch.cuda.is_available():
    USES["a CUDA graph"] = "not tried: no GPU"


@USES.add("an exported program in a file")
def exported_file() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.export.save(torch.export.export(layer(), (X,)), f"{folder}/layer.pt2")
        assert_close(torch.export.load(f"{folder}/layer.pt2").module()(X), layer()(X))


@USES.add("a whole model exported for any batch and length")
def exported_model() -> None:
    dims = ({0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("length", min=2, max=32)},)
    program = torch.export.export(model(), (IDS,), dynamic_shapes=dims).module()
    assert_close(program(IDS[:1, :3]), model()(IDS[:1, :3]), rtol=1e-4, atol=1e-5)


@USES.add("scripted (torch.jit.script)")
def scripted() -> str:
    return refusal(lambda: torch.jit.script(layer()), NotImplementedError)


@USES.add("traced symbolically (torch.fx)")
def traced_by_fx() -> str:
    return refusal(lambda: torch.fx.symbolic_trace(layer()), torch.fx.proxy.TraceError)


@USES.add("some activations recomputed (a policy)")
def recomputed_by_policy() -> None:
    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    same_slopes(
        lambda module: (
            lambda x: checkpoint(module, x.clone().requires_grad_(), use_reentrant=False, context_fn=contexts)
        )
    )


@USES.add("gradients of each sample")
def sample_gradients() -> None:
    module = layer()

    def loss(weights: Any, x: Any) -> Any:
        return (torch.func.functional_call(module, weights, (x,)) ** 2).sum()

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(module.named_parameters()), X)
    for each, wanted in zip(found.values(), slopes(layer()), strict=True):
        assert_close(each.sum(0), wanted, rtol=1e-4, atol=1e-4)


@USES.add("a penalty on gradients")
def penalty() -> None:
    x, module = X.clone().requires_grad_(), layer()
    (slope,) = torch.autograd.grad((module(x) ** 2).sum(), x, create_graph=True)
    (slope**2).sum().backward()
    assert torch.isfinite(module.W_query.weight.grad).all()


@USES.add("gradients checked against differences")
def gradients_checked() -> None:
    assert torch.autograd.gradcheck(layer().double(), (X[:1].double().requires_grad_(),))


@USES.add("heads on several devices (parallelize, a mesh)")
def heads_shared() -> None:
    with process_group():
        module = layer()
        parallelize(module, init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",)), tensor="tensor")
        assert_close(module(X).full_tensor(), layer()(X), rtol=1e-4, atol=1e-5)


@USES.add("called by several threads")
def threads() -> None:
    module = layer()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: module(X), range(8)):
            assert_close(found, layer()(X))
