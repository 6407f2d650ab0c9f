"""Recurrent cells, `rnn`, decoders and `dynamic_decode`: values and gradients against loops of torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program.layers import basic_rnn

L = fluid.layers
LENGTHS = [4, 2, 0]


class Built:
    """A program of float64, its parameters as leaves of torch, and what a run of it gives."""

    def __init__(self, build: Callable[[], list[Any]]) -> None:
        self.main, startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        self.main.random_seed = startup.random_seed = 5
        with fluid.program_guard(self.main, startup):
            self.fetches = build()
        self.exe = fluid.Executor(fluid.CPUPlace())
        self.exe.run(startup, scope=self.scope)
        names = [v.name for v in self.main.parameters()]
        self.parameters = {n: torch.tensor(np.array(self.scope.find_var(n)), requires_grad=True) for n in names}

    def run(self, feed: dict[str, Any], fetches: list[Any] | None = None) -> list[np.ndarray]:
        return list(self.exe.run(self.main, feed, fetches or self.fetches, scope=self.scope))

    def named(self, ending: str) -> torch.Tensor:
        return next(value for name, value in self.parameters.items() if name.endswith(ending))


def gru(built: Built, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    both = torch.sigmoid(torch.cat([x, h], 1) @ built.named("w_0") + built.named("b_0"))
    r, u = both.chunk(2, 1)
    return u * h + (1 - u) * torch.tanh(torch.cat([x, r * h], 1) @ built.named("w_1") + built.named("b_1"))


def lstm(built: Built, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    i, j, f, o = (torch.cat([x, h], 1) @ built.named("w_0") + built.named("b_0")).chunk(4, 1)
    c = c * torch.sigmoid(f + 1.0) + torch.sigmoid(i) * torch.tanh(j)
    return torch.tanh(c) * torch.sigmoid(o), c


def close(found: Any, wanted: torch.Tensor | None) -> None:
    assert wanted is not None
    np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-9, atol=1e-12)


def inputs() -> tuple[Any, Any]:
    x = fluid.data("x", [None, None, 3], "float64")
    x.stop_gradient = False
    return x, fluid.data("n", [None], "int64")


def feed(x: np.ndarray) -> dict[str, Any]:
    return {"x": x, "n": np.array(LENGTHS)}


@pytest.mark.parametrize("is_reverse", [False, True])
def test_a_gru_keeps_its_state_behind_an_end(is_reverse: bool) -> None:
    def build() -> list[Any]:
        x, n = inputs()
        cell = L.GRUCell(4, dtype="float64")
        start = cell.get_initial_states(x, dtype="float64", init_value=0.25)
        out, last = L.rnn(cell, x, start, n, is_reverse=is_reverse)
        fluid.append_backward(L.reduce_sum(out * out) + L.reduce_sum(last))
        return [out, last, "x@GRAD", *(f"{p.name}@GRAD" for p in fluid.default_main_program().parameters())]

    built = Built(build)
    rows = np.random.default_rng(1).normal(size=(3, 5, 3))
    x = torch.tensor(rows, requires_grad=True)
    h, outputs = torch.full((3, 4), 0.25, dtype=torch.float64), {}
    for t in reversed(range(5)) if is_reverse else range(5):
        outputs[t] = gru(built, x[:, t], h)
        inside = torch.tensor([[float(t < n)] for n in LENGTHS], dtype=torch.float64)
        h = outputs[t] * inside + h * (1 - inside)
    out = torch.stack([outputs[t] for t in range(5)], 1)
    ((out * out).sum() + h.sum()).backward()  # type: ignore[no-untyped-call]  # torch
    found = built.run(feed(rows))
    for got, wanted in zip(found, [out, h, x.grad, *(p.grad for p in built.parameters.values())], strict=True):
        close(got, wanted)


def test_an_lstm_carries_both_states_time_major() -> None:
    def build() -> list[Any]:
        x = fluid.data("x", [None, None, 3], "float64")
        cell = L.LSTMCell(4, dtype="float64")
        start = cell.get_initial_states(x, dtype="float64", batch_dim_idx=1)
        out, (h, c) = L.rnn(cell, x, start, time_major=True)
        fluid.append_backward(L.reduce_sum(out * out) + L.reduce_sum(c))
        return [out, h, c, *(f"{p.name}@GRAD" for p in fluid.default_main_program().parameters())]

    built = Built(build)
    x = torch.tensor(np.random.default_rng(2).normal(size=(6, 2, 3)))
    h = c = torch.zeros(2, 4, dtype=torch.float64)
    outputs = []
    for step in x:
        h, c = lstm(built, step, h, c)
        outputs.append(h)
    out = torch.stack(outputs)
    ((out * out).sum() + c.sum()).backward()  # type: ignore[no-untyped-call]  # torch
    for got, wanted in zip(
        built.run({"x": x.numpy()}), [out, h, c, *(p.grad for p in built.parameters.values())], strict=True
    ):
        close(got, wanted)


def test_parameters_of_a_cell_have_fluids_names_and_are_shared() -> None:
    def build() -> list[Any]:
        x, _ = inputs()
        cell, named = L.GRUCell(4, dtype="float64"), L.LSTMCell(4, fluid.ParamAttr(name="w"), False, dtype="float64")
        state = cell.get_initial_states(x, dtype="float64")
        _, once = cell(x[:, 0], state)
        _, twice = cell(x[:, 0], once)
        named(x[:, 0], [twice, twice])
        return [twice]

    built, prefix = Built(build), "GRUCell/BasicGRUUnit_0"
    assert list(built.parameters) == [f"{prefix}.{n}" for n in ("w_0", "b_0", "w_1", "b_1")] + ["w"]
    x = np.random.default_rng(3).normal(size=(2, 1, 3))
    once = gru(built, torch.tensor(x[:, 0]), torch.zeros(2, 4, dtype=torch.float64))
    close(built.run({"x": x})[0], gru(built, torch.tensor(x[:, 0]), once))


def test_a_cell_with_other_states_than_it_was_given_is_refused() -> None:
    class Odd(L.RNNCell):  # type: ignore[misc, name-defined]  # a class of the package's table of names
        def call(self, inputs: Any, states: Any, **kwargs: Any) -> Any:
            return inputs, [states, states]

    def build() -> list[Any]:
        x, _ = inputs()
        return list(L.rnn(Odd(), x, x[:, 0]))

    with pytest.raises(ProgramError, match="Odd returns states in the nest"):
        Built(build)


# ---------------------------------------------------------------- decoding

WORDS, END, BEAMS = 7, 1, 3


def decoder() -> Any:
    def normal(name: str, seed: int) -> Any:
        return fluid.ParamAttr(name=name, initializer=fluid.initializer.Normal(0.0, 2.0, seed=seed))

    return L.BeamSearchDecoder(
        L.GRUCell(5, normal("cell", 8), dtype="float64"), 0, END, BEAMS,
        embedding_fn=lambda ids: fluid.embedding(ids, [WORDS, 4], param_attr=normal("table", 4), dtype="float64"),
        output_fn=lambda out: L.fc(out, WORDS, num_flatten_dims=2, param_attr=normal("scores", 6)),
    )  # fmt: skip


def searched(built: Built, start: torch.Tensor, most: int) -> tuple[list[list[int]], list[float]]:
    """The beams of one source: words and log probabilities, best first, by a search over lists."""
    table, weight = built.named("table"), built.named("scores")
    bias = built.named("fc_0.b_0")
    cell = {"w_0": "cell_gate", "w_1": "cell_candidate"}

    def step(word: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.cat([table[word], state])
        r, u = torch.sigmoid(x @ built.named(cell["w_0"])).chunk(2)
        act = torch.tanh(torch.cat([table[word], r * state]) @ built.named(cell["w_1"]))
        new = u * state + (1 - u) * act
        return new, torch.log_softmax(new @ weight + bias, -1).detach()

    beams = [([0], 0.0, start, False)]
    for _ in range(most):
        grown = []
        for words, score, state, ended in beams:
            if ended:
                grown.append(([*words, END], score, state, True))
                continue
            new, logs = step(words[-1], state)
            grown += [([*words, w], score + float(logs[w]), new, w == END) for w in range(WORDS)]
        beams = sorted(grown, key=lambda beam: -beam[1])[:BEAMS]
        if all(ended for *_, ended in beams):
            break
    return [words[1:] for words, *_ in beams], [score for _, score, *_ in beams]


@pytest.mark.parametrize("most", [2, 12])
def test_beams_are_those_of_a_search_over_lists(most: int) -> None:
    def build() -> list[Any]:
        ids, states, lengths = L.dynamic_decode(
            decoder(), fluid.data("h", [None, 5], "float64"), max_step_num=most, return_length=True
        )
        return [ids, states.log_probs, lengths]

    built = Built(build)
    assert fluid.Program.parse(str(built.main)) == built.main
    for h in np.random.default_rng(9).normal(size=(4, 1, 5)):
        ids, scores, lengths = built.run({"h": h})
        words, logs = searched(built, torch.tensor(h[0]), most + 1)
        assert ids[0].T.tolist() == words
        np.testing.assert_allclose(scores[0], logs, rtol=1e-9)
        assert lengths.shape == (1, BEAMS)
        assert ids.shape[1] == max(len(one) for one in words)


def test_sources_are_decoded_side_by_side_and_time_major() -> None:
    built = Built(lambda: [L.dynamic_decode(decoder(), fluid.data("h", [None, 5], "float64"), 5)[0]])
    major = Built(lambda: [L.dynamic_decode(decoder(), fluid.data("h", [None, 5], "float64"), 5, True)[0]])
    h = np.random.default_rng(11).normal(size=(3, 5))
    (ids,) = built.run({"h": h})
    np.testing.assert_array_equal(major.run({"h": h})[0], ids.transpose(1, 0, 2))
    for row, own in zip(h, ids, strict=True):
        (alone,) = built.run({"h": row[None]})
        np.testing.assert_array_equal(alone[0], own[: alone.shape[1]])


class Doubling(L.Decoder):  # type: ignore[misc, name-defined]  # a class of the package's table of names
    """Doubles its state until it is above a bound of its own; ends count twice without `impute_finished`."""

    def initialize(self, inits: Any) -> tuple[Any, Any, Any]:
        return inits, inits, inits.sum(1) < 0.0

    def step(self, time: Any, inputs: Any, states: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        new = states * 2.0
        return {"twice": new}, new, new + kwargs["shift"], new.sum(1) > kwargs["bound"]


@pytest.mark.parametrize("impute", [False, True])
def test_a_decoder_of_ones_own_ends_sequence_by_sequence(impute: bool) -> None:
    def build() -> list[Any]:
        x = fluid.data("x", [None, 2], "float64")
        x.stop_gradient = False
        out, state, lengths = L.dynamic_decode(
            Doubling(), x, impute_finished=impute, return_length=True, shift=1.0, bound=9.0
        )
        fluid.append_backward(L.reduce_sum(out["twice"]) + L.reduce_sum(state))
        return [out["twice"], state, lengths, "x@GRAD"]

    x = np.array([[1.0, 1.0], [4.0, 4.0], [0.25, 1.0]])
    out, state, lengths, grad = Built(build).run({"x": x})
    steps, own = 3, np.array([3, 1, 3])
    assert lengths.tolist() == own.tolist()
    last = own if impute else np.array([steps] * 3)
    np.testing.assert_allclose(state, x * 2.0 ** last[:, None])
    taken = np.array([[2.0 ** min(t + 1, n + 1 if impute else 9) for t in range(steps)] for n in last])
    np.testing.assert_allclose(out, x[:, None, :] * taken[:, :, None])
    np.testing.assert_allclose(grad, np.repeat((taken.sum(1) + 2.0**last)[:, None], 2, 1))


def test_a_step_of_another_shape_is_refused() -> None:
    class Wider(Doubling):
        def step(self, time: Any, inputs: Any, states: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
            new = torch.cat([states, states], 1)
            return new, new, inputs, new.sum(1) > 1.0

    with pytest.raises(ProgramError, match=r"step of a decoder returns .*\[s0, 4\].* for .*\[s0, 2\]"):
        Built(lambda: [L.dynamic_decode(Wider(), fluid.data("x", [None, 2], "float64"))[0]])


def test_paths_through_beams() -> None:
    ids = np.array([[[2, 3]], [[4, 5]], [[6, 7]]])
    parents = np.array([[[0, 0]], [[1, 0]], [[1, 0]]])
    built = Built(lambda: [L.gather_tree(fluid.data("i", [3, 1, 2], "int64"), fluid.data("p", [3, 1, 2], "int64"))])
    # beam 0 ends with 6, which continues beam 1 (5), which continues beam 0 (2)
    assert built.run({"i": ids, "p": parents})[0][:, 0].T.tolist() == [[2, 5, 6], [3, 4, 7]]


# ---------------------------------------------------------------- decoders with helpers


def word_attr(name: str, seed: int) -> Any:
    return fluid.ParamAttr(name=name, initializer=fluid.initializer.Normal(0.0, 2.0, seed=seed))


def words_of(ids: Any) -> Any:
    return fluid.embedding(ids, [WORDS, 4], param_attr=word_attr("table", 4), dtype="float64")


def scores_of(out: Any) -> Any:
    return L.fc(out, WORDS, param_attr=word_attr("scores", 6), bias_attr=False)


def steps_of(built: Built, h: torch.Tensor, words: Callable[[int, int], int], count: int) -> torch.Tensor:
    """The scores [count, words] of one sequence, whose step t gets the word `words(t, best word before)`."""
    cell, found, last = {"w_0": "cell_gate", "w_1": "cell_candidate"}, [], 0
    for t in range(count):
        x = built.named("table")[words(t, last)]
        r, u = torch.sigmoid(torch.cat([x, h]) @ built.named(cell["w_0"])).chunk(2)
        h = u * h + (1 - u) * torch.tanh(torch.cat([x, r * h]) @ built.named(cell["w_1"]))
        found.append(h @ built.named("scores"))
        last = int(found[-1].argmax())
    return torch.stack(found)


def test_training_feeds_given_words_with_gradients() -> None:
    ids, lengths = np.array([[3, 4, 2], [5, 6, 0]]), [3, 2]

    def build() -> list[Any]:
        given, n = fluid.data("ids", [None, None], "int64"), fluid.data("n", [None], "int64")
        h = fluid.data("h", [None, 5], "float64")
        helper = L.TrainingHelper(words_of(given), n)
        cell = L.GRUCell(5, word_attr("cell", 8), False, dtype="float64")
        out, _, steps = L.dynamic_decode(L.BasicDecoder(cell, helper, scores_of), h, return_length=True)
        fluid.append_backward(L.reduce_sum(out.cell_outputs * out.cell_outputs))
        names = [p.name for p in fluid.default_main_program().parameters()]
        return [out.cell_outputs, out.sample_ids, steps, *(f"{name}@GRAD" for name in names)]

    built = Built(build)
    h = np.random.default_rng(4).normal(size=(2, 5))
    scores, best, steps, *grads = built.run({"ids": ids, "n": np.array(lengths), "h": h})
    assert steps.tolist() == lengths
    # behind an end the sequence goes on: its last input is a step of the table, then zeros
    wanted = steps_of(built, torch.tensor(h[0]), lambda t, _: int(ids[0, t]), 3)
    close(scores[0], wanted)
    close(scores[1, :2], steps_of(built, torch.tensor(h[1]), lambda t, _: int(ids[1, t]), 2))
    np.testing.assert_array_equal(best, scores.argmax(-1))
    (torch.stack([wanted, steps_of(built, torch.tensor(h[1]), lambda t, _: int(ids[1, t]), 3)]) ** 2).sum().backward()  # type: ignore[no-untyped-call]  # torch
    for got, one in zip(grads, built.parameters.values(), strict=True):
        close(got, one.grad)


@pytest.mark.parametrize("greedy", [True, False])
def test_words_are_chosen_until_the_end(greedy: bool) -> None:
    def build() -> list[Any]:
        start, h = fluid.data("start", [None], "int64"), fluid.data("h", [None, 5], "float64")
        kind = L.GreedyEmbeddingHelper if greedy else L.SampleEmbeddingHelper
        extra = [] if greedy else [1e-6]  # so cold that the best word is drawn
        helper = kind(words_of, start, END, *extra)
        cell = L.GRUCell(5, word_attr("cell", 8), False, dtype="float64")
        out, _, steps = L.dynamic_decode(L.BasicDecoder(cell, helper, scores_of), h, 6, return_length=True)
        return [out.sample_ids, steps]

    built = Built(build)
    h = np.random.default_rng(6).normal(size=(3, 5))
    ids, steps = built.run({"start": np.zeros(3, np.int64), "h": h})
    for row, own, count in zip(h, ids, steps, strict=True):
        best = steps_of(built, torch.tensor(row), lambda t, last: last, len(own)).argmax(-1).tolist()
        assert own[:count].tolist() == best[:count]
        assert END not in best[: count - 1]


def stacked(step: Callable[[int, int, torch.Tensor, list[torch.Tensor]], list[torch.Tensor]], x: torch.Tensor) -> Any:
    """Two layers in two directions over [n, t, i], all states starting at 0.1: outputs, and states [4, n, 4] each."""
    sides: list[torch.Tensor] = []
    finals: dict[int, list[torch.Tensor]] = {}
    for direction in range(2):
        times = range(5) if direction == 0 else reversed(range(5))
        states = [[torch.full((3, 4), 0.1, dtype=torch.float64) for _ in range(2)] for _ in range(2)]
        outputs: dict[int, torch.Tensor] = {}
        for t in times:
            inside, below = torch.tensor([[float(t < n)] for n in LENGTHS], dtype=torch.float64), x[:, t]
            for layer in range(2):
                new = step(direction, layer, below, states[layer])
                states[layer] = [a * inside + b * (1 - inside) for a, b in zip(new, states[layer], strict=False)]
                below = states[layer][0]
            outputs[t] = below
        sides.append(torch.stack([outputs[t] for t in range(5)], 1))
        finals.update({2 * layer + direction: states[layer] for layer in range(2)})
    whole = torch.cat(sides, 2)
    kinds = len(finals[0])
    return whole, [torch.stack([finals[i][kind] for i in range(4)]) for kind in range(kinds)]


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_stacked_cells_of_two_directions_equal_a_loop(kind: str) -> None:
    def build() -> list[Any]:
        x, n = inputs()
        start = L.fill_constant_batch_size_like(x, [4, -1, 4], "float64", 0.1, output_dim_idx=1)
        more = {"num_layers": 2, "sequence_length": n, "bidirectional": True, "dtype": "float64", "param_attr": "w"}
        if kind == "gru":
            out, *last = basic_rnn.basic_gru(x, start, 4, **more)
        else:
            out, *last = basic_rnn.basic_lstm(x, start, start, 4, **more)
        fluid.append_backward(L.reduce_sum(out * out) + sum(L.reduce_sum(one) for one in last))
        return [out, *last, "x@GRAD", *(f"{p.name}@GRAD" for p in fluid.default_main_program().parameters())]

    built = Built(build)

    def step(direction: int, layer: int, x: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
        side, infix = ("bw", "_reverse") if direction else ("fw", "")
        name = f"basic_{kind}{infix}_layers_{layer}/Basic{kind.upper()}Unit_0.b_"
        w, b = f"w_{side}_w_{layer}", built.named
        if kind == "lstm":
            i, j, f, o = (torch.cat([x, states[0]], 1) @ b(w) + b(f"{name}0")).chunk(4, 1)
            c = states[1] * torch.sigmoid(f + 1.0) + torch.sigmoid(i) * torch.tanh(j)
            return [torch.tanh(c) * torch.sigmoid(o), c]
        h = states[0]
        r, u = torch.sigmoid(torch.cat([x, h], 1) @ b(f"{w}_gate") + b(f"{name}0")).chunk(2, 1)
        return [u * h + (1 - u) * torch.tanh(torch.cat([x, r * h], 1) @ b(f"{w}_candidate") + b(f"{name}1"))]

    rows = np.random.default_rng(3).normal(size=(3, 5, 3))
    x = torch.tensor(rows, requires_grad=True)
    out, last = stacked(step, x)
    ((out * out).sum() + sum(one.sum() for one in last)).backward()
    found = built.run(feed(rows))
    for got, wanted in zip(found, [out, *last, x.grad, *(p.grad for p in built.parameters.values())], strict=True):
        close(got, wanted)


def test_stacked_cells_drop_between_layers_and_start_from_zeros() -> None:
    def build() -> list[Any]:
        x, _ = inputs()
        gru, _ = basic_rnn.basic_gru(x, None, 4, dropout_prob=0.5, dtype="float64")
        lstm, _, _ = basic_rnn.basic_lstm(x, None, None, 4, dropout_prob=0.5, dtype="float64")
        unit = basic_rnn.BasicGRUUnit("gru", 4, "u", "v", dtype="float64")
        more = basic_rnn.BasicLSTMUnit("lstm", 4, "p", "q", forget_bias=0.0, dtype="float64")
        zeros = L.zeros_like(x[:, 0].matmul(L.fill_constant([3, 4], "float64", 0.0)))
        return [gru, lstm, unit(x[:, 0], zeros), *more(x[:, 0], zeros, zeros)]

    built = Built(build)
    names = [p.name for p in built.main.parameters()]
    assert {"u_gate", "u_candidate", "v_gate", "v_candidate", "p", "q"} < set(names)
    rows = np.random.default_rng(4).normal(size=(3, 5, 3))
    trained = built.run(feed(rows))
    still = built.exe.run(built.main.clone(for_test=True), feed(rows), built.fetches[:2], scope=built.scope)
    assert [float((one == 0).mean()) > 0.2 for one in trained[:2]] == [True, True]
    kept = [np.where(one != 0, one, np.nan) for one in trained[:2]]
    np.testing.assert_allclose(np.nanmax(np.abs(kept[0] * 0.5 - still[0])), 0, atol=1e-12)
    np.testing.assert_allclose(np.nanmax(np.abs(kept[1] * 0.5 - still[1])), 0, atol=1e-12)
    assert np.abs(trained[2]).max() > 0 and [one.shape for one in trained[2:]] == [(3, 4)] * 3
