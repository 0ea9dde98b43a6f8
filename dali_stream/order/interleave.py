"""The dataset of each draw of a mixture, and the number of the sample in this dataset, from counts alone and without state.

Two datasets are easy: of the first m samples, floor(m * a / (a + b) + 1/2) are of the first dataset, so sample m is of it where
that number rises. More datasets are the leaves of a binary tree (Huffman's, since few splits then lie above a heavy dataset),
and each of its nodes splits the samples that reach it in this way.

A split rounds by less than 1. A leaf inherits its share of the rounding of the splits above it, so the number of samples of a
dataset after any number of draws is less than 3 from its share of them, and mostly less than 2. With one consumer, which rounds
to the nearest number, it is half as much.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
import numpy.typing as npt

from dali_stream.order.rng import philox

Int64 = npt.NDArray[np.int64]


class Interleave:
    """The datasets of the draws of each consumer.

    Each consumer rounds at another one of C thresholds in a split. If all consumers have the same weights, the sum of their
    samples is therefore less than 1 from the share at the first split, after any number of draws of each of them.

    Args:
        weights: Weight of each dataset for each consumer, shape (C, M), integers of 0 or more. Their sum for a consumer is at
            most 2**31, and at least 1 for each one that draws. After that number of draws, each dataset has had exactly its
            weight.
        seed: Seed of the thresholds of more than one consumer.
    """

    def __init__(self, weights: Int64, seed: int) -> None:
        consumers, datasets = weights.shape
        # Node i < M is dataset i. A leaf gives all samples to its first child, which is itself.
        first, second = list(range(datasets)), list(range(datasets))
        heap = [(int(weight), node) for node, weight in enumerate(weights.sum(0))]
        heapq.heapify(heap)
        while len(heap) > 1:
            (light, second_child), (heavy, first_child) = heapq.heappop(heap), heapq.heappop(heap)
            heapq.heappush(heap, (light + heavy, len(first)))
            first.append(first_child)
            second.append(second_child)
        self._children = np.array([second, first], np.int64)
        self._depth, below = 0, np.array([len(first) - 1])
        while (below >= datasets).any():
            below, self._depth = np.unique(self._children[:, below]), self._depth + 1
        weight = np.concatenate([weights, np.zeros((consumers, len(first) - datasets), np.int64)], 1)
        for node in range(datasets, len(first)):
            weight[:, node] = weight[:, first[node]] + weight[:, second[node]]
        rank = _ranks(first, second, consumers, seed)
        # Of a weight w, threshold k of C is (k + 1/2) / C * w, without a product above 2**62.
        quotient, rest = np.divmod(weight, 2 * consumers)
        self._threshold = quotient * (2 * rank + 1) + rest * (2 * rank + 1) // (2 * consumers)
        self._threshold[:, :datasets] = 0
        self._first = weight[:, first]
        self._weight = np.maximum(weight, 1)  # no sample reaches a weight of 0
        self._parent = {child: node for node in range(datasets, len(first)) for child in (first[node], second[node])}

    def at(self, consumer: Int64, draw: Int64) -> tuple[Int64, Int64]:
        """Return dataset and sample of draws.

        Args:
            consumer: Consumer of each draw, shape (N,).
            draw: Number of each draw among those of its consumer, shape (N,).

        Returns:
            Two arrays of shape (N,). `sample` is the number of earlier draws of the consumer that are of the same dataset.
        """
        node, sample = np.full(len(draw), self._weight.shape[1] - 1), draw
        for _ in range(self._depth):
            weight, of_first = self._weight[consumer, node], self._first[consumer, node]
            times, rest = np.divmod(sample, weight)
            before, part = np.divmod(rest * of_first + self._threshold[consumer, node], weight)
            before += times * of_first
            is_first = part + of_first >= weight
            sample = np.where(is_first, before, sample - before)
            node = self._children[is_first.astype(np.int64), node]
        return node, sample

    def count(self, dataset: int, draws: Int64) -> Int64:
        """Return how many of each consumer's first draws are of a dataset, shape (C,).

        Args:
            dataset: Number of the dataset.
            draws: Number of draws of each consumer, shape (C,).
        """
        for node, is_first in reversed(self._path(dataset)):
            weight, of_first = self._weight[:, node], self._first[:, node]
            times, rest = np.divmod(draws, weight)
            before = times * of_first + (rest * of_first + self._threshold[:, node]) // weight
            draws = before if is_first else draws - before
        return draws

    def find(self, dataset: int, consumer: Int64, sample: Int64) -> Int64:
        """Return the draws of samples of a dataset, the inverse of `at`.

        Of the first x draws at a node of weight w with threshold t, floor((x * a + t) / w) go to the first child, of weight a,
        and floor((x * (w - a) + w - 1 - t) / w) to the second. So sample s of the first child is the least draw x with
        (x + 1) * a + t >= (s + 1) * w.

        Args:
            dataset: Number of the dataset.
            consumer: Consumer of each sample, shape (N,).
            sample: Number of each sample among those of the dataset and the consumer, shape (N,).

        Returns:
            Number of each draw among those of its consumer, shape (N,).
        """
        for node, is_first in self._path(dataset):
            weight, of_first = self._weight[consumer, node], self._first[consumer, node]
            threshold = self._threshold[consumer, node]
            own = of_first if is_first else weight - of_first
            times, rest = np.divmod(sample, own)
            missing = (rest + 1) * weight - (threshold if is_first else weight - 1 - threshold)
            sample = times * weight - (-missing // own) - 1
        return sample

    def _path(self, dataset: int) -> list[tuple[int, bool]]:
        """Return the nodes above a dataset, from its parent to the root, and whether the path is through their first child."""
        path, child = [], dataset
        while child in self._parent:
            node = self._parent[child]
            path.append((node, int(self._children[1, node]) == child))
            child = node
        return path


def _ranks(first: list[int], second: list[int], consumers: int, seed: int) -> Int64:
    """Return the ranks of the consumers' thresholds at each node, shape (C, nodes): random, and spread.

    The threshold at the parent decides which consumers have one more sample at a node. Consumers whose thresholds at the parent
    are neighbours, in groups of about the square root of C, therefore have thresholds over the whole range at the node.
    """
    side = max(1, math.isqrt(consumers))
    rank = np.empty((len(first), consumers), np.int64)
    rank[-1] = np.arange(consumers)  # of the parent of the root
    for node in range(len(first) - 1, -1, -1):
        numbers = philox("thresholds", seed, node).random_raw(2 * consumers).reshape(2, consumers)
        within = np.empty(consumers, np.int64)
        within[np.lexsort((numbers[0], rank[node] // side))] = np.arange(consumers) % side
        rank[node, np.lexsort((numbers[1], within))] = np.arange(consumers)
        if first[node] != node:
            rank[[first[node], second[node]]] = rank[node]
    return rank.T
