"""Plans of runs: memory, a lower bound of the time and the cost, from the compiled step."""
