"""Optional parts, each in a folder of its own. They import the core; the core looks each one up in a single place.

hlo_cost: the costs of a compiled program, counted in its text.
"""
