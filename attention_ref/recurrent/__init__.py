"""Mixers that carry a state from token to token: gates, the delta rule, moving averages, state spaces."""
