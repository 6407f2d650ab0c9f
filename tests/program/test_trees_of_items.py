"""`tdm_child` and `tdm_sampler`: against the tree itself, and the probabilities of what is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import OperatorError, ProgramError
from penstock.program.layers.trees import tdm_child, tdm_sampler

# nodes 1 | 2 3 | 4 5 6 7 8: below 2 the leaves 4, 5, 6, below 3 the leaf 7 and 8, which is a level further up than 0..3
CHILDREN = {1: (2, 3, 0), 2: (4, 5, 6), 3: (7, 8, 0)}
LEAVES = {4: 11, 5: 12, 6: 13, 7: 14, 8: 15}
PATHS = np.array([[1, 2, 4], [1, 2, 5], [1, 2, 6], [1, 3, 7], [3, 8, 0]])
LEVELS = [[1], [2, 3], [4, 5, 6, 7, 8]]
NEGATIVES = [0, 1, 3]
Attr = fluid.ParamAttr


def info() -> np.ndarray:
    rows = np.zeros((9, 6), "int32")
    for node, item in LEAVES.items():
        rows[node, 0] = item
    for node, children in CHILDREN.items():
        rows[node, 3:] = children
    return rows


def started(main: fluid.Program, startup: fluid.Program, **state: Any) -> tuple[fluid.Executor, fluid.Scope]:
    exe, scope = fluid.Executor(fluid.CPUPlace()), fluid.Scope()
    exe.run(startup, scope=scope)
    for name, value in state.items():
        scope.find_var(name).get_tensor().set(value.astype("int32"), fluid.CPUPlace())
    return exe, scope


def sampler(seed: int = 0, **options: Any) -> Any:
    main, startup = fluid.Program(), fluid.Program()
    main.random_seed = 3
    with fluid.program_guard(main, startup):
        x = fluid.data("x", [None, 1], "int64")
        made = tdm_sampler(
            x, NEGATIVES, [1, 2, 5], 5, Attr(name="travel"), Attr(name="layer"), seed=seed, dtype="int64", **options
        )
    flat = np.array([node for level in LEVELS for node in level]).reshape(-1, 1)
    exe, scope = started(main, startup, travel=PATHS, layer=flat)
    fetches = [one for part in made for one in part] if options.get("output_list", True) else list(made)
    return lambda items: exe.run(main, {"x": np.array(items).reshape(-1, 1)}, fetches, scope=scope)


def test_children_and_leaves_are_those_of_the_tree() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        x = fluid.data("x", [None, 2], "int64")
        children, is_leaf = tdm_child(x, 9, 3, Attr(name="info"), dtype="int32")
    assert children.shape == is_leaf.shape == (-1, 2, 3)
    exe, scope = started(main, startup, info=info())
    nodes = np.array([[1, 2], [3, 4], [0, 2]])
    found, leaves = exe.run(main, {"x": nodes}, [children, is_leaf], scope=scope)
    wanted = [[CHILDREN.get(node, (0, 0, 0)) for node in row] for row in nodes.tolist()]
    assert found.tolist() == [[list(one) for one in row] for row in wanted]
    assert leaves.tolist() == [[[int(one in LEAVES) for one in own] for own in row] for row in wanted]


def test_an_item_has_its_path_with_others_beside() -> None:
    found = sampler()([0, 3, 4])
    nodes, labels, masks = found[:3], found[3:6], found[6:]
    assert [one.shape for one in nodes] == [(3, num + 1, 1) for num in NEGATIVES]
    for row, item in enumerate((0, 3, 4)):
        for level, own in enumerate(PATHS[item].tolist()):
            got, width = nodes[level][row, :, 0].tolist(), NEGATIVES[level] + 1
            if own == 0:
                assert got == labels[level][row, :, 0].tolist() == masks[level][row, :, 0].tolist() == [0] * width
                continue
            assert got[0] == own and len(set(got)) == width
            assert set(got[1:]) <= set(LEVELS[level])
            assert labels[level][row, :, 0].tolist() == [1] + [0] * (width - 1)
            assert masks[level][row, :, 0].tolist() == [1] * width


def test_results_without_lists_and_own_nodes() -> None:
    nodes, labels, mask = sampler(output_list=False, output_positive=False)([0, 4])
    assert nodes.shape == labels.shape == mask.shape == (2, sum(NEGATIVES))
    assert nodes[0, 0] == 3 and 4 not in nodes[0, 1:] and not labels.any()
    assert mask.tolist() == [[1] * 4, [1] + [0] * 3]


def test_each_other_node_is_as_likely_and_drawn_anew() -> None:
    run = sampler()
    first, second = (run([1] * 4000)[2][:, 1:, 0] for _ in range(2))
    assert (first != second).any()
    share = np.array([(first == node).any(1).mean() for node in (4, 6, 7, 8)])
    assert np.abs(share - 3 / 4).max() < 5 * np.sqrt(3 / 16 / 4000)  # three of four, five standard deviations
    columns = np.array([[(first[:, at] == node).mean() for node in (4, 6, 7, 8)] for at in range(3)])
    assert (columns.sum(1) == 1).all() and not (first == 5).any()
    same = sampler(seed=7)
    np.testing.assert_array_equal(same([1] * 20)[2], same([1] * 20)[2])


def test_what_a_tree_has_not_is_refused() -> None:
    with pytest.raises(OperatorError, match="item 5 at row 1; expected 0 to 4"):
        sampler()([0, 5])
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.data("x", [None, 1], "int64")
        with pytest.raises(ProgramError, match="level 1 has 2 nodes and 2 to draw"):
            tdm_sampler(x, [0, 2], [1, 2], 2)
        with pytest.raises(ProgramError, match="has 1 levels, layer_node_num_list 2"):
            tdm_sampler(x, [0], [1, 2], 2)
        with pytest.raises(ProgramError, match="leaf_node_num is 9; expected 1 to 3"):
            tdm_sampler(x, [0, 1], [1, 2], 9)


def test_a_tree_that_the_script_declared_is_the_one_that_is_read() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        fluid.layers.create_parameter([2, 2], "float32", default_initializer=fluid.initializer.Normal())
        tdm_sampler(fluid.data("item", [None, 1], "int64"), NEGATIVES, [1, 2, 5], 5)  # parameters of integers
        for program in (startup, main):
            block = program.global_block()
            given = {"initializer": fluid.initializer.ConstantInitializer(0)} if program is startup else {}
            block.create_var(name="info", dtype="int32", shape=[9, 6], persistable=True, **given)
        x = fluid.data("x", [None, 1], "int64")
        children, _ = tdm_child(x, 9, 3, Attr(name="info"), dtype="int32")
        items = fluid.layers.gather_nd(main.global_block().var("info"), children.reshape([-1, 1]))
    exe, scope = started(main, startup, info=info())
    found = exe.run(main, {"x": np.array([[2]]), "item": np.array([[0]])}, [items], scope=scope)[0]
    assert found[:, 0].tolist() == [11, 12, 13]
