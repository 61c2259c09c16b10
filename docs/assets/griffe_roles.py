"""Docstrings as pages have them: roles as ``:class:`X` `` become code, ``text::`` before a block becomes ``text:``."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|meth|func|mod|data|attr):`~?(?:megascale\.)?([^`]+)`")


class Roles(griffe.Extension):
    """Rewrites every docstring once it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of ``obj``."""
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"(?<=\w)::$", ":", text, flags=re.MULTILINE)
