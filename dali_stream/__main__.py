"""Entry point of `python -m dali_stream`, which is the same as `dali-stream`."""

from __future__ import annotations

import sys

from dali_stream.cli import main

sys.exit(main())
