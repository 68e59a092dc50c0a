"""Gives every Python process the emulated GPU: put this folder on PYTHONPATH, together with the repository.

Python imports this module when it starts. So the emulation also reaches the processes that a program starts.
"""

from emulation.activation import activate

activate(False)
