"""The sentiment of short sentences, by a convolution over time or by an LSTM (generated, padded sentences).

    CPU_NUM=2 python examples/book/understand_sentiment.py --mode reduce --net lstm

Some words are good, some bad, most neither; a word after a negation counts the other way round, so single words do
not decide. Quality: at least 95 % of 600 held-back sentences are judged rightly. The last line printed is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

import penstock as fluid
from penstock.scope import Scope

Rows = tuple[NDArray[np.int64], NDArray[np.int64]]
VOCABULARY, LENGTH, PADDING = 120, 12, 0
NEGATIONS, GOOD, BAD = range(1, 5), range(5, 25), range(25, 45)
NUM_TEST, BATCH_SIZE, LIMIT = 600, 90, 0.95
MODES = {"all_reduce": "AllReduce", "reduce": "Reduce"}
L: Any = fluid.layers


def sentence(draw: np.random.Generator) -> tuple[NDArray[np.int64], int]:
    """Return (words [LENGTH], padded at the end, 1 if it is good). One judgement more or less decides."""
    words = draw.integers(45, VOCABULARY, size=LENGTH)
    places = draw.choice(np.arange(1, 8, 2), size=3, replace=False)
    score = 0
    for place in places:
        good, negated = draw.random() < 0.5, draw.random() < 0.5
        words[place] = draw.choice(GOOD if good else BAD)
        words[place - 1] = draw.choice(NEGATIONS) if negated else words[place - 1]
        score += 1 if good != negated else -1
    words[draw.integers(8, LENGTH + 1) :] = PADDING
    return words, int(score > 0)


def load() -> tuple[Rows, Rows]:
    """Return (training, test): words int64 [n, LENGTH] and labels [n, 1]."""
    draw = np.random.default_rng(3)
    sentences = [sentence(draw) for _ in range(NUM_TEST + 3600)]
    words, labels = np.stack([s for s, _ in sentences]), np.array([[label] for _, label in sentences])
    return (words[NUM_TEST:], labels[NUM_TEST:]), (words[:NUM_TEST], labels[:NUM_TEST])


def convolution_net(words: Any) -> Any:
    """Return the probabilities of bad and good: windows of two words, each filter's sum over time, two layers."""
    width = 16
    rows = fluid.embedding(words, [VOCABULARY, width], is_sparse=True, padding_idx=PADDING)
    windows = L.conv2d(L.unsqueeze(rows, [1]), 24, [2, width], act="relu")
    judged = L.reduce_sum(windows, [2, 3])
    return L.fc(L.dropout(L.fc(judged, 24, act="relu"), 0.1), 2, act="softmax")


def lstm_net(words: Any) -> Any:
    """Return the probabilities of bad and good: an LSTM over the words, its largest outputs, one layer."""
    hidden = 24
    rows = fluid.embedding(words, [VOCABULARY, 16], is_sparse=True, padding_idx=PADDING)
    gates = L.fc(rows, 4 * hidden, num_flatten_dims=2)
    outputs, _ = L.dynamic_lstm(gates, 4 * hidden, lengths=(words != PADDING).sum(1))
    return L.fc(L.reduce_max(outputs, 1), 2, act="softmax")


NETS = {"conv": convolution_net, "lstm": lstm_net}
RATE = {"conv": 0.005, "lstm": 0.015}


def run(mode: str, *, net: str = "conv", num_passes: int = 5) -> float:
    """Train on CPU_NUM replicas; return the share of test sentences that are judged rightly."""
    main, startup = fluid.Program(), fluid.Program()
    startup.random_seed = main.random_seed = 1
    with fluid.program_guard(main, startup):
        words, label = fluid.data("words", [None, LENGTH], "int64"), fluid.data("label", [None, 1], "int64")
        probabilities = NETS[net](words)
        loss = L.mean(L.cross_entropy(probabilities, label))
        right = L.accuracy(probabilities, label)
        test_program = main.clone(for_test=True)
        clip = fluid.clip.GradientClipByGlobalNorm(5.0)
        fluid.optimizer.Adam(RATE[net], grad_clip=clip).minimize(loss)
    scope, exe = Scope(), fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    strategy = fluid.BuildStrategy()
    strategy.reduce_strategy = getattr(fluid.BuildStrategy.ReduceStrategy, MODES[mode])
    execution = fluid.ExecutionStrategy()
    execution.num_threads = os.cpu_count() or 1  # one core an operator: these are small
    trainer = fluid.ParallelExecutor(False, loss.name, main, None, execution, strategy, scope=scope)
    train, test = load()
    for number in range(num_passes):
        order = np.random.default_rng(number).permutation(len(train[1]))
        for start in range(0, len(order), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            trainer.run([loss], {"words": train[0][rows], "label": train[1][rows]})
    trainer.close()
    [share] = exe.run(test_program, {"words": test[0], "label": test[1]}, [right], scope=scope)
    return float(share.reshape(()))


def main() -> None:
    """Train and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="all_reduce")
    parser.add_argument("--net", choices=NETS, default="conv")
    given = parser.parse_args()
    print(json.dumps({"test_accuracy": round(run(given.mode, net=given.net), 4), "limit": LIMIT}))


if __name__ == "__main__":
    main()
