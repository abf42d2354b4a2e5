"""Named adapters: sets of their own form, made into rows of `messages`. Each is a file of its own.

`format: <name>` in an entry of `data.train` chooses one. To add one: a function of a row, decorated with the columns that
tell such a row, and its name in `ADAPTERS`.
"""

from __future__ import annotations

from zoo.data.adapters.base import Adapter
from zoo.data.adapters.captions import captions
from zoo.data.adapters.cord_v2 import cord_v2
from zoo.data.adapters.llava_instruct import llava_instruct

ADAPTERS: dict[str, Adapter] = {
    "cord_v2": cord_v2,
    "llava_instruct": llava_instruct,
    "captions": captions,
}
