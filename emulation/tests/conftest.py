"""Lets the emulation's tests import the helpers in `tests/`."""

import sys

from emulation.build import ROOT

sys.path.append(str(ROOT / "tests"))
