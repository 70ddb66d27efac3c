"""Which tokens top-k, top-p, min-p and their combinations leave, against the warpers of Hugging
Face transformers, in its order.
"""

import numpy as np
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspark_jax.decode.sampling import filtered
from dspark_jax.runtime import backend

from helpers.sampling_parts import (
    BORDER,
    ROWS_EACH,
    SETTINGS,
    filter_cases,
    left_by,
    settings_of,
)


def warped(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """In the order of transformers' own list of them."""
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    scores = torch.from_numpy(logits)
    for warper in warpers:
        scores = warper(None, scores)
    return scores.numpy()


def test_the_filters_leave_the_same_tokens():
    """Rows within 1e-6 of a border are left out."""
    logits, rows = filter_cases()
    ours = np.asarray(backend.jit(filtered)(settings_of(rows), logits[:, None]))[:, 0]
    theirs = np.concatenate(
        [
            warped(logits[i * ROWS_EACH : (i + 1) * ROWS_EACH], **settings)
            for i, settings in enumerate(SETTINGS)
        ]
    )
    clear = np.array([left_by(row, **settings)[1] > BORDER for row, settings in zip(logits, rows)])
    print(f"{np.sum(~clear)} of {len(rows)} rows left out")
    assert np.mean(clear) > 0.95
    assert np.array_equal(np.isfinite(ours)[clear], np.isfinite(theirs)[clear])
    # What is left is the same up to the constant that a softmax does not see.
    best = theirs.max(axis=-1, keepdims=True)
    left = np.isfinite(theirs) & clear[:, None]
    np.testing.assert_allclose(ours[left], (theirs - best)[left], rtol=0, atol=1e-4)
