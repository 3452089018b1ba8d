"""The cases and properties of one verification, each made once."""

from __future__ import annotations

from collections.abc import Sequence

from mha_deploy.cases import Case, case_names, masked_real_cases, standard_cases
from mha_deploy.cases.magnitudes import near_overflow
from mha_deploy.cases.suite import small_case
from mha_deploy.errors import InputError
from mha_deploy.precision import Precision
from mha_deploy.spec import AttentionSpec
from mha_deploy.verification.properties import NAMES, Property, properties
from mha_deploy.verification.yardstick import References

NEAR_OVERFLOW = "near-overflow"


class Suite:
    """What artifacts of one block are held to: all, or the cases and properties that `names` names.

    Raises:
        InputError: a name that is no case and no property of this block, with those that are.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        references: References,
        *,
        real: Sequence[Case] = (),
        seed: int = 0,
        names: Sequence[str] = (),
    ) -> None:
        self.real = tuple(real)
        self._order = case_names(spec)
        self._order.insert(self._order.index("large-values") + 1, NEAR_OVERFLOW)
        at = self._order.index("flat-softmax")
        masked = [each for case in real[:1] for each in masked_real_cases(spec, case)]
        self._order[at:at] = [case.name for case in (*real, *masked)]
        known = [*self._order, *NAMES]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise InputError(
                f"no case or property {', '.join(map(repr, unknown))}; this block has {', '.join(known)}"
            )
        self._spec, self._references, self._seed = spec, references, seed
        self._names = tuple(names) or tuple(known)
        self._shared = [
            *standard_cases(spec, seed=seed, names=self._names),
            *(case for case in real if case.name in self._names),
        ]
        self._masked_real = [case for case in masked if case.name in self._names]
        self._own: dict[Precision, Case] = {}
        self.properties: tuple[Property, ...] = tuple(
            held
            for held in (properties(spec, seed) if set(NAMES) & set(self._names) else ())
            if held.name in self._names
        )

    @property
    def case_names(self) -> list[str]:
        """Those of all precisions."""
        return [name for name in self._order if name in self._names]

    def cases(self, precision: Precision) -> tuple[Case, ...]:
        """Those of every artifact and those that go to the limits of `precision`, cheap ones first."""
        if NEAR_OVERFLOW in self._names and precision not in self._own:
            self._own[precision] = near_overflow(
                small_case(self._spec, NEAR_OVERFLOW, self._seed),
                precision,
                lambda feeds: self._references.in_range(precision, feeds),
            )
        cases = [*self._shared, *(case for own, case in self._own.items() if own == precision)]
        if precision.is_integer:
            cases += self._masked_real
        return tuple(sorted(cases, key=lambda case: self._order.index(case.name)))
