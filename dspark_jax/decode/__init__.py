"""From prompts to tokens: requests, the engine, a round and its parts, the gate, the run that holds
them together, replay of recorded rounds.
"""
