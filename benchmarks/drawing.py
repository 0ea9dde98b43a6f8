"""Figures of the README and the documentation, as SVG files.

matplotlib measures the text, so that none is cut. It draws text as outlines, which need no fonts of the reader. A file
therefore also has its content as text, in `<title>` and `<desc>`. It depends only on the content and on matplotlib's version,
and its background is white, so that it is readable on light and on dark pages.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure

OTHER, INK, DIM = "#a9b4c2", "#1c2128", "#57606a"
WIDTH, LINE, MARGIN = 860, 20, 12  # pixels: a figure, the height of a note, and the space beside it
_PIXELS = 96  # per inch, as in browsers
_CHARACTERS = 125  # maximum length of a note
_STYLE = {
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",  # part of matplotlib
    "font.size": 9,
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "dali_stream",
    "text.color": INK,
    "text.parse_math": False,  # a "$" in a label is not the start of a formula
    "ytick.labelcolor": INK,
}


class Picture(NamedTuple):
    """A figure and its content as text.

    Attributes:
        figure: The figure.
        title: Subject of the figure, in one line.
        text: All panels and numbers, for readers who cannot see the figure. Pages have it as the text of the picture.
        notes: Sentences below the figure.
    """

    figure: Figure
    title: str
    text: str
    notes: Sequence[str] = ()

    def svg(self) -> str:
        """Return the SVG file."""
        made = io.StringIO()
        with style():
            self.figure.savefig(made, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        _, head, rest = made.getvalue().partition("<svg ")
        attributes, _, content = rest.partition(">\n")
        texts = f"<title>{escape(self.title)}</title>\n <desc>{escape(' '.join([self.text, *self.notes]))}</desc>"
        lines = f'{head}role="img" {attributes}>\n {texts}\n{content}'.splitlines()
        return "\n".join(line.rstrip() for line in lines) + "\n"


@contextmanager
def style() -> Iterator[None]:
    """Draw with the settings of the figures, and not with those of the user."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def new_figure(height: float, notes: Sequence[str] = ()) -> Figure:
    """Return an empty figure with notes at its bottom.

    Args:
        height: Height without the notes, in pixels.
        notes: Sentences below the axes. Long ones are wrapped.
    """
    lines = [line for note in notes for line in textwrap.wrap(note, _CHARACTERS)]
    below = LINE * len(lines) + (MARGIN if lines else 0)
    whole = height + below
    figure = Figure(figsize=(WIDTH / _PIXELS, whole / _PIXELS), layout="constrained")
    figure.get_layout_engine().set(rect=(0, below / whole, 1, height / whole), w_pad=0.1, h_pad=0.06, hspace=0)
    for number, line in enumerate(reversed(lines)):
        note = figure.text(MARGIN / WIDTH, (MARGIN + LINE * number) / whole, line, color=DIM, size=8.5, va="bottom")
        note.set_in_layout(False)
    return figure
