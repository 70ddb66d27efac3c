"""The names of the decoding modes; round.py says what they do. Nothing of jax is imported here, as
`dspark --help` shows them.
"""

MODES = ("plain", "sequential", "block")
