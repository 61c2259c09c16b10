"""Compiles native.c for each level of CPUs, into wheels and editable installs. All else is in pyproject.toml."""

import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent

levels = SimpleNamespace(**runpy.run_path(str(ROOT / "megascale/kernels/native/levels.py")))


class BuildPackage(build_py):
    """Builds the package with the libraries. One that cannot be compiled is a warning in the build's log."""

    has_libraries = False

    def run(self) -> None:
        """Build the package; the libraries of an editable one lie beside their sources."""
        super().run()
        folder = levels.FOLDER
        if not self.editable_mode:
            folder = Path(self.build_lib) / folder.relative_to(ROOT)
            shutil.rmtree(folder, ignore_errors=True)  # an earlier build's
        for name, reason in levels.build(folder).items():
            self.warn(f"there is no library {name!r} of native.c: {reason}")
        self.has_libraries = any(folder.iterdir())
        if not self.has_libraries:
            folder.rmdir()
            self.warn("without a library there is no native backend: torch's kernels run instead")


class Wheel(bdist_wheel):
    """A wheel with libraries is for one kind of machine, and for any Python: ctypes loads them."""

    def run(self) -> None:
        """Build first: that tells whether there are libraries."""
        self.run_command("build")
        if self.get_finalized_command("build_py").has_libraries:
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform."""
        return (self.python_tag, "none", super().get_tag()[2])


setup(cmdclass={"build_py": BuildPackage, "bdist_wheel": Wheel})
