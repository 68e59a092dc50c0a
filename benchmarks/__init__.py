"""Every figure that the documents show, and how it is measured: README.md has the commands.

They run from the repository's root, each as a module: `python -m benchmarks.suites.kernels --quick`. `--help`
shows the options of each.
"""

import os

# Read by OpenMP and by the profiler when torch loads them, so set before anything here imports it: threads
# stay on their cores, and nothing is written into the progress bars.
os.environ.setdefault("OMP_PROC_BIND", "true")
os.environ.setdefault("OMP_PLACES", "cores")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
