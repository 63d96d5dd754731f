"""A few seconds of `make fuzz`."""

from __future__ import annotations

import pytest

from tests.fuzz import tried
from tests.fuzz_targets import Target, targets


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_input_is_read_or_refused(target: Target) -> None:
    tried(target, 60, 1)
