"""A few of the random cases of ``make fuzz``, the same in every run."""

import pytest
from fuzz.harness import allot, run
from fuzz.properties import PROPERTIES

CASES = 400


@pytest.mark.parametrize("name", sorted(PROPERTIES))
@pytest.mark.filterwarnings("ignore")
def test_holds(name):
    assert run(name, max(5, allot(CASES)[name]), seed=0)


def test_every_public_name_has_a_case():
    """A name that is added to the package is added to the properties as well."""
    from pathlib import Path

    import schoenbat

    text = "\n".join(path.read_text() for path in (Path(__file__).parent / "fuzz").glob("*.py"))
    assert not [name for name in schoenbat.__all__ if name not in text]


def test_cases_are_handed_out_without_remainder():
    assert sum(allot(10_000).values()) == 10_000
