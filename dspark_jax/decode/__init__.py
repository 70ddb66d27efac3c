"""From prompts to tokens: requests, the engine, a round and its parts, the gate, replay of recorded
rounds.
"""
