"""Why a backend does not serve a call."""

from typing import NamedTuple


class Refusal(NamedTuple):
    """Why a backend does not get a call whose type and device it serves.

    A backend that is named for one call raises. One that is named for all operators raises if it has the operator and
    lacks this input; an operator that it does not have is left to the automatic choice.

    Attributes:
        reason: for people.
        has_operator: whether the backend has the operator.
    """

    reason: str
    has_operator: bool = True
