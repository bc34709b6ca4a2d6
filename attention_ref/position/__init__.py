"""Softmax attention whose scores know how far apart a query and a key are."""
