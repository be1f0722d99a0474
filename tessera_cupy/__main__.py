"""``python -m tessera_cupy``: the same as the ``tessera-cupy`` command."""

from __future__ import annotations

import sys

from tessera_cupy.cli import main

if __name__ == "__main__":
    sys.exit(main())
