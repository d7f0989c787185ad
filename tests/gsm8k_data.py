"""Location of the real GSM8K files, for tests that need them."""

from __future__ import annotations

from pathlib import Path

import pytest

GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k"
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not here")
