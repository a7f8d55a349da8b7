"""Models bare, attached, edited by hand and with timm's own option; compiled ones are marked."""

from functools import lru_cache

import pytest

from experiments.overhead.models import (
    COMPILED,
    OWN_OPTION,
    SPECS,
    Images,
    compiled_variants,
    evaluation_work,
    training_work,
    variants,
)

IMAGES = Images()
WAYS = ["bare", "attached", "hand-edited"]
CASES = [
    *((name, way) for name in SPECS for way in WAYS),
    *((name, "own option") for name in OWN_OPTION),
]


@lru_cache(maxsize=1)
def models_of(name, versions):
    """The models of the tests that follow one another."""
    return versions(name, IMAGES)


@pytest.mark.parametrize("work", [training_work, evaluation_work])
@pytest.mark.parametrize(("name", "way"), sorted(CASES))
def test_model(time_variant, name, way, work):
    time_variant(work(name, models_of(name, variants), IMAGES), way)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:Dynamo detected a call:UserWarning")
@pytest.mark.parametrize("work", [training_work, evaluation_work])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_model(time_variant, name, way, work):
    time_variant(work(name, models_of(name, compiled_variants), IMAGES, "compiled "), way)
