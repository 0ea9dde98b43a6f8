"""Assignment of draws to the datasets of a mixture. It is computed from the number of a draw, without the draws before it.

For two datasets with weights a and b, floor(m * a / (a + b) + 1/2) of the first m samples belong to the first dataset. Sample m
belongs to the first dataset if this number is larger for m + 1 than for m. More datasets are the leaves of a binary tree, and
each node splits the samples that reach it in this way. The tree is a Huffman tree, which has few splits above a dataset with a
large weight.

A split rounds by less than 1. The deviation of a leaf is that of the split above it, plus the leaf's share of the deviation of
each higher split. In a Huffman tree, these shares are at most 1, 1/2, 1/3, 1/5, 1/8, ... (reciprocal Fibonacci numbers). After
any number of draws, the number of samples of a dataset therefore deviates from its share by less than
1 + (1 + 1/2 + 1/3 + 1/5 + ...) < 3.4, and mostly by less than 2. A single consumer rounds to the nearest integer, which halves
the bound.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from dali_stream.checks.arrays import Int64
from dali_stream.order.rng import philox


class Interleave:
    """Dataset of each draw of each consumer.

    At a split, each of the C consumers rounds with a different threshold, so that they do not all round up at the same draw.
    If all consumers have the same weights and have made the same number of draws, the sum of their samples therefore deviates
    by less than 1 from the share at the first split.

    Args:
        weights: Weight of each dataset for each consumer, nonnegative integers, shape (C, M). Their sum for a consumer is at
            most 2**31, and at least 1 if the consumer draws. After this number of draws, each dataset has been drawn exactly
            as often as its weight.
        seed: Seed of the thresholds. It has no effect for one consumer.
    """

    def __init__(self, weights: Int64, seed: int) -> None:
        consumers, datasets = weights.shape
        # Node i < M is dataset i. A leaf gives all samples to its first child, which is itself.
        first, second = list(range(datasets)), list(range(datasets))
        # Huffman's algorithm joins the two lightest nodes until one is left, the root, which has the largest number.
        heap = [(int(weight), node) for node, weight in enumerate(weights.sum(0))]
        heapq.heapify(heap)
        while len(heap) > 1:
            (light, second_child), (heavy, first_child) = heapq.heappop(heap), heapq.heappop(heap)
            heapq.heappush(heap, (light + heavy, len(first)))
            first.append(first_child)
            second.append(second_child)
        self._children = np.array([second, first], np.int64)
        # `at` walks all draws down the tree together, for as many steps as the deepest leaf needs. A draw that reaches its leaf
        # earlier stays at it, because a leaf is its own first child.
        self._depth, below = 0, np.array([len(first) - 1])
        while (below >= datasets).any():
            below, self._depth = np.unique(self._children[:, below]), self._depth + 1
        weight = np.concatenate([weights, np.zeros((consumers, len(first) - datasets), np.int64)], 1)
        for node in range(datasets, len(first)):
            weight[:, node] = weight[:, first[node]] + weight[:, second[node]]
        rank = _ranks(first, second, consumers, seed)
        # Threshold k of C at a node of weight w is (k + 1/2) / C * w, computed without a product above 2**62.
        quotient, rest = np.divmod(weight, 2 * consumers)
        self._threshold = quotient * (2 * rank + 1) + rest * (2 * rank + 1) // (2 * consumers)
        self._threshold[:, :datasets] = 0  # so that a leaf does not change the number of a sample
        self._first = weight[:, first]
        self._weight = np.maximum(weight, 1)  # avoids a division by 0; no sample reaches a node of weight 0

    def at(self, consumer: Int64, draw: Int64) -> tuple[Int64, Int64]:
        """Return the datasets of some draws, and the numbers of the samples within them.

        Args:
            consumer: Consumer of each draw, shape (N,).
            draw: Number of each draw among those of its consumer, shape (N,).

        Returns:
            Dataset and sample, both of shape (N,). `sample` is the number of earlier draws of the consumer from this dataset.
        """
        node, sample = np.full(len(draw), self._weight.shape[1] - 1), draw
        for _ in range(self._depth):
            # The first child got `before` = floor((sample * of_first + threshold) / weight) of the earlier samples at the node.
            # Dividing by the weight first keeps the product within int64. The sample itself belongs to the first child if
            # this number is larger for the next sample.
            weight, of_first = self._weight[consumer, node], self._first[consumer, node]
            times, rest = np.divmod(sample, weight)
            before, part = np.divmod(rest * of_first + self._threshold[consumer, node], weight)
            before += times * of_first
            is_first = part + of_first >= weight
            sample = np.where(is_first, before, sample - before)
            node = self._children[is_first.astype(np.int64), node]
        return node, sample


def _ranks(first: list[int], second: list[int], consumers: int, seed: int) -> Int64:
    """Return random ranks of the consumers' thresholds at each node, shape (C, nodes).

    The threshold at the parent determines which consumers have one more sample at a node. If these consumers had similar
    thresholds at the node too, their rounding errors would add up. The consumers are therefore divided into groups of about
    sqrt(C) neighbours at the parent, and the thresholds of each group are spread over the whole range at the node.
    """
    side = max(1, math.isqrt(consumers))
    rank = np.empty((len(first), consumers), np.int64)
    rank[-1] = np.arange(consumers)  # initial ranks for the root, which has no parent
    for node in range(len(first) - 1, -1, -1):
        numbers = philox("thresholds", seed, node).random_raw(2 * consumers).reshape(2, consumers)
        within = np.empty(consumers, np.int64)
        # The first sort shuffles each group of neighbours, and the second gives the i-th members of all groups the i-th part of
        # the range, in random order.
        within[np.lexsort((numbers[0], rank[node] // side))] = np.arange(consumers) % side
        rank[node, np.lexsort((numbers[1], within))] = np.arange(consumers)
        if first[node] != node:  # the children start with these ranks, and are visited later because their numbers are smaller
            rank[[first[node], second[node]]] = rank[node]
    return rank.T
