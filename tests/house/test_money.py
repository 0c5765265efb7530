"""Tests that only core/money.py computes with money. A name with `_micros` in it is money."""

from __future__ import annotations

import ast

from house_sources import sources


def is_money(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return "_micros" in name or (isinstance(node, ast.BinOp) and (is_money(node.left) or is_money(node.right)))


def test_only_money_py_does_sums_of_money() -> None:
    sums = []
    elsewhere = [source for source in sources("gpurun") if source.path != "gpurun/core/money.py"]
    for source, node in ((module, node) for module in elsewhere for node in ast.walk(module.tree)):
        adds = isinstance(node, ast.BinOp) and (is_money(node.left) or is_money(node.right))
        grows = isinstance(node, ast.AugAssign) and (is_money(node.target) or is_money(node.value))
        totals = isinstance(node, ast.Call) and ast.unparse(node.func) in ("sum", "float", "round", "divmod")
        within = totals and any(is_money(part) for argument in node.args for part in ast.walk(argument))
        sums += [f"{source.at(node)} {ast.unparse(node)}"] if adds or grows or within else []
    assert not sums, "\n".join(sums)
