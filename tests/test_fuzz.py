"""A few seconds of `make fuzz`."""

from __future__ import annotations

import pytest

from tests.fuzz import Target, targets, tried


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_input_is_read_or_refused(target: Target) -> None:
    tried(target, 60, 1)
