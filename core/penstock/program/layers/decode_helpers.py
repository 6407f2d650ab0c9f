"""A decoder made of a cell and of what chooses the next input: from given sequences, the best word, or a drawn one.

Source: BasicDecoder, TrainingHelper, GreedyEmbeddingHelper and SampleEmbeddingHelper (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from penstock.compat.torch import tree_map
from penstock.program.layers.decoding import Decoder
from penstock.program.layers.random import sampling_id
from penstock.program.record.variable import dtype_named


class DecodeHelper:
    """Base class of what `BasicDecoder` asks: the first input, a word for each sequence, the next input."""

    def initialize(self) -> tuple[Any, Any]:
        """Return (first input, bool [batch]: which sequences have ended)."""
        raise NotImplementedError(f"{type(self).__name__} has no method initialize")

    def sample(self, time: Any, outputs: Any, states: Any) -> Any:
        """Return a word for each sequence."""
        raise NotImplementedError(f"{type(self).__name__} has no method sample")

    def next_inputs(self, time: Any, outputs: Any, states: Any, sample_ids: Any) -> tuple[Any, Any, Any]:
        """Return (ended, next input, next states)."""
        raise NotImplementedError(f"{type(self).__name__} has no method next_inputs")


class TrainingHelper(DecodeHelper):
    """Feeds given sequences. Shapes: inputs [batch, time, …], with `time_major` [time, batch, …]; int [batch]."""

    def __init__(self, inputs: Any, sequence_length: Any, time_major: bool = False) -> None:
        self.inputs, self.sequence_length, self.time_major = inputs, sequence_length, time_major
        self._steps = tree_map(lambda x: _longer(x if time_major else x.transpose(0, 1)), inputs)

    def initialize(self) -> tuple[Any, Any]:
        """Return the first step of the sequences, and which have none."""
        return tree_map(lambda x: x[0], self._steps), self.sequence_length == 0

    def sample(self, time: Any, outputs: Any, states: Any) -> Any:
        """Return the best word of each."""
        return torch.argmax(outputs, -1)

    def next_inputs(self, time: Any, outputs: Any, states: Any, sample_ids: Any) -> tuple[Any, Any, Any]:
        """Return the next step of the sequences; zeros behind the last one."""
        following = time + 1
        return self.sequence_length <= following, tree_map(lambda x: _step(x, following), self._steps), states


def _longer(x: Any) -> Any:
    """[time, batch, …] with a step of zeros behind."""
    return F.pad(x, [*[0, 0] * (x.ndim - 1), 0, 1])


def _step(x: Any, time: Any) -> Any:
    return torch.index_select(x, 0, time.reshape([1])).squeeze(0)


class GreedyEmbeddingHelper(DecodeHelper):
    """Feeds the best word of each step, by `embedding_fn`, until it is `end_token`. `start_tokens`: int [batch]."""

    def __init__(self, embedding_fn: Callable[[Any], Any], start_tokens: Any, end_token: int) -> None:
        self.embedding_fn, self.start_tokens, self.end_token = embedding_fn, start_tokens, end_token

    def initialize(self) -> tuple[Any, Any]:
        """Return the embedded start tokens; no sequence has ended."""
        return self.embedding_fn(self.start_tokens), torch.zeros_like(self.start_tokens, dtype=torch.bool)

    def sample(self, time: Any, outputs: Any, states: Any) -> Any:
        """Return the best word of each."""
        return torch.argmax(outputs, -1)

    def next_inputs(self, time: Any, outputs: Any, states: Any, sample_ids: Any) -> tuple[Any, Any, Any]:
        """Return the embedded words."""
        return sample_ids == self.end_token, self.embedding_fn(sample_ids), states


class SampleEmbeddingHelper(GreedyEmbeddingHelper):
    """Feeds a word of each step drawn by its probability, softmax(outputs / softmax_temperature)."""

    def __init__(
        self,
        embedding_fn: Callable[[Any], Any],
        start_tokens: Any,
        end_token: int,
        softmax_temperature: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(embedding_fn, start_tokens, end_token)
        self._temperature, self._seed = softmax_temperature, seed

    def sample(self, time: Any, outputs: Any, states: Any) -> Any:
        """Return a drawn word for each."""
        logits = outputs if self._temperature is None else outputs / self._temperature
        shares = torch.softmax(logits, -1).detach()
        kind = str(self.start_tokens.dtype).removeprefix("torch.")
        return sampling_id(shares, seed=self._seed or 0, dtype=kind).to(dtype_named(kind))


class _Output(NamedTuple):
    cell_outputs: Any
    sample_ids: Any


class BasicDecoder(Decoder):
    """A decoder that runs a cell on what a helper gives. Outputs: `cell_outputs` and `sample_ids` of each step."""

    OutputWrapper = _Output

    def __init__(
        self, cell: Callable[..., Any], helper: DecodeHelper, output_fn: Callable[[Any], Any] | None = None
    ) -> None:
        self.cell, self.helper, self.output_fn = cell, helper, output_fn

    def initialize(self, inits: Any) -> tuple[Any, Any, Any]:
        """Return the helper's first input, the given states, and what has ended."""
        inputs, ended = self.helper.initialize()
        return inputs, inits, ended

    def step(self, time: Any, inputs: Any, states: Any, **kwargs: Any) -> tuple[_Output, Any, Any, Any]:
        """Run the cell and ask the helper."""
        outputs, following = self.cell(inputs, states, **kwargs)
        outputs = outputs if self.output_fn is None else self.output_fn(outputs)
        ids = self.helper.sample(time, outputs, following).detach()
        ended, new_inputs, new_states = self.helper.next_inputs(time, outputs, following, ids)
        return self.OutputWrapper(outputs, ids), new_states, new_inputs, ended
