"""What part of the model a tensor belongs to, for people who want to know where the bytes are."""

import re

# The first pattern that begins the name, after the prefix of its layer or stage, decides.
PARTS = (
    ("embed.", "embedding"),
    ("head.", "head"),
    ("norm.", "head"),
    ("hc_head_", "head"),
    ("main_", "main projection"),
    ("markov_head.", "Markov head"),
    ("confidence_head.", "confidence head"),
    ("hc_", "hyper-connections"),
    ("attn_norm.", "norms"),
    ("ffn_norm.", "norms"),
    ("attn.indexer.", "indexer"),
    ("attn.compressor.", "compressor"),
    ("attn.", "attention"),
    ("ffn.experts.", "routed experts"),
    ("ffn.shared_experts.", "shared expert"),
    ("ffn.gate.", "gate"),
)
_PATTERNS = re.compile("|".join(f"({re.escape(pattern)})" for pattern, _ in PARTS))
OTHER = "other"

# In the order of the forward pass.
ORDER = (
    "embedding",
    "main projection",
    "hyper-connections",
    "norms",
    "attention",
    "compressor",
    "indexer",
    "gate",
    "routed experts",
    "shared expert",
    "head",
    "Markov head",
    "confidence head",
    OTHER,
)


def part_of(tensor: str) -> str:
    """The part of a tensor by its official name, without the prefix of its layer or stage."""
    found = _PATTERNS.match(tensor)
    return PARTS[found.lastindex - 1][1] if found else OTHER


def size(count: int) -> str:
    """Bytes with a decimal unit."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}" if unit != "B" else f"{count} B"
        amount /= 1000
    return f"{amount:.3g} TB"
