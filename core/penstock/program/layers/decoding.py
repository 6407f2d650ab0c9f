"""Decoding step by step until all sequences have ended: `Decoder`, `BeamSearchDecoder` and `dynamic_decode`.

A decoder gives the input, states and ends before the first step, and maps those of a step to outputs and those of the
next one; each is a variable or a nest of them. Source: fluid.layers.rnn (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from penstock.compat.torch import tree_leaves, tree_map
from penstock.errors import ProgramError
from penstock.program.layers.arrays import array_write, create_array, tensor_array_to_tensor
from penstock.program.layers.beam_search import gather_tree
from penstock.program.layers.control_flow import While
from penstock.program.layers.tensor import assign, fill_constant
from penstock.program.record.context import default_main_program
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.unsized import sized_in_block

_NEVER = 1e9  # what is subtracted from the log probability of a word that may not follow


class Decoder:
    """Base class of decoders, for `dynamic_decode`."""

    def initialize(self, inits: Any) -> tuple[Any, Any, Any]:
        """Return (input, states, bool variable: which sequences have ended) before the first step."""
        raise NotImplementedError(f"{type(self).__name__} has no method initialize(inits)")

    def step(self, time: Any, inputs: Any, states: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        """Return (outputs, next states, next input, ended) of the step `time`, int64 [1]."""
        raise NotImplementedError(f"{type(self).__name__} has no method step(time, inputs, states)")

    def finalize(self, outputs: Any, final_states: Any, sequence_lengths: Any) -> tuple[Any, Any]:
        """Return (outputs, states) made of the outputs of all steps, [time, …]. A class may do without."""
        raise NotImplementedError(f"{type(self).__name__} has no method finalize")

    @property
    def tracks_own_finished(self) -> bool:
        """Whether `step` counts sequences that ended before among those that have ended."""
        return False


class _Output(NamedTuple):
    scores: Any
    predicted_ids: Any
    parent_ids: Any


class _State(NamedTuple):
    cell_states: Any
    log_probs: Any
    finished: Any
    lengths: Any


class BeamSearchDecoder(Decoder):
    """Beam search with a cell: of each sequence the `beam_size` best continuations at a time.

    Shapes: states of the cell [batch, …], outputs of `dynamic_decode` int64 [batch, time, beam_size], best first. The
    cell sees [batch * beam_size, …]; what else it reads is repeated by `tile_beam_merge_with_batch`. `embedding_fn`
    maps ids [batch, beam_size] to inputs, `output_fn` the cell's outputs to scores of all words.
    """

    OutputWrapper = _Output
    StateWrapper = _State

    def __init__(
        self,
        cell: Callable[..., Any],
        start_token: int,
        end_token: int,
        beam_size: int,
        embedding_fn: Callable[[Any], Any] | None = None,
        output_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        self.cell = cell
        self.start_token, self.end_token, self.beam_size = start_token, end_token, beam_size
        self.embedding_fn, self.output_fn = embedding_fn, output_fn

    @staticmethod
    def tile_beam_merge_with_batch(x: Any, beam_size: int) -> Any:
        """Repeat each row `beam_size` times. Shapes: [batch, …]; result [batch * beam_size, …]."""
        return tree_map(lambda one: _beams(one, beam_size).flatten(0, 1), x)

    @property
    def tracks_own_finished(self) -> bool:
        """True: beams change places, and their ends with them."""
        return True

    def initialize(self, inits: Any) -> tuple[Any, _State, Any]:
        """Return the start token, the repeated states and what has ended, for each beam."""
        first = tree_leaves(inits)[0]
        ids = first.new_full([first.shape[0], self.beam_size], self.start_token, dtype=torch.int64)
        kind = first.dtype if first.dtype.is_floating_point else torch.float32
        log_probs = F.pad(first.new_zeros([first.shape[0], 1], dtype=kind), [0, self.beam_size - 1], value=-_NEVER)
        ended = ids.new_zeros([first.shape[0], self.beam_size], dtype=torch.bool)
        states = tree_map(lambda x: _beams(x, self.beam_size), inits)
        inputs = ids if self.embedding_fn is None else self.embedding_fn(ids)
        return inputs, self.StateWrapper(states, log_probs, ended, torch.zeros_like(ids)), ended

    def step(self, time: Any, inputs: Any, states: Any, **kwargs: Any) -> tuple[_Output, _State, Any, Any]:
        """Run the cell, and choose the best continuations of each sequence."""
        merged = tree_map(lambda x: x.flatten(0, 1), (inputs, states.cell_states))
        outputs, following = self.cell(*merged, **kwargs)
        outputs, following = tree_map(lambda x: x.unflatten(0, [-1, self.beam_size]), (outputs, following))
        logits = outputs if self.output_fn is None else self.output_fn(outputs)
        chosen, new = self._search(logits, following, states)
        ids = chosen.predicted_ids.detach()
        return chosen, new, ids if self.embedding_fn is None else self.embedding_fn(ids), new.finished

    def _search(self, logits: Any, following: Any, states: Any) -> tuple[_Output, _State]:
        words = logits.desc.shape[-1]
        if not isinstance(words, int):
            raise ProgramError(f"{user_line()}: BeamSearchDecoder: the number of words of {logits!r} is not known")
        ended = states.finished.unsqueeze(2)
        around = [self.end_token, words - self.end_token - 1]
        only_end = F.pad(logits.new_zeros([1]), around, value=-_NEVER)
        own = torch.where(ended, only_end, torch.log_softmax(logits, -1))
        total = (own + states.log_probs.unsqueeze(2)).flatten(1)
        scores, places = torch.topk(total, self.beam_size)
        beams = torch.div(places, words, rounding_mode="floor")
        tokens = torch.remainder(places, words)
        kept = tree_map(lambda x: _picked(x, beams), (following, states.finished, states.lengths))
        cells, finished, lengths = kept
        lengths = lengths + torch.logical_not(finished).to(lengths.dtype)
        finished = torch.logical_or(finished, tokens == self.end_token)
        return self.OutputWrapper(scores, tokens, beams), self.StateWrapper(cells, scores, finished, lengths)

    def finalize(self, outputs: Any, final_states: Any, sequence_lengths: Any) -> tuple[Any, Any]:
        """Return the words of each beam, int64 [time, batch, beam_size], found back from the last step."""
        return gather_tree(outputs.predicted_ids, outputs.parent_ids), final_states


def _beams(x: Any, beam_size: int) -> Any:
    """[batch, …] as [batch, beam_size, …]."""
    return x.unsqueeze(1).expand([-1, beam_size, *[-1] * (x.ndim - 1)])


def _picked(x: Any, beams: Any) -> Any:
    """The beams [batch, beam_size] of x [batch, beam_size, …]."""
    own = beams.reshape([*beams.shape, *[1] * (x.ndim - 2)])
    return torch.gather(x, 1, own.expand([-1, -1, *x.shape[2:]]))


def dynamic_decode(
    decoder: Decoder,
    inits: Any = None,
    max_step_num: int | None = None,
    output_time_major: bool = False,
    impute_finished: bool = False,
    is_test: bool = False,
    return_length: bool = False,
    **kwargs: Any,
) -> Any:
    """Run a decoder until all sequences have ended, or one step more than `max_step_num`.

    Return (outputs, states after the last step), with `return_length` the steps of each sequence, too. How many steps
    there were follows from data: outputs, [batch, time, …] or [time, batch, …], are known when they are fetched.
    `impute_finished`: sequences that have ended keep their states. `is_test` makes no difference.
    """
    inputs, states, ended = decoder.initialize(inits)
    inputs, states, ended = tree_map(assign, (inputs, states, ended.detach()))
    lengths = torch.zeros_like(ended, dtype=torch.int64)
    time = fill_constant([1], "int64", 0)
    going = assign(_goes_on(ended, time, None))
    recording, arrays = recording_of(default_main_program()), list[Any]()
    with While(going).block():
        # Copies, as views of what the step's end writes would be written before their gradient is made.
        own_inputs, own_states, before = tree_map(assign, (inputs, states, ended))
        outputs, new_states, new_inputs, now = decoder.step(time, own_inputs, own_states, **kwargs)
        if not decoder.tracks_own_finished:
            now = torch.logical_or(now, before)
        grown = lengths + torch.logical_not(before).to(torch.int64)
        if impute_finished:
            new_states = tree_map(lambda old, new: _kept(old, new, before), own_states, new_states)
        with recording.open_blocks[-1].outside():
            arrays = [create_array(one.dtype) for one in tree_leaves(outputs)]
        for one, array in zip(tree_leaves(outputs), arrays, strict=True):
            array_write(one, time, array)
        time.add_(1)
        news = [*tree_leaves((new_inputs, new_states)), now, grown]
        olds = [*tree_leaves((inputs, states)), ended, lengths]
        _carry(olds, news)
        assign(_goes_on(ended, time, max_step_num), going)
    final, states = sized_in_block(
        recording, lambda: _finished(decoder, outputs, arrays, states, lengths, output_time_major)
    )
    return (final, states, lengths) if return_length else (final, states)


def _goes_on(ended: Any, time: Any, most: int | None) -> Any:
    going = torch.logical_not(torch.all(ended)).reshape([1])
    return going if most is None else torch.logical_and(going, time <= most)


def _kept(old: Any, new: Any, ended: Any) -> Any:
    """The state of sequences that have ended before, the new one of the others."""
    return torch.where(ended.reshape([*ended.shape, *[1] * (old.ndim - ended.ndim)]), old, new)


def _carry(olds: list[Any], news: list[Any]) -> None:
    """Write the values of a step where the next one reads them."""
    if len(olds) != len(news):
        raise ProgramError(
            f"{user_line()}: step of a decoder returns {len(news) - 2} inputs and states; it was given {len(olds) - 2}"
        )
    for old, new in zip(olds, news, strict=True):
        if (old.desc.shape, old.desc.dtype) != (new.desc.shape, new.desc.dtype):
            raise ProgramError(
                f"{user_line()}: step of a decoder returns {new!r} for {old!r}; expected its shape and dtype",
                variable=new.name,
            )
    for old, copy in zip(olds, [assign(new) for new in news], strict=True):
        assign(copy, old)


def _finished(
    decoder: Decoder, outputs: Any, arrays: list[Any], states: Any, lengths: Any, is_time_major: bool
) -> tuple[Any, Any]:
    """The outputs of all steps together, and the states, as the decoder returns them at the end."""
    queue = iter(arrays)
    whole = tree_map(lambda _: tensor_array_to_tensor(next(queue), 0, use_stack=True)[0], outputs)
    if type(decoder).finalize is not Decoder.finalize:
        whole, states = decoder.finalize(whole, states, lengths)
    return whole if is_time_major else tree_map(lambda x: x.transpose(0, 1), whole), states
