"""ListOps: the rules of the generator, and the value of an expression."""

import hashlib
import re
import statistics

import numpy as np
import pytest

from schoenbat.data import listops


def independent_value(text: str) -> int:
    """Evaluate by Python's own parser, sharing nothing with the library: operators become function calls."""
    functions = {
        "MIN": lambda *values: sorted(values)[0],
        "MAX": lambda *values: sorted(values)[-1],
        "MED": lambda *values: int(np.median(values)),
        "SM": lambda *values: int(np.sum(values) % 10),
    }
    calls = re.sub(r"\[(\w+) ", r"\1(", text).replace("]", ")")
    return eval(re.sub(r"(\d|\)) (?=[\dA-Z])", r"\1, ", calls), {"__builtins__": {}}, functions)


@pytest.fixture(scope="module")
def long_examples():
    return listops.generate(200, seed=3)


def test_independent_evaluator_knows_the_published_example():
    assert independent_value("[MAX 2 9 [MIN 4 7 ] 0 ]") == 9


def test_labels_are_the_values_of_the_expressions(long_examples):
    tokens, _, labels = long_examples
    for row, label in zip(tokens, labels, strict=True):
        text = listops.decode(row)
        assert listops.evaluate(text) == label
        assert independent_value(text) == label


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MED 1 4 ]", 2),
        ("[MED 9 1 5 ]", 5),
        ("[SM 9 9 9 ]", 7),
        ("[MIN 3 [MAX 8 9 ] 4 ]", 3),
        ("[SM [MED 1 2 ] [MIN 9 8 ] ]", 9),
    ],
)
def test_evaluate(text, value):
    assert listops.evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "0 values"),
        ("[MAX 1 2", "1 unclosed"),
        ("1 2", "2 values"),
        ("1 ]", "token 1"),
        ("[MAX ]", "token 1"),
        ("[MAX 10 2 ]", "'10'"),
        ("[FOO 1 2 ]", r"'\[FOO'"),
        ("<pad>", "'<pad>'"),
    ],
)
def test_evaluate_refuses_what_is_not_an_expression(text, problem):
    with pytest.raises(ValueError, match=problem):
        listops.evaluate(text)


def test_lengths_are_strictly_between_the_bounds_and_say_where_padding_begins(long_examples):
    tokens, lengths, _ = long_examples
    assert tokens.shape == (200, 2000)
    assert tokens.dtype == np.uint8
    assert lengths.min() > 500
    assert lengths.max() < 2000
    assert np.array_equal((tokens != 0).sum(1), lengths)
    assert all((row[:length] != 0).all() for row, length in zip(tokens, lengths, strict=True))


@pytest.mark.parametrize(("shortest", "longest"), [(5, 7), (20, 22)])
def test_the_bounds_are_exclusive(shortest, longest):
    _, lengths, _ = listops.generate(20, seed=0, min_length=shortest, max_length=longest)
    assert set(lengths.tolist()) == {shortest + 1}


def test_trees_follow_the_published_rules(long_examples):
    operators, arguments, depths = [], [], []
    for row in long_examples[0]:
        opened = []
        for token in listops.decode(row).split():
            if token == "]":
                arguments.append(opened.pop())
                continue
            if opened:
                opened[-1] += 1
            if token.startswith("["):
                operators.append(token)
                opened.append(0)
            depths.append(len(opened) + (not token.startswith("[")))
    assert set(arguments) == set(range(2, 11))
    assert max(depths) == 10
    shares = [operators.count(name) / len(operators) for name in ("[MIN", "[MAX", "[MED", "[SM")]
    assert min(shares) > 0.24
    assert max(shares) < 0.26
    assert 5.8 < statistics.mean(arguments) < 6.3


def test_a_quarter_of_the_free_nodes_are_operators():
    blocks = [listops._block(1, index, min_length=0, max_length=10**6) for index in (0, 1)]
    lengths = [len(expression) for block in blocks for expression, _ in block]
    assert len(lengths) == 2 * listops.TREES_PER_BLOCK
    # The root is such a node, and only a digit has length 1; three standard deviations are 0.029.
    assert abs(np.mean([length > 1 for length in lengths]) - 0.25) < 0.029


def test_labels_are_balanced_as_far_as_the_task_allows():
    _, _, labels = listops.generate(1500, seed=0)
    shares = np.bincount(labels, minlength=10) / len(labels)
    # MIN and MAX make 0 and 9 more frequent than the rest.
    assert shares.min() > 0.05
    assert shares.max() < 0.21
    assert {int(i) for i in shares.argsort()[-2:]} == {0, 9}


def test_examples_are_distinct_even_when_most_draws_repeat():
    tokens, _, _ = listops.generate(3000, seed=0, min_length=4, max_length=6)
    assert len(np.unique(tokens, axis=0)) == 3000


def test_the_same_seed_gives_the_same_bytes_on_every_machine():
    tokens, lengths, labels = listops.generate(50, seed=7)
    digest = hashlib.sha256(tokens.tobytes() + lengths.tobytes() + labels.tobytes()).hexdigest()
    assert digest[:16] == "1427823dadf028e0"


def test_other_seeds_give_other_examples_and_more_examples_begin_with_the_same():
    few, more, other = (
        listops.generate(count, seed, max_length=900)[0] for count, seed in [(5, 1), (9, 1), (5, 2)]
    )
    assert np.array_equal(few, more[:5])
    assert not (few[:, None] == other[None]).all(-1).any()


def test_examples_do_not_depend_on_the_number_of_processes():
    alone = listops.generate(300, seed=5, min_length=10, max_length=40)
    together = listops.generate(300, seed=5, min_length=10, max_length=40, workers=2)
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


def test_a_filter_that_lets_too_little_through_is_an_error_not_an_endless_loop():
    # There are ten expressions of one token.
    with pytest.raises(ValueError, match="found 10 of 11 distinct"):
        listops.generate(11, seed=0, min_length=0, max_length=2)


def test_no_examples():
    tokens, lengths, labels = listops.generate(0, seed=0)
    assert tokens.shape == (0, 2000)
    assert len(lengths) == len(labels) == 0


@pytest.mark.parametrize("options", [{"count": -1}, {"max_length": 501}, {"workers": 0}])
def test_bad_options_are_named(options):
    with pytest.raises(ValueError, match=r"{} must be .*, got {}".format(*next(iter(options.items())))):
        listops.generate(**{"count": 1, "seed": 0} | options)
