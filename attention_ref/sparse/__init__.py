"""Softmax attention in which a query sees a chosen few of the keys."""
