"""What is embedded in a page of the explorer, read back as its script reads it."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any


def embedded(page: str) -> dict[str, Any]:
    """The data of a page."""
    (text,) = re.findall(r'<script type="text/plain" id="data">([A-Za-z0-9+/=]+)</script>', page)
    data: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return data
