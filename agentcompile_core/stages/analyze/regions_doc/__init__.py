"""Regions of a graph: dependencies and convexity, hard boundaries, merging by signature, checks of matches, summaries."""
