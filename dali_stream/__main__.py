"""`python -m dali_stream` is `dali-stream`."""

from __future__ import annotations

import sys

from dali_stream.cli import main

sys.exit(main())
