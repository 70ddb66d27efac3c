"""What a row of logits says: the token, by how much it won, whether it is sound."""

import numpy as np

from dspark_jax.decode import sampling

NAN, INF = np.nan, np.inf
LOGITS = np.array(
    [
        [1, 3, 2, 3],
        [0, -INF, -1, -4],
        [-5, -5, -7, -5],
        [-INF] * 4,
        [0, NAN, 9, 1],
        [0, INF, 1, 2],
    ],
    np.float32,
)


def test_the_token_is_the_best_id_and_the_lowest_of_equals():
    tokens = sampling.choose(LOGITS)
    assert tokens.dtype == np.int32 and tokens.tolist()[:3] == [1, 0, 0]


def test_the_margin_is_the_distance_to_the_second_best():
    margins = sampling.margin(LOGITS)
    assert margins.dtype == np.float32 and margins.tolist()[:3] == [0, 1, 0]


def test_a_row_without_a_finite_best_is_not_sound():
    """A NaN anywhere, an infinite best, nothing but -inf; a -inf below the best does no harm."""
    assert sampling.finite(LOGITS).tolist() == [True] * 3 + [False] * 3


def test_any_leading_shape():
    rows = LOGITS.reshape(2, 3, 4)
    for function in (sampling.choose, sampling.margin, sampling.finite):
        assert function(rows).shape == (2, 3)
        flat = np.asarray(function(LOGITS))
        assert np.asarray(function(rows)).tobytes() == flat.tobytes()
