"""`python -m fusedacc audit`: run a training script and report whether it accumulates gradients correctly."""

from __future__ import annotations

import argparse
import os
import sys

from ..auditing import Audit
from ..auditing.running import print_failure, run_module, run_script
from ..auditing.session import StoppedError
from .exit_status import MISUSED


def run(options: argparse.Namespace) -> int:
    if not options.is_module and not os.path.isfile(options.script):
        return _refuse(f"there is no file {options.script}: name a script, or use -m with a module's name")
    try:
        audit = Audit(
            updates=options.updates,
            steps=options.steps,
            scale=options.scale,
            ignore=[kind for kind in options.ignore.split(",") if kind],
            stop=options.stop,
            title=os.path.basename(options.script),
            json_file=options.json,
            folder=options.folder,
        )
    except ValueError as problem:
        return _refuse(str(problem))
    has_failed = False
    with audit:
        try:
            run_function = run_module if options.is_module else run_script
            run_function(options.script, options.arguments)
        except StoppedError:
            pass
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            has_failed = bool(end.code)
        except KeyboardInterrupt:
            print("Interrupted.", file=sys.stderr)
        except BaseException as error:  # whatever the script raises
            print_failure(error)
            has_failed = True
        sys.stdout.flush()
    return MISUSED if has_failed else audit.status or 0


def _refuse(problem: str) -> int:
    print(f"python -m fusedacc audit: {problem}", file=sys.stderr)
    return MISUSED
