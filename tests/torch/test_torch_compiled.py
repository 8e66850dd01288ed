"""What the compiler is asked: the options that each torch knows, and which sizes are symbolic."""

import functools

import pytest
import torch

from dualtune_torch.kernels import blocks, compiled, cross_entropy
from dualtune_torch.lora import dropped


@pytest.fixture
def programs(monkeypatch):
    """Compile for a GPU, though the tensors are on the CPU. The shapes of the tensors that each program gets."""
    found = []

    def keep(graph, inputs):
        nodes = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        found.append([tuple(x.shape) for x in nodes if isinstance(x, torch.Tensor)])
        return graph

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=keep))
    monkeypatch.setattr(compiled, "_is_on_gpu", lambda tensor: True)
    compiled.compile_function.cache_clear()
    yield found
    compiled.compile_function.cache_clear()
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (blocks.rotated, lambda N: (torch.ones(N, 3, 8), torch.ones(N, 8), torch.ones(N, 8))),
        (blocks.gated, lambda N: (torch.nn.SiLU(), torch.ones(N, 24), torch.ones(N, 24))),
        (dropped, lambda N: (torch.ones(N, 24), torch.ones(N).int(), torch.ones(24).int(), 7, 1.1)),
        (
            cross_entropy.loss_and_gradient_in_place,
            lambda N: (torch.ones(N, 24), torch.ones(N).long(), cross_entropy.Scaling()),
        ),
    ],
)
def test_only_the_number_of_tokens_is_symbolic_on_a_gpu(programs, function, args):
    call = compiled.compile_function(function)
    for tokens in (5, 16, 33):
        torch.testing.assert_close(call(*args(tokens)), function(*args(tokens)))
    (shapes,) = programs  # one for all numbers of tokens
    by_tokens = [shape for shape in shapes if not isinstance(shape[0], int)]
    assert by_tokens and all(type(size) is int for shape in shapes for size in shape[1:])


@pytest.mark.parametrize("known", [{"fullgraph"}, {"fullgraph", "recompile_limit"}])
def test_an_older_torch_gets_the_options_it_has(known, monkeypatch):
    """`recompile_limit` came with torch 2.12 and `isolate_recompiles` with 2.13."""
    got = {}

    def old(model=None, *, fullgraph=False, dynamic=None):
        got.update(fullgraph=fullgraph)
        return model

    def newer(model=None, *, fullgraph=False, dynamic=None, recompile_limit=None):
        got.update(fullgraph=fullgraph, recompile_limit=recompile_limit)
        return model

    monkeypatch.setattr(torch, "compile", newer if "recompile_limit" in known else old)
    compiled.compile_function.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=8):
        assert compiled.compile_function(abs)(-1) == 1
        limit = got.get("recompile_limit", torch._dynamo.config.recompile_limit)
    compiled.compile_function.cache_clear()
    assert got.keys() == known and got["fullgraph"]
    assert limit == compiled.RECOMPILE_LIMIT
