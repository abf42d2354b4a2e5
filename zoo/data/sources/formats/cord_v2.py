"""CORD v2 (naver-clova-ix/cord-v2): photographs of receipts, and what they say as JSON.

Columns: `image`, and `ground_truth`, a string of JSON whose `gt_parse` holds the menu, the subtotal and the total. The
answer is `gt_parse` as JSON without line breaks, its keys in the order of the file.
"""

from __future__ import annotations

import json
from typing import Any

from zoo.data.errors import RowError
from zoo.data.sources.formats.set_format import Adapter, exchange

PROMPT = "<image>Give the contents of this receipt as JSON."


def _convert(item: dict[str, Any], source: str) -> dict[str, Any]:
    truth = item.get("ground_truth")
    try:
        parsed = json.loads(truth)["gt_parse"] if isinstance(truth, str) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict | list) or not parsed:
        text = "'ground_truth' is no JSON with a 'gt_parse'; rows of cord_v2 have image and ground_truth."
        raise RowError(source, "bad_row", text)
    answer = json.dumps(parsed, ensure_ascii=False)
    return exchange(PROMPT, answer, images=[item.get("image")], kind="receipt")


cord_v2 = Adapter(_convert, ("image", "ground_truth"))
