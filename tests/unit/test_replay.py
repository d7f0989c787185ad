"""What cannot be replayed as it was is said before anything is loaded."""

from pathlib import Path

import pytest

from tidegate.config import Settings
from tidegate.errors import TidegateError
from tidegate.trainer.replay import Replay


def test_a_run_of_several_ranks_asks_for_one(tmp_path: Path) -> None:
    settings = Settings.model_validate({"model": {"path": "m"}, "trainer": {"ranks": 2}})
    with pytest.raises(TidegateError, match=r"trained on 2 ranks.*--set trainer\.ranks=1"):
        Replay(tmp_path, settings).start()
