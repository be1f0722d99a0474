"""Typed errors, and the one way in which an argument error is worded.

Wrong arguments raise ``ValueError`` or ``TypeError``; the classes here are for
conditions of the machine (no GPU, an unsupported GPU, a kernel that is not
there) and of files (a profile table that cannot be read).
"""

from __future__ import annotations


class TesseraError(Exception):
    """Base of every error that is not simply a wrong argument."""


class NoGpuError(TesseraError, RuntimeError):
    """A GPU was asked for and none can be used; the message says why."""


class UnsupportedGpuError(TesseraError, RuntimeError):
    """The GPU's compute capability has no kernels; the message lists those that have."""


class MissingExtraError(TesseraError, ImportError):
    """A package of an optional extra is not installed; the message says how to get it."""


class KernelMissingError(TesseraError, RuntimeError):
    """A kernel is not in the cache and compiling is switched off (``TESSERA_NO_JIT=1``)."""


class KernelCompileError(TesseraError, RuntimeError):
    """NVRTC refused a kernel; the message carries its log, with file and line."""


class PlanNotEligibleError(TesseraError, ValueError):
    """A plan cannot serve a request; the message gives the reason."""


class PlanOverflowError(TesseraError, RuntimeError):
    """A plan that a GPU made needed more room than it had; its output is NaN. Run it again."""


class RankError(TesseraError, RuntimeError):
    """Another rank of a process group failed, or did not answer in time; the message names it."""


class TableError(TesseraError, ValueError):
    """A profile table is wrong; the message names file, line and field."""


def wrong(argument: str, expected: str, got: object, fix: str) -> str:
    """Word an argument error: what was expected, what came, and what to do.

    >>> wrong("q", "a 4-D array", "shape (3, 4)", "add batch and head axes")
    '`q`: expected a 4-D array, got shape (3, 4). Fix: add batch and head axes.'
    """
    return f"`{argument}`: expected {expected}, got {got}. Fix: {fix.rstrip('.')}."


def install(extra: str) -> str:
    """The command that adds an optional extra, for an error's advice.

    The folder is named since an index may not have the package, however it was installed here.

    >>> install("cuda12")
    "pip install '.[cuda12]' in the project's folder"
    """
    return f"pip install '.[{extra}]' in the project's folder"
