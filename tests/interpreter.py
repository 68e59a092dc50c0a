"""Makes Triton's interpreter three times as fast: at every call of a device function, it looks through all
names of the language for functions to replace, most of which it has replaced already.
"""

import inspect
import sys
from types import SimpleNamespace


def quicken() -> None:
    """Remember which names of the language are to be replaced. Does nothing if Triton is not imported."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or interpreter.inspect is not inspect:
        return
    is_builtin = interpreter.tl.core.is_builtin
    names: dict[object, list[str]] = {}

    def getmembers(owner: object) -> list[tuple[str, object]]:
        """As `inspect.getmembers`, without what needs no replacement."""
        if owner not in names:
            names[owner] = [name for name, member in inspect.getmembers(owner) if is_builtin(member)]
        if not names[owner] or not is_builtin(getattr(owner, names[owner][0])):
            return []  # all have been replaced
        return [(name, getattr(owner, name)) for name in names[owner]]

    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": getmembers})
