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
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

OWN, OTHER, INK, DIM = "#0b7a5c", "#a9b4c2", "#1c2128", "#57606a"
WIDTH, ROW, LINE, HEADING, MARGIN = 860, 30, 20, 40, 12  # pixels: a figure, and the height of a bar, a note and a title
_PIXELS = 96  # per inch, as in browsers
_CHARACTERS = 125  # maximum length of a note
_STYLE = {
    "axes.edgecolor": OTHER,
    "axes.labelcolor": DIM,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",  # part of matplotlib
    "font.size": 9,
    "legend.frameon": False,
    "legend.labelcolor": DIM,
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "dali_stream",
    "text.color": INK,
    "text.parse_math": False,  # a "$" in a label is not the start of a formula
    "xtick.color": DIM,
    "ytick.color": DIM,
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


class Bar(NamedTuple):
    """A bar with a label before it and a figure after it.

    Attributes:
        label: Label.
        value: Length.
        figure: Text after the bar.
        ours: Whether it is a bar of dali_stream.
        ends: Slowest and fastest round, which a line shows, or None.
    """

    label: str
    value: float
    figure: str
    ours: bool
    ends: tuple[float, float] | None = None


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


def heading(axes: Axes, title: str) -> Text:
    """Put a title above axes, at the left end of the figure, where a long one has room. Return it."""
    axes.set_title(" ", size=13)  # room for the title
    place = axes.annotate(
        title,
        xy=(MARGIN / WIDTH, 1),
        xycoords=("figure fraction", "axes fraction"),
        xytext=(0, 7),
        textcoords="offset points",
        weight="bold",
        size=10.5,
        annotation_clip=False,
    )
    place.set_in_layout(False)
    return place


def bars(axes: Axes, title: str, rows: Sequence[Bar]) -> None:
    """Draw horizontal bars, from the top to the bottom."""
    heading(axes, title)
    places = range(len(rows))
    ends = [row.ends or (row.value, row.value) for row in rows]
    errors = [[row.value - low for row, (low, _) in zip(rows, ends, strict=True)],
              [high - row.value for row, (_, high) in zip(rows, ends, strict=True)]]  # fmt: skip
    drawn = axes.barh(
        places,
        [row.value for row in rows],
        0.68,
        color=[OWN if row.ours else OTHER for row in rows],
        xerr=errors if any(row.ends for row in rows) else None,
        error_kw={"ecolor": INK, "elinewidth": 1.2},
    )
    figures = axes.bar_label(drawn, [row.figure for row in rows], padding=5)
    axes.set_yticks(places, [row.label for row in rows])
    for row, *texts in zip(rows, figures, axes.get_yticklabels(), strict=True):
        for text in texts:
            text.set_weight("bold" if row.ours else "normal")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    without_frame(axes)


def legend(axes: Axes, **entries: Any) -> None:
    """Put a legend below axes without an x axis. `entries` are arguments of matplotlib, by default all that has a label."""
    axes.legend(**entries, loc="upper left", bbox_to_anchor=(0, 0), ncols=8, handlelength=1.2, columnspacing=1.4)


def without_frame(axes: Axes) -> None:
    """Remove the frame and the ticks of axes, apart from the labels on the left."""
    axes.spines[:].set_visible(False)
    axes.xaxis.set_visible(False)
    axes.tick_params(axis="y", length=0)


def spoken(title: str, rows: Sequence[Bar]) -> str:
    """Return the content of bars as text."""
    return f"{title}: {'; '.join(f'{row.label}: {row.figure}' for row in rows)}."
