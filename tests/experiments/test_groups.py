"""The comparisons: every attention in them can be built, and is named once."""

import pytest

from schoenbat.experiments.groups import GROUPS, TASKS, find_group, label_of
from schoenbat.registry import build_attention


@pytest.mark.parametrize("name", GROUPS)
def test_every_attention_of_a_group_can_be_built(name):
    group = find_group(name)
    assert set(group.tasks) <= set(TASKS)
    assert len(set(group.attentions.values())) == len(group.attentions)
    labels = {label for group in GROUPS.values() for label in group.attentions}
    for text in group.attentions.values():
        build_attention(text, head_dim=32, num_heads=2, max_length=64)
        assert label_of(text) in labels


def test_an_unknown_group_is_named():
    with pytest.raises(ValueError, match="unknown group 'all'; known are main, paper"):
        find_group("all")
