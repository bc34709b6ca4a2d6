"""Side by side: the forms of the package and installed peers on the same arrays, in one run, as ratios."""
