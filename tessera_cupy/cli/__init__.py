"""The ``tessera-cupy`` command, and its commands.

Each command is a module with ``add_to``, which declares its arguments, and a function that
runs it and returns the exit status: 0 for success, 1 for a failure that was explained in one
line on stderr, 2 for wrong usage. With ``--json``, stdout carries one JSON object and
nothing else; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from tessera_cupy import __version__
from tessera_cupy.cli import bench, cache, demo, env, explore, parallel, plan, plans, profile
from tessera_cupy.cli.output import Output
from tessera_cupy.errors import TesseraError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after the program's name; None means those of this process.

    Returns:
        The exit status. Set ``TESSERA_DEBUG=1`` to see the traceback of an error.

    Example:
        >>> main(["env", "--json"])  # doctest: +SKIP
        0
    """
    parsed = _parser().parse_args(arguments)
    output = Output(parsed.json)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = output.warn
            status: int = parsed.run(parsed, output)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, has what it wanted; nor may the exit's own flush complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (TesseraError, ValueError, TypeError, OSError, MemoryError) as error:
        if os.environ.get("TESSERA_DEBUG") == "1":
            raise
        output.fail(error)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tessera-cupy",
        description="Block-sparse attention through raw CUDA kernels: look, try, plan, compile.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (env, demo, explore, plan, plans, parallel, cache, bench, profile):
        command.add_to(commands)
    return parser
