"""Builds wheels: they bring native.c, compiled for each level of CPUs. All else is in pyproject.toml."""

import os
import runpy
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
COMPILE_SECONDS = 600

levels = SimpleNamespace(**runpy.run_path(str(ROOT / "megascale/kernels/native/levels.py")))


class BuildPackage(build_py):
    """Builds the package with the libraries. One that cannot be compiled is a warning in the build's log."""

    has_libraries = False

    def run(self) -> None:
        """Build the package; an editable one, a clone, gets no libraries."""
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / levels.FOLDER.relative_to(ROOT)
        shutil.rmtree(folder, ignore_errors=True)  # an earlier build's
        folder.mkdir(parents=True)
        for name in levels.levels_here():
            try:
                content = compiled(name)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self.warn(f"this wheel has no library {name!r} of native.c: {error}")
            else:
                (folder / levels.file_name(name, content)).write_bytes(content)
                self.has_libraries = True
        if not self.has_libraries:
            folder.rmdir()
            self.warn("this wheel is pure: without a compiler its users have no native backend")


def compiled(name: str) -> bytes:
    """Return native.c, compiled for a level.

    Raises OSError, ValueError or SubprocessError; what the compiler says is in the build's log.
    """
    compiler = (
        shlex.split(os.environ.get("CC", "")) or list(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))[:1]
    )
    if not compiler:
        raise OSError("there is no C compiler; install gcc, or set CC")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "library.so"
        for command in levels.commands(compiler, name, target):
            subprocess.run(command, check=True, timeout=COMPILE_SECONDS)
        content = target.read_bytes()
    if b"__kmpc_" in content:
        raise ValueError("it calls another OpenMP than torch's libgomp; set CC to gcc")
    return content


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
