"""What pyproject.toml cannot state: the readme with absolute links, and the examples inside the package."""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from tidegate import __version__  # noqa: E402
from tidegate.scaffold.links import absolute_links  # noqa: E402


class BuildWithExamples(build_py):
    """Copies `examples/` to `tidegate/scaffold/examples`; an editable installation reads the repository's."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "tidegate", "scaffold", "examples")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(HERE / "examples", target, ignore=_ignored)


def _ignored(folder: str, names: list[str]) -> set[str]:
    # The package has the model of tiny_base already (tidegate/scaffold/tiny_base).
    model = {"model"} if os.path.basename(folder) == "tiny_base" else set()
    return model | {name for name in names if name in ("__pycache__", "runs") or name.endswith(".pyc")}


setup(
    cmdclass={"build_py": BuildWithExamples},
    long_description=absolute_links((HERE / "README.md").read_text(encoding="utf-8"), "", __version__),
    long_description_content_type="text/markdown",
)
