"""Check of a mixture: whether its datasets, each of which has findings of its own, can be mixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, counted
from dali_stream.mixture import Mixture
from dali_stream.tools.diagnosis.report import OK, PROBLEM, WARNING, Finding
from dali_stream.tools.mixture import repeated_often


def check_mixture(arguments: Mapping[str, Any], datasets: Mapping[str, Dataset]) -> list[Finding]:
    """Check that the datasets can be mixed, and that an epoch does not repeat the frames of one much more often.

    Args:
        arguments: Arguments of the `Mixture` by name, as the mixture file has them.
        datasets: Those of its datasets that could be opened, by name.
    """
    if len(datasets) < len(arguments["datasets"]):
        return []  # another finding says why a dataset cannot be opened
    try:
        mixture = Mixture(**{**arguments, "datasets": datasets})
    except (DaliStreamError, ValueError, TypeError) as error:
        return [Finding("dataset", "mixture", PROBLEM, str(error), "correct the mixture file as the message says")]
    text = f"{counted(len(datasets), 'dataset')}, {counted(len(mixture), 'sample')} an epoch"
    if warning := repeated_often(dict(zip(datasets, mixture.shares.passes.tolist(), strict=True))):
        return [Finding("dataset", "mixture", WARNING, f"{text}. {warning}", "change the weights, or give repeats instead")]
    return [Finding("dataset", "mixture", OK, text)]
