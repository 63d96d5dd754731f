"""What is said of an error that isn't ours: one line, with the place in the user's own code."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from arriero.engine.errors import describe
from arriero.schemas.messages import Sample
from tests.batches import random_sample


def test_a_record_that_does_not_validate_is_told_in_one_line_without_an_address() -> None:
    found = random_sample(3)
    with pytest.raises(ValidationError) as caught:
        Sample.model_validate(found.model_dump() | {"advantages": np.array([0, np.nan, np.nan], np.float32)})
    told = describe(caught.value)
    assert told.startswith("ValidationError: advantages must be finite")
    assert "\n" not in told
    assert "http" not in told
    assert ".py:" in told  # of tests, which aren't ours
