"""Kinds over ragged sequences, and recurrent ones."""

from __future__ import annotations

import math
from typing import Any

import torch

from penstock.program import layers
from penstock.program.framework.kinds.call import REQUIRED, Call, Kind, layer
from penstock.program.layers import lstm_units
from penstock.program.record.variable import record_call


def _convolution(call: Call) -> Any:
    return layers.sequence_conv(
        call.one("X"), call.one("Filter").desc.shape[1], call["contextLength"], padding_start=call["contextStart"],
        param_attr=call.parameter("Filter"), bias_attr=False,
    )  # fmt: skip


def _pool(call: Call) -> Any:
    return layers.sequence_pool(call.one("X"), call["pooltype"], pad_value=call["pad_value"])


def _mask(call: Call) -> Any:
    longest, most = call.optional("MaxLenTensor"), call["maxlen"]
    if longest is None and most > 0:
        longest = most
    return layers.sequence_mask(call.one("X"), longest, call.dtype("out_dtype") or "int64")


def _pad(call: Call) -> Any:
    longest = call["padded_length"]
    return layers.sequence_pad(call.one("X"), call.one("PadValue"), longest if longest > 0 else None)


def _expand(call: Call) -> Any:
    return layers.sequence_expand(call.one("X"), call.one("Y"), call["ref_level"])


def _reset(call: Call) -> Any:
    if call["append"]:
        raise call.refuse("has append=True")
    return layers.lod_reset(call.one("X"), call.optional("Y"), list(call["target_lod"]) or None)


def _lstm(call: Call) -> Any:
    hidden = call.one("Weight").desc.shape[0]
    return layers.dynamic_lstm(
        call.one("Input"), 4 * hidden, call.optional("H0"), call.optional("C0"), call.parameter("Weight"),
        call.parameter("Bias"), call["use_peepholes"], call["is_reverse"], call["gate_activation"],
        call["cell_activation"], call["candidate_activation"], call.one("Weight").desc.dtype,
    )  # fmt: skip


def _lstmp(call: Call) -> Any:
    hidden, bias = call.one("ProjWeight").desc.shape[0], call.one("Bias")
    peepholes = bias[:, 4 * hidden :].reshape([3, hidden]) if call["use_peepholes"] else None
    weights = call.one("Weight"), call.one("ProjWeight"), bias[:, : 4 * hidden], peepholes
    return lstm_units.projected_lstm(
        call.one("Input"), weights, (call.optional("H0"), call.optional("C0")),
        tuple(call[f"{name}_activation"] for name in ("gate", "cell", "candidate", "proj")),
        (call["cell_clip"] or None, call["proj_clip"] or None), is_reverse=call["is_reverse"],
    )  # fmt: skip


def _beam_search(call: Call) -> Any:
    return layers.beam_search(
        call.one("pre_ids"), call.one("pre_scores"), call.optional("ids"), call.one("scores"), call["beam_size"],
        call["end_id"], call["level"], call["is_accumulated"], return_parent_idx=True,
    )  # fmt: skip


def _gru(call: Call) -> Any:
    return layers.dynamic_gru(
        call.one("Input"), call.one("Weight").desc.shape[0], call.parameter("Weight"), call.parameter("Bias"),
        call["is_reverse"], call["gate_activation"], call["activation"], call.optional("H0"), call["origin_mode"],
    )  # fmt: skip


def _gru_step(call: Call) -> Any:
    if (call["activation"], call["gate_activation"]) != (_TANH, _SIGMOID):
        raise call.refuse(f"has activation={call['activation']}, gate_activation={call['gate_activation']}")
    parameters = call.parameter("Weight"), call.parameter("Bias")
    size = 3 * call.one("Weight").desc.shape[0]
    made = layers.gru_unit(
        call.one("Input"), call.one("HiddenPrev"), size, *parameters, origin_mode=call["origin_mode"]
    )
    return made[::-1]


def _lstm_step(call: Call) -> Any:
    before = call.one("C_prev")
    i, f, o, candidate = call.one("X").split(before.desc.shape[1], 1)
    cell = torch.sigmoid(f + call["forget_bias"]) * before + torch.sigmoid(i) * torch.tanh(candidate)
    return cell, torch.sigmoid(o) * torch.tanh(cell)


def _stacked(call: Call) -> Any:
    """Layers over steps of one length, by torch; weights of all layers and directions come before their biases."""
    mode = call["mode"] if call.type == "rnn" else "LSTM"
    states = call.many("PreState") if call.type == "rnn" else [call.one("InitH"), call.one("InitC")]
    given, functions = _weight_list(call), {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh,
                                                 "RNN_RELU": torch.rnn_relu}  # fmt: skip
    if mode not in functions or not given or not (call["is_test"] or call["dropout_prob"] == 0.0):
        raise call.refuse(
            f"has mode={mode!r}, {len(given)} weights, dropout_prob={call['dropout_prob']} (dropout between layers is "
            "at rest alone)"
        )
    half = len(given) // 2
    weights = [one for at in range(0, half, 2) for one in (*given[at : at + 2], *given[half + at : half + at + 2])]
    settings = (True, call["num_layers"], 0.0, False, bool(call["is_bidirec"]), False)
    first = states if mode == "LSTM" else states[0]
    out, *last = record_call(functions[mode], (call.one("Input"), first, weights, *settings), {})
    return (out, *last) if call.type == "cudnn_lstm" else {"Out": [out], "State": last}


