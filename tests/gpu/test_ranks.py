"""tests/gpu/ranks.py on as many GPUs as there are."""

import pytest
import torch


@pytest.mark.parametrize("ranks", [2, 4])
def test_parallel_equals_serial(ranks: int, reports: list[str]) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs; `python tests/gpu/ranks.py --ranks {ranks}` runs on gloo without")
    from gpu.ranks import CASES, check

    assert check(CASES[ranks], reports.append), reports
