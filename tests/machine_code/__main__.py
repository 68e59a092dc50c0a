"""Runs `python -m machine_code`. See tables.py."""

import sys

from .tables import main

sys.exit(main())
