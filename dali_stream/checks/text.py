"""Text of others, such as the names in a dataset, in messages, logs and tables."""

from __future__ import annotations

import html
import logging
import re
from collections.abc import Iterable

# Control characters of ASCII and Latin-1, among them those that move the cursor or set the title of a terminal, separators of
# lines, characters that reverse the direction of the text after them, and halves of surrogate pairs, which cannot be encoded.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LONG_WORD, _LONG_TEXT, _LONG_LIST = 500, 4000, 100  # maximum numbers of characters, characters and names
_WORD = re.compile(rf"\S{{{_LONG_WORD + 1},}}")


def visible(text: object) -> str:
    r"""Return a text that cannot control a terminal or forge a line of a log, and has at most about 4000 characters.

    Control characters and line breaks are escaped as in Python, such as "\x1b" and "\n". The middle of a long word, such as a
    path of 100 kB, and of a long text is left out. A text that is visible already is returned unchanged.
    """
    text = _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))
    return shortened(_WORD.sub(lambda found: shortened(found[0], _LONG_WORD), text), _LONG_TEXT)


def shortened(text: str, most: int) -> str:
    """Return a text with an ellipsis in place of its middle if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[len(text) - most // 2 :]}"


def listed(names: Iterable[object], nothing: str = "none") -> str:
    """Return names as a visible text, such as "a, b". After 100 names, the text has the number of the other names.

    Args:
        names: Names, for example the keys of a dict.
        nothing: Text for no names. Default: "none".
    """
    all_names = list(names)
    more = [f"and {len(all_names) - _LONG_LIST} more"] if len(all_names) > _LONG_LIST else []
    return ", ".join([*map(visible, all_names[:_LONG_LIST]), *more]) or nothing


def html_table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """Return an HTML table that a notebook displays. Text is visible, and never markup.

    Args:
        title: Caption of the table.
        rows: Names and values of the rows. After 100 rows, a row has the number of the others.
    """
    all_rows = list(rows)
    more = [("", f"and {len(all_rows) - _LONG_LIST} more")] if len(all_rows) > _LONG_LIST else []
    shown = [*all_rows[:_LONG_LIST], *more]
    cells = "".join(f"<tr><th>{_escaped(name)}</th><td>{_escaped(value)}</td></tr>" for name, value in shown)
    return f"<table><caption>{_escaped(title)}</caption>{cells}</table>"


def _escaped(text: object) -> str:
    return html.escape(visible(text))


def make_visible(record: logging.LogRecord) -> bool:
    """Make the text of a log record visible. This is a filter of the package's logger."""
    record.msg, record.args = visible(record.getMessage()), ()
    return True
