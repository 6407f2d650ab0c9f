"""`tdm_child`, `tdm_sampler`: trees of items, as state of a Program. Source: fluid.contrib.layers (Fluid 1.8).

A tree is three arrays of integers, which the script sets in the scope after the startup program: the path from the root
to each item, the nodes of each level, and for each node its item, its level, its parent and its children.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.native.trees import num_numbers
from penstock.program.initializers import Constant
from penstock.program.layers.expected import expect_ids
from penstock.program.layers.random import drawn
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line
from penstock.program.record.variable import dtype_named, record_call
from penstock.program.training.parameters import ParamAttr, create_parameter

_CHILDREN = 3
"""The column of a node's first child; before it are its item, 0 if it is no leaf, its level and its parent."""


def tdm_child(x: Any, node_nums: int, child_nums: int, param_attr: Any = None, dtype: Any = "int32") -> Any:
    """Return the children of nodes, and for each whether it is a leaf: 1, else 0. Node 0 stands for none.

    Shapes: x int32 or int64 [n, …]; both results [n, …, child_nums] of `dtype`. Parameter: w_0 [node_nums,
    3 + child_nums] of `dtype`: item (0 for what is no leaf), level, parent and children of each node.
    """
    expect_ids("tdm_child", x)
    kind, prefix = dtype_named(dtype), default_main_program().unique("tdm_child")
    with name_scope(prefix):
        nodes = _tree([node_nums, _CHILDREN + child_nums], kind, param_attr, prefix, "w_0")
        ids = x.reshape([-1]).to(torch.int64)
        own: Any = torch.index_select(nodes, 0, ids)
        has_any = ((ids != 0) & (own[:, _CHILDREN] != 0)).unsqueeze(1)
        children: Any = torch.where(has_any, own[:, _CHILDREN:], 0)
        items: Any = torch.index_select(nodes, 0, children.reshape([-1]).to(torch.int64))[:, 0]
        is_leaf = torch.where(has_any, items.reshape([-1, child_nums]) != 0, False).to(kind)
        sizes = [*x.shape, child_nums]
        return children.reshape(sizes), is_leaf.reshape(sizes)


def tdm_sampler(
    x: Any,
    neg_samples_num_list: Sequence[int],
    layer_node_num_list: Sequence[int],
    leaf_node_num: int,
    tree_travel_attr: Any = None,
    tree_layer_attr: Any = None,
    output_positive: bool = True,
    output_list: bool = True,
    seed: int = 0,
    tree_dtype: Any = "int32",
    dtype: Any = "int32",
) -> tuple[Any, Any, Any]:
    """Return for items the node of each level that they are below, and others of that level: (nodes, labels, mask).

    Of level l there are `neg_samples_num_list[l]` others, drawn anew in each run, different ones and each as likely.
    Labels are 1 for the item's own node (with `output_positive`). Levels that an item's path does not reach are padded
    by 0, where the mask is 0, else 1. What is drawn follows from `Program.random_seed`, or from a `seed`.
    Shapes: x int [n, 1]; each result a list of [n, k, 1] for each level, or [n, sum of k] without `output_list`, of
    `dtype`. Parameters of `tree_dtype`: travel [leaf_node_num, levels], layer [sum of layer_node_num_list, 1].
    """
    expect_ids("tdm_sampler", x)
    negatives, sizes = [int(n) for n in neg_samples_num_list], [int(n) for n in layer_node_num_list]
    _expect_levels(negatives, sizes, leaf_node_num)
    kind, prefix = dtype_named(tree_dtype), default_main_program().unique("tdm_sampler")
    with name_scope(prefix):
        paths = _tree([leaf_node_num, len(sizes)], kind, tree_travel_attr, prefix, "travel")
        levels = _tree([sum(sizes), 1], kind, tree_layer_attr, prefix, "layer")
        items = x.reshape([-1]).to(torch.int64)
        numbers = drawn("tdm_sampler", "uniform", [items.shape[0], num_numbers(negatives)], (0.0, 1.0), seed, "float64")
        operands = (items, paths, levels.reshape([-1]), numbers, negatives, sizes, bool(output_positive))
        made = record_call(torch.ops.penstock.sample_tree, operands, {})
        results = [one.to(dtype_named(dtype)) for one in made]
        if not output_list:
            return results[0], results[1], results[2]
        columns = [num + bool(output_positive) for num in negatives]
        parts = [[part.unsqueeze(2) for part in torch.split(one, columns, 1)] for one in results]
        return parts[0], parts[1], parts[2]


def _tree(shape: Sequence[int], dtype: torch.dtype, attr: Any, prefix: str, suffix: str) -> Any:
    """The state that holds a part of a tree; what the script has declared under its name, if it has."""
    attr = ParamAttr.of(attr)
    name = (attr and attr.name) or ""
    known = default_main_program().variables.get(name)
    text = str(dtype).removeprefix("torch.")
    if known is not None and known.persistable and tuple(known.shape) == tuple(shape) and known.dtype == text:
        return default_main_program().handle(name)
    plain = ParamAttr() if attr is None else copy.copy(attr)
    plain.trainable = False
    return create_parameter(shape, text, plain, Constant(0), prefix=prefix, suffix=suffix)


def _expect_levels(negatives: Sequence[int], sizes: Sequence[int], num_leaves: int) -> None:
    if len(negatives) != len(sizes) or not sizes:
        raise ProgramError(
            f"{user_line()}: tdm_sampler: neg_samples_num_list has {len(negatives)} levels, layer_node_num_list "
            f"{len(sizes)}; expected as many, and one at least"
        )
    for level, (num, size) in enumerate(zip(negatives, sizes, strict=True)):
        if not 0 <= num < size:
            raise ProgramError(
                f"{user_line()}: tdm_sampler: level {level} has {size} nodes and {num} to draw beside an item's own; "
                f"expected 0 to {size - 1}"
            )
    if not 0 < num_leaves <= sum(sizes):
        raise ProgramError(
            f"{user_line()}: tdm_sampler: leaf_node_num is {num_leaves}; expected 1 to {sum(sizes)}, all nodes"
        )
