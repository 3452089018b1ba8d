"""How long requests are: fixed, uniform, log-normal, or drawn from a file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mha_deploy.errors import InputError
from mha_deploy.signature import Array

FORMS = "fixed:N, uniform:LOW:HIGH, lognormal:MEAN:LOW:HIGH[:SIGMA], file:PATH"
DEFAULT_SIGMA = 0.8
# A longer request, or a wider or narrower spread, is a mistake: numbers stay far from their types' ends.
LONGEST = 1 << 20
_SIGMAS = (1e-3, 1e3)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths by probability: `values` ascending, `weights` that add up to 1. `name` is what asked for."""

    name: str
    values: tuple[int, ...]
    weights: tuple[float, ...]

    def draw(self, count: int, random: np.random.Generator) -> Array:
        return random.choice(np.array(self.values), count, p=np.array(self.weights))

    @property
    def mean(self) -> float:
        return math.fsum(value * weight for value, weight in zip(self.values, self.weights, strict=True))


def parse_lengths(text: str) -> Lengths:
    """The lengths that `text` names, in one of `FORMS`; a file holds one length a line, each as likely.

    Raises:
        InputError: another form, numbers out of range, or a file that cannot be read.
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "file":
            return _from_file(text, Path(rest))
        numbers = [float(part) for part in rest.split(":")]
        if kind == "lognormal" and len(numbers) in (3, 4):
            mean, low, high, sigma = [*numbers, DEFAULT_SIGMA][:4]
            return _lognormal(text, mean, _whole(low), _whole(high), sigma)
        if kind == "uniform" and len(numbers) == 2:
            return _even(text, range(_whole(numbers[0]), _whole(numbers[1]) + 1))
        if kind == "fixed" and len(numbers) == 1:
            return _even(text, (_whole(numbers[0]),))
    except ValueError as error:
        raise InputError(
            f"lengths {text!r}; expected {FORMS}, lengths being whole and from 1 to {LONGEST}"
        ) from error
    raise InputError(f"lengths {text!r}; expected {FORMS}")


def _whole(number: float) -> int:
    if not 1 <= number <= LONGEST or number != int(number):
        raise ValueError(number)
    return int(number)


def _even(name: str, values: range | tuple[int, ...] | list[int]) -> Lengths:
    if not values:
        raise ValueError(name)
    counts = dict.fromkeys(sorted(values), 0)
    for value in values:
        counts[value] += 1
    return Lengths(name, tuple(counts), tuple(count / len(values) for count in counts.values()))


def _from_file(name: str, path: Path) -> Lengths:
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the lengths {path}: {error}") from error
    return _even(name, [_whole(float(line)) for line in lines])


def _lognormal(name: str, mean: float, low: int, high: int, sigma: float) -> Lengths:
    """Each length from low to high as likely as the log-normal density there says, with that `sigma`.

    The density's location is set so that the lengths have `mean`: the mean rises with it, and bisection
    finds it. Where neighbours differ by 1 / high in their logarithm, a shift of sigma^2 x high changes
    their odds by e, which bounds the search.
    """
    if not (low < mean < high and _SIGMAS[0] <= sigma <= _SIGMAS[1]):
        raise ValueError(name)
    reach = 20 * sigma**2 * high + 20
    left, right = math.log(low) - reach, math.log(high) + reach
    values = np.arange(low, high + 1)
    for _ in range(100):
        middle = (left + right) / 2
        if values @ _shares(values, middle, sigma) < mean:
            left = middle
        else:
            right = middle
    shares = _shares(values, right, sigma)
    return Lengths(name, tuple(range(low, high + 1)), tuple(float(share) for share in shares))


def _shares(values: Array, location: float, sigma: float) -> Array:
    logs = np.log(values)
    exponents = -((logs - location) ** 2) / (2 * sigma**2) - logs
    weights: Array = np.exp(exponents - exponents.max())
    shares: Array = weights / weights.sum()
    return shares
