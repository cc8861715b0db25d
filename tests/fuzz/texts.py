"""What is parsed: ListOps expressions, attention specifications; and the settings of a training run."""

import statistics
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from fuzz.harness import holds_for, refusal
from schoenbat import attention_names, build_attention
from schoenbat.data import listops, pathfinder
from schoenbat.registry import attention_options
from schoenbat.training.protocol import Protocol

TREES = st.recursive(
    st.integers(0, 9),
    lambda trees: st.tuples(
        st.sampled_from(sorted(listops.OPERATORS)), st.lists(trees, min_size=1, max_size=10)
    ),
    max_leaves=40,
)


def value_of(tree) -> int:
    if isinstance(tree, int):
        return tree
    operator, arguments = tree
    values = [value_of(argument) for argument in arguments]
    match operator:
        case "[MIN":
            return min(values)
        case "[MAX":
            return max(values)
        case "[MED":
            return int(np.floor(statistics.median(values)))
    return sum(values) % 10


def text_of(tree) -> str:
    if isinstance(tree, int):
        return str(tree)
    return f"{tree[0]} {' '.join(map(text_of, tree[1]))} ]"


@holds_for(TREES, share=2)
def expressions_are_worth_what_they_say(case) -> None:
    assert listops.evaluate(text_of(case)) == value_of(case)


TOKENS = st.sampled_from([*listops.VOCABULARY, "10", "-1", "[", "MAX", "٣", "²", "1.0", "\0", "]]"])


@holds_for(st.one_of(st.lists(TOKENS, max_size=12).map(" ".join), st.text(max_size=20)), share=2)
def no_text_is_worth_something_else(case: str) -> None:
    values: list[int] = []
    if refusal(lambda: values.append(listops.evaluate(case))) is None:
        assert 0 <= values[0] <= 9
        assert text_of(_parse(case.split())) == " ".join(case.split())


def _parse(tokens: list[str]):
    """The tree of an expression that is complete."""
    token = tokens.pop(0)
    if token not in listops.OPERATORS:
        return int(token)
    arguments = []
    while tokens[0] != listops.CLOSE:
        arguments.append(_parse(tokens))
    tokens.pop(0)
    return token, arguments


@holds_for(
    st.tuples(st.integers(0, 30), st.integers(0, 10), st.integers(0, 40), st.integers(0, 60)), share=0.5
)
def generated_expressions_are_distinct_and_right(case: tuple[int, int, int, int]) -> None:
    count, seed, low, high = case
    made: list[tuple] = []
    call = lambda: made.append(listops.generate(count, seed, min_length=low, max_length=high))  # noqa: E731
    if refusal(call) is not None:
        return
    tokens, lengths, labels = made[0]
    texts = [listops.decode(row) for row in tokens]
    assert len({*texts}) == count
    assert all(low < length < high for length in lengths)
    assert [listops.evaluate(text) for text in texts] == labels.tolist()


@holds_for(st.tuples(st.integers(0, 3), st.integers(-1, 2**40)), share=0.3)
def generated_images_are_images(case: tuple[int, int]) -> None:
    count, seed = case
    made: list[tuple] = []
    if refusal(lambda: made.append(pathfinder.generate(count, seed))) is None:
        images, labels = made[0]
        assert images.shape == (count, 32, 32)
        assert set(labels.tolist()) <= {0, 1}
        assert all(image.max() == 255 for image in images)
    else:
        assert seed < 0


@dataclass(frozen=True)
class Specification:
    text: str
    head_dim: int
    num_heads: int


OPTION_VALUES = st.one_of(
    st.sampled_from(
        (
            *(
                "true",
                "false",
                "none",
                "0",
                "1",
                "-1",
                "2",
                "64",
                "1e-3",
                "0.5",
                "nan",
                "inf",
                "-inf",
                "1e400",
            ),
            *("exp", "inv", "paper", "unbiased", "token", "batch", "learned", "", " ", "9" * 20, "1_0", "٣"),
        )
    ),
    st.text(max_size=6),
)


@st.composite
def _specifications(draw) -> Specification:
    name = draw(st.one_of(st.sampled_from(attention_names()), st.text(max_size=8)))
    options = []
    if name in attention_names():
        known = st.sampled_from(attention_options(name))
        options = draw(st.lists(st.tuples(known, OPTION_VALUES), max_size=3))
    separator = draw(st.sampled_from([",", ", ", ",,", ";"]))
    text = separator.join(f"{option}={value}" for option, value in options)
    return Specification(
        f"{name}:{text}" if options else name, draw(st.sampled_from([1, 4, 7])), draw(st.integers(1, 3))
    )


@holds_for(_specifications(), share=6)
def a_specification_is_an_attention_or_refused(case: Specification) -> None:
    made: list[torch.nn.Module] = []
    if (
        refusal(lambda: made.append(build_attention(case.text, case.head_dim, case.num_heads, 16)))
        is not None
    ):
        return
    module = made[0].eval()
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 2, case.num_heads, 9, case.head_dim, generator=generator).unbind()
    width = getattr(module, "value_dim", case.head_dim)
    value = torch.randn(2, case.num_heads, 9, width, generator=generator)
    results: list[torch.Tensor] = []
    if refusal(lambda: results.append(module(query, key, value))) is None:
        assert results[0].shape == (2, case.num_heads, 9, width)
        assert results[0].isfinite().all()


NUMBERS = st.one_of(
    st.integers(-3, 10**7), st.floats(allow_nan=True), st.sampled_from([0, 1, 2, 1.5, None, "7"])
)
SETTINGS = st.dictionaries(
    st.sampled_from(
        ["steps", "warmup", "batch_size", "learning_rate", "evaluate_every", "select_after", "dropout"]
    ),
    NUMBERS,
    max_size=3,
)


@holds_for(
    st.tuples(st.sampled_from(["listops", "text", "retrieval", "pathfinder", "image", "nothing"]), SETTINGS),
    3,
)
def settings_make_a_schedule_or_are_refused(case: tuple[str, dict]) -> None:
    task, changes = case
    made: list[Protocol] = []
    if refusal(lambda: made.append(Protocol.paper(task, **changes))) is not None:
        return
    protocol = made[0]
    last = protocol.steps - 1
    rates = [protocol.learning_rate_at(step) for step in (0, protocol.warmup - 1, last // 2, last)]
    assert all(0 <= rate <= protocol.learning_rate * (1 + 1e-9) for rate in rates), rates
    assert protocol.selects(protocol.steps)
