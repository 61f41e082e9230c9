"""One found and measured network for the whole folder: to capture it takes a second."""

import pytest
import shrinkable

from nasfast import shrink


@pytest.fixture(scope="session")
def found():
    return shrink.find(shrinkable.small(), shrinkable.images(1), multiple=4, widths=4)


@pytest.fixture(scope="session")
def measured(found):
    return shrink.measure(found, shrinkable.images(), score_images=16, batch=12)
