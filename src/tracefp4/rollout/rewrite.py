"""Residual sums of a compiled layer become part of the launches beside them.

A decode step is bound by launches as much as by bytes, and two sums of a layer stand next to an operator of ours, into
which a compiler cannot fuse them::

    h = x + attention(...)                  h, n = enter(x, attention(...))     one launch, experts' rounding included
    n = norm(h)                     ->
    y = h + experts(n, ...)                 y = experts(n, ..., added=h)

This is a change of the graph that Dynamo hands to its backend, found by what the nodes are and not by the names of a
family. What looks otherwise stays as it is. Roundings are those of the separate steps.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from tracefp4.models.norms import plain_norm

Backend = Callable[[GraphModule, list[Any]], Callable[..., Any]]

_SHAPES = ("view", "reshape")
"""Methods that hand on the values of a contiguous tensor as they lie."""


@lru_cache(maxsize=8)
def rewriting(backend: str | Backend) -> Backend:
    """A backend of ``torch.compile`` that rewrites a graph before ``backend`` compiles it.

    The same object for the same ``backend``: layers that share a graph must have the same one.
    """
    from torch._dynamo.backends.registry import lookup_backend

    def compile_rewritten(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        rewrite(module)
        return lookup_backend(backend)(module, inputs)  # type: ignore[no-any-return, arg-type]

    return compile_rewritten


def rewrite(module: GraphModule) -> None:
    """Apply both changes of the picture wherever they fit."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is torch.ops.tracefp4.experts.default:
            _enter(graph, node)
            _leave(graph, node)
    graph.lint()
    module.recompile()


def _enter(graph: Graph, experts: Node) -> None:
    """Let the experts' rounding take their norm and the sum before it."""
    norm = experts.args[0]
    while _reshapes(norm):
        norm = norm.args[0]  # type: ignore[union-attr]
    if not isinstance(norm, Node) or norm.target is not plain_norm:
        return
    total, weight, eps, offset = norm.args
    key = experts.args[3]
    if not isinstance(offset, bool) or not _is_sum(total) or not _is_input(weight) or not _is_input(key):
        return
    if _is_number(eps):
        total.prepend(eps)  # type: ignore[union-attr, arg-type]
    elif not _is_input(eps):
        return
    with graph.inserting_before(total):  # type: ignore[arg-type]
        both = graph.call_function(torch.ops.tracefp4.enter.default, (*total.args, weight, eps, offset, key))  # type: ignore[union-attr]
        hidden, normed = (graph.call_function(operator.getitem, (both, index)) for index in (0, 1))
    for old, new in ((norm, normed), (total, hidden)):
        new.meta = dict(old.meta)  # type: ignore[union-attr]
        old.replace_all_uses_with(new)  # type: ignore[union-attr]
        graph.erase_node(old)  # type: ignore[arg-type]


def _leave(graph: Graph, experts: Node) -> None:
    """Let the experts' sum take the one after it."""
    out = experts
    while len(out.users) == 1 and _reshapes(user := next(iter(out.users))):
        out = user
    if len(out.users) != 1 or not _is_sum(total := next(iter(out.users))):
        return
    first, second = total.args
    other = second if first is out else first
    if other is out:
        return
    with graph.inserting_before(total):
        new = graph.call_function(torch.ops.tracefp4.experts.default, (*experts.args[:4], other))
    new.meta = dict(total.meta)
    total.replace_all_uses_with(new)
    while total is not None:  # the sum, the change of shape, the experts: nobody uses them now
        before = next((a for a in total.args if isinstance(a, Node) and not a.users.keys() - {total}), None)
        last = total is experts
        graph.erase_node(total)
        total = None if last else before  # type: ignore[assignment]


def _reshapes(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_method" and node.target in _SHAPES


def _is_sum(node: Any) -> bool:
    """Whether a node adds two tensors of one shape and dtype."""
    if not isinstance(node, Node) or node.target not in (operator.add, operator.iadd) or len(node.args) != 2:
        return False
    parts = [a.meta.get("example_value") if isinstance(a, Node) else None for a in node.args]
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return False
    a, b = parts
    return a.shape == b.shape and a.dtype == b.dtype  # type: ignore[union-attr]


def _is_number(node: Any) -> bool:
    """Whether it reads a number that is an input; Dynamo hands floats over in tensors."""
    return isinstance(node, Node) and node.op == "call_method" and node.target == "item" and _is_input(node.args[0])


def _is_input(node: Any) -> bool:
    """Whether it exists before anything is computed: an input, a weight, or a number."""
    return not isinstance(node, Node) or node.op in ("placeholder", "get_attr")
