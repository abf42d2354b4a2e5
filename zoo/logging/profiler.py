"""`run.profile`: PyTorch's profiler over some steps of a run, on some of its ranks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from zoo.config.schema import Recipe
from zoo.files import write_atomically
from zoo.logging.run_log import RunLog

FOLDER = "profile"
_ROWS = 40  # of the table


class StepProfiler:
    """Profiles the steps of `run.profile` where this rank is one of `run.profile_ranks`; else it does nothing.

    It writes run.dir/profile/steps_FIRST-LAST_rank_N.json.gz, a trace for chrome://tracing or ui.perfetto.dev, and the most
    expensive operations as a table beside it (.txt). Stopping it waits for the device.
    """

    def __init__(self, recipe: Recipe, rank: int) -> None:
        assert recipe.run.dir is not None  # derived by validate
        self._folder, self._rank = Path(recipe.run.dir) / FOLDER, rank
        self._first = self._last = 0  # steps; none are profiled
        if recipe.run.profile is not None and rank in recipe.run.profile_ranks:
            self._first, self._last = map(int, recipe.run.profile.split(":"))  # as `validate` has checked
        self._profile: Any = None
        self._began = self._step = 0  # steps
        self._range = ExitStack()  # of a step in the trace

    def before(self, step: int) -> None:
        """A step begins; steps count from 1."""
        if not self._first <= step <= self._last:
            return
        if self._profile is None:
            from torch.profiler import profile

            self._profile, self._began = profile(acc_events=True), step
            self._profile.start()
        self._step = step
        self._range.enter_context(torch.profiler.record_function(f"step {step}"))

    def after(self, step: int, log: RunLog) -> None:
        """A step has ended; after the last one write what was profiled."""
        self._range.close()
        if self._profile is None or step < self._last:
            return
        trace = self._write()
        log.event("profile", step, path=str(trace))
        log.say(f"profiled steps {self._began} to {step}: {self._folder} (a trace for ui.perfetto.dev, and a table)")

    def close(self) -> None:
        """Write what there is where the run has ended before."""
        self._range.close()
        if self._profile is not None:
            self._write()

    def _write(self) -> Path:
        """Stop the profiler; the trace's path."""
        profile, self._profile = self._profile, None
        profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"steps_{self._began}-{self._step}_rank_{self._rank}.json.gz"
        profile.export_chrome_trace(str(trace))
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=order, row_limit=_ROWS, max_name_column_width=100)
        write_atomically(trace.with_suffix("").with_suffix(".txt"), table + "\n")
        return trace
