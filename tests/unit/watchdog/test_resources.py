"""What has run out is found behind the messages of libraries."""

import pytest

from zoo.config.memory import Limit
from zoo.config.schema import Recipe
from zoo.watchdog import resources

ONEDNN = RuntimeError("could not create a primitive")


@pytest.mark.parametrize(("left", "explained"), [(2**20, True), (2**33, False)])
def test_a_failure_of_onednn_is_explained_where_no_memory_is_left(
    left: int, explained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "limits", lambda: [Limit(2**34, left, "this machine's memory")])
    monkeypatch.setattr(resources, "_shortage", lambda recipe, *, on_gpu: "the estimate")
    found = resources.explain(ONEDNN, Recipe())
    if not explained:
        assert found is None
        return
    assert str(found).startswith("the host's memory is used up; this machine's memory is 17.2 GB: the estimate")
    assert resources.explain(RuntimeError("shape"), Recipe()) is None
