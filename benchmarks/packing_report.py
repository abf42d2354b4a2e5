"""PackingOptions and report of `benchmarks.packing`, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import linear_regression

from zoo.bench.options import Bounded
from zoo.config.layers.keys import number
from zoo.errors import UserError
from zoo.types import JsonObject


@dataclass(frozen=True)
class PackingOptions(Bounded):
    """What is measured: `samples` of `shortest` to `longest` tokens, for each context-parallel size in `cp`."""

    samples: int = number(64, 1, 10**6)
    shortest: int = number(50, 1, 10**8)
    longest: int = number(4000, 1, 10**8)
    cp: tuple[int, ...] = number((2, 4), 1, 10**4)
    device: str = "cpu"
    threads: int = number(1, 1, 1024)
    repeats: int = number(30, 1, 10**6)
    seed: int = number(0, 0, 2**32 - 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.longest < self.shortest:
            raise UserError(f"longest={self.longest} is below shortest={self.shortest}")


@dataclass(frozen=True)
class Line:
    """One operation, or all together; times are medians."""

    name: str
    elements: int  # int64 elements that it puts out
    ms: float
    flat_ms: float  # of one index_select, flat, that puts out as many elements; 0 where there are none
    rows_ms: float  # of one index_select of rows
    moved: int  # bytes read and written
    flat_moved: int  # those of the flat index_select

    @property
    def time_ratio(self) -> float:
        """Time in units of the flat index_select."""
        return self.ms / self.flat_ms

    @property
    def rows_ratio(self) -> float:
        """Time in units of the index_select of rows."""
        return self.ms / self.rows_ms

    @property
    def bytes_ratio(self) -> float:
        """Bytes in units of the flat index_select."""
        return self.moved / self.flat_moved


@dataclass(frozen=True)
class Case:
    """One context-parallel size: a row of `tokens`, `padding` of them padding, from a batch (samples, width)."""

    cp: int
    align: int
    tokens: int
    padding: int
    width: int
    lines: list[Line]
    together: Line


@dataclass(frozen=True)
class Growth:
    """Milliseconds of all together at 1, 2 and 4 times the tokens, and the exponent of tokens that fits them best."""

    tokens: list[int]
    ms: list[float]
    flat_ms: list[float]

    @property
    def exponent(self) -> float:
        """1.0 is linear."""
        return _exponent(self.tokens, self.ms)

    @property
    def flat_exponent(self) -> float:
        """That of the flat index_select."""
        return _exponent(self.tokens, self.flat_ms)


@dataclass(frozen=True)
class PackingReport:
    """What the bench shows."""

    options: PackingOptions
    cases: list[Case]
    growth: Growth


def as_dict(report: PackingReport) -> JsonObject:
    """The report as JSON takes it, with the ratios; 0 where there is none."""
    tree = asdict(report)
    tree["growth"] |= {"exponent": report.growth.exponent, "flat_exponent": report.growth.flat_exponent}
    for case, values in zip(report.cases, tree["cases"], strict=True):
        pairs = zip((*case.lines, case.together), (*values["lines"], values["together"]), strict=True)
        for line, entry in pairs:
            ratios = (line.time_ratio, line.rows_ratio, line.bytes_ratio) if line.elements else (0.0,) * 3
            entry |= dict(zip(("time_ratio", "rows_ratio", "bytes_ratio"), ratios, strict=True))
    return tree


def table(report: PackingReport) -> str:
    """The report as text."""
    options = report.options
    lines = [
        f"{options.samples} samples of {options.shortest} to {options.longest} tokens, seed {options.seed}; int64 ids, "
        "labels and positions (3 rows)",
        f"{options.device}, threads={options.threads}, medians of {options.repeats}; flat and rows: one "
        "torch.index_select of as many elements, and the time of the operation in units of it",
    ]
    head = f"{'':<20}{'elements':>10}{'ms':>9}{'flat ms':>10}{'rows ms':>10}{'/ flat':>9}{'/ rows':>9}{'MB':>9}{'/ flat':>9}"
    for case in report.cases:
        lines += [
            "",
            f"cp={case.cp} align={case.align}: batch ({options.samples}, {case.width}), row of {case.tokens} tokens, "
            f"{case.padding} of them padding",
            head,
        ]
        for line in (*case.lines, case.together):
            moved = f"{line.moved / 1e6:>9.2f}"
            if line.elements:
                lines.append(
                    f"{line.name:<20}{line.elements:>10}{line.ms:>9.3f}{line.flat_ms:>10.3f}{line.rows_ms:>10.3f}"
                    f"{line.time_ratio:>8.2f}x{line.rows_ratio:>8.2f}x{moved}{line.bytes_ratio:>8.2f}x"
                )
            else:
                lines.append(f"{line.name:<20}{'':>10}{line.ms:>9.3f}{'':>38}{moved}")
    growth = report.growth
    steps = ", ".join(f"{ms:.2f} ms at {tokens}" for tokens, ms in zip(growth.tokens, growth.ms, strict=True))
    lines += [
        "",
        f"growth with tokens (cp={report.cases[0].cp}): {steps}: exponent {growth.exponent:.2f} "
        f"(flat {growth.flat_exponent:.2f})",
    ]
    return "\n".join(lines)


def _exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of the straight line that fits the logarithms of the points best."""
    return linear_regression(list(map(math.log, x)), list(map(math.log, y))).slope
