"""The emulation's tests use the helpers of the project's."""

import sys

from emulation.build import ROOT

sys.path.append(str(ROOT / "tests"))
