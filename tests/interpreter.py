"""Makes Triton's interpreter three times as fast.

At every call of a device function, the interpreter searches all names of the language for functions to
replace. After the first call, most of them are already replaced.
"""

import inspect
import sys
from types import SimpleNamespace


def quicken() -> None:
    """Cache which names of the language to replace. Do nothing if Triton is not imported."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or interpreter.inspect is not inspect:
        return
    is_builtin = interpreter.tl.core.is_builtin
    names: dict[object, list[str]] = {}

    def getmembers(owner: object) -> list[tuple[str, object]]:
        """Return the result of `inspect.getmembers` without members that need no replacement."""
        if owner not in names:
            names[owner] = [name for name, member in inspect.getmembers(owner) if is_builtin(member)]
        if not names[owner] or not is_builtin(getattr(owner, names[owner][0])):
            return []  # all are already replaced
        return [(name, getattr(owner, name)) for name in names[owner]]

    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": getmembers})