def _weight_list(call: Call) -> list[Any]:
    """The weights of all layers and directions, then their biases: as a list, or cut out of cuDNN's one parameter W.

    Of each come those of the input and of the state, gates in the order i, f, candidate, o. Source: cudnn_lstm_op.cc.
    """
    whole, wide, hidden = (
        call.optional("W") if call.type == "cudnn_lstm" else None,
        call["input_size"],
        call["hidden_size"],
    )
    if whole is None:
        return call.many("WeightList")
    directions = 2 if call["is_bidirec"] else 1
    matrices = [
        (4 * hidden, size)
        for layer in range(call["num_layers"])
        for size in (wide if layer == 0 else directions * hidden, hidden) * directions
    ]
    shapes: list[tuple[int, ...]] = [*matrices, *[(4 * hidden,)] * len(matrices)]
    sizes = [math.prod(shape) for shape in shapes]
    if whole.desc.shape != (sum(sizes),):
        raise call.refuse(f"has W of {whole.desc.shape}, where its attributes ask for {sum(sizes)} elements")
    parts = torch.split(whole, sizes)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


_SIGMOID, _TANH = 1, 2  # numbers of activations in gru_unit
_STACKED = {"dropout_prob": 0.0, "is_bidirec": False, "hidden_size": 100, "input_size": 10, "num_layers": 1,
            "is_test": False, "seed": 0}  # fmt: skip

SEQUENCES: dict[str, Kind] = {
    "sequence_conv": Kind(_convolution, "X Filter", attrs={"contextLength": REQUIRED, "contextStart": 0}),
    "sequence_pool": Kind(_pool, "X", "Out MaxIndex-", {"pooltype": "AVERAGE", "pad_value": 0.0}),
    "sequence_softmax": layer(layers.sequence_softmax), "sequence_reverse": layer(layers.sequence_reverse, "X", "Y"),
    "sequence_reshape": layer(layers.sequence_reshape, attrs={"new_dim": REQUIRED}),
    "sequence_concat": layer(layers.sequence_concat, "X*"),
    "sequence_expand": Kind(_expand, "X Y", attrs={"ref_level": -1}),
    "sequence_expand_as": layer(layers.sequence_expand_as, "X Y"),
    "sequence_enumerate": layer(layers.sequence_enumerate, attrs={"win_size": REQUIRED, "pad_value": 0}),
    "sequence_mask": Kind(_mask, "X MaxLenTensor?", "Y", {"maxlen": -1, "out_dtype": REQUIRED}),
    "sequence_pad": Kind(_pad, "X PadValue", "Out Length", {"padded_length": -1}),
    "sequence_unpad": layer(layers.sequence_unpad, "X Length"),
    "sequence_slice": layer(layers.sequence_slice, "X Offset Length"),
    "sequence_scatter": layer(layers.sequence_scatter, "X Ids Updates"),
    "lstm": Kind(_lstm, "Input H0? C0? Weight Bias?", "Hidden Cell BatchGate- BatchCellPreAct-", {
        "use_peepholes": True, "is_reverse": False, "gate_activation": "sigmoid", "cell_activation": "tanh",
        "candidate_activation": "tanh",
    }),
    "lstmp": Kind(
        _lstmp, "Input H0? C0? Weight ProjWeight Bias",
        "Projection Cell BatchGate- BatchCellPreAct- BatchHidden- OrderedP0-", {
            "use_peepholes": True, "is_reverse": False, "gate_activation": "sigmoid", "cell_activation": "tanh",
            "candidate_activation": "tanh", "proj_activation": "tanh", "cell_clip": 0.0, "proj_clip": 0.0,
        },
    ),
    "gru": Kind(_gru, "Input H0? Weight Bias?", "Hidden BatchGate- BatchResetHiddenPrev- BatchHidden-", {
        "is_reverse": False, "gate_activation": "sigmoid", "activation": "tanh", "origin_mode": False,
    }),
    "gru_unit": Kind(_gru_step, "Input HiddenPrev Weight Bias?", "Gate ResetHiddenPrev Hidden", {
        "activation": _TANH, "gate_activation": _SIGMOID, "origin_mode": False,
    }),
    "lstm_unit": Kind(_lstm_step, "X C_prev", "C H", {"forget_bias": 0.0}),
    "cudnn_lstm": Kind(_stacked, "Input InitH InitC W? WeightList*", "Out LastH LastC Reserve- StateOut-", _STACKED),
    "rnn": Kind(_stacked, "Input PreState* WeightList*", "Out State* DropoutState- Reserve-", {
        **_STACKED, "mode": "RNN_TANH",
    }),
    "lod_rank_table": layer(layers.lod_rank_table, attrs={"level": 0}),
    "max_sequence_len": layer(layers.max_sequence_len, "RankTable"),
    "reorder_lod_tensor_by_rank": layer(layers.reorder_lod_tensor_by_rank, "X RankTable"),
    "shrink_rnn_memory": layer(layers.shrink_memory, "X I RankTable"),
    "beam_search": Kind(
        _beam_search, "pre_ids pre_scores ids? scores", "selected_ids selected_scores parent_idx",
        {"level": REQUIRED, "beam_size": REQUIRED, "end_id": REQUIRED, "is_accumulated": True},
    ),
    "lod_reset": Kind(_reset, "X Y?", attrs={"target_lod": [], "append": False}),
}  # fmt: skip
