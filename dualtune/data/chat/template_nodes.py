"""Rewrite a parsed chat template so that each step that can be expensive reports to the meter."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.visitor import NodeTransformer

# Names that are not valid in a template.
TICK, CHECK_TIME, CHARGE, CONCAT, COLLECT = "<tick>", "<check time>", "<charge>", "<concat>", "<collect>"
_REFUSED = (nodes.EvalContextModifier, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class Instrument(NodeTransformer):
    """Rewrites a parsed template so that it reports to the meter. Its output does not change."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, _REFUSED):
            name = "autoescape" if isinstance(node, nodes.EvalContextModifier) else type(node).__name__.lower()
            raise TemplateSyntaxError(f"{name} is not available to chat templates", node.lineno)
        return super().generic_visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        tick = _filter(nodes.Const(None), TICK, node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # template data bypasses `finalize`, constants do not

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.Tuple(node.nodes, "load"), CONCAT, node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Check the clock at each comparison of a chain, except one with a constant: the source bounds its cost."""
        self.generic_visit(node)
        left = node.expr
        for operand in node.ops:
            right = operand.expr
            has_constant = isinstance(left, nodes.Const) or isinstance(right, nodes.Const)
            if operand.op in ("in", "notin") or not has_constant:
                operand.expr = _filter(right, CHECK_TIME, node.lineno)
            left = right
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        self._visit_star(node)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        self.generic_visit(node)
        self._visit_star(node)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        self._visit_star(node)
        return node

    def _visit_star(self, node: nodes.Call | nodes.Filter | nodes.Test) -> None:
        if node.dyn_args is not None:
            node.dyn_args = _filter(node.dyn_args, COLLECT, node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, CHARGE, node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, CHARGE, node.lineno) if node.items else node

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, CHARGE, node.lineno) if node.items and node.ctx == "load" else node


def _filter(node: nodes.Expr, name: str, lineno: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=lineno)
