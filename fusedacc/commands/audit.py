"""`python -m fusedacc audit`: run a training script and report whether it accumulates gradients correctly."""

from __future__ import annotations

import argparse
import os
import sys

from ..auditing import Audit
from ..auditing.running import print_failure, run_module, run_script
from ..auditing.session import StoppedError

#: Exit statuses: of a misuse, a failure of the script, or nothing that could be checked.
MISUSED = 2
DESCRIPTION = """\
Runs a training script, unchanged, and finds which micro-batches reach the optimizer in each update, and with
which weight. Exit status: 0 no problem, 1 problems, 2 nothing could be checked, a wrong argument, or the
script failed. After Ctrl-C the report so far decides.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--updates",
        type=int,
        default=100,
        metavar="N",
        help="watch the first N updates of an optimizer (default: 100; 0: all), then let the script go on",
    )
    parser.add_argument("--stop", action="store_true", help="end the script after these updates")
    parser.add_argument(
        "--steps", type=int, metavar="K", help="require K micro-batches in each update on a rank"
    )
    parser.add_argument(
        "--scale", type=float, metavar="S", help="what the weights of a window should add up to (default: 1)"
    )
    parser.add_argument(
        "--ignore", default="", metavar="KIND,...", help="do not report problems of these kinds"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the report to this file, as JSON")
    parser.add_argument(
        "--folder", help="where ranks exchange files (default: in the folder for temporary files)"
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="the script is a module's name")
    parser.add_argument("script", help="the training script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments"
    )


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
