"""Operators appended by Fluid's type have its slots, attributes and defaults, and compute what layers do."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tools import fluid_operators

import penstock as fluid
from penstock.errors import ProgramError
from penstock.io.fluid.schema import DTYPES
from penstock.program.framework.kinds import detections, elements, losses, products, sequences, shapes, updates
from penstock.program.framework.kinds.call import REQUIRED, Call
from penstock.program.framework.kinds.table import KINDS

PROTOS: dict[str, tuple[list[str], list[str], dict[str, Any]]] = json.loads(
    Path(__file__).with_name("fluid_protos.json").read_text(encoding="utf-8")
)
# Attributes of 1.8 that 2.6.2 has moved or dropped.
OLDER = {
    "relu6": {"threshold"}, "swish": {"beta"}, "dropout": {"seed", "fix_seed"}, "randperm": {"seed"},
    "assign_value": {"values"}, "lookup_table_v2": {"is_sparse", "is_distributed"}, "rnn": {"seed"},
}  # fmt: skip
# Defaults that differ: 2.6.2 has others than 1.8, or none that could be run.
OTHERWISE = {("group_norm", "groups"), ("unique", "dtype"), ("lars_momentum", "lars_weight_decay")}
OLD_TYPES = {
    "isfinite", "cos_sim", "squeeze", "unsqueeze", "flatten", "expand_as", "pad_constant_like", "diag", "one_hot",
    "gaussian_random_batch_size_like", "lstm_unit", "space_to_depth", "smooth_l1_loss",
    "lstmp", "margin_rank_loss", "mean_iou",
}  # fmt: skip
X = np.linspace(-1.0, 1.0, 12, dtype="float32").reshape(4, 3)


@pytest.fixture(autouse=True)
def programs() -> Iterator[None]:
    with fluid.program_guard(fluid.Program(), fluid.Program()), fluid.scope_guard(fluid.Scope()):
        yield


def plain(slots: str) -> set[str]:
    return {slot.rstrip("?*-") for slot in slots.split()}


def run(fetches: list[Any], feed: Mapping[str, Any]) -> list[np.ndarray]:
    exe = fluid.Executor()
    exe.run(fluid.default_startup_program())
    found: list[np.ndarray] = exe.run(fluid.default_main_program(), feed=feed, fetch_list=fetches)
    return found


def appended(type_: str, inputs: Mapping[str, Any], attrs: Mapping[str, Any], out: str = "Out") -> Any:
    block = fluid.default_main_program().global_block()
    made = block.create_var(name="made", dtype="float32")
    block.append_op(type=type_, inputs=inputs, outputs={out: [made]}, attrs=attrs)
    return made


def test_the_page_lists_the_types_of_the_table() -> None:
    written = fluid_operators.PAGE.read_text(encoding="utf-8")
    assert written == fluid_operators.page(), "write it with: python -m tools.fluid_operators --write"


def test_only_types_that_paddle_2_dropped_have_no_proto() -> None:
    assert set(KINDS) - set(PROTOS) == OLD_TYPES


@pytest.mark.parametrize("type_", sorted(PROTOS))
def test_slots_and_defaults_are_those_of_paddle(type_: str) -> None:
    kind, (inputs, outputs, attrs) = KINDS[type_], PROTOS[type_]
    fused = {"Bias"} if "conv" in type_ and "sequence" not in type_ else set()
    assert plain(kind.inputs) <= plain(" ".join(inputs)) | fused
    assert {slot for slot in inputs if slot[-1] not in "?*"} <= plain(kind.inputs)
    assert plain(kind.outputs) <= plain(" ".join(outputs))
    assert {slot for slot in outputs if slot[-1] not in "?*"} <= plain(kind.outputs)
    assert set(kind.attrs) - set(attrs) <= OLDER.get(type_, set())
    for name in (set(kind.attrs) & set(attrs)) - {name for other, name in OTHERWISE if other == type_}:
        default = attrs[name]
        if name.endswith("dtype") and isinstance(default, int):
            default = DTYPES.get(default, default)
        wanted = (
            REQUIRED if default is None else pytest.approx(default, rel=5e-6) if isinstance(default, float) else default
        )
        assert kind.attrs[name] == wanted, name
    assert not list(kind.asks({}, {name: value for name, value in attrs.items() if value is not None}))


CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "a default of Fluid reduces the first dimension": ("reduce_sum", {}, X.sum(0)),
    "all dimensions are reduced": ("reduce_mean", {"reduce_all": True}, X.mean()),
    "an alpha is Fluid's": ("leaky_relu", {}, np.where(X > 0, X, np.float32(0.02) * X)),
    "an attribute has Fluid's name": ("softshrink", {"lambda": 0.25}, F.softshrink(torch.from_numpy(X), 0.25).numpy()),
    "a dtype is torch's": ("cast", {"in_dtype": torch.float32, "out_dtype": torch.int64}, X.astype("int64")),
    "a dtype is a name": ("arg_max", {"axis": 1, "dtype": "int32"}, X.argmax(1)),
    "what is laid out as it is gets a new name": ("flatten", {"axis": 1}, X),
    "sums run backwards": ("cumsum", {"axis": 0, "reverse": True}, X[::-1].cumsum(0)[::-1]),
    "a dropout at rest scales": ("dropout", {"dropout_prob": 0.25, "is_test": True}, X * np.float32(0.75)),
}


@pytest.mark.parametrize("case", CASES)
def test_an_operator_of_one_input_is_appended(case: str) -> None:
    type_, attrs, expected = CASES[case]
    x = fluid.layers.data("x", [3])
    (found, same) = run([appended(type_, {"X": [x]}, attrs), x], {"x": X})
    np.testing.assert_allclose(found.reshape(np.shape(expected)), expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(same, X)


def test_a_similar_type_is_named_for_one_that_is_not_there() -> None:
    block = fluid.default_main_program().global_block()
    out = block.create_var(name="out", dtype="float32")
    for type_, alike in (("warp", "warp"), ("elementwise_plus", "elementwise_p"), ("softmax_cross_entropy", "softmax")):
        with pytest.raises(ProgramError, match=rf"append_op\(type='{type_}'\): there is no operator of this") as caught:
            block.append_op(type=type_, inputs={}, outputs={"Out": out})
        assert ("similar ones: " in str(caught.value)) == (type_ != "warp")
        assert type_ == "warp" or alike in str(caught.value)
        assert "docs/fluid-operators.md" in str(caught.value)


@pytest.mark.parametrize(
    ("type_", "inputs", "outputs", "attrs", "said"),
    [
        ("relu", ["X"], ["Output"], {}, "output 'Output'"),
        ("relu", ["X", "Y"], ["Out"], {}, "input 'Y'"),
        ("matmul", ["X", "Y"], ["Out"], {"transpose_x": True}, "attribute 'transpose_x' True"),
        ("clip", ["X"], ["Out"], {"min": 0.0}, "no attribute 'max', which has no default"),
        ("sgd", ["Param", "Grad", "LearningRate"], ["ParamOut"], {"multi_precision": True}, "'multi_precision' True"),
    ],
)
def test_what_a_type_does_not_have_is_refused(
    type_: str, inputs: list[str], outputs: list[str], attrs: dict[str, Any], said: str
) -> None:
    x, block = fluid.layers.data("x", [3]), fluid.default_main_program().global_block()
    made = {slot: block.create_var(dtype="float32") for slot in outputs}
    with pytest.raises(ProgramError, match=f"operator '{type_}' has .*{said}"):
        block.append_op(type=type_, inputs=dict.fromkeys(inputs, x), outputs=made, attrs=attrs)


class Anything:
    """A variable, or a module: its attributes and results are itself, and it has no elements."""

    shape = (2,) * 5

    def __getattr__(self, name: str) -> Anything:
        return self

    def __call__(self, *given: object, **named: object) -> Anything:
        return self

    def __iter__(self) -> Iterator[Anything]:
        return iter(())

    def __exit__(self, *error: object) -> None:
        """Let errors through."""

    __enter__ = __getitem__ = __add__ = __sub__ = __mul__ = __call__


class Reading(Call):
    """A call whose variables are anything; `read`: the slots that it is asked for. `bare`: without optional inputs."""

    def __init__(self, type_: str, read: set[str], *, bare: bool) -> None:
        kind, one = KINDS[type_], Anything()
        unset = {name: one if value is REQUIRED else value for name, value in kind.attrs.items()}
        inputs = {slot.rstrip("?*"): [one] for slot in kind.inputs.split() if not (bare and slot.endswith("?"))}
        super().__init__(type_, inputs, {**unset, **BRANCHES.get(type_, {})}, {s: [one] for s in kind.output_slots})
        object.__setattr__(self, "read", read)

    def optional(self, slot: str) -> Any:
        self.read.add(slot)  # type: ignore[attr-defined]  # set above, of a frozen class
        return super().optional(slot)

    def many(self, slot: str) -> list[Any]:
        self.read.add(slot)  # type: ignore[attr-defined]
        return super().many(slot)


BRANCHES = {"auc": {"slide_steps": 0}}  # what has to be given to get past a refusal
UNREAD = {"accuracy": {"Out"}}  # Fluid does not read it either


def test_every_listed_input_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (detections, elements, losses, products, sequences, shapes, updates):
        for name in {"layers", "torch", "F"} & set(vars(module)):
            monkeypatch.setattr(module, name, Anything())
    unread = {}
    for type_, kind in KINDS.items():
        read: set[str] = set()
        for bare in (False, True):
            with contextlib.suppress(Exception):  # anything is no variable; slots not reached are unread
                kind.make(Reading(type_, read, bare=bare))
        if missing := set(kind.input_slots) - read:
            unread[type_] = missing
    assert unread == UNREAD


@pytest.mark.parametrize(("type_", "slot"), [("dropout", "Seed"), ("batch_norm", "MomentumTensor")])
def test_an_input_of_training_is_refused_unless_at_rest(type_: str, slot: str) -> None:
    x, block = fluid.layers.data("x", [3]), fluid.default_main_program().global_block()
    state = {
        name: fluid.layers.create_global_var([3], 1.0, "float32", persistable=True, name=name)
        for name in ("Mean", "Variance")
        if type_ == "batch_norm"
    }
    inputs, out = {"X": x, **state, slot: fluid.layers.fill_constant([1], "float32", 0.5)}, KINDS[type_].made[0]
    made = block.create_var(name="made", dtype="float32")
    with pytest.raises(ProgramError, match=f"operator '{type_}' has input '{slot}' while training .*; that is not"):
        block.append_op(type=type_, inputs=inputs, outputs={out: made}, attrs={})
    block.append_op(type=type_, inputs=inputs, outputs={out: made}, attrs={"is_test": True})
    (found,) = run([made], {"x": X})
    expected = X * np.float32(0.5) if type_ == "dropout" else (X - 1.0) / np.sqrt(1.0 + 1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


NUMBERS = [
    ("int64", "9007199254740993", 2**53 + 1), ("int64", "-3", -3), ("int32", "4.0", 4), ("float32", "0.1", 0.1),
    ("float64", "16777217", 2.0**24 + 1), ("float32", "inf", np.inf), ("float32", "-inf", -np.inf),
    ("float32", "nan", np.nan), ("bool", "1.0", True), ("float32", "", 7.0),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "text", "expected"), NUMBERS)
def test_a_number_in_words_wins_over_a_value(dtype: str, text: str, expected: Any) -> None:
    block, start = (p.global_block() for p in (fluid.default_main_program(), fluid.default_startup_program()))
    attrs = {"shape": [2], "dtype": dtype, "value": 7.0, "str_value": text}
    x, made = fluid.layers.data("x", [3]), [block.create_var(dtype=dtype) for _ in range(2)]
    block.append_op(type="fill_constant", inputs={}, outputs={"Out": made[0]}, attrs=attrs)
    block.append_op(type="fill_constant_batch_size_like", inputs={"Input": x}, outputs={"Out": made[1]}, attrs=attrs)
    state = block.create_var(name="state", shape=[2], dtype=dtype, persistable=True)
    held = start.create_var(name="state", shape=[2], dtype=dtype, persistable=True)
    start.append_op(type="fill_constant", inputs={}, outputs={"Out": held}, attrs=attrs)
    for found in run([*made, state], {"x": X}):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, np.full(len(found), expected, dtype))


@pytest.mark.parametrize(("dtype", "text"), [("int64", "nan"), ("int64", "-inf"), ("float32", "seven"), ("bool", "")])
def test_a_text_that_is_no_number_is_refused(dtype: str, text: str) -> None:
    block = fluid.default_main_program().global_block()
    made, attrs = block.create_var(dtype=dtype), {"shape": [2], "dtype": dtype, "str_value": text or "yes"}
    with pytest.raises(ProgramError, match=f"operator 'fill_constant' has str_value=.*; expected a number of {dtype}"):
        block.append_op(type="fill_constant", inputs={}, outputs={"Out": made}, attrs=attrs)


@pytest.mark.parametrize(("type_", "slot"), [("split", "Out"), ("unstack", "Y"), ("relu", "Out")])
@pytest.mark.parametrize("given", [2, 5])
def test_results_and_outputs_are_as_many(type_: str, slot: str, given: int) -> None:
    block = fluid.default_main_program().global_block()
    x = fluid.data("x", [4, 3], "float32")
    outs, attrs = [block.create_var(dtype="float32") for _ in range(given)], {"num": 4, "axis": 0}
    number = 1 if type_ == "relu" else 4
    with pytest.raises(
        ProgramError, match=f"operator '{type_}' is given {given} variables for its output '{slot}', and makes {number}"
    ):
        block.append_op(type=type_, inputs={"X": x}, outputs={slot: outs}, attrs={} if type_ == "relu" else attrs)
    block.append_op(type="split", inputs={"X": x}, outputs={"Out": outs[:2]}, attrs={"num": 2})
    np.testing.assert_array_equal(np.concatenate(run(outs[:2], {"x": X})), X)


@pytest.mark.parametrize("value", [np.array([1, 2]), [np.array([1, 2])], (3, 4), torch.ones(2)])
def test_an_unlisted_attribute_may_be_an_array(value: Any) -> None:
    asked = [*KINDS["relu"].asks({}, {"grid": value, "Scale_x": value, "data_format": value})]
    assert [text.split(" ", 2)[1] for text in asked] == ["'grid'", "'Scale_x'", "'data_format'"]
    nothing = {"grid": np.array([]), "sides": np.int64(0), "Scale_x": np.array([1.0]), "parts": ()}
    assert not [*KINDS["relu"].asks({}, nothing)]


def test_parameters_are_inputs_of_any_origin() -> None:
    image, weight = np.arange(50.0, dtype="float32").reshape(1, 2, 5, 5), np.ones((3, 2, 2, 2), "float32")
    x = fluid.layers.data("x", [2, 5, 5])
    made = fluid.layers.scale(fluid.layers.fill_constant([3, 2, 2, 2], "float32", 1.0), 1.0)
    out = appended("conv2d", {"Input": x, "Filter": made}, {"strides": [2, 2]}, "Output")
    (found,) = run([out], {"x": image})
    expected = F.conv2d(torch.from_numpy(image), torch.from_numpy(weight), stride=2)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(ProgramError, match="is asked for with shape"):
        appended("layer_norm", {"X": x, "Scale": made}, {}, "Y")


def test_statistics_of_a_batch_norm_by_hand_move() -> None:
    helper = fluid.LayerHelper("norm", input=fluid.layers.data("x", [3]))
    start, frozen = fluid.initializer.Constant, fluid.ParamAttr(trainable=False)
    scale, shift = (
        helper.create_parameter(fluid.ParamAttr(), [3], "float32", default_initializer=start(v)) for v in (1, 0)
    )
    mean, variance = (helper.create_global_variable(persistable=True, shape=[3], dtype="float32") for _ in range(2))
    for one, value in ((mean, 0.0), (variance, 1.0)):
        helper.set_variable_initializer(one, start(value))
    assert not frozen.trainable
    out = helper.create_variable_for_type_inference("float32")
    inputs = {"X": helper.input(), "Scale": scale, "Bias": shift, "Mean": mean, "Variance": variance}
    outputs = {"Y": out, "MeanOut": mean, "VarianceOut": variance}
    helper.append_op(type="batch_norm", inputs=inputs, outputs=outputs, attrs={"momentum": 0.75, "is_test": False})
    found, moved = run([out, mean.name], {"x": X})
    np.testing.assert_allclose(found, (X - X.mean(0)) / np.sqrt(X.var(0) + 1e-5), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(moved, 0.25 * X.mean(0), rtol=1e-5, atol=1e-7)


def test_accuracy_and_auc_are_appended() -> None:
    scores, label = fluid.layers.data("scores", [2]), fluid.layers.data("label", [1], dtype="int64")
    values, indices = fluid.layers.topk(scores, 1)
    right = appended("accuracy", {"Out": values, "Indices": indices, "Label": label}, {}, "Accuracy")
    block = fluid.default_main_program().global_block()
    counters = [
        fluid.layers.create_global_var([1, 100], 0, "int64", persistable=True, name=name) for name in ("pos", "neg")
    ]
    area = block.create_var(name="area", dtype="float32")
    inputs = {"Predict": scores, "Label": label, "StatPos": counters[0], "StatNeg": counters[1]}
    outputs = {"AUC": area, "StatPosOut": counters[0], "StatNegOut": counters[1]}
    block.append_op(
        type="auc", inputs=inputs, outputs=outputs, attrs={"num_thresholds": 99, "slide_steps": 0, "curve": "ROC"}
    )
    feed = {"scores": np.array([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]], "float32"), "label": np.array([[0], [1], [0]])}
    share, found, counted = run([right, area, "pos"], feed)
    assert (share.item(), found.item()) == (pytest.approx(2 / 3), pytest.approx(1.0))
    assert counted.sum() == 1


STEPS = 3
UPDATES: dict[str, tuple[type, dict[str, Any], dict[str, float], dict[str, Any]]] = {
    "momentum": (fluid.optimizer.Momentum, {"momentum": 0.9, "use_nesterov": True}, {"Velocity": 0.0},
                 {"mu": 0.9, "use_nesterov": True}),
    "lars_momentum": (fluid.optimizer.LarsMomentum, {"momentum": 0.9}, {"Velocity": 0.0}, {"mu": 0.9}),
    "adagrad": (fluid.optimizer.Adagrad, {"epsilon": 1e-3}, {"Moment": 0.0}, {"epsilon": 1e-3}),
    "decayed_adagrad": (fluid.optimizer.DecayedAdagrad, {}, {"Moment": 0.0}, {}),
    "adadelta": (fluid.optimizer.Adadelta, {}, {"AvgSquaredGrad": 0.0, "AvgSquaredUpdate": 0.0}, {}),
    "rmsprop": (fluid.optimizer.RMSProp, {"rho": 0.9, "epsilon": 1e-10, "momentum": 0.5, "centered": True},
                {"MeanSquare": 0.0, "MeanGrad": 0.0, "Moment": 0.0}, {"momentum": 0.5, "centered": True}),
    "ftrl": (fluid.optimizer.Ftrl, {"l1": 0.1, "l2": 0.1}, {"SquaredAccumulator": 0.0, "LinearAccumulator": 0.0},
             {"l1": 0.1, "l2": 0.1}),
    "adam": (fluid.optimizer.Adam, {}, {"Moment1": 0.0, "Moment2": 0.0, "Beta1Pow": 0.9, "Beta2Pow": 0.999}, {}),
    "lamb": (fluid.optimizer.Lamb, {}, {"Moment1": 0.0, "Moment2": 0.0, "Beta1Pow": 0.9, "Beta2Pow": 0.999},
             {"weight_decay": 0.01}),
}  # fmt: skip
_OUT = {"SquaredAccumulator": "SquaredAccumOut", "LinearAccumulator": "LinearAccumOut"}


def network() -> Any:
    w = fluid.layers.create_parameter([3, 2], "float32", name="w", default_initializer=fluid.initializer.Constant(0.5))
    return fluid.layers.mean(fluid.layers.square(fluid.layers.mul(fluid.layers.data("x", [3]), w)))


def trained(minimize: Any) -> np.ndarray:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup), fluid.scope_guard(fluid.Scope()) as _:
        minimize(network())
        exe = fluid.Executor()
        exe.run(startup)
        for step in range(STEPS):
            exe.run(main, feed={"x": X + step}, fetch_list=[])
        return np.array(fluid.global_scope().find_var("w").get_tensor())


@pytest.mark.parametrize("type_", UPDATES)
def test_an_update_by_hand_is_that_of_the_optimizer(type_: str) -> None:
    optimizer, options, states, attrs = UPDATES[type_]

    def by_hand(loss: Any) -> None:
        ((param, gradient),) = fluid.append_backward(loss)
        rate = fluid.layers.create_global_var([1], 0.1, "float32", persistable=True)
        kept = {
            slot: fluid.layers.create_global_var([1] if "Pow" in slot else [3, 2], first, "float32", persistable=True)
            for slot, first in states.items()
        }
        outputs = {"ParamOut": param, **{_OUT.get(slot, f"{slot}Out"): one for slot, one in kept.items()}}
        block = fluid.default_main_program().global_block()
        inputs = {"Param": param, "Grad": gradient, "LearningRate": rate, **kept}
        op = block.append_op(type=type_, inputs=inputs, outputs=outputs, attrs=attrs)
        assert op.all_attrs()["op_role"] == 2

    wanted = trained(lambda loss: optimizer(0.1, **options).minimize(loss))
    # a power 0.999 in float32 has lost 2^-24 / (1 - 0.999) of the difference from 1
    np.testing.assert_allclose(trained(by_hand), wanted, rtol=6e-5 if "Beta2Pow" in states else 2e-6)
    assert not np.allclose(wanted, 0.5)


def test_an_update_into_another_variable_is_refused() -> None:
    ((param, gradient),) = fluid.append_backward(network())
    block = fluid.default_main_program().global_block()
    rate, other = (fluid.layers.create_global_var([1], 0.1, "float32", persistable=True) for _ in range(2))
    with pytest.raises(
        ProgramError, match=r"'sgd' updates Param in place, so its output ParamOut is 'w', too; got 'glo"
    ):
        block.append_op(
            type="sgd", inputs={"Param": param, "Grad": gradient, "LearningRate": rate}, outputs={"ParamOut": other}
        )
