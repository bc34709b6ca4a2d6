"""Attention at linear cost: through fewer keys, or through features of queries and keys."""
