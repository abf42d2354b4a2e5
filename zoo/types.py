"""Names of types that many packages share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

type JsonObject = dict[str, Any]
"""An object of JSON or YAML whose fields are known where it is read: a row, a config.json, a line of train.jsonl."""

type JsonMapping = Mapping[str, Any]
"""The same, where a function only reads it."""
