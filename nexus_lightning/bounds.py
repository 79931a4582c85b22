"""Bounds of a setting, declared where the setting is: metadata of a dataclass field, checked in one place."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """What a value may be. None (a setting that is left out) always may."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()

    def problem(self, value: Any) -> str | None:
        """What must change, or None.

        Example:
            >>> Bounds(least=0, most=1).problem(1.5), Bounds(choices=("sum", "mean")).problem("sum")
            ('must lie in [0, 1]', None)
        """
        if self.choices:
            return None if value in self.choices else f"choose one of {', '.join(self.choices)}"
        fits = (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )
        return None if fits else self._text()

    def _text(self) -> str:
        low, high = self.least if self.above is None else self.above, self.most if self.below is None else self.below
        if high is None:
            known = {0: "must not be negative" if self.above is None else "must be positive"}
            return known.get(low, f"must be {'at least' if self.above is None else 'above'} {low:g}")  # type: ignore[arg-type]
        if low is None:
            return f"must be {'at most' if self.below is None else 'below'} {high:g}"
        if self.above is not None and self.below is not None:
            return f"must lie between {low:g} and {high:g}"
        return f"must lie in {'[' if self.above is None else '('}{low:g}, {high:g}{']' if self.below is None else ')'}"


def setting(default: Any, **bounds: Any) -> Any:
    """A dataclass field with a default and :class:`Bounds`."""
    return field(default=default, metadata={"bounds": Bounds(**bounds)})


def bounds_problems(key: str, settings: Any) -> list[str]:
    """A line for every field of a dataclass that is out of its bounds."""
    problems = []
    for each in fields(settings):
        value, bounds = getattr(settings, each.name), each.metadata.get("bounds")
        if bounds is not None and value is not None and (problem := bounds.problem(value)):
            problems.append(f"{key}.{each.name}={value}: {problem}")
    return problems
