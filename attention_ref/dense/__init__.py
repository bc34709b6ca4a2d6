"""Softmax attention in which every query may see every key, and its masks, heads, caches and tilings."""
