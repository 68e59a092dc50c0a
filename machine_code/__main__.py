"""`python -m machine_code`: see tables.py."""

import sys

from .tables import main

sys.exit(main())
