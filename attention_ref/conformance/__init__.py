"""Draws cases from the variant files, certifies them, and tells anyone whether their function is right."""
