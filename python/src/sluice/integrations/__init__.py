"""Sluice beside other packages: a module for each, which needs that package and is imported by its own name."""
